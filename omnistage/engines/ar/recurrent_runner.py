"""Runs models with recurrent layers: a slot of the pool for each running sequence, beside its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omnistage.core.errors import InternalError
from omnistage.engines.ar.attention import BatchLayout
from omnistage.engines.ar.graphs import StepTensors
from omnistage.engines.ar.memory import zeros
from omnistage.engines.ar.recurrent import StatePool, StateStep
from omnistage.engines.ar.runner import LaunchedStep, Runner
from omnistage.engines.ar.scheduler import ScheduledSequence, SchedulerOutput


@dataclass(slots=True)
class _Held:
    """A running sequence's slot."""

    slot: int
    length: int = 0
    """Tokens that its state holds."""
    logits: torch.Tensor | None = None
    """`[V]` after the last of them, where that token may have to be sampled from again."""


class RecurrentRunner(Runner):
    """A state holds all tokens so far and cannot go back: none is computed twice, and none is shared."""

    def __init__(self, *args: Any, max_batch: int, **options: Any) -> None:
        super().__init__(*args, max_batch=max_batch, **options)
        self._held: dict[str, _Held] = {}
        self._free = list(range(max_batch))[::-1]
        device = self.component.device
        self._pool = StatePool(
            self.component.recurrent_modules, max_batch, lambda shape, dtype: zeros(shape, device, dtype)
        )

    def remove(self, key: str) -> None:
        super().remove(key)
        self._release(key)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        for key in output.preempted:
            self._release(key)
        return super().launch(output)

    def _release(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._free.append(held.slot)
            self._free.sort(reverse=True)  # low ones first: states that lie together are used in place

    def _hold(self, key: str) -> _Held:
        if key not in self._held:
            if not self._free:
                raise InternalError("more sequences run than the pool has states for")
            self._held[key] = _Held(self._free.pop())
        return self._held[key]

    def _forward(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        # Where a grammar's mask came late, the last token is scheduled again; its logits were kept.
        new = [item for item in batch if item.start >= self._hold(item.key).length]
        got = self._advance(new) if new else StepTensors(None, None, None)
        if not self.sampler.constrained:
            return got
        sampled = [item for item in new if item.sample]
        for row, item in enumerate(sampled):
            if item.key in self.sampler.constrained and got.logits is not None:
                self._held[item.key].logits = got.logits[row].clone()
        if len(new) == len(batch):
            return got
        rows = {item.key: row for row, item in enumerate(sampled)}
        logits = [
            self._again(item.key) if got.logits is None or item.key not in rows else got.logits[rows[item.key]]
            for item in batch
            if item.sample
        ]
        return StepTensors(torch.stack(logits), None, None)

    def _again(self, key: str) -> torch.Tensor:
        logits = self._held[key].logits
        if logits is None:
            raise InternalError(f"sequence {key!r} was scheduled to go back, which its state cannot")
        return logits

    def _advance(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        held = [self._held[item.key] for item in batch]
        for state, item in zip(held, batch, strict=True):
            if item.start != state.length:
                raise InternalError(f"sequence {item.key!r} goes on from {item.start}, its state from {state.length}")
            state.length += item.count
        layout = BatchLayout(
            np.array([item.count for item in batch], dtype=np.int32),
            np.array([item.start + item.count for item in batch], dtype=np.int32),
            [],
            [],
        )
        prompts = [self._rows[item.key].prompt_length for item in batch]
        step = StateStep.of(layout, [state.slot for state in held], self.component.device, prompts)
        with self._pool.computing(step):
            return super()._forward(batch)
