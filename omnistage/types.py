"""Every noun that more than one layer shares: parameters, prompts, stage inputs, chunks, outputs, traces.

Plain dataclasses of tensors and primitives, so that the same contract can be spoken to a stage in another process.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omnistage.errors import InvalidRequestError, OmniError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from omnistage.media.audio import AudioOutput


class Modality(StrEnum):
    """What goes into a pipeline or comes out of it."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


class FinishReason(StrEnum):
    """Why a request, or one stage of it, ended. Every request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


# ------------------------------------------------------------------------------- users' values in messages

SHOWN_CHARS = 80
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = SHOWN_CHARS


def short_repr(value: object) -> str:
    """What a user gave, for a message: at most about 80 characters, whatever its size."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python does not print whole numbers of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def is_utf8(text: str) -> bool:
    """Whether text can be encoded; half of a surrogate pair, as broken JSON escapes leave it, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------------------------------------- parameters

_FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


class StageParams(BaseModel):
    """Base of what a request may set on one stage. Frozen, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


def invalid_params(error: ValidationError, prefix: str = "") -> InvalidRequestError:
    """Our error for the first problem that pydantic found."""
    first = error.errors(include_url=False)[0]
    path = ".".join(part if isinstance(part, str) else short_repr(part) for part in first["loc"])[:SHOWN_CHARS]
    param = f"{prefix}.{path}" if prefix and path else (prefix or path)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such parameter; see the class for those there are"
    elif first["type"] != "value_error":
        message = f"{message} (got {short_repr(first.get('input'))})"
    return InvalidRequestError(message, param=param or None)


class StructuredOutput(BaseModel):
    """Constrain the text: exactly one of a JSON schema, a regular expression, a grammar (EBNF), or any JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: dict[str, object] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [self.json_schema is not None, self.regex is not None, self.grammar is not None, self.json_object]
        if sum(given) != 1:
            raise ValueError("give exactly one of json_schema, regex, grammar, json_object")
        return self


class SamplingParams(StageParams):
    """How an autoregressive stage picks tokens. The defaults are greedy-free plain sampling at temperature 1."""

    max_tokens: int = Field(default=1024, ge=1, le=1_000_000, description="Most tokens to generate.")
    min_tokens: int = Field(default=0, ge=0, description="No stop before this many tokens.")
    temperature: _FiniteFloat = Field(default=1.0, ge=0.0, le=100.0, description="0 is greedy.")
    top_k: int = Field(default=0, ge=0, description="Keep the k likeliest tokens; 0 keeps all.")
    top_p: _FiniteFloat = Field(default=1.0, gt=0.0, le=1.0, description="Keep the likeliest tokens up to this mass.")
    min_p: _FiniteFloat = Field(default=0.0, ge=0.0, le=1.0, description="Drop tokens below this share of the best.")
    repetition_penalty: _FiniteFloat = Field(default=1.0, gt=0.0, le=10.0, description="Over prompt and output.")
    presence_penalty: _FiniteFloat = Field(default=0.0, ge=-2.0, le=2.0, description="Over the output only.")
    frequency_penalty: _FiniteFloat = Field(default=0.0, ge=-2.0, le=2.0, description="Over the output only.")
    logit_bias: dict[int, _FiniteFloat] | None = Field(default=None, description="Token id to added logit.")
    allowed_token_ids: tuple[int, ...] | None = Field(default=None, description="Only these may be sampled.")
    suppress_token_ids: tuple[int, ...] = Field(default=(), description="Never sampled.")
    stop: tuple[str, ...] = Field(default=(), max_length=64, description="Strings that end the text.")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Ids that end it, besides the model's own.")
    ignore_eos: bool = Field(default=False, description="Go on past the model's own end tokens.")
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="Same seed, same output, in any batch.")
    logprobs: int | None = Field(default=None, ge=0, le=50, description="Alternatives to report beside each token.")
    n: int = Field(default=1, ge=1, le=128, description="Answers to one prompt.")
    structured: StructuredOutput | None = None

    @model_validator(mode="before")
    @classmethod
    def _stop_may_be_a_string(cls, values: object) -> object:
        if isinstance(values, dict) and isinstance(values.get("stop"), str):
            return {**values, "stop": (values["stop"],)}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if any(not text for text in self.stop):
            raise ValueError("an empty stop string can never be found; remove it")
        if any(token < 0 for token in (*self.stop_token_ids, *self.suppress_token_ids)):
            raise ValueError("token ids must not be negative")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty, so nothing could be sampled; leave it out or name ids")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class CodecParams(StageParams):
    """How a codec stage turns codes into samples."""

    streaming: bool = Field(default=True, description="Emit audio while codes still arrive; false waits for all.")
    num_steps: int = Field(default=10, ge=1, le=1000, description="Solver time points of a flow-matching decoder.")
    guidance_scale: _FiniteFloat = Field(default=0.5, ge=0.0, le=100.0)
    sway: _FiniteFloat = Field(default=-1.0, ge=-10.0, le=10.0, description="Sway coefficient of the time grid.")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="Seed of the initial noise.")


# ------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class OmniTokensPrompt:
    """A prompt that is already tokens, or embeddings in place of tokens.

    `prompt_embeds` is `[n, hidden]`; then `prompt_token_ids` may be left out.
    """

    prompt_token_ids: tuple[int, ...] = ()
    prompt_embeds: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What every stage and bridge may know of a request. Immutable for its whole life."""

    request_id: str
    modalities: frozenset[Modality] = frozenset({Modality.TEXT})
    priority: int = 0
    """Lower runs earlier."""
    deadline: float | None = None
    """`time.monotonic()` value past which the request ends with `FinishReason.DEADLINE`."""
    voice: str | None = None
    arrival: float = field(default_factory=time.monotonic)


# -------------------------------------------------------------------------------------------- stage inputs


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """One media item inside a prompt: which rows it fills and what the encoder needs to fill them.

    `positions` are indices into the prompt (`int64 [n]`, not always contiguous: audio and video of one clip are
    interleaved); the encoder's output rows go there in order. `key` is the content's digest: the encoder cache and
    the prefix hash are built on it.
    """

    kind: Modality
    key: bytes
    positions: torch.Tensor
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ARInput:
    """Start of an autoregressive stage's work on a request."""

    token_ids: tuple[int, ...]
    embeds: torch.Tensor | None = None
    """`[n, E]` rows used instead of embedding `token_ids` (which then serve penalties only)."""
    positions: torch.Tensor | None = None
    """`int64 [3, n]` for m-RoPE or `[n]`; `None` counts 0, 1, 2, ..."""
    position_delta: int = 0
    """Generated token at index i gets position i + position_delta."""
    media: tuple[MediaSpan, ...] = ()
    context: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What downstream bridges need of the prompt beyond its tokens (grids, lengths), handed on untouched."""
    streaming: bool = False
    """True: each generated token needs a row of `SideRows` to be computed; the stage waits (starved) without."""
    side_rows: torch.Tensor | None = None
    """`[k, E]` side rows known already."""


@dataclass(frozen=True, slots=True)
class SideRows:
    """Rows added to the embeddings of generated tokens, one a token, in order.

    After `final` the last row of all serves every further token.
    """

    rows: torch.Tensor
    final: bool = False


@dataclass(frozen=True, slots=True)
class CodecInput:
    """Start of a codec stage's work on a request; codes follow by `CodecFrames`."""

    codes: tuple[int, ...] = ()
    final: bool = False


@dataclass(frozen=True, slots=True)
class CodecFrames:
    """More codes for a running codec request."""

    codes: tuple[int, ...]
    final: bool = False


StagePayloadIn = ARInput | CodecInput
StageFeed = SideRows | CodecFrames


@dataclass(frozen=True, slots=True)
class StageInput:
    """A request as one stage sees it."""

    info: RequestInfo
    params: StageParams
    payload: StagePayloadIn
    emit_hidden: bool = False
    """Someone downstream reads this stage's hidden rows."""


# ------------------------------------------------------------------------------------------- stage outputs


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and the likeliest alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens sampled in a step, the text they completed, and the hidden rows computed since the last chunk.

    `hidden` holds one row for each *computed* token (prompt tokens first, then generated tokens once they have
    been fed back), `hidden_start` is the index of its first row in the sequence. `prompt` rides on the first
    chunk only.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: torch.Tensor | None = None
    hidden_start: int = 0
    prompt: ARInput | None = None
    ended_by: int | None = None
    """The end token, when one ended the answer; it is the last of `token_ids`."""


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Mono samples, float32 in [-1, 1]."""

    samples: np.ndarray
    sample_rate: int


ChunkPayload = TokenChunk | AudioChunk


@dataclass(frozen=True, slots=True)
class StageChunk:
    """A piece of a stage's output for one request. For each `index`, the chunk that carries `finish` is the last.

    A chunk with neither payload nor finish says that the stage ran its first step on the request at `time`.
    """

    request_id: str
    stage: str
    payload: ChunkPayload | None = None
    index: int = 0
    """Which of the request's `n` answers."""
    finish: FinishReason | None = None
    error: OmniError | None = None
    time: float = field(default_factory=time.monotonic)


# ------------------------------------------------------------------------------------------ request outputs


@dataclass(slots=True)
class StageTrace:
    """Times of one stage of one request, in seconds since the request arrived; None: it did not happen."""

    stage: str
    submitted: float | None = None
    started: float | None = None
    first_chunk: float | None = None
    last_chunk: float | None = None
    chunks: int = 0
    tokens: int = 0
    finish: FinishReason | None = None

    @property
    def queue(self) -> float | None:
        """Seconds between the stage taking the request and its first step on it."""
        return None if self.submitted is None or self.started is None else self.started - self.submitted


@dataclass(slots=True)
class Trace:
    """What ran when, for one request."""

    request_id: str
    arrival: float
    admitted: float | None = None
    finished: float | None = None
    stages: dict[str, StageTrace] = field(default_factory=dict)

    def __str__(self) -> str:
        def ms(value: float | None) -> str:
            return "-" if value is None else f"{value * 1e3:.1f}"

        lines = [f"request {self.request_id}: {ms(self.finished)} ms in all"]
        lines.append(f"{'stage':<14}{'queue':>9}{'started':>9}{'first':>9}{'last':>9}{'chunks':>8}{'tokens':>8}  end")
        for t in self.stages.values():
            lines.append(
                f"{t.stage:<14}{ms(t.queue):>9}{ms(t.started):>9}{ms(t.first_chunk):>9}{ms(t.last_chunk):>9}"
                f"{t.chunks:>8}{t.tokens:>8}  {t.finish or '-'}"
            )
        return "\n".join(lines)


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's answers."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: float = 0.0
    stage_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class OmniRequestOutput:
    """The whole answer so far. `finished` outputs are final."""

    request_id: str
    outputs: list[CompletionOutput] = field(default_factory=list)
    audio: AudioOutput | None = None
    finish_reason: FinishReason | None = None
    error: OmniError | None = None
    usage: Usage = field(default_factory=Usage)
    trace: Trace | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids if self.outputs else []


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """One item of `AsyncOmni.generate()`: what is new, by modality. The last one carries `final`."""

    request_id: str
    modality: Modality
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    audio: AudioChunk | None = None
    finish_reason: FinishReason | None = None
    """End of this modality's stream (per answer)."""
    final: OmniRequestOutput | None = None


DTypeName = Literal["auto", "float32", "float16", "bfloat16"]
