"""Runs sequences one by one, where a component keeps their state itself: the slow way, for models that need it.

Everything else of a stage stays as it is: the scheduler's blocks count tokens, so that their number and memory are
bounded, and a sequence that loses its blocks loses its state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from omnistage.core.errors import OmniError
from omnistage.core.failures import stage_failure
from omnistage.engines.ar.component import OwnSequence
from omnistage.engines.ar.graphs import StepTensors
from omnistage.engines.ar.rows import UNREAD
from omnistage.engines.ar.runner import LaunchedStep, Runner
from omnistage.engines.ar.scheduler import ScheduledSequence, SchedulerOutput
from omnistage.engines.streams import avoid_attention_plans, upload

Own = TypeVar("Own", bound=OwnSequence)


@dataclass(slots=True)
class OwnProgress(Generic[Own]):
    """How far a sequence that its component keeps is computed."""

    sequence: Own
    length: int = 0
    """Tokens that it has computed."""
    logits: torch.Tensor | None = None
    """`[V]` after the last of them, which may have to be sampled from again."""


class SequenceRunner(Runner, Generic[Own]):
    """Computes each sequence by itself before a step, as far as that must be; a failure there ends it alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._states: dict[str, OwnProgress[Own]] = {}
        super().__init__(*args, **options)
        avoid_attention_plans(self.component.device)

    def remove(self, key: str) -> None:
        super().remove(key)
        self._states.pop(key, None)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        failed: dict[str, OmniError] = {}
        with self._stream.use():
            for key in output.preempted:
                self._states.pop(key, None)
                if key in self._rows:
                    self._rows[key].forget_blocks()
            for item in output.batch:
                try:
                    self._catch_up(item)
                except BaseException as error:  # the boundary of one sequence: nobody else is in its forward
                    self._states.pop(item.key, None)
                    failed[item.key] = stage_failure(error, "the model's forward")
        step = super().launch(replace(output, batch=tuple(item for item in output.batch if item.key not in failed)))
        step.result.failed |= failed
        return step

    @abstractmethod
    def _catch_up(self, item: ScheduledSequence) -> None:
        """Compute a sequence as far as the step needs it."""

    def _last_logits(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        logits = [state.logits for state in (self._states[item.key] for item in batch if item.sample)]
        rows = [row for row in logits if row is not None]
        return StepTensors(torch.stack(rows) if rows else None, None, None)


class OwnStateRunner(SequenceRunner[OwnSequence]):
    """A prompt is computed whole, however it is cut: many recurrent layers cannot go on with several tokens."""

    def _forward(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        for item in batch:
            self._catch_up(item)  # nothing to do where `launch` has computed it
        return self._last_logits(batch)

    def _catch_up(self, item: ScheduledSequence) -> None:
        """To the end of its chunk, once its prompt is complete."""
        rows, end = self._rows[item.key], item.start + item.count
        if end < rows.prompt_length:
            return
        state = self._states.get(item.key)
        if state is None:
            state = self._states[item.key] = OwnProgress(self.component.open_sequence(rows.payload.media))
        # After a preemption too the prompt is one forward and each generated token another, as at first: recurrent
        # layers and windows may give other numbers for both in one.
        while state.length < end:
            start, state.length = state.length, max(rows.prompt_length, state.length + 1)
            state.logits = state.sequence.forward(self._token_ids(rows.tokens[start : state.length], rows.sampled_row))

    def _token_ids(self, tokens: np.ndarray, sampled_row: int) -> torch.Tensor:
        if tokens[0] == UNREAD:
            return self.last_ids[sampled_row, None].clamp(min=0)
        return upload(tokens, self.component.device)
