"""Attention over the paged KV pool: the interface, and the glue that hands it to `transformers` modules.

A backend turns a step's layout (host arrays) into a plan (device tensors) once a step, then attends layer by layer.
`sdpa` is the reference and runs on every device; GPU kernels must match it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from omnistage.core.errors import ConfigError, StageError
from omnistage.engines.streams import avoid_attention_plans
from omnistage.hf import transformers

ATTENTION_NAME = "omnistage_paged"
"""Name under which `transformers` finds our attention. No mask function is registered, so it builds no mask."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A step's sequences on the host. S sequences, T tokens in all, sequence i has its queries concatenated."""

    query_lengths: np.ndarray
    """int32 [S]"""
    sequence_lengths: np.ndarray
    """int32 [S], this step's tokens included."""
    slots: list[np.ndarray]
    """Per sequence, int64 slots of all its tokens (at least `sequence_lengths[i]` of them)."""
    block_tables: list[np.ndarray]
    """Per sequence, int32 blocks."""
    ends: list[np.ndarray | None] | None = None
    """Per sequence, int64 `[queries]`: past the last token that each query sees in attention that looks `ahead`; None
    where that is itself."""


@dataclass(slots=True)
class PagedContext:
    """What attention needs in a forward; rides to every layer as the keyword argument `paged`."""

    backend: AttentionBackend
    slot_mapping: torch.Tensor
    """int64 [T]: where this step's keys and values go; -1 for padding."""
    plan: AttentionPlan
    layout: BatchLayout | None = None
    """What the plan was made of; not in captured steps."""


current = threading.local()
"""`paged`: the context of the forward that this thread runs, for operators that cannot be given it.

Were its tensors arguments of compiled layers, these would be compiled again for each kind of layout: other numbers of
sequences, other widths of tables, other offsets.
"""

KVCache = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, each `[num_blocks, block_size, kv_heads, head_dim]`; V may have a `head_dim` of its own."""


def attention_modules(decoder: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder whose layers are numbered, in that order."""
    modules = [
        module
        for name, module in decoder.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int) and name.endswith(("attn", "attention"))
    ]
    return sorted(modules, key=lambda module: int(module.layer_idx))


def bind_caches(modules: Sequence[nn.Module], caches: Sequence[KVCache]) -> None:
    """Give every attention module its cache.

    Held by the module rather than looked up by its number: a number would make `torch.compile` compile each layer
    again, a tensor does not.
    """
    if len(modules) != len(caches):
        raise StageError(f"the decoder has {len(modules)} attention modules for {len(caches)} layers")
    for module, cache in zip(modules, caches, strict=True):
        setattr(module, "kv_cache", cache)  # noqa: B010  (torch types attributes as tensors and modules)


class AttentionPlan:
    """Base of a backend's per-step metadata."""

    __slots__ = ()


class GraphPlan(ABC):
    """A plan whose tensors keep their place, because a captured graph reads them at every replay."""

    plan: AttentionPlan

    @abstractmethod
    def fill(self, lengths: Sequence[int], block_tables: Sequence[np.ndarray]) -> None:
        """Describe the next replay: sequences with one query each, this step's tokens included; the rest is padding."""


class PrefillGraphPlan(ABC):
    """The same for sequences with several queries."""

    plan: AttentionPlan

    @abstractmethod
    def fill_layout(self, layout: BatchLayout) -> None:
        """Describe the next replay; the rest is padding."""


class ScoreOptions(NamedTuple):
    """How the scores of queries and keys become weights."""

    scale: float
    window: int | None
    softcap: float | None = None
    """Bounds the scores by its `tanh`."""
    sinks: torch.Tensor | None = None
    """`[heads]`: scores of a key without a value."""
    ahead: bool = False
    """Tokens see later ones up to the `ends` of the layout."""


class AttentionBackend(ABC):
    """Writes keys and values into the pool and attends through it."""

    name: str
    supports_graphs = False
    """It has a `graph_plan` and a `prefill_graph_plan`, so that steps can be captured in CUDA graphs."""

    @abstractmethod
    def plan(self, layout: BatchLayout, device: torch.device) -> AttentionPlan:
        """Device metadata of one step."""

    def graph_plan(self, size: int, length: int, block_size: int, device: torch.device) -> GraphPlan:
        """The plan of a captured decode step for `size` sequences of at most `length` tokens."""
        raise StageError(f"attention backend {self.name!r} cannot be captured in a CUDA graph; set cuda_graphs: false")

    def prefill_graph_plan(
        self, tokens: int, sequences: int, length: int, block_size: int, device: torch.device
    ) -> PrefillGraphPlan:
        """The plan of a captured step with so many tokens of so many sequences, each of at most `length` tokens."""
        raise StageError(f"attention backend {self.name!r} cannot be captured in a CUDA graph; set cuda_graphs: false")

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        paged: PagedContext,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        """`[T, heads, d]`, `[T, kv_heads, d]` twice → `[T, heads, d]`. Causal within each sequence.

        Only a backend that `make_backend` gives for attention that is not plain has to take a soft cap or sinks.
        """


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    paged: PagedContext | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`transformers`' attention signature: query `[1, heads, T, d]` in, `[1, T, heads, d]` out."""
    paged = current.paged if paged is None else paged  # a module may pass no keyword arguments on
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = paged.backend.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        module.kv_cache,  # type: ignore[arg-type]
        paged,
        # The window of the model's own mask, where that was recorded; a module's argument may say something else.
        ScoreOptions(
            scale,
            getattr(module, "paged_window", sliding_window),
            softcap,
            s_aux,
            getattr(module, "paged_ahead", False),
        ),
    )
    return out.unsqueeze(0), None


transformers.AttentionInterface.register(ATTENTION_NAME, paged_attention)


def make_backend(name: str, device: torch.device, plain: bool = True, *, float8: bool = False) -> AttentionBackend:
    """The backend called `name`; `auto` takes the fastest that the device has and that computes this attention.

    Attention is not `plain` with soft caps, sinks, or values of another width than keys. `float8`: of the cache.
    """
    from omnistage.engines.ar.attention.sdpa import SdpaBackend
    from omnistage.engines.ar.attention.triton_backend import TritonBackend, triton_available

    if name == "auto":
        kernels = plain and not float8 and device.type == "cuda" and triton_available()
        name = "triton" if kernels else "sdpa"
    if name == "sdpa":
        avoid_attention_plans(device)
        return SdpaBackend()
    if name == "triton":
        if not plain:
            raise ConfigError(
                "the triton attention backend has no soft caps, sinks or values narrower than keys, which this model "
                "needs; set attention: sdpa"
            )
        if float8:
            raise ConfigError(
                "the triton attention backend does not read a cache in float8; set attention: sdpa, or leave kv_dtype "
                "out"
            )
        if not triton_available():
            raise ConfigError("the triton attention backend needs a CUDA device and the triton package; use sdpa")
        return TritonBackend()
    raise ConfigError(f"unknown attention backend {name!r}; known: auto, sdpa, triton")
