"""`/v1/audio/speech`: a text, spoken. Raw formats stream as they are made."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
from fastapi import APIRouter, Request, Response

from omnistage.errors import InvalidRequestError, StageError, UnsupportedModalityError
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.context import caller, service_of
from omnistage.server.documented import answers
from omnistage.server.encode import CONTENT_TYPES, encode_audio, pcm16
from omnistage.server.schemas import SpeechRequest
from omnistage.server.service import collect
from omnistage.server.sse import stream_response
from omnistage.types import Modality

router = APIRouter()
_FILES = tuple(dict.fromkeys(CONTENT_TYPES.values()))
_READ_ALOUD = "Say exactly this, and nothing else: "


@router.post("/v1/audio/speech", response_class=Response, responses=answers(files=_FILES))
async def speech(body: SpeechRequest, request: Request) -> Response:
    """Speak a text. A chat model is asked to say it; what it then says is its own."""
    service = service_of(request)
    model = service.model(body.model)
    holder = caller(request)
    if Modality.AUDIO not in model.modalities:
        raise UnsupportedModalityError("this model does not speak; use one that gives audio", param="model")
    options = RequestOptions(["audio"], body.voice, 0, body.timeout)
    content = f"{body.instructions}\n{_READ_ALOUD}" if body.instructions else _READ_ALOUD
    messages = [{"role": "user", "content": f"{content}{body.input}"}]
    running = service.running(holder, model, messages, model.seeded(body.seed, {}), options)
    media_type = CONTENT_TYPES[body.response_format]
    if body.response_format == "pcm":

        async def samples() -> AsyncIterator[bytes]:
            async with running as stream:
                async for item in stream:
                    if item.audio is not None:
                        yield pcm16(np.asarray(item.audio.samples, dtype=np.float32))
                    if item.final is not None and item.final.error is not None:
                        raise item.final.error

        return await stream_response(samples(), media_type)
    async with running as stream:
        final = (await collect(stream, request))[-1].final
    if final is None or final.error is not None:
        raise final.error if final is not None and final.error is not None else StageError("no speech came")
    if final.audio is None:
        raise InvalidRequestError("the model said nothing to this text; try another", param="input")
    return Response(encode_audio(final.audio, body.response_format), media_type=media_type)
