"""`/v1/audio/transcriptions`: a model that hears is asked to write down what is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Request, Response, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse

from omnistage.errors import InvalidRequestError, StageError, UnsupportedModalityError
from omnistage.media.audio import decode_audio
from omnistage.params import SamplingParams
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.answers import Transcription, TranscriptionEvent
from omnistage.server.context import caller, service_of
from omnistage.server.documented import answers
from omnistage.server.errors import ContentFilterError, body_of
from omnistage.server.service import ServedModel, collect
from omnistage.server.sse import event, stream_response
from omnistage.server.tools import renamed
from omnistage.types import FinishReason, Modality, OutputChunk, Usage

router = APIRouter()
_ASK = "Transcribe the audio. Write down exactly the words that are said, and nothing else."
_MAX_TEXT = 4000


@router.post(
    "/v1/audio/transcriptions",
    response_model=None,
    responses=answers(Transcription, events=TranscriptionEvent, files=("text/plain",)),
)
async def transcriptions(
    request: Request,
    file: Annotated[UploadFile, File(description="A sound file, or a video with sound.")],
    model: Annotated[str, Form()],
    language: Annotated[str | None, Form(max_length=40, pattern="^[A-Za-z][A-Za-z -]*$")] = None,
    prompt: Annotated[str | None, Form(max_length=_MAX_TEXT)] = None,
    response_format: Annotated[Literal["json", "text", "verbose_json"], Form()] = "json",
    temperature: Annotated[float, Form(ge=0, le=2, allow_inf_nan=False)] = 0.0,
    stream: Annotated[bool, Form()] = False,
    timeout: Annotated[float | None, Form(allow_inf_nan=False)] = None,
) -> Response:
    """Write down what is said in a sound. No times are given: models that chat do not know them."""
    service = service_of(request)
    holder = caller(request)
    served = service.model(model)
    stage = served.stage_taking(SamplingParams)
    if Modality.AUDIO not in served.omni.processor.input_modalities or stage is None:
        raise UnsupportedModalityError("this model does not hear; use one that takes audio", param="model")
    data = await file.read()
    if not data:
        raise InvalidRequestError("is empty; send a sound file", param="file")
    content = [{"type": "audio", "audio": data}, {"type": "text", "text": _question(language, prompt)}]
    running = renamed(
        service.running(
            holder,
            served,
            [{"role": "user", "content": content}],
            {stage: SamplingParams(temperature=temperature)},
            RequestOptions(["text"], None, 0, timeout),
        ),
        lambda path: "file" if path.startswith("messages") else path,
    )
    if stream:

        async def items() -> AsyncIterator[bytes]:
            async with running as answers:
                async for item in answers:
                    for told in _events(item):
                        yield event(told)

        return await stream_response(items())
    async with running as answers:
        final = (await collect(answers, request))[-1].final
    if final is None or final.error is not None:
        raise final.error if final is not None and final.error is not None else StageError("no answer came")
    if final.finish_reason is FinishReason.CONTENT_FILTER:
        raise _filtered()
    text = final.text.strip()
    if response_format == "text":
        return PlainTextResponse(f"{text}\n")
    if response_format == "verbose_json":
        # The language is what the client said: nothing here recognises it.
        spoken = {"task": "transcribe", "language": language or "", "duration": await _seconds(data, served)}
        return JSONResponse({**spoken, "segments": [], "text": text, "usage": _usage(final.usage)})
    return JSONResponse({"text": text, "usage": _usage(final.usage)})


async def _seconds(data: bytes, model: ServedModel) -> float:
    """How long a sound lasts that the model has heard: decoded again, as its header may not say."""
    return (await asyncio.to_thread(decode_audio, data, model.omni.media_limits)).seconds


def _filtered() -> ContentFilterError:
    """There is no other way to say that a transcription is not whole."""
    return ContentFilterError("the content filter ended this transcription")


def _question(language: str | None, prompt: str | None) -> str:
    parts = [_ASK]
    if language:
        parts.append(f"The language is {language}.")
    if prompt:
        parts.append(f"Context that may help with names and spelling: {prompt}")
    return " ".join(parts)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _events(item: OutputChunk) -> list[dict[str, Any]]:
    if item.final is None:
        return [{"type": "transcript.text.delta", "delta": item.text}] if item.text else []
    if item.final.error is not None:
        return [body_of(item.final.error)]
    if item.final.finish_reason is FinishReason.CONTENT_FILTER:
        return [body_of(_filtered())]
    return [{"type": "transcript.text.done", "text": item.final.text.strip(), "usage": _usage(item.final.usage)}]
