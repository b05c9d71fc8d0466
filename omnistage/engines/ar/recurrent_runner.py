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
class _State:
    """A running sequence's slot."""

    slot: int
    length: int = 0
    """Tokens that its state holds."""
    logits: torch.Tensor | None = None
    """`[V]` after the last of them, where that token may have to be sampled from again."""


class RecurrentRunner(Runner):
    """A state holds all tokens so far and cannot go back: none is computed twice, and none is shared."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        count, device = self.budget.max_running, self.component.device
        self._states: dict[str, _State] = {}
        self._free = list(range(count))[::-1]
        self._pool = StatePool(
            self.component.recurrent_modules, count, lambda shape, dtype: zeros(shape, device, dtype)
        )

    def remove(self, key: str) -> None:
        super().remove(key)
        self._release(key)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        for key in output.preempted:
            self._release(key)
        return super().launch(output)

    def _release(self, key: str) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            self._free.append(state.slot)
            self._free.sort(reverse=True)  # low ones first: states that lie together are used in place

    def _hold(self, key: str) -> _State:
        if key not in self._states:
            if not self._free:
                raise InternalError("more sequences run than the pool has states for")
            self._states[key] = _State(self._free.pop())
        return self._states[key]

    def _forward(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        # Where a grammar's mask came late, the last token is scheduled again; its logits were kept.
        new = [item for item in batch if item.start >= self._hold(item.key).length]
        step = self._advance(new) if new else StepTensors(None, None, None)
        if not self.sampler.constrained:
            return step
        sampled = [item for item in new if item.sample]
        for row, item in enumerate(sampled):
            if item.key in self.sampler.constrained and step.logits is not None:
                self._states[item.key].logits = step.logits[row].clone()
        if len(new) == len(batch):
            return step
        rows = {item.key: row for row, item in enumerate(sampled)}
        logits = [
            self._again(item.key) if step.logits is None or item.key not in rows else step.logits[rows[item.key]]
            for item in batch
            if item.sample
        ]
        return StepTensors(torch.stack(logits), None, None)

    def _again(self, key: str) -> torch.Tensor:
        logits = self._states[key].logits
        if logits is None:
            raise InternalError(f"sequence {key!r} was scheduled to go back, which its state cannot")
        return logits

    def _advance(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        states = [self._states[item.key] for item in batch]
        for state, item in zip(states, batch, strict=True):
            if item.start != state.length:
                raise InternalError(f"sequence {item.key!r} continues at {item.start}, its state at {state.length}")
            state.length += item.count
        layout = BatchLayout(
            np.array([item.count for item in batch], dtype=np.int32),
            np.array([item.start + item.count for item in batch], dtype=np.int32),
            [],
            [],
        )
        prompts = [self._rows[item.key].prompt_length for item in batch]
        step = StateStep.of(layout, [state.slot for state in states], self.component.device, prompts)
        with self._pool.computing(step):
            return super()._forward(batch)
