"""Small steps with prompts in them under CUDA graphs: the decoder's forward for a number of tokens, padded.

A prompt of a few hundred tokens is computed faster than its kernels are launched one by one, and other stages wait for
the interpreter meanwhile. What surrounds the decoder (embeddings, media, heads) is not captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from omnistage.engines.ar.attention import BatchLayout, PagedContext, current
from omnistage.engines.graphs import capture, try_capture

if TYPE_CHECKING:
    from omnistage.engines.ar.runner import Runner

logger = logging.getLogger(__name__)


class PromptStep(NamedTuple):
    """The tokens of a step, before the decoder."""

    embeds: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    media: torch.Tensor | None
    """Which of the rows media replaced; None where the component emits none."""
    layout: BatchLayout


ForwardRows = tuple[torch.Tensor, torch.Tensor | None]
"""Hidden rows, and those that the component emits."""
MAX_SEQUENCES = 64
"""Of a captured step; most of them have one token, beside a prompt or two."""
MAX_LENGTH = 4096
"""Tokens of its longest sequence."""


class _Captured:  # pragma: no cover  (needs CUDA; tests/gpu)
    """Static buffers and the graph for `tokens` tokens."""

    def __init__(self, runner: Runner, tokens: int, max_length: int, pool: Any) -> None:
        component = runner.component
        spec, device = component.spec, component.device
        self.embeds = torch.zeros(tokens, spec.embed_size, dtype=component.dtype, device=device)
        kind = torch.float64 if spec.fractional_positions else torch.int64
        self.positions = torch.zeros(spec.position_dims, tokens, dtype=kind, device=device)
        self.slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        length = min(MAX_LENGTH, max_length)
        self.attention = runner.backend.prefill_graph_plan(tokens, MAX_SEQUENCES, length, runner.block_size, device)
        paged = PagedContext(runner.backend, self.slots, self.attention.plan)
        self.media = torch.zeros(tokens, 1, dtype=torch.bool, device=device) if spec.emit_size else None

        def step() -> ForwardRows:
            current.paged = paged
            hidden = component.forward(self.embeds, self.positions, paged)
            # In the graph: a component may have kept rows of its layers for it.
            return hidden, None if self.media is None else component.emit(self.embeds, hidden, self.media)

        self.graph, self.rows = capture(step, device, pool)

    def run(self, step: PromptStep) -> ForwardRows:
        count = len(step.embeds)
        if self.media is not None and step.media is not None:
            self.media[:count] = step.media
        self.embeds[:count] = step.embeds
        self.positions[:, :count] = step.positions
        self.slots[:count] = step.slots
        self.slots[count:].fill_(-1)
        self.attention.fill_layout(step.layout)
        self.graph.replay()
        hidden, emitted = self.rows  # which the next replay overwrites
        return hidden[:count].clone(), None if emitted is None else emitted[:count].clone()


class PrefillGraphs:
    """The captured forwards of one stage; steps that fit none of them run without."""

    def __init__(self, runner: Runner, token_sizes: Sequence[int], max_length: int) -> None:
        self._captured: dict[int, _Captured] = {}
        self.replays = 0
        self._max_length = min(MAX_LENGTH, max_length)
        pool: Any = torch.cuda.graph_pool_handle()
        start = time.perf_counter()
        for tokens in sorted(token_sizes, reverse=True):  # the others use the memory of the largest
            make = partial(_Captured, runner, tokens, max_length, pool)
            captured = try_capture(make, "CUDA graphs for steps with prompts")
            if captured is None:
                break
            self._captured[tokens] = captured
        seconds = time.perf_counter() - start
        logger.info("captured steps with prompts of %s tokens in %.2f s", sorted(self._captured), seconds)

    def run(self, step: PromptStep) -> ForwardRows | None:
        """The rows of a step's tokens; None: none of the graphs takes them."""
        fitting = [tokens for tokens in self._captured if tokens >= len(step.embeds)]
        sequences = step.layout.sequence_lengths
        if not fitting or len(sequences) > MAX_SEQUENCES or int(sequences.max()) > self._max_length:
            return None
        self.replays += 1
        return self._captured[min(fitting)].run(step)
