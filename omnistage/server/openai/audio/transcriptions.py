"""`/v1/audio/transcriptions`: a model that hears is asked to write down what is said, or its ears alone do it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Request, Response, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field, field_validator

from omnistage.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnsupportedModalityError,
)
from omnistage.core.family import Transcriber
from omnistage.core.params import SamplingParams
from omnistage.core.types import FinishReason
from omnistage.media.audio import decode_audio
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk, Usage
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import CancelledRequestError, ContentFilterError, body_of
from omnistage.server.http.openapi import answers
from omnistage.server.http.sse import event, stream_response
from omnistage.server.openai.audio.transcriber import Dictation, check_hears, dictated
from omnistage.server.openai.base import WireModel
from omnistage.server.openai.request_models import Finite
from omnistage.server.openai.response_models import Transcription, TranscriptionEvent
from omnistage.server.openai.tools import renamed
from omnistage.server.service import ServedModel, final_output

router = APIRouter()
_ASK = "Transcribe the audio. Write down exactly the words that are said, and nothing else."
_MAX_TEXT = 4000
_MOST_TOKENS = 1_000_000
"""As many as parameters may ask for: a transcription is as long as what is said, so the model's room is its bound."""
_REFUSED = {
    "chunking_strategy": "a sound is heard in one piece here; leave it out",
    "include": "transcriptions come without log probabilities here; leave it out",
    "known_speaker_names": "speakers are not told apart here; leave it out",
    "known_speaker_references": "speakers are not told apart here; leave it out",
    "timestamp_granularities": "no times are known here; leave it out",
}
_TIMED = ("srt", "vtt", "diarized_json")
_ENGLISH = ("en", "english")
Language = Annotated[str, Field(max_length=40, pattern="^[A-Za-z][A-Za-z -]*$")]


class TranscriptionForm(WireModel):
    """`POST /v1/audio/transcriptions`. OpenAI's clients write lists as fields with `[]` behind their names."""

    file: UploadFile = Field(description="A sound file, or a video with sound.")
    model: str
    language: Language | None = None
    languages: list[Language] = Field(default=[], alias="languages[]", max_length=32)
    prompt: str | None = Field(default=None, max_length=_MAX_TEXT)
    keywords: list[str] = Field(default=[], alias="keywords[]", max_length=128)
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Finite = Field(default=0.0, ge=0, le=2)
    stream: bool = False
    # OpenAI's, refused with a reason
    chunking_strategy: str | None = None
    include: list[str] = Field(default=[], alias="include[]")
    known_speaker_names: list[str] = Field(default=[], alias="known_speaker_names[]")
    known_speaker_references: list[str] = Field(default=[], alias="known_speaker_references[]")
    timestamp_granularities: list[str] = Field(default=[], alias="timestamp_granularities[]")
    # Ours
    timeout: Finite | None = None

    @field_validator("response_format", mode="before")
    @classmethod
    def _without_times(cls, value: object) -> object:
        if value in _TIMED:
            raise ValueError(
                f"{value} needs times or speakers, which are not known here; use json, text or verbose_json"
            )
        return value

    @field_validator(*_REFUSED)
    @classmethod
    def _refuse(cls, value: Any, info: Any) -> Any:
        if value:
            raise ValueError(_REFUSED[info.field_name])
        return value

    @field_validator("keywords")
    @classmethod
    def _few_words(cls, value: list[str]) -> list[str]:
        if sum(map(len, value)) > _MAX_TEXT:
            raise ValueError(f"has more than {_MAX_TEXT} characters in all; name fewer")
        return value

    def question(self) -> str:
        """What the model is asked about the sound."""
        parts = [_ASK]
        if self.language:
            parts.append(f"The language is {self.language}.")
        if self.languages:
            parts.append(f"The languages may be: {', '.join(self.languages)}.")
        if self.keywords:
            parts.append(f"Words that may be said: {', '.join(self.keywords)}.")
        if self.prompt:
            parts.append(f"Context that may help with names and spelling: {self.prompt}")
        return " ".join(parts)

    def check_ears(self) -> None:
        """Raise for what is said to ears that listen alone: they take no advice."""
        languages = [language for language in (self.language, *self.languages) if language]
        if any(language.lower() not in _ENGLISH for language in languages):
            raise InvalidRequestError("this model hears English only", param="language")
        for name in ("prompt", "keywords"):
            if getattr(self, name):
                raise InvalidRequestError("this model writes down what it hears and takes no advice", param=name)
        if self.temperature:
            raise InvalidRequestError("this model has no such dial; leave it out", param="temperature")


@router.post(
    "/v1/audio/transcriptions",
    response_model=None,
    responses=answers(Transcription, events=TranscriptionEvent, files=("text/plain",)),
)
async def transcriptions(
    form: Annotated[TranscriptionForm, Form(media_type="multipart/form-data")], request: Request
) -> Response:
    """Write down what is said in a sound. No times are given: none are known here."""
    service = service_of(request)
    holder = caller(request)
    served = service.model(form.model)
    check_hears(served)
    data = await form.file.read()
    if not data:
        raise InvalidRequestError("is empty; send a sound file", param="file")
    processor = served.omni.processor
    if isinstance(processor, Transcriber):
        form.check_ears()
        return await _dictation(form, await dictated(service, holder, served, processor, data, form.timeout))
    stage = served.stage_for_params(SamplingParams)
    if stage is None:
        raise UnsupportedModalityError("this model does not write; use one that gives text", param="model")
    content = [{"type": "audio", "audio": data}, {"type": "text", "text": form.question()}]
    running = renamed(
        service.run_request(
            holder,
            served,
            [{"role": "user", "content": content}],
            {stage: SamplingParams(temperature=form.temperature, max_tokens=_MOST_TOKENS)},
            RequestOptions(["text"], None, 0, form.timeout),
        ),
        lambda path: "file" if path == "prompt" or path.startswith("messages") else path,
    )
    if form.stream:

        async def items() -> AsyncIterator[bytes]:
            async with running as answers:
                async for item in answers:
                    for told in _events(item):
                        yield event(told)

        return await stream_response(items())
    async with running as answers:
        final = await final_output(answers)
    if (failed := _failure(final)) is not None:
        raise failed
    text = final.text.strip()
    if form.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    if form.response_format == "verbose_json":
        # The language is what the client said: nothing here recognises it.
        spoken = {"task": "transcribe", "language": form.language or "", "duration": await _seconds(data, served)}
        return JSONResponse({**spoken, "segments": [], "text": text, "usage": _usage(final.usage)})
    return JSONResponse({"text": text, "usage": _usage(final.usage)})


async def _dictation(form: TranscriptionForm, made: Dictation) -> Response:
    """The answer of ears alone: all of it at once, and counted in seconds, for which OpenAI's events have no place."""
    usage = {"type": "duration", "seconds": made.seconds}
    if form.stream:

        async def items() -> AsyncIterator[bytes]:
            if made.text:
                yield event({"type": "transcript.text.delta", "delta": made.text})
            yield event({"type": "transcript.text.done", "text": made.text})

        return await stream_response(items())
    if form.response_format == "text":
        return PlainTextResponse(f"{made.text}\n")
    if form.response_format == "verbose_json":
        spoken = {"task": "transcribe", "language": "english", "duration": made.seconds, "segments": []}
        return JSONResponse({**spoken, "text": made.text, "usage": usage})
    return JSONResponse({"text": made.text, "usage": usage})


async def _seconds(data: bytes, model: ServedModel) -> float:
    """How long a sound lasts that the model has heard: decoded again, as its header may not say."""
    return (await asyncio.to_thread(decode_audio, data, model.omni.media_limits)).seconds


def _failure(final: OmniRequestOutput) -> OmniError | None:
    """Why a transcription is not whole: there is no other way to say so than an error."""
    if final.error is not None or final.finish_reason is FinishReason.STOP:
        return final.error
    if final.finish_reason is FinishReason.CONTENT_FILTER:
        return ContentFilterError("the content filter ended this transcription")
    if final.finish_reason is FinishReason.DEADLINE:
        return DeadlineExceededError("the time was over before all was written down; allow more", param="timeout")
    if final.finish_reason is FinishReason.LENGTH:
        return LimitExceededError(
            f"the model has no room for more than the {final.usage.completion_tokens} tokens that it wrote, and was "
            "not done; send a shorter sound",
            param="file",
        )
    return CancelledRequestError("the request was cancelled")


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
    if (failed := _failure(item.final)) is not None:
        return [body_of(failed)]
    return [{"type": "transcript.text.done", "text": item.final.text.strip(), "usage": _usage(item.final.usage)}]
