"""`/v1/audio/speech`: text to speech. The bytes are sent as they are generated, in every format."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Literal, NotRequired

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from omnistage.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnsupportedModalityError,
)
from omnistage.core.family import DrawingProcessor, SpeechReader, VoiceCloner
from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.types import AudioChunk, FinishReason, Modality
from omnistage.media.audio_output import channels_of
from omnistage.media.tempo import MAX_SPEED, MIN_SPEED, TempoStretcher
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, Usage
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import body_of
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.routing import api_router
from omnistage.server.http.sse import event, stream_response
from omnistage.server.observe.audit import note_ignored
from omnistage.server.openai.audio.encode import CONTENT_TYPES, AudioWriter, audio_writer
from omnistage.server.openai.base import WireModel
from omnistage.server.openai.request_models import Finite, Seed, Voice, voice_name
from omnistage.server.openai.response_models import TokenCounts, speech_tokens
from omnistage.server.openai.running import Running
from omnistage.server.service import ServedModel, Service

router = api_router()
_FILES = tuple(dict.fromkeys(CONTENT_TYPES.values()))
_MAX_READ_CHARS = 4096
"""As with OpenAI. A chat model is limited by its context instead."""
_READ_ALOUD = "Say exactly this, and nothing else: "
_NO_SPEECH = "the model generated no speech for this text; try another"
_NO_WORDS = (
    "nothing in this text can be spoken: the voice speaks English words (Latin letters and digits) and leaves out "
    "code, pictures and other scripts; send some words"
)


class SpeechRequest(WireModel):
    """`POST /v1/audio/speech`."""

    model: str | None = Field(default=None, description="May be left out where one model is served.")
    input: str = Field(min_length=1, max_length=100_000)
    voice: Voice | None = None
    response_format: Literal["wav", "pcm", "flac", "mp3", "opus", "aac"] = "mp3"
    stream_format: Literal["sse", "audio"] | None = Field(default=None, description="Events, or the file's bytes.")
    instructions: str | None = Field(default=None, description="How to speak; without effect for voices that read.")
    speed: Finite | None = Field(default=None, ge=MIN_SPEED, le=MAX_SPEED, description="At the voice's own pitch.")
    # vLLM-Omni's
    ref_audio: str | None = Field(
        default=None, min_length=1, description="A clip of the voice to speak with: a URL as in chats, such as data:..."
    )
    ref_text: str | None = Field(default=None, max_length=_MAX_READ_CHARS, description="What is said in the clip.")
    stream: bool | None = Field(default=None, description="Without effect: speech is always streamed.")
    # Ours
    seed: Seed | None = None
    timeout: Finite | None = None
    # For diffusion models that generate sound, by the names of their parameters
    seconds: Finite | None = Field(default=None, description="Length of the sound.")
    steps: int | None = Field(default=None, description="Denoising steps.")
    guidance: Finite | None = Field(default=None, description="How closely to follow the input.")
    negative_prompt: str | None = Field(default=None, description="What to avoid.")


class SpeechEvent(TypedDict):
    """One event of streamed speech: `audio` is base64, the next piece of the file."""

    type: Literal["speech.audio.delta", "speech.audio.done"]
    audio: NotRequired[str]
    usage: NotRequired[TokenCounts]
    finish_reason: NotRequired[Literal["length"]]
    """Where the speech was cut: the model generates no more at once."""


class VoiceList(TypedDict):
    voices: list[str]


@router.get("/v1/audio/voices")
async def list_voices(request: Request) -> VoiceList:
    """The voices of all models that this key may use, as vLLM-Omni's clients ask for them."""
    allowed = caller(request).models
    models = [each for name, each in service_of(request).models.items() if allowed is None or name in allowed]
    return VoiceList(voices=list(dict.fromkeys(voice for model in models for voice in model.omni.voices.voices)))


@router.post("/v1/audio/speech", response_class=Response, responses=response_docs(events=SpeechEvent, files=_FILES))
async def speech(body: SpeechRequest, request: Request) -> Response:
    """Speak a text: as it is where the model can, else by a chat model that is asked to say it."""
    service = service_of(request)
    model = service.model(body.model)
    running = run_speech(service, caller(request), model, body)
    reads = reads_aloud(model)
    speed = 1.0 if body.speed is None else body.speed
    if body.stream_format == "sse":
        return await stream_response(_events(running, body.response_format, reads=reads, speed=speed))
    pieces = _file(running, body.response_format, reads=reads, speed=speed)
    return await stream_response(pieces, CONTENT_TYPES[body.response_format])


def reads_aloud(model: ServedModel) -> bool:
    """Whether a voice of its own reads the text; a model that has nothing but speech to give has tokens for it."""
    return isinstance(model.omni.processor, SpeechReader) and Modality.TEXT in model.omni.modalities


def run_speech(
    service: Service, holder: Holder, model: ServedModel, body: SpeechRequest, clip: Mapping[str, object] | None = None
) -> Running:
    """The request that speaks a text. `clip`: in place of `ref_audio`, a part of a message."""
    if Modality.AUDIO not in model.omni.modalities:
        raise UnsupportedModalityError("this model has no audio output; use one that has", param="model")
    if clip is None and body.ref_audio is not None:
        clip = {"type": "audio_url", "audio_url": {"url": body.ref_audio}}
    options = RequestOptions(["audio"], voice_name(body.voice), 0, body.timeout)
    messages = _messages(body, model, clip)
    params = model.with_seed(body.seed, _sound_params(body, model))
    return service.run_request(holder, model, messages, params, options, rename=_field_name)


def _messages(body: SpeechRequest, model: ServedModel, clip: Mapping[str, object] | None) -> list[dict[str, object]]:
    processor = model.omni.processor
    if body.ref_text is not None and clip is None:
        raise InvalidRequestError("needs ref_audio, whose text it is; send both, or leave it out", param="ref_text")
    if clip is not None and not isinstance(processor, VoiceCloner):
        raise InvalidRequestError(
            "this model cannot speak with the voice of a clip; leave it out, or use a model that can", param="ref_audio"
        )
    if isinstance(processor, SpeechReader):
        if body.instructions:
            note_ignored("instructions")
        if len(body.input) > _MAX_READ_CHARS:
            raise LimitExceededError(
                f"has {len(body.input)} characters, over the limit of {_MAX_READ_CHARS}; send it in parts",
                param="input",
            )
        if clip is not None and isinstance(processor, VoiceCloner):
            return processor.read_aloud_as(body.input, clip, body.ref_text)
        return processor.read_aloud(body.input)
    content = f"{body.instructions}\n{_READ_ALOUD}" if body.instructions else _READ_ALOUD
    return [{"role": "user", "content": f"{content}{body.input}"}]


def _field_name(param: str) -> str:
    """The request's name for what is wrong in the conversation that it has become."""
    if param.startswith("messages[0].content[1]"):
        return "ref_audio"
    return "input" if param.startswith(("messages", "prompt")) else param


def _sound_params(body: SpeechRequest, model: ServedModel) -> dict[str, StageParams]:
    """The parameters of a diffusion model. Raises where one is sent to another kind of model."""
    fields = sorted({"seconds", "steps", "guidance", "negative_prompt"} & body.model_fields_set)
    fields = [name for name in fields if getattr(body, name) is not None]
    if not fields:
        return {}
    stage = model.stage_for_params(DiffusionParams)
    if stage is None or not isinstance(model.omni.processor, DrawingProcessor):
        raise InvalidRequestError(
            "parameter not supported; it is for diffusion models that generate sound", param=fields[0]
        )
    return {stage: DiffusionParams.parse({name: getattr(body, name) for name in fields})}


async def speech_pieces(
    running: Running, format: str, *, reads: bool, speed: float, sounds: list[AudioChunk] | None = None
) -> AsyncGenerator[bytes | OmniRequestOutput]:
    """Pieces of the file as it grows, none of them empty, then the final output. Raises where it is incomplete.

    `sounds` gets the sound itself.
    """
    writer: AudioWriter | None = None
    tempo: TempoStretcher | None = None

    def encode(samples: NDArray[np.float32], *, last: bool = False) -> bytes:
        if tempo is not None:
            samples = tempo.push(samples, last=last)
        data = writer.write(samples) if writer is not None and len(samples) else b""
        return data + writer.finish() if writer is not None and last else data

    async with running as stream:
        async for item in stream:
            if item.audio is not None:
                if sounds is not None:
                    sounds.append(item.audio)
                channels = channels_of(item.audio.samples)
                writer = writer or audio_writer(format, item.audio.sample_rate, channels)
                if speed != 1.0 and channels > 1:
                    raise InvalidRequestError("must be 1 for sound with several channels", param="speed")
                if speed != 1.0 and tempo is None:
                    tempo = TempoStretcher(item.audio.sample_rate, speed)
                samples = np.asarray(item.audio.samples, dtype=np.float32)
                if data := await asyncio.to_thread(encode, samples):
                    yield data
            if item.final is None:
                continue
            if item.final.error is not None:
                raise item.final.error
            if item.final.finish_reason is FinishReason.DEADLINE:  # audio cannot say that it is incomplete
                raise DeadlineExceededError(
                    "the timeout passed before the speech was complete; allow more time", param="timeout"
                )
            if writer is None:
                raise InvalidRequestError(_NO_WORDS if reads else _NO_SPEECH, param="input")
            if data := await asyncio.to_thread(encode, np.zeros(0, np.float32), last=True):
                yield data
            yield item.final


async def _file(running: Running, format: str, *, reads: bool = False, speed: float = 1.0) -> AsyncGenerator[bytes]:
    """An error in the middle breaks the response off: a file has no place for it."""
    async with aclosing(speech_pieces(running, format, reads=reads, speed=speed)) as pieces:
        async for piece in pieces:
            if isinstance(piece, bytes):
                yield piece


async def _events(running: Running, format: str, *, reads: bool = False, speed: float = 1.0) -> AsyncGenerator[bytes]:
    started = False
    async with aclosing(speech_pieces(running, format, reads=reads, speed=speed)) as pieces:
        try:
            async for piece in pieces:
                data: SpeechEvent
                if isinstance(piece, bytes):
                    data = {"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()}
                else:
                    # A voice that reads aloud uses no tokens: those of its other stages stand for nothing.
                    data = {"type": "speech.audio.done", "usage": _usage(Usage() if reads else piece.usage)}
                    if piece.finish_reason is FinishReason.LENGTH:
                        data["finish_reason"] = "length"
                yield event(data)
                started = True
        except OmniError as error:
            if not started:  # it can still have its HTTP status
                raise
            yield event(body_of(error))


def _usage(usage: Usage) -> TokenCounts:
    output = usage.completion_tokens + speech_tokens(usage)
    return {"input_tokens": usage.prompt_tokens, "output_tokens": output, "total_tokens": usage.prompt_tokens + output}
