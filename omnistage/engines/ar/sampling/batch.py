"""A batch of the same requests in the same order: its rows in groups that are treated alike, its index tensors.

Built once and reused until the batch changes. Rows without processors never pay for rows with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from omnistage.engines.ar.sampling.device_selection import NOTHING, DeviceSelector, has_kernels
from omnistage.engines.ar.sampling.processors import Arrays, Processors, RowState, uniform, uniforms
from omnistage.engines.ar.sampling.row_block import Block, Field, GrammarMasks, build_block
from omnistage.engines.ar.sampling.selection import FAILED, UNCOVERED, TokenSelector, argmax_host, top_rows
from omnistage.engines.streams import upload


class RowGroup:
    """Rows of a batch that are treated alike: all plain, or all processed. `rows` are their places in the batch."""

    def __init__(
        self, rows: list[int], batch: Sequence[RowState], processed: bool, vocab_size: int, arrays: Arrays
    ) -> None:
        self.rows = rows
        self.states = [batch[row] for row in rows]
        self.index = None if rows == list(range(len(batch))) else upload(np.array(rows), arrays.device)
        self.processors = Processors(self.states, vocab_size, arrays) if processed else None
        self.unchanged = self.index is None and self.processors is None
        """Its logits are the batch's own."""
        self._device = arrays.device
        self._vocab_size = vocab_size
        self._copy: Tensor | None = None

    def prepare(self, logits: Tensor) -> Tensor:
        """This group's logits after its processors; the batch's own are left as they are."""
        if self.processors is None:
            return logits if self.index is None else logits.index_select(0, self.index)
        if self.index is not None:
            x = logits.index_select(0, self.index).float()
        else:
            if self._copy is None:  # kept for the next steps: fresh memory costs more than the copy
                self._copy = torch.empty(logits.shape, dtype=torch.float32, device=self._device)
            x = self._copy.copy_(logits)
        self.processors.apply(x)
        return x


class HostGroup(RowGroup):
    """Its tokens are selected on the host."""

    def __init__(
        self, rows: list[int], batch: Sequence[RowState], processed: bool, vocab_size: int, arrays: Arrays
    ) -> None:
        super().__init__(rows, batch, processed, vocab_size, arrays)
        self._random = [i for i, state in enumerate(self.states) if not state.params.greedy]
        self._selector: TokenSelector | None = None
        self._random_index: Tensor | None = None
        if self._random:
            self._selector = TokenSelector([self.states[i].params for i in self._random], vocab_size)
            if len(self._random) < len(self.rows):
                self._random_index = torch.tensor(self._random)

    def _uniforms(self, local: Iterable[int]) -> list[float]:
        states = self.states
        return [uniform(states[i].stream, states[i].step) for i in local]

    def pick(self, x: Tensor) -> list[int]:
        """An id for each row, or `FAILED` or `UNCOVERED`."""
        if self._selector is None:
            return argmax_host(x)
        random = (x if self._random_index is None else x.index_select(0, self._random_index)).float()
        ids = self._selector.select(random, self._uniforms(self._random))
        if self._random_index is None:
            return ids
        merged = argmax_host(x)
        for i, token in zip(self._random, ids, strict=True):
            merged[i] = token
        return merged

    def pick_again(self, x: Tensor, local: Sequence[int], attempt: int) -> list[int]:
        """Ids of rows that were left `UNCOVERED`, from more of their logits."""
        rows = x[torch.tensor(local)].float()
        selector = TokenSelector([self.states[i].params for i in local], self._vocab_size, attempt)
        return selector.select(rows, self._uniforms(local))


class DeviceGroup(RowGroup):
    """Its tokens are selected on the device, and nothing waits for them."""

    def __init__(
        self, rows: list[int], batch: Sequence[RowState], processed: bool, vocab_size: int, arrays: Arrays
    ) -> None:
        super().__init__(rows, batch, processed, vocab_size, arrays)
        self._selector = DeviceSelector([state.params for state in self.states], vocab_size, arrays.device)
        self._streams = np.array([state.stream for state in self.states], dtype=np.uint64)
        self._steps = np.array([state.step for state in self.states], dtype=np.uint64)

    def select(self, logits: Tensor) -> Tensor:
        """An id for each row, int64, or `FAILED` or `NOTHING`."""
        u = upload(uniforms(self._streams, self._steps), self._device)
        self._steps += np.uint64(1)
        ids = self._selector.select(self.prepare(logits), u)
        if self.processors is None:
            return ids
        # What a processor rules out is -inf as well: a row without numbers before that is the model's failure.
        rows = logits if self.index is None else logits.index_select(0, self.index)
        return torch.where((ids == NOTHING) & (rows.amax(dim=1) == -torch.inf), FAILED, ids)


class BatchPlan:
    """What a batch of these requests needs, for as long as `steps` lasts (then `min_tokens` ends for someone)."""

    def __init__(self, keys: tuple[str, ...], states: list[RowState], vocab_size: int, arrays: Arrays) -> None:
        self.keys = keys
        self.states = states
        self.steps = min((s.params.min_tokens - s.step for s in states if s.holds_stops), default=None)
        plain = [i for i, s in enumerate(states) if not s.processed]
        changed = [i for i, s in enumerate(states) if s.processed]
        changed.sort(key=lambda i: states[i].grammar is None)
        self.processed = frozenset(changed)
        """Rows whose logits are changed before selection."""
        split = [(rows, processed) for rows, processed in ((plain, False), (changed, True)) if rows]
        self.host_groups: list[HostGroup] = []
        self.device_groups: list[DeviceGroup] = []
        self.block: Block | None = None
        """What the sampling kernels take, where there are any."""
        self._masks: GrammarMasks | None = None
        self.constrained = any(s.grammar is not None for s in states)
        if arrays.host:
            self.host_groups = [HostGroup(rows, states, flag, vocab_size, arrays) for rows, flag in split]
        elif has_kernels(arrays.device):
            self.block = build_block(states, vocab_size, arrays)
            if self.constrained:
                self._masks = GrammarMasks(states, self.block, vocab_size, arrays.device)
        else:
            self.device_groups = [DeviceGroup(rows, states, flag, vocab_size, arrays) for rows, flag in split]
        self.logprob_rows = [i for i, s in enumerate(states) if s.params.logprobs is not None]
        self.tops = min(max((s.params.logprobs or 0 for s in states), default=0), vocab_size)
        groups: tuple[RowGroup, ...] = (*self.host_groups, *self.device_groups)
        self.recording = [(g.index, g.processors) for g in groups if g.processors is not None and g.processors.records]
        self._logprob_index = upload(np.array(self.logprob_rows, dtype=np.int64), arrays.device)

    def advance(self) -> None:
        """A token was sampled, or is being sampled, for each row."""
        if self.steps is not None:
            self.steps -= 1
        if self.block is not None:
            self.block[Field.STEP] += 1
        for state in self.states:
            state.step += 1

    def record(self, ids: Tensor) -> None:
        """Count the sampled tokens for the penalties."""
        for index, processors in self.recording:
            processors.record(ids if index is None else ids[index])

    def logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        """`[L, 1 + 2n]`: logprob of the chosen token, of the n likeliest, and their ids; raw logits."""
        rows = logits.index_select(0, self._logprob_index).float()
        mass = rows.logsumexp(dim=1, keepdim=True)
        sampled = rows.gather(1, ids[self._logprob_index].clamp(min=0)[:, None])
        top, top_ids = top_rows(rows, self.tops)
        return torch.cat([(sampled - mass).double(), (top - mass).double(), top_ids.double()], dim=1)

    # ------------------------------------------------------------------------------------------- selection

    def pick_on_host(self, logits: Tensor) -> list[int]:
        """An id for each row, or `FAILED`."""
        groups = self.host_groups
        prepared = [logits if group.unchanged else group.prepare(logits) for group in groups]
        picks = [group.pick(x) for group, x in zip(groups, prepared, strict=True)]
        # A group without an index is the whole batch in its order; one group alone may still be in another.
        tokens = picks[0]
        if groups[0].index is not None:
            tokens = [FAILED] * len(self.keys)
            for group, ids in zip(groups, picks, strict=True):
                for row, token in zip(group.rows, ids, strict=True):
                    tokens[row] = token
        attempt = 0
        while UNCOVERED in tokens:
            attempt += 1
            for group, x in zip(groups, prepared, strict=True):
                local = [i for i, row in enumerate(group.rows) if tokens[row] == UNCOVERED]
                if local:
                    for i, token in zip(local, group.pick_again(x, local, attempt), strict=True):
                        tokens[group.rows[i]] = token
        return tokens

    def pick_on_device(self, logits: Tensor) -> Tensor:
        """An id for each row, int64 `[S]` there, or `FAILED` or `NOTHING`."""
        if self.block is not None:
            from omnistage.engines.ar.sampling import triton_sample

            if self._masks is not None:
                self._masks.upload()
            out = torch.empty(len(self.keys), dtype=torch.int64, device=logits.device)
            triton_sample.sample(logits, upload(self.block, logits.device), out)
            return out
        groups = self.device_groups
        picks = [group.select(logits) for group in groups]
        if groups[0].index is None:
            return picks[0]
        tokens = torch.empty(len(self.keys), dtype=torch.int64, device=logits.device)
        for group, ids in zip(groups, picks, strict=True):
            tokens[group.index] = ids
        return tokens
