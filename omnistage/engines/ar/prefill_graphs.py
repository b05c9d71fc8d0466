"""Small steps with prompts in them under CUDA graphs: the decoder's forward for a number of tokens, padded.

A prompt of a few hundred tokens is computed faster than its kernels are launched one by one, and other stages wait for
the interpreter meanwhile. What surrounds the decoder (embeddings, media, heads) is not captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from omnistage.core.failures import loses_device
from omnistage.engines.ar.attention import BatchLayout, PagedContext, current
from omnistage.engines.graphs import capture

if TYPE_CHECKING:
    from omnistage.engines.ar.runner import Runner

logger = logging.getLogger(__name__)

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

    def run(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        media: torch.Tensor | None,
        layout: BatchLayout,
    ) -> ForwardRows:
        count = len(embeds)
        if self.media is not None and media is not None:
            self.media[:count] = media
        self.embeds[:count] = embeds
        self.positions[:, :count] = positions
        self.slots[:count] = slots
        self.slots[count:].fill_(-1)
        self.attention.fill_layout(layout)
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
            try:
                with torch.inference_mode():
                    self._captured[tokens] = _Captured(runner, tokens, max_length, pool)
            except RuntimeError as error:  # there may be no memory for it
                if loses_device(error):
                    raise
                logger.warning("no CUDA graphs for steps with prompts: %s", error)
                break
        seconds = time.perf_counter() - start
        logger.info("captured steps with prompts of %s tokens in %.2f s", sorted(self._captured), seconds)

    def run(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        media: torch.Tensor | None,
        layout: BatchLayout,
    ) -> ForwardRows | None:
        """The rows of a step's tokens; None: none of the graphs takes them. `media`: which of them media replaced."""
        fitting = [tokens for tokens in self._captured if tokens >= len(embeds)]
        sequences = layout.sequence_lengths
        if not fitting or len(sequences) > MAX_SEQUENCES or int(sequences.max()) > self._max_length:
            return None
        self.replays += 1
        return self._captured[min(fitting)].run(embeds, positions, slots, media, layout)
