"""What the autoregressive engine asks of a model family: an adapter around a `transformers` decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.core.errors import StageError
from omnistage.core.types import ARInput, MediaSpan, RequestInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from omnistage.engines.ar.attention import PagedContext


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
    emit_size: int = 0
    """Width of the hidden rows handed downstream; 0: none."""
    emit_anew: bool = False
    """A request that hands rows downstream takes none from the prefix cache: computed with another part of the prompt
    they differ in the last bits, and so would what is made of them."""
    side_input: bool = False
    """Generated tokens take a side row from upstream."""
    prompt_vocab_size: int = 0
    """Ids that a prompt may hold, where they are more than can be sampled; 0: the same."""


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

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All networks that it holds, for the memory plan."""
        return (self.decoder,)

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

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[S, H]` → `[S, V]`."""

    def emit(self, embeds: torch.Tensor, hidden: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        """Rows `[T, emit_size]` for downstream; `media` is `bool [T, 1]`, true where a media item filled the row."""
        raise StageError(f"{type(self).__name__} emits no hidden rows")

    def encode(self, span: MediaSpan) -> torch.Tensor:
        """Rows `[len(span.positions), E]` of a media item."""
        raise StageError(f"{type(self).__name__} takes no {span.kind} input")

    def final_side_rows(self) -> torch.Tensor:
        """Rows `[k, E]` that follow the upstream's last one; the last of them serves all further tokens."""
        raise StageError(f"{type(self).__name__} takes no side rows")
