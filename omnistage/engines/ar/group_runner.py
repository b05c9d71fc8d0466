"""Runs a model's own forward over the paged cache: sequences with one token as one padded batch, each chunk by itself.

For models that do not run in a flattened batch. Everything else of a stage is as for any: chunks of prompts, blocks,
prefix reuse, preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from omnistage.engines.ar.graphs import StepTensors
from omnistage.engines.ar.group import Group
from omnistage.engines.ar.rows import UNREAD
from omnistage.engines.ar.runner import Runner
from omnistage.engines.ar.scheduler import ScheduledSequence
from omnistage.engines.streams import upload


class GroupRunner(Runner):
    """Gives the component groups instead of a flattened batch."""

    def _forward(self, batch: Sequence[ScheduledSequence]) -> StepTensors:
        groups: dict[int, list[int]] = {}
        for number, item in enumerate(batch):
            end = item.start + item.count
            together = item.count == 1 and item.start > 0
            kind = (0 if self.component.spec.padded_groups else end) if together else -1 - number
            groups.setdefault(kind, []).append(number)
        logits: dict[int, torch.Tensor] = {}
        for numbers in groups.values():
            output = self._forward_group([batch[number] for number in numbers])
            logits.update(zip(numbers, output, strict=True))
        sampled = [logits[number] for number, item in enumerate(batch) if item.sample]
        return StepTensors(torch.stack(sampled) if sampled else None, None, None)

    def _forward_group(self, items: Sequence[ScheduledSequence]) -> torch.Tensor:
        rows = [self._rows[item.key] for item in items]
        device, count = self.component.device, items[0].count
        token_ids = np.stack([r.tokens[item.start : item.start + count] for r, item in zip(rows, items, strict=True)])
        unread = np.flatnonzero(token_ids[:, -1] == UNREAD)
        ids = upload(token_ids, device)
        if len(unread):
            sampled = upload(np.array([rows[place].sampled_row for place in unread]), device)
            ids[upload(unread, device), -1] = self.last_ids[sampled].clamp(min=0)
        lengths = [item.start + item.count for item in items]
        return self.component.forward_group(ids, Group.of(count, lengths, [r.slots for r in rows], device))
