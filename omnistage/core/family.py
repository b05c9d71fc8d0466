"""The family contract: what a model family provides, and what its factories are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from omnistage.core.checkpoint import Checkpoint
from omnistage.core.messages import PLAIN_TEMPLATE, ChatMessage, TemplateOptions
from omnistage.core.transcripts import TranscriptionOptions
from omnistage.core.types import (
    DTypeName,
    Modality,
    OmniTokensPrompt,
    RequestInfo,
    StageChunk,
    StageFeed,
    StagePayloadIn,
    TextBatch,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from omnistage.core.bundle import Bundle
    from omnistage.core.clips import AudioClip
    from omnistage.core.params import DiffusionParams

BridgeResult = tuple[object, Sequence[StagePayloadIn | StageFeed]]
Bridge = Callable[[RequestInfo, object, StageChunk], BridgeResult]
"""`bridge(request, state, chunk) -> (state, inputs)`.

A pure fold over the chunks of the edge's sources: `state` is None at first, then whatever the last call returned.
The first input that it yields starts the downstream stage's work on the request, later ones feed it. The chunk
with `finish` is the last it sees of that source.
"""


class StageSettings(BaseModel):
    """What the configuration says of every stage, whatever its engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str  # narrowed by each engine; named here so that it is printed first
    component: str = Field(description="Registry name of the network that this stage runs.")
    output: Modality | None = Field(default=None, description="Modality that the stage outputs; null: none.")
    device: str | None = Field(default=None, description="null: the deployment's.")
    dtype: DTypeName | None = Field(default=None, description="null: the deployment's.")


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a component factory is given."""

    model: Checkpoint
    stage_name: str
    stage: StageSettings
    """The stage's own configuration, of its engine's class."""
    device: torch.device
    dtype: torch.dtype
    progress: Callable[[str, float], None] | None = None
    torch_threads: int | None = None
    """CPU threads that the deployment asks for; None: torch's choice."""
    requested_dtype: DTypeName = "auto"
    """The deployment's dtype as it was asked for."""
    target: torch.device | None = None
    """Where the component will run, if it is built on the meta device for a memory plan; None: on `device`."""


ComponentFactory = Callable[[LoadContext], object]


class InputProcessor(Protocol):
    """Turns what a user sends into the entry stage's input. Thread-safe."""

    input_modalities: frozenset[Modality]

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> StagePayloadIn:
        """Apply the chat template; media become spans. `tools` are functions that the model may call."""

    def text(self, prompt: str) -> StagePayloadIn:
        """A bare prompt, no template; special tokens in it stay text."""

    def tokens(self, prompt: OmniTokensPrompt) -> StagePayloadIn: ...

    def voices(self) -> Sequence[str]:
        """Names that a request's `voice` may take; empty where the model does not speak."""


@runtime_checkable
class WholePrompts(Protocol):
    """An input processor that gives media apart from their prompt, unless the entry stage takes none that way."""

    def use_whole_prompts(self, *, rows: bool = False) -> None:
        """Called once, before the first input, where the entry stage takes prompts with media as a whole.

        `rows`: as rows for all of their tokens, else as what its model's own forward takes.
        """


@runtime_checkable
class AudioLimits(Protocol):
    """An input processor whose model takes audio of some lengths only."""

    def clip_seconds(self) -> tuple[float, float]:
        """The shortest and the longest audio clip that may be one part of a message."""


@runtime_checkable
class ClipRate(Protocol):
    """An input processor whose messages hold clips at a rate of its own."""

    @property
    def clip_rate(self) -> int:
        """Samples a second of the clips in messages."""


@runtime_checkable
class VoicePrompts(Protocol):
    """An input processor whose prompts name the voice, and hold clips at a rate of their own. Thread-safe."""

    @property
    def clip_rate(self) -> int:
        """Samples a second of the clips in messages."""

    def with_voice(self, voice: str | None) -> InputProcessor:
        """The processor for requests with this voice, one of `voices()`; None: the default."""


THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ThinkBlock:
    """What a model may write before its answer, between `THINK_START` and `THINK_END`."""

    end_token: int
    opened: bool
    """The chat template has written the start: an answer begins inside."""


@runtime_checkable
class Thinking(Protocol):
    """An input processor of a model that may think before it answers."""

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool | None = None,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> StagePayloadIn:
        """As `InputProcessor.chat`; `thinking` is `enable_thinking` of the template, None: not said."""

    def has_variable(self, name: str) -> bool:
        """Whether the template reads a variable of this name, beside those that every template gets."""

    def think_block(self, thinking: bool | None) -> ThinkBlock | None:
        """That of answers to such chats; None where the model has none."""


@runtime_checkable
class TokenText(Protocol):
    """An input processor whose model reads text as tokens. Thread-safe."""

    def tokens(self, prompt: OmniTokensPrompt) -> StagePayloadIn: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""


@runtime_checkable
class TokenVocabulary(Protocol):
    """An input processor that has its tokens' vocabulary. Thread-safe."""

    def text_tokens(self, text: str) -> Sequence[int]:
        """The ids of a bare prompt, also where the model does not hold so many; up to twice as many."""

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it, like `ĠHello`; the ids are of the vocabulary."""


@runtime_checkable
class SpeechReader(Protocol):
    """An input processor of a model that can speak a text as it is."""

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        """The conversation that has just this text spoken."""


@runtime_checkable
class VoiceCloner(Protocol):
    """An input processor of a model that can speak a text with the voice of a clip."""

    def read_aloud_as(self, text: str, clip: Mapping[str, object], clip_text: str | None) -> list[dict[str, object]]:
        """The conversation that has this text spoken as in a clip, a part of a message, and what is said in that.

        Raises for the field `ref_text` where the model needs the clip's text and there is none.
        """


@runtime_checkable
class Transcriber(Protocol):
    """An input processor of a model that can transcribe audio without its language model. Thread-safe."""

    def transcribe(self, clip: AudioClip, over: Callable[[], bool] | None = None) -> str:
        """The text of audio at `audio_sample_rate`; empty where there is no speech.

        It calls `over` now and then and may stop once that is true: the result is not used then.
        """

    @property
    def audio_sample_rate(self) -> int:
        """Sample rate of the audio that it takes, in Hz."""


@runtime_checkable
class TextEncoder(Protocol):
    """An input processor of a model that gives embeddings or scores of texts. Thread-safe."""

    def encode(self, batch: TextBatch) -> StagePayloadIn:
        """The entry stage's input for these texts; raises for pairs where the model takes single texts only."""


@runtime_checkable
class SpeechRecognizer(Protocol):
    """An input processor of a model whose stage transcribes speech. Thread-safe."""

    @property
    def audio_sample_rate(self) -> int:
        """Sample rate of the audio that it takes, in Hz."""

    @property
    def has_timestamps(self) -> bool: ...

    def recognize(self, clip: AudioClip, options: TranscriptionOptions) -> StagePayloadIn:
        """The stage's input for audio at `audio_sample_rate`. Raises for options that the model does not have."""


@runtime_checkable
class OptionalInputs(Protocol):
    """An input processor whose model may be there without some of its parts."""

    def unsupported_reason(self, kind: Modality) -> str:
        """Why it does not take this kind of media, and what helps."""


@runtime_checkable
class DrawingProcessor(Protocol):
    """Turns a request to draw into the entry stage's input. Thread-safe."""

    input_modalities: frozenset[Modality]

    def draw(
        self, prompt: str, images: Sequence[np.ndarray], mask: np.ndarray | None, params: DiffusionParams
    ) -> StagePayloadIn:
        """`images` are `uint8 [h, w, 3]`, `mask` is `uint8 [h, w]`; `params` is all that the request will use."""

    def voices(self) -> Sequence[str]: ...


AnyProcessor = InputProcessor | DrawingProcessor


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: how to recognise it and everything special that serves it."""

    name: str
    architectures: tuple[str, ...]
    """Values of `architectures` or `model_type` in config.json. `*` matches any causal LM, after all others."""
    pipeline: Path
    components: Mapping[str, ComponentFactory]
    bridges: Mapping[str, Bridge]
    processor: Callable[[Checkpoint], AnyProcessor]
    tiny: Callable[..., None] | None = None
    verify: Callable[..., object] | None = None
    """Called with a `ModelRunner`, then `cases`, `seed` and `progress` by name; gives `VerifyRow`s."""
    aliases: tuple[str, ...] = field(default=())
    variants: tuple[str, ...] = field(default=())
    """What `tiny` takes as `variant`, the default first; empty where it takes none."""
    pipeline_of: Callable[[Mapping[str, object]], Path] | None = None
    """The pipeline by a checkpoint's config.json, where not all of its checkpoints have the same parts."""
    text_bridges: frozenset[str] = frozenset()
    """Those of its bridges that read text and never hidden states: they also work behind a remote server."""
    plans_memory: bool = False
    """Its factories take the meta device: they build components without reading weights, which the memory plan asks."""
    full_precision: tuple[str, ...] = ()
    """Regular expressions of modules that are never quantised by default, beside those of all models."""
    bundle: Bundle | None = None
    """Weights that `omnistage pull` fetches for it."""
