"""What clients send, as pydantic models of OpenAI's wire format. Fields that we add come last in each."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.validation import field_error, short_repr
from omnistage.server.openai.base import WireModel as WireModel

Finite = Annotated[float, Field(allow_inf_nan=False)]
SIZE_PATTERN = r"^(auto|\d{2,5}x\d{2,5})$"


def _checked_size(size: str) -> str:
    if not re.fullmatch(SIZE_PATTERN, size, re.ASCII):
        raise ValueError(
            f"must be WIDTHxHEIGHT in pixels, 2 to 5 digits each as in 512x512, or auto; got {short_repr(size)}"
        )
    return size


# Checked here: pydantic's own message would be the pattern.
Size = Annotated[str, AfterValidator(_checked_size), WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN})]


class StreamOptions(WireModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class VoiceId(WireModel):
    id: str


class AudioOptions(WireModel):
    """How a spoken answer is wanted."""

    voice: str | VoiceId | None = None
    format: Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"] = "wav"

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


_SAMPLING = (
    "temperature",
    "top_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)
"""Fields that are called the same in `SamplingParams`."""


class SamplingFields(WireModel):
    """What chat and plain completions share."""

    model: str
    temperature: Finite | None = None
    top_p: Finite | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | tuple[str, ...] | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    logit_bias: dict[int, Finite] | None = None
    seed: int | None = None
    user: str | None = None
    # Ours
    top_k: int | None = None
    min_p: Finite | None = None
    repetition_penalty: Finite | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    priority: int = 0
    timeout: Finite | None = None

    def _sampling(self, **more: object) -> SamplingParams | None:
        """The sampling parameters that were given, None where there are none."""
        values: dict[str, object] = {name: getattr(self, name) for name in _SAMPLING}
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        if self.seed is not None:
            values["seed"] = self.seed % 2**63  # OpenAI's may be negative
        given = {name: value for name, value in {**values, **more}.items() if value is not None}
        return SamplingParams.parse(given) if given else None


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...]
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    def sampling(self) -> SamplingParams | None:
        return self._sampling(max_tokens=self.max_tokens, logprobs=self.logprobs)


class SpeechRequest(WireModel):
    """`POST /v1/audio/speech`."""

    model: str
    input: str = Field(min_length=1, max_length=100_000)
    voice: str | VoiceId | None = None
    response_format: Literal["wav", "pcm", "flac", "mp3", "opus", "aac"] = "mp3"
    stream_format: Literal["sse", "audio"] | None = Field(default=None, description="Events, or the file's bytes.")
    instructions: str | None = None
    # OpenAI's, of which only the value that changes nothing is taken
    speed: Finite | None = Field(default=None, json_schema_extra={"minimum": 1, "maximum": 1})
    # Ours
    seed: int | None = None
    timeout: Finite | None = None

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice

    @field_validator("speed")
    @classmethod
    def _own_speed(cls, value: float | None) -> float | None:
        if value not in (None, 1.0):
            raise ValueError("the model speaks at its own speed; leave it out")
        return value


class ImageRequest(WireModel):
    """`POST /v1/images/generations`, and the fields of `/v1/images/edits` that are no files."""

    model: str
    prompt: str = Field(min_length=1, max_length=32_000)
    n: int | None = Field(default=None, ge=1, le=16)
    size: Size | None = Field(default=None, description="WIDTHxHEIGHT, or auto.")
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(default=None, ge=0, le=100)
    stream: bool | None = False
    partial_images: int | None = Field(default=None, ge=0, le=3)
    # OpenAI's, without effect here
    user: str | None = None
    safety_identifier: str | None = None
    quality: str | None = None
    moderation: str | None = None
    input_fidelity: str | None = None
    background: Literal["opaque", "auto"] | None = None
    # Ours
    steps: int | None = None
    guidance: Finite | None = None
    true_cfg: Finite | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    strength: Finite | None = None
    scheduler: str | None = None
    progress: bool = Field(default=False, description="A stream also says which step it is at.")
    priority: int = 0
    timeout: Finite | None = None

    def drawing(self) -> DiffusionParams:
        values: dict[str, object] = {
            name: getattr(self, name)
            for name in ("n", "steps", "guidance", "true_cfg", "negative_prompt", "seed", "strength", "scheduler")
        }
        if self.size not in (None, "auto"):
            width, _, height = str(self.size).partition("x")
            values |= {"width": int(width), "height": int(height)}
        return DiffusionParams.parse({name: value for name, value in values.items() if value is not None})

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.output_format == "png" and self.output_compression not in (None, 100):
            raise field_error("output_compression", "is for jpeg and webp; png loses nothing, leave it out")
        if self.stream and self.response_format == "url":
            raise field_error("response_format", "a stream carries the pictures themselves; leave it out")
        return self
