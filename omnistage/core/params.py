"""What a request may set on a stage, checked by pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from omnistage.core.validation import invalid_params, is_utf8

MAX_STOP_CHARS = 1024
"""Of one stop string: a table as long as it is made for each."""
_FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
_Bias = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
"""Logits are float32, and must stay finite."""


class StageParams(BaseModel):
    """Base of what a request may set on one stage. Frozen, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    shared: ClassVar[bool] = False
    """Whether one set of these serves all stages of a request that take the type, however many there are."""

    def merged(self, override: Self | None) -> Self:
        """These defaults with the fields that `override` sets explicitly."""
        if override is None:
            return self
        changes = {name: getattr(override, name) for name in override.model_fields_set}
        return type(self).parse({**{n: getattr(self, n) for n in self.model_fields_set}, **changes})

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Build from untrusted values, turning pydantic's error into ours."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise invalid_params(error) from error


class StructuredOutput(BaseModel):
    """Constrain the text: exactly one of a JSON schema, a regular expression, a grammar (EBNF), xgrammar's structural
    tags, or any JSON object. `after_token` lets a model think first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: dict[str, object] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, object] | None = Field(
        default=None, description="A format of xgrammar's structural tags: free text in which some words begin JSON."
    )
    json_object: bool = False
    after_token: int | None = Field(
        default=None, ge=0, description="The text is free up to this token, and constrained behind it."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        texts = (self.json_schema, self.regex, self.grammar, self.structural_tag)
        if sum(text is not None for text in texts) + self.json_object != 1:
            raise ValueError("give exactly one of json_schema, regex, grammar, structural_tag, json_object")
        return self


class AdapterWeight(BaseModel):
    """One adapter of a request, and how strongly it acts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=200)
    weight: float = Field(default=1.0, allow_inf_nan=False, ge=-100.0, le=100.0)


def _one_or_several(value: object) -> object:
    """A text in place of a list of texts."""
    return (value,) if isinstance(value, str) else value


def _as_list(value: object) -> object:
    """A name or one adapter in place of a list of them."""
    each = value if isinstance(value, list | tuple) else (value,)
    return tuple({"name": adapter} if isinstance(adapter, str) else adapter for adapter in each)


def _distinct(adapters: tuple[AdapterWeight, ...]) -> tuple[AdapterWeight, ...]:
    if len({adapter.name for adapter in adapters}) < len(adapters):
        raise ValueError("names an adapter twice; add its weights up")
    return adapters


MAX_MIXED_ADAPTERS = 16
Adapters = Annotated[
    tuple[AdapterWeight, ...],
    BeforeValidator(_as_list),
    Field(max_length=MAX_MIXED_ADAPTERS),
    AfterValidator(_distinct),
]
"""LoRA adapters whose changes are added up: a name, or several with weights."""


class SamplingParams(StageParams):
    """How an autoregressive stage samples tokens. The defaults are plain sampling at temperature 1."""

    max_tokens: int = Field(default=1024, ge=1, le=1_000_000, description="Maximum tokens to generate.")
    min_tokens: int = Field(default=0, ge=0, description="No stop before this many tokens.")
    temperature: _FiniteFloat = Field(default=1.0, ge=0.0, le=100.0, description="0 is greedy.")
    top_k: int = Field(default=0, ge=0, description="Keep the k likeliest tokens; 0 keeps all.")
    top_p: _FiniteFloat = Field(default=1.0, gt=0.0, le=1.0, description="Keep the likeliest tokens up to this mass.")
    min_p: _FiniteFloat = Field(default=0.0, ge=0.0, le=1.0, description="Drop tokens below this share of the best.")
    repetition_penalty: _FiniteFloat = Field(default=1.0, ge=0.01, le=10.0, description="Over prompt and output.")
    presence_penalty: _FiniteFloat = Field(default=0.0, ge=-2.0, le=2.0, description="Over the output only.")
    frequency_penalty: _FiniteFloat = Field(default=0.0, ge=-2.0, le=2.0, description="Over the output only.")
    logit_bias: dict[int, _Bias] | None = Field(default=None, description="Token id to added logit.")
    allowed_token_ids: tuple[int, ...] | None = Field(default=None, description="Only these may be sampled.")
    suppress_token_ids: tuple[int, ...] = Field(default=(), description="Never sampled.")
    stop: Annotated[tuple[str, ...], BeforeValidator(_one_or_several)] = Field(
        default=(), max_length=64, description="Strings that end the text."
    )
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Ids that end the output, besides the model's.")
    ignore_eos: bool = Field(default=False, description="Continue past the model's end tokens.")
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="Same seed, same output, in any batch.")
    logprobs: int | None = Field(default=None, ge=0, le=50, description="Alternatives to report beside each token.")
    n: int = Field(default=1, ge=1, le=128, description="Answers to one prompt.")
    structured: StructuredOutput | None = None
    lora: Adapters = Field(default=(), description="LoRA adapters: a name, or a list of {name, weight}.")

    @field_validator("min_tokens")
    @classmethod
    def _within_max_tokens(cls, min_tokens: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens", min_tokens)
        if min_tokens > max_tokens:
            raise ValueError(f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})")
        return min_tokens

    @field_validator("stop")
    @classmethod
    def _check_stop_not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError("an empty stop string can never be found; remove it")
        if any(len(text) > MAX_STOP_CHARS for text in stop):
            raise ValueError(f"a stop string may have at most {MAX_STOP_CHARS} characters; shorten it")
        return stop

    @field_validator("stop_token_ids", "suppress_token_ids")
    @classmethod
    def _can_be_ids(cls, ids: tuple[int, ...]) -> tuple[int, ...]:
        if any(token < 0 for token in ids):
            raise ValueError("token ids must not be negative")
        return ids

    @field_validator("allowed_token_ids")
    @classmethod
    def _allow_something(cls, ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if ids is not None and not ids:
            raise ValueError("allowed_token_ids is empty, so nothing could be sampled; leave it out or name ids")
        return ids

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def answers(params: StageParams) -> int:
    """How many answers a stage gives under these parameters."""
    return params.n if isinstance(params, SamplingParams) else 1


SpeechQuality = Literal["full", "balanced", "fast"]
"""How carefully a flow-matching decoder solves: as the model's authors do, or with less arithmetic."""


class CodecParams(StageParams):
    """How a codec stage turns codes into samples."""

    streaming: bool = Field(default=True, description="Emit audio while codes still arrive; false waits for all.")
    num_steps: int = Field(default=10, ge=1, le=1000, description="Solver time points of a flow-matching decoder.")
    guidance_scale: _FiniteFloat = Field(default=0.5, ge=0.0, le=100.0)
    quality: SpeechQuality = Field(
        default="full", description="The decoder's solver: full is the model's own, the others cost less."
    )
    sway: _FiniteFloat = Field(default=-1.0, ge=-10.0, le=10.0, description="Sway coefficient of the time grid.")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="Seed of the initial noise.")


class DiffusionParams(StageParams):
    """How pictures and videos are made. What is left out is as the pipeline's YAML or the model says.

    One set serves the whole request: the stages that encode, denoise and decode all read it.
    """

    shared: ClassVar[bool] = True

    width: int | None = Field(default=None, ge=16, le=16384, description="Pixels; models may need multiples.")
    height: int | None = Field(default=None, ge=16, le=16384, description="Pixels; models may need multiples.")
    steps: int | None = Field(default=None, ge=1, le=1000, description="Denoising steps.")
    guidance: _FiniteFloat | None = Field(
        default=None, ge=0.0, le=100.0, description="How closely to follow the prompt; as the family defines it."
    )
    true_cfg: _FiniteFloat | None = Field(
        default=None, ge=0.0, le=100.0, description="Classifier-free guidance on a guidance-distilled model."
    )
    negative_prompt: str | None = Field(default=None, max_length=32_000, description="What to avoid.")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="Picture i of n starts from seed + i.")
    n: int = Field(default=1, ge=1, le=64, description="Pictures of one prompt.")
    strength: _FiniteFloat | None = Field(
        default=None, gt=0.0, le=1.0, description="How much to change the input picture; 1 ignores it."
    )
    control_scale: _FiniteFloat | None = Field(
        default=None, ge=0.0, le=10.0, description="How closely to follow the picture that controls (ControlNet)."
    )
    num_frames: int | None = Field(default=None, ge=1, le=4096, description="Frames of a video.")
    fps: _FiniteFloat | None = Field(default=None, gt=0.0, le=240.0, description="Frames a second of a video.")
    seconds: _FiniteFloat | None = Field(default=None, gt=0.0, le=600.0, description="Length of a sound.")
    scheduler: str | None = Field(
        default=None, max_length=100, description="A diffusers scheduler class instead of the checkpoint's own."
    )
    max_sequence_length: int | None = Field(default=None, ge=1, le=8192, description="Maximum prompt tokens to encode.")
    preview_every: int = Field(default=0, ge=0, le=1000, description="Send a preview every this many steps; 0: never.")
    early_stop: _FiniteFloat | None = Field(
        default=None, gt=0.0, le=1.0, description="Stop once a step changes the expected picture by less than this."
    )
    lora: Adapters = Field(default=(), description="LoRA adapters: a name, or a list of {name, weight}.")

    @field_validator("negative_prompt")
    @classmethod
    def _is_text(cls, negative: str | None) -> str | None:
        if negative is not None and not is_utf8(negative):
            raise ValueError("negative_prompt is not valid Unicode text")
        return negative
