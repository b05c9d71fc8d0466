"""What the autoregressive engine asks of a model family: an adapter around a `transformers` decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from omnistage.core.errors import StageError, UnsupportedModelError
from omnistage.core.types import ARInput, MediaSpan, RequestInfo

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from omnistage.engines.ar.attention import KVCache, PagedContext
    from omnistage.engines.ar.group import Group
    from omnistage.engines.ar.sharding import RankGroup


KVShape = tuple[int, int, int]
"""Key heads of an attention module, the width of a key and that of a value."""

Choose = Callable[[torch.Tensor, int], torch.Tensor]
"""Logits `[S, V]` of the residual code with this index → the chosen codes, `int64 [S]`."""


@dataclass(frozen=True, slots=True)
class ResidualCodes:
    """The codes of a frame that follow the sampled one, and how they are sampled: greedily where that one is."""

    count: int
    vocab_size: int
    hidden_size: int
    """Width H of the hidden rows that they are predicted from."""
    top_k: int = 0
    top_p: float = 1.0
    temperature: float | None = None
    """None: that of the sampled code."""


@dataclass(frozen=True, slots=True)
class OwnState:
    """Bytes of a sequence whose state the component keeps itself (`OwnSequence`)."""

    token_bytes: int
    """For each of its tokens."""
    fixed_bytes: int
    """Whatever its length: the state of recurrent layers."""
    alone: bool = False
    """The model keeps part of it, so that a sequence must end before the next begins."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a recurrent layer's state, as transformers' cache layers name it."""

    kind: Literal["conv_states", "recurrent_states"]
    index: int
    """Which of that kind."""
    shape: tuple[int, ...]
    """Of one sequence."""
    dtype: torch.dtype


class OwnSequence(ABC):
    """A sequence that a component computes by itself, with the cache that its model makes for it."""

    @abstractmethod
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`int64 [T]`, which follow those of the calls before → logits `[V]` of the token after them."""


class GroupedSequence(OwnSequence):
    """A sequence whose prompt its model computes whole, and whose further tokens with those of others."""

    @abstractmethod
    def begin(self, token_ids: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """A prompt `int64 [T]`, whose keys and values go to `slots` → logits `[V]` of the token after it."""


@dataclass(frozen=True, slots=True)
class ARSpec:
    """Shapes that the engine plans with."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Ids that can be sampled."""
    embed_size: int
    """Width E of the rows that `embed` gives and that prompts by embeddings must have."""
    max_length: int
    position_dims: int = 1
    """1 for plain positions, 3 for m-RoPE."""
    fractional_positions: bool = False
    """Positions are not always whole numbers; `forward` gets them as float64."""
    emit_size: int = 0
    """Width of the hidden rows handed downstream; 0: none."""
    emit_anew: bool = False
    """A request that hands rows downstream takes none from the prefix cache: computed with another part of the prompt
    they differ in the last bits, and so would what is made of them."""
    side_input: bool = False
    """Generated tokens take a side row from upstream."""
    side_size: int = 0
    """Width of the side rows, where it is not E."""
    deep_size: int = 0
    """Width of what `encode` may give beyond E, for deeper layers: `forward_media` takes it."""
    residual: ResidualCodes | None = None
    """A generated token is the first code of a frame; `predict` gives the others, `embed_frames` embeds all."""
    prompt_vocab_size: int = 0
    """Ids that a prompt may hold, where they are more than can be sampled; 0: the same."""
    layer_shapes: tuple[KVShape, ...] = ()
    """Of each attention module, where they are not all `num_kv_heads` of `head_dim`."""
    plain_attention: bool = True
    """Without soft caps, sinks or values of another width than keys, so that every attention backend computes it."""
    own_state: OwnState | None = None
    """Sequences run one by one, and the component keeps their state: `open_sequence`. None: in the engine's pool."""
    states: tuple[tuple[StateShape, ...], ...] = ()
    """Of each of `recurrent_modules`."""
    uneven_states: bool = False
    """These compute single tokens otherwise than several, and not only by rounding: prompts are not cut into single
    ones, and generated tokens remain single ones when they are computed again."""
    grouped: bool = False
    """The component takes groups of sequences (`forward_group`) instead of a flattened batch."""
    padded_groups: bool = False
    """They may differ in length."""
    whole_prompts: bool = False
    """Each prompt is computed whole, by a sequence of its own, and `advance_group` is called for what they generate."""
    held_bytes: int = 0
    """What such a sequence keeps beside its blocks, whatever its length."""
    whole_media: bool = False
    """It takes prompts with media as their processor makes them as a whole, not one media item after the other."""
    usual_length: int = 0
    """Tokens of the longest sequence where the budget does not say; 0: `max_length`."""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What the cache of each attention module holds for a token."""
        return self.layer_shapes or ((self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    @property
    def state_bytes(self) -> int:
        """What a sequence takes beside its blocks, whatever its length: the state of recurrent layers."""
        return sum(prod(state.shape) * state.dtype.itemsize for states in self.states for state in states)

    def empty_caches(self, blocks: int, size: int, new: Callable[[tuple[int, ...]], torch.Tensor]) -> list[KVCache]:
        """Caches of all attention modules for so many blocks; `new` makes a tensor of a shape."""
        return [
            (new((blocks, size, heads, key_dim)), new((blocks, size, heads, value_dim)))
            for heads, key_dim, value_dim in self.kv_shapes
        ]


class ARComponent(ABC):
    """An unpatched `transformers` decoder and what surrounds it. T tokens flattened, no batch dimension."""

    spec: ARSpec
    decoder: nn.Module
    """Runs `inputs_embeds` through attention registered under `omnistage_paged`; its layers are in `.layers`."""
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()
    suppress_token_ids: tuple[int, ...] = ()
    tokenizer: PreTrainedTokenizerFast | None = None
    pure_forward = False
    """`forward` keeps nothing aside, and its result depends on its arguments and the weights alone.

    A class that has a `forward` of its own says so itself.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls) and "pure_forward" not in vars(cls):
            cls.pure_forward = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All networks that it holds, for the memory plan."""
        return (self.decoder,)

    @property
    def attention_modules(self) -> Sequence[nn.Module]:
        """The modules that each get a cache, in the order of `spec.kv_shapes`."""
        from omnistage.engines.ar.attention import attention_modules  # brings transformers

        return attention_modules(self.decoder)

    @property
    def recurrent_modules(self) -> Sequence[nn.Module]:
        """The modules that keep a state for each sequence (`recurrent.py`), in the order of `spec.states`."""
        return ()

    @property
    def decoders(self) -> tuple[nn.Module, ...]:
        """Networks with repeated `.layers` that run in every step; the engine may merge linear layers and compile."""
        return (self.decoder,)

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        """Modules that `logits` computes with; the engine may exchange linear layers of them for faster ones."""
        return ()

    def shard(self, group: RankGroup, device: torch.device) -> None:
        """Keep one rank's share of the weights, on `device`, with its share of the KV heads in `spec`."""
        del group, device
        raise UnsupportedModelError(
            f"{type(self).__name__} cannot run on several ranks yet; set tensor_parallel: 1 for its stage"
        )

    def media_bytes(self, tokens: int) -> int:
        """Peak memory of encoding media that take this many tokens of a prompt."""
        return 0

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        """Complete an input that came over a bridge. Runs once a request, before it is queued."""
        del info
        return payload

    def check(self, info: RequestInfo, payload: ARInput) -> None:  # noqa: B027  (optional hook)
        """Raise an `OmniError` for input that this family cannot take. Thread-safe."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`int64 [T]` → `[T, E]`."""

    @abstractmethod
    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        """`[T, E]`, `int64 [position_dims, T]` → final hidden states `[T, H]`."""

    def forward_group(self, token_ids: torch.Tensor, group: Group) -> torch.Tensor:
        """`int64 [B, n]` → logits `[B, V]` of the tokens after them; nothing else is called of a `grouped` one."""
        raise StageError(f"{type(self).__name__} runs flattened batches")

    def open_sequence(self, media: Sequence[MediaSpan] = ()) -> OwnSequence:
        """A new sequence, where there is an `own_state` or prompts are computed whole, then a `GroupedSequence`."""
        del media
        raise StageError(f"{type(self).__name__} keeps its sequences in the engine's pool")

    def advance_group(
        self, sequences: Sequence[GroupedSequence], token_ids: torch.Tensor, slots: Sequence[np.ndarray]
    ) -> torch.Tensor:
        """One more token `int64 [B]` of each sequence → logits `[B, V]`; `slots` are those of all their tokens."""
        raise StageError(f"{type(self).__name__} takes its prompts in chunks")

    def forward_media(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        paged: PagedContext,
        places: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """`forward` of every batch with media, where there is a `deep_size`; it is never captured.

        Media fill the rows `places` (`bool [T]`); `rows` `[M, deep_size]` are what `encode` gave for them beyond E,
        zeros where it gave nothing.
        """
        raise StageError(f"{type(self).__name__} has no rows for deeper layers")

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[S, H]` → `[S, V]`."""

    def emit(self, embeds: torch.Tensor, hidden: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        """Rows `[T, emit_size]` for downstream; `media` is `bool [T, 1]`, true where a media item filled the row."""
        raise StageError(f"{type(self).__name__} emits no hidden rows")

    def encode(self, span: MediaSpan) -> torch.Tensor:
        """Rows `[len(span.positions), E]` of a media item, or `[len(span.positions), E + deep_size]`."""
        raise StageError(f"{type(self).__name__} takes no {span.kind} input")

    def add_side(self, embeds: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Embeddings `[T, E]` of generated tokens with their side rows `[T, side_size]`."""
        return embeds + rows

    def use_kernels(self) -> None:
        """Called once, before layers are compiled and steps captured, where a stage may run Triton kernels."""
        return

    def predict(self, hidden: torch.Tensor, token_ids: torch.Tensor, choose: Choose) -> torch.Tensor:
        """Residual codes `int64 [S, residual.count]` of the frames that `token_ids` `[S]` begin.

        `hidden` `[S, H]` are the rows that the tokens were sampled from. No row may depend on another, and nothing may
        wait for the device: the call is captured in a CUDA graph.
        """
        raise StageError(f"{type(self).__name__} has no code predictor")

    def embed_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """`int64 [T, 1 + residual.count]` → `[T, E]`: what is fed back for generated tokens, before side rows."""
        raise StageError(f"{type(self).__name__} has no code predictor")

    def final_side_rows(self) -> torch.Tensor:
        """Rows `[k, side_size]` that follow the upstream's last one; the last of them serves all further tokens."""
        raise StageError(f"{type(self).__name__} does not support side rows")
