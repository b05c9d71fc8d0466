"""Recurrent layers in a flattened batch: a sequence's rows are computed with the state of that sequence.

The module's own forward stays the arithmetic, and transformers' own cache layer is what it finds its state in. Around
it, rows are taken apart: sequences with one token are one batch `[B, 1, H]` with their states gathered from a pool, and
each longer chunk runs by itself and goes on from its sequence's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from omnistage.core.errors import StageError
from omnistage.engines.ar.attention import BatchLayout
from omnistage.engines.ar.component import StateShape
from omnistage.engines.streams import upload
from omnistage.hf import transformers

_Slots = slice | torch.Tensor
_Forward = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Several rows of one sequence, or its first."""

    start: int
    end: int
    slot: int
    fresh: bool
    """They are its first."""
    together: int
    """So many belong to the prompt; the others were single ones when they were computed first."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """Which rows of a flattened batch belong to which state."""

    rows: torch.Tensor | None
    """int64 `[B]`: rows of sequences that go on by one token; None: all of the batch, in this order."""
    slots: _Slots
    """Of those sequences."""
    chunks: tuple[StateChunk, ...]
    """Other sequences."""

    @classmethod
    def of(
        cls, layout: BatchLayout, slots: Sequence[int], device: torch.device, prompts: Sequence[int] | None = None
    ) -> StateStep:
        """`slots`: of each sequence of the layout; `prompts`: the lengths of their prompts."""
        counts, lengths = layout.query_lengths.tolist(), layout.sequence_lengths.tolist()
        starts = [0, *accumulate(counts)]
        single = [i for i, count in enumerate(counts) if count == 1 and lengths[i] > 1]
        chunks = tuple(
            StateChunk(
                starts[i],
                starts[i + 1],
                slots[i],
                lengths[i] == counts[i],
                counts[i] if prompts is None else min(counts[i], max(0, prompts[i] + counts[i] - lengths[i])),
            )
            for i in range(len(counts))
            if counts[i] > 1 or lengths[i] == 1
        )
        # In the order of their slots: where these are adjacent, states are used in place.
        single.sort(key=lambda i: slots[i])
        places = [slots[i] for i in single]
        first = places[0] if places else 0
        adjacent = not places or places[-1] - first == len(places) - 1
        rows = [starts[i] for i in single]
        return cls(
            None if rows == list(range(starts[-1])) else upload(np.array(rows, dtype=np.int64), device),
            slice(first, first + len(places)) if adjacent else upload(np.array(places, dtype=np.int64), device),
            chunks,
        )


class StatePool:
    """The states of a bounded number of sequences, for all recurrent modules of a component."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        slots: int,
        new: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> None:
        """`new` makes a tensor of zeros. The modules use this pool from now on."""
        self.step: StateStep | None = None
        for module in modules:
            states = states_of(module)
            states.pool = self
            states.tensors = [new((slots, *state.shape), state.dtype) for state in states.shapes]

    @contextmanager
    def computing(self, step: StateStep) -> Iterator[None]:
        """For the forward of the component inside."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


class LayerStates:
    """One recurrent module's part of the pool, and how its forward is given a state."""

    def __init__(
        self, shapes: tuple[StateShape, ...], argument: str, layer: int, *, stepwise: bool, uneven: bool
    ) -> None:
        """`argument`: of the module's forward that takes a cache; `layer`: where it looks in that.

        `stepwise`: from a state it goes on by single tokens only, and gives other numbers for several. `uneven`: for
        single ones it gives other numbers.
        """
        self.shapes = shapes
        self.stepwise, self.uneven = stepwise, uneven
        self.layer = layer
        self.pool: StatePool | None = None
        self.tensors: list[torch.Tensor] = []
        self._argument = argument
        self._count = 1 + max(shape.index for shape in shapes)

    def begin(self, forward: _Forward, rows: torch.Tensor, slot: int) -> torch.Tensor:
        """The first rows `[1, n, H]` of a sequence."""
        layer = self._new_layer()
        out = self._run(forward, rows, layer)
        for shape, pool in zip(self.shapes, self.tensors, strict=True):
            pool[slot].copy_(getattr(layer, shape.kind)[shape.index][0])
        return out

    def go_on(self, forward: _Forward, rows: torch.Tensor, slots: _Slots) -> torch.Tensor:
        """Rows `[B, n, H]` that follow those before; one sequence, or one row of each."""
        layer = self._new_layer()
        starts = []
        for shape, pool in zip(self.shapes, self.tensors, strict=True):
            state = pool[slots]  # a view of the pool where slots are adjacent, else a copy
            _set_state(layer, shape, state)
            starts.append(state)
        out = self._run(forward, rows, layer)
        for shape, pool, state in zip(self.shapes, self.tensors, starts, strict=True):
            new = getattr(layer, shape.kind)[shape.index]
            if new is not state or isinstance(slots, torch.Tensor):
                pool[slots] = new
        return out

    def chunk(self, forward: _Forward, rows: torch.Tensor, chunk: StateChunk) -> torch.Tensor:
        """Rows `[1, n, H]` of one sequence."""
        together = chunk.together if self.uneven else rows.shape[1]
        place, parts = slice(chunk.slot, chunk.slot + 1), []
        if chunk.fresh:
            parts.append(self.begin(forward, rows[:, :together], chunk.slot))
        elif self.stepwise:
            together = 0
        elif together:
            parts.append(self.go_on(forward, rows[:, :together], place))
        parts += [self.go_on(forward, rows[:, i : i + 1], place) for i in range(together, rows.shape[1])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _new_layer(self) -> transformers.cache_utils.LinearAttentionLayer:
        return transformers.cache_utils.LinearAttentionLayer(number_of_states=self._count)

    def _run(self, forward: _Forward, rows: torch.Tensor, layer: object) -> torch.Tensor:
        cache = transformers.DynamicCache()
        cache.layers = [layer] * (self.layer + 1)
        return forward(rows, **{self._argument: cache})


class RecurrentLayer:
    """Mixed into the class of a recurrent module. Rows are `[1, T, H]`; what else it is called with is not used."""

    states: LayerStates

    def forward(self, hidden_states: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
        states, forward = self.states, super().forward  # type: ignore[misc]
        step = None if states.pool is None else states.pool.step
        if step is None:  # one sequence, and nothing is kept: a run for its memory
            return forward(hidden_states)  # type: ignore[no-any-return]
        if step.rows is None:
            return states.go_on(forward, hidden_states.transpose(0, 1), step.slots).transpose(0, 1)
        out = torch.empty_like(hidden_states)
        if len(step.rows):
            out[0, step.rows] = states.go_on(forward, hidden_states[0, step.rows, None], step.slots)[:, 0]
        for chunk in step.chunks:
            out[:, chunk.start : chunk.end] = states.chunk(forward, hidden_states[:, chunk.start : chunk.end], chunk)
        return out


def make_recurrent(module: nn.Module, states: LayerStates) -> nn.Module:
    """The module itself, which from now on computes flattened batches as a `StatePool` has it."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (RecurrentLayer, kind), {})
    setattr(module, "states", states)  # noqa: B010  (torch types attributes as tensors and modules)
    return module


def states_of(module: nn.Module) -> LayerStates:
    states = getattr(module, "states", None)
    if not isinstance(states, LayerStates):
        raise StageError(f"{type(module).__name__} keeps no state in the engine's pool")
    return states


def _set_state(layer: transformers.cache_utils.LinearAttentionLayer, shape: StateShape, state: torch.Tensor) -> None:
    """Make `state` that of transformers' cache layer, as it is after a forward."""
    getattr(layer, shape.kind)[shape.index] = state
    getattr(layer, f"is_{shape.kind}_initialized")[shape.index] = True
    layer.has_previous_state[shape.index] = True
    layer.dtype, layer.device = state.dtype, state.device
    if shape.kind == "conv_states":
        layer.conv_kernel_size[shape.index] = state.shape[-1]
