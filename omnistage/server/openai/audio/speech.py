"""`/v1/audio/speech`: a text, spoken. Its bytes go out as it is made, in every format."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing

import numpy as np
from fastapi import APIRouter, Request, Response

from omnistage.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnsupportedModalityError,
)
from omnistage.core.family import SpeechReader
from omnistage.core.types import FinishReason, Modality
from omnistage.omni import OutputStream
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, Usage
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import body_of
from omnistage.server.http.openapi import answers
from omnistage.server.http.sse import event, stream_response
from omnistage.server.openai.audio.encode import CONTENT_TYPES, SoundWriter, sound_writer
from omnistage.server.openai.chat.response import usage_of
from omnistage.server.openai.request_models import SpeechRequest
from omnistage.server.openai.response_models import SpeechEvent
from omnistage.server.service import ServedModel

router = APIRouter()
_FILES = tuple(dict.fromkeys(CONTENT_TYPES.values()))
_MOST_READ = 4096
"""Characters, as with OpenAI. A chat model's own room bounds what it is asked to say."""
_READ_ALOUD = "Say exactly this, and nothing else: "
_SAID_NOTHING = "the model said nothing to this text; try another"
_NO_WORDS = (
    "nothing in this text can be spoken: the voice speaks English words (Latin letters and digits) and leaves out "
    "code, pictures and other scripts; send some words"
)


@router.post("/v1/audio/speech", response_class=Response, responses=answers(events=SpeechEvent, files=_FILES))
async def speech(body: SpeechRequest, request: Request) -> Response:
    """Speak a text: as it is where the model can, else a chat model is asked to, and what it then says is its own."""
    service = service_of(request)
    model = service.model(body.model)
    holder = caller(request)
    if Modality.AUDIO not in model.modalities:
        raise UnsupportedModalityError("this model does not speak; use one that gives audio", param="model")
    options = RequestOptions(["audio"], body.voice_name, 0, body.timeout)
    messages = _messages(body, model)
    running = service.run_request(holder, model, messages, model.with_seed(body.seed, {}), options)
    reads = isinstance(model.omni.processor, SpeechReader)
    if body.stream_format == "sse":
        return await stream_response(_events(running, body.response_format, reads=reads))
    pieces = _file(running, body.response_format, reads=reads)
    return await stream_response(pieces, CONTENT_TYPES[body.response_format])


def _messages(body: SpeechRequest, model: ServedModel) -> list[dict[str, object]]:
    processor = model.omni.processor
    if isinstance(processor, SpeechReader):
        if body.instructions:
            raise InvalidRequestError("this model's voice takes none; leave it out", param="instructions")
        if len(body.input) > _MOST_READ:
            raise LimitExceededError(
                f"has {len(body.input)} characters, and at most {_MOST_READ} are read aloud at once; send it in parts",
                param="input",
            )
        return processor.read_aloud(body.input)
    content = f"{body.instructions}\n{_READ_ALOUD}" if body.instructions else _READ_ALOUD
    return [{"role": "user", "content": f"{content}{body.input}"}]


async def _spoken(
    running: AbstractAsyncContextManager[OutputStream], format: str, *, reads: bool = False
) -> AsyncGenerator[bytes | OmniRequestOutput]:
    """Pieces of the file as it grows, none of them empty, then the end. Raises for an end that is not the text's."""
    writer: SoundWriter | None = None
    async with running as stream:
        async for item in stream:
            if item.audio is not None:
                writer = writer or sound_writer(format, item.audio.sample_rate)
                samples = np.asarray(item.audio.samples, dtype=np.float32)
                if data := await asyncio.to_thread(writer.write, samples):
                    yield data
            if item.final is None:
                continue
            if item.final.error is not None:
                raise item.final.error
            if item.final.finish_reason is FinishReason.DEADLINE:  # a sound cannot say that it is not whole
                raise DeadlineExceededError("the time was over before all of it was said; allow more", param="timeout")
            if writer is None:
                raise InvalidRequestError(_NO_WORDS if reads else _SAID_NOTHING, param="input")
            if data := await asyncio.to_thread(writer.finish):
                yield data
            yield item.final


async def _file(
    running: AbstractAsyncContextManager[OutputStream], format: str, *, reads: bool = False
) -> AsyncGenerator[bytes]:
    """What fails midway breaks the answer off: bytes have no room to say it."""
    async with aclosing(_spoken(running, format, reads=reads)) as pieces:
        async for piece in pieces:
            if isinstance(piece, bytes):
                yield piece


async def _events(
    running: AbstractAsyncContextManager[OutputStream], format: str, *, reads: bool = False
) -> AsyncGenerator[bytes]:
    begun = False
    async with aclosing(_spoken(running, format, reads=reads)) as pieces:
        try:
            async for piece in pieces:
                if isinstance(piece, bytes):
                    yield event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
                else:
                    # A voice that reads needs no tokens: those of the stages on its way stand for nothing.
                    usage = Usage() if reads else piece.usage
                    yield event({"type": "speech.audio.done", "usage": _usage(usage)})
                begun = True
        except OmniError as error:
            if not begun:  # it can still have its status
                raise
            yield event(body_of(error))


def _usage(usage: Usage) -> dict[str, int]:
    counted = usage_of(usage)
    return {
        "input_tokens": counted["prompt_tokens"],
        "output_tokens": counted["completion_tokens"],
        "total_tokens": counted["total_tokens"],
    }
