"""What several endpoints accept, as pydantic models of OpenAI's wire format. Fields that we add come last in each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Optional

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, create_model, field_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.params import MAX_MIXED_ADAPTERS, Adapters, DiffusionParams, SamplingParams
from omnistage.core.validation import short_repr
from omnistage.server.http.openapi import bounds_of
from omnistage.server.openai.base import WireModel, max_items
from omnistage.server.openai.extensions import ExtensionFields

Finite = Annotated[float, Field(allow_inf_nan=False)]
MAX_STOP = 64
MAX_LOGIT_BIAS = 4096
SIZE_PATTERN = r"^(auto|\d{2,5}x\d{2,5})$"


def _checked_size(size: str) -> str:
    if not re.fullmatch(SIZE_PATTERN, size, re.ASCII):
        raise ValueError(
            f"must be WIDTHxHEIGHT in pixels, 2 to 5 digits each as in 512x512, or auto; got {short_repr(size)}"
        )
    return size


# Checked here: pydantic's own message would be the pattern.
Size = Annotated[str, AfterValidator(_checked_size), WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN})]


Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""As with OpenAI it may be negative."""
TopK = Annotated[int, Field(ge=-1, description="Keep the k likeliest tokens; 0 or -1 keeps all.")]
"""-1 as with vLLM and SGLang, whose clients send it as their default."""


class StreamOptions(WireModel):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="Usage so far in every event, as vLLM has it.")
    include_obfuscation: bool | None = None


class VoiceId(WireModel):
    id: str


Voice = str | VoiceId


def voice_name(voice: Voice | None) -> str | None:
    return voice.id if isinstance(voice, VoiceId) else voice


class AudioOptions(WireModel):
    """How speech is returned."""

    voice: Voice | None = None
    format: Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"] = "wav"


LoraField = Annotated[
    Adapters | None,
    max_items(MAX_MIXED_ADAPTERS),
    Field(default=None, description="LoRA adapters: a name, or a list of {name, weight}."),
]


NOT_EXPOSED = frozenset({"suppress_token_ids"})
"""Sampling parameters that no request sets."""
_OF_OTHER_FORM = frozenset({"max_tokens", "logprobs", "structured", "n", "top_k", "seed", "stop", "stop_token_ids"}) | {
    *("logit_bias", "allowed_token_ids", "lora", "min_tokens", "skip_special_tokens")
}
"""Those that endpoints declare themselves: their names, types or limits are OpenAI's, or some endpoints lack them."""
_BOUNDS = (Ge, Gt, Le, Lt)


def _as_sent(name: str) -> tuple[object, None]:
    """A sampling parameter as clients send it: it may be left out, and its bounds are checked where it becomes one."""
    field = SamplingParams.model_fields[name]
    plain: object = field.annotation
    for item in field.metadata:
        plain = plain if isinstance(item, _BOUNDS) else Annotated[plain, item]
    return Optional[plain], None  # noqa: UP045  # `|` is not for `Annotated`


if TYPE_CHECKING:
    _Parameters = WireModel
else:
    _derived = SamplingParams.model_fields.keys() - NOT_EXPOSED - _OF_OTHER_FORM
    _Parameters = create_model("Parameters", __base__=WireModel, **{name: _as_sent(name) for name in sorted(_derived)})


class SamplesText(_Parameters):
    """A request that samples text. Each of its fields that is named like a sampling parameter sets it.

    It has a field for every sampling parameter but those of `_OF_OTHER_FORM`, which endpoints declare, set in
    `sampling_params`, or list as not exposed: a test checks it.
    """

    not_exposed: ClassVar[frozenset[str]] = NOT_EXPOSED
    derived: ClassVar[frozenset[str]] = frozenset({"max_tokens", "logprobs", "structured"})
    """Parameters that `sampling_params` sets from fields of other names or types."""

    model: str | None = Field(default=None, description="May be left out where one model is served.")
    stream: bool | None = False
    stop: Annotated[str | tuple[str, ...], max_items(MAX_STOP)] | None = None
    seed: Seed | None = None
    user: str | None = None
    # Ours
    top_k: TopK | None = None
    lora: LoraField = None
    priority: int = 0
    timeout: Finite | None = None

    def sampling_params(self, max_tokens_field: str, **derived: object) -> SamplingParams | None:
        """The sampling parameters that the request sets; None: it sets none."""
        values = {name: getattr(self, name) for name in self.model_fields_set & SamplingParams.model_fields.keys()}
        values |= {"max_tokens": getattr(self, max_tokens_field), **derived}
        if values.get("seed") is not None:
            values["seed"] %= 2**63  # OpenAI's may be negative
        if values.get("top_k") == -1:
            values["top_k"] = 0
        values = {name: value for name, value in values.items() if value is not None}
        try:
            return SamplingParams.parse(values) if values else None
        except InvalidRequestError as error:
            if error.param == "max_tokens":
                error.param = max_tokens_field
            raise


class SamplingFields(SamplesText, ExtensionFields):
    """What chat and plain completions share."""

    model_config = ConfigDict(json_schema_extra=bounds_of(SamplingParams, max_completion_tokens="max_tokens"))

    n: int | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[int, Finite], max_items(MAX_LOGIT_BIAS)] | None = None
    # Ours
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Annotated[tuple[int, ...], max_items(MAX_STOP)] | None = None
    return_token_ids: bool | None = Field(default=None, description="Send the ids of generated tokens, as vLLM does.")

    # Of a field: it costs nothing where that is not sent.
    @field_validator("stream_options")
    @classmethod
    def _only_streams(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("is for streams; send stream: true, or leave it out")
        return options


class DrawingFields(WireModel):
    """What requests for images and videos share. Each field that is named like a diffusion parameter sets it."""

    prompt: str = Field(min_length=1, max_length=32_000)
    size: Size | None = Field(default=None, description="WIDTHxHEIGHT, or auto.")
    # Ours
    steps: int | None = None
    guidance: Finite | None = None
    true_cfg: Finite | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    lora: LoraField = None
    scheduler: str | None = None
    priority: int = 0
    timeout: Finite | None = None


def diffusion_params(request: WireModel, size: str | None, **derived: object) -> DiffusionParams:
    """The parameters that a request for images or videos sets: its fields of the same names, and its size."""
    names = DiffusionParams.model_fields.keys() & type(request).model_fields.keys()
    values = {name: getattr(request, name) for name in names} | derived
    if size is not None and size != "auto":
        values["width"], values["height"] = map(int, size.split("x"))
    try:
        return DiffusionParams.parse({name: value for name, value in values.items() if value is not None})
    except InvalidRequestError as error:
        if error.param in ("width", "height"):
            error.param = "size"
        raise
