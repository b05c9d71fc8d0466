"""Runs models whose prompts are computed whole: each prompt is one forward, what sequences generate is one of all.

For prompts whose tokens attend to later ones, as those of a picture do, or to what a sequence keeps beside the pool.
Blocks, their bounds and preemption are as for any; there is no prefix to go on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from omnistage.core.errors import InternalError, OmniError
from omnistage.core.failures import stage_failure
from omnistage.engines.ar.component import GroupedSequence
from omnistage.engines.ar.graphs import StepTensors
from omnistage.engines.ar.rows import UNREAD, SequenceRows
from omnistage.engines.ar.runner import LaunchedStep, Runner
from omnistage.engines.ar.scheduler import ScheduledSequence, SchedulerOutput
from omnistage.engines.streams import upload


@dataclass(slots=True)
class _State:
    sequence: GroupedSequence
    length: int
    """Tokens that it has computed."""
    logits: torch.Tensor
    """`[V]` after the last of them, which may have to be sampled from again."""


class WholePromptRunner(Runner):
    """However a prompt is cut, it is computed when its last chunk is scheduled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._states: dict[str, _State] = {}
        super().__init__(*args, **options)

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

    def _catch_up(self, item: ScheduledSequence) -> None:
        """Compute a sequence's prompt with the end of its last chunk; after a preemption, what it had generated too."""
        rows, end = self._rows[item.key], item.start + item.count
        if len(item.blocks) > len(rows.table):
            rows.sync_blocks(item.blocks, self.block_size)
        if end < rows.prompt_length:
            return
        if item.key not in self._states:
            sequence = self.component.open_sequence(rows.payload.media)
            if not isinstance(sequence, GroupedSequence):
                raise InternalError(f"{type(sequence).__name__} takes its tokens alone")
            ids = upload(rows.tokens[: rows.prompt_length], self.component.device)
            self._states[item.key] = _State(sequence, rows.prompt_length, sequence.begin(ids, rows.slots))
        while self._states[item.key].length < end - 1:  # one after the other, as at first
            self._advance([item.key])

    def _forward(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        # Where a grammar's mask came late, the last token is scheduled again; its logits were kept.
        ends = {item.key: item.start + item.count for item in batch if item.key in self._states}
        behind = [key for key, end in ends.items() if self._states[key].length < end]
        if behind:
            self._advance(behind)
        sampled = [self._states[item.key].logits for item in batch if item.sample]
        return StepTensors(torch.stack(sampled) if sampled else None, None, None)

    def _advance(self, keys: Sequence[str]) -> None:
        """Compute one more token of each sequence."""
        states, rows = [self._states[key] for key in keys], [self._rows[key] for key in keys]
        ids = self._token_ids([(r, int(r.tokens[state.length])) for r, state in zip(rows, states, strict=True)])
        logits = self.component.advance_group([state.sequence for state in states], ids, [r.slots for r in rows])
        for state, row in zip(states, logits, strict=True):
            state.length, state.logits = state.length + 1, row

    def _token_ids(self, tokens: Sequence[tuple[SequenceRows, int]]) -> torch.Tensor:
        ids = upload(np.array([token for _, token in tokens], dtype=np.int64), self.component.device)
        unread = [(i, rows.sampled_row) for i, (rows, token) in enumerate(tokens) if token == UNREAD]
        if unread:
            places = upload(np.array(unread).T.copy(), ids.device)
            # A row that could not be sampled ends with its step; until then any token will do.
            ids[places[0]] = self.last_ids[places[1]].clamp(min=0)
        return ids
