"""What the runner remembers of each sequence: tokens, positions, prompt rows, side rows, slots. No policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from omnistage.core.errors import InternalError
from omnistage.core.types import ARInput
from omnistage.engines.adapters.library import NOTHING, Selection
from omnistage.engines.ar.scheduler import ScheduledSequence

_EMPTY_SLOTS = np.empty(0, dtype=np.int64)
_EMPTY_TABLE = np.empty(0, dtype=np.int32)
_NO_CODES = np.empty((0, 0), dtype=np.int64)
_MAX_BORROWED = 64
"""Side rows that are left in the upstream's memory."""
_MAX_BORROWED_BYTES = 2 << 20
"""Of the tensor that a borrowed row is in; those of steps with prompts are larger."""
UNREAD = -1
"""In place of a token id: the device is sampling it, or has sampled it and nobody has read it."""


@dataclass(slots=True, eq=False)
class SequenceRows:
    """Tensor-side state of one sequence, kept over preemption (only the slots are forgotten then)."""

    key: str
    payload: ARInput
    prompt_length: int
    tokens: np.ndarray
    length: int
    emit: bool
    embeds: torch.Tensor | None
    positions: np.ndarray | None
    media_index: np.ndarray
    """Prompt indices filled by media, ascending; `media_rows` is in this order once encoded."""
    media_rows: torch.Tensor | None = None
    side: list[torch.Tensor] = field(default_factory=list)
    side_final: bool = False
    _num_own: int = 0
    """Side rows that are copies of its own."""
    emitted: int = 0
    sampled_row: int = 0
    """Where its unread token stands among those that the last step samples."""
    slots: np.ndarray = field(default_factory=lambda: _EMPTY_SLOTS)
    table: np.ndarray = field(default_factory=lambda: _EMPTY_TABLE)
    adapters: Selection = NOTHING
    codes: np.ndarray = field(default_factory=lambda: _NO_CODES)
    """`[n, c]`: the residual codes of the generated tokens; for an unread token they are unread too."""

    @classmethod
    def open(
        cls,
        key: str,
        payload: ARInput,
        capacity: int,
        emit: bool,
        device: torch.device,
        dtype: torch.dtype,
        num_codes: int = 0,
    ) -> SequenceRows:
        prompt = len(payload.token_ids)
        tokens = np.zeros(max(capacity, prompt + 1), dtype=np.int64)
        # Ids beside embeddings are never looked up, and may be of another model's vocabulary.
        if payload.embeds is None:
            tokens[:prompt] = payload.token_ids
        positions = None
        if payload.positions is not None:
            positions = np.atleast_2d(payload.positions.cpu().numpy())
        media = [span.positions.cpu().numpy() for span in payload.media]
        return cls(
            key=key,
            payload=payload,
            prompt_length=prompt,
            tokens=tokens,
            length=prompt,
            emit=emit,
            embeds=None if payload.embeds is None else payload.embeds.to(device=device, dtype=dtype),
            positions=positions,
            media_index=np.sort(np.concatenate(media)) if media else _EMPTY_SLOTS,
            codes=np.zeros((len(tokens) - prompt, num_codes), dtype=np.int64) if num_codes else _NO_CODES,
        )

    def append(self, token_id: int) -> None:
        """A token was sampled, or is being sampled (`UNREAD`)."""
        if self.length == len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
            if self.codes.shape[1]:
                self.codes = np.concatenate((self.codes, np.zeros((self.length, self.codes.shape[1]), dtype=np.int64)))
        self.tokens[self.length] = token_id
        self.length += 1

    def frame(self, index: int) -> np.ndarray:
        """Residual codes of the generated token at sequence index `index`."""
        row: np.ndarray = self.codes[index - self.prompt_length]
        return row

    def position(self, index: int) -> float | np.ndarray:
        """Position of a generated token: one for all dimensions, or `[dims]` where the payload gives it."""
        if self.positions is not None and index < self.positions.shape[1]:
            return self.positions[:, index]
        return index + self.payload.position_delta

    def ends(self, start: int, end: int) -> np.ndarray | None:
        """Past the last token that each of the tokens [start, end) sees; None where that is itself for all."""
        ranges = [(first, last) for first, last in self.payload.both_ways if first < end and last > start]
        if not ranges:
            return None
        ends = np.arange(start, end) + 1
        for first, last in ranges:
            if first < start or last > end:
                raise InternalError(f"tokens of sequence {self.key!r} that attend both ways were cut at {start}, {end}")
            ends[first - start : last - start] = last
        return ends

    def fill_positions(self, out: np.ndarray, start: int, end: int) -> None:
        """Write the positions of tokens [start, end) into `out [dims, end - start]`."""
        known_length = self.prompt_length if self.positions is None else self.positions.shape[1]
        split = min(max(known_length, start), end)
        if split > start:
            positions = self.positions
            out[:, : split - start] = np.arange(start, split) if positions is None else positions[:, start:split]
        if end > split:
            out[:, split - start :] = np.arange(split, end) + self.payload.position_delta

    # --------------------------------------------------------------------------------------------- blocks

    def sync_blocks(self, blocks: Sequence[int], block_size: int) -> None:
        """Take over blocks appended since the last call."""
        num_blocks = len(self.table)
        if len(blocks) > num_blocks:
            new = np.asarray(blocks[num_blocks:], dtype=np.int64)
            self.table = np.concatenate((self.table, new.astype(np.int32)))
            fresh = (new[:, None] * block_size + np.arange(block_size)[None, :]).reshape(-1)
            self.slots = np.concatenate((self.slots, fresh))

    def forget_blocks(self) -> None:
        self.table, self.slots = _EMPTY_TABLE, _EMPTY_SLOTS

    # ------------------------------------------------------------------------------------------ side rows

    def feed(self, rows: torch.Tensor, *, final: bool) -> None:
        """Append side rows. They are views of the upstream's memory until `own_side_rows`."""
        self.side.extend(rows.unbind(0))
        self.side_final = self.side_final or final

    def may_borrow(self, rows: torch.Tensor) -> bool:
        """Whether more rows can be fed without `own_side_rows`."""
        return len(self.side) - self._num_own < _MAX_BORROWED and rows.untyped_storage().nbytes() <= _MAX_BORROWED_BYTES

    def own_side_rows(self) -> None:
        """Copy the side rows that came last, so that the upstream's memory is free again: a row's tensor is shared by
        all requests of a step."""
        if self._num_own < len(self.side):
            self.side[self._num_own :] = torch.stack(self.side[self._num_own :]).unbind(0)
            self._num_own = len(self.side)

    def side_row(self, index: int) -> torch.Tensor:
        """The row for the generated token at sequence index `index`."""
        step = index - self.prompt_length
        if step >= len(self.side):
            if not self.side_final or not self.side:
                raise InternalError(f"sequence {self.key!r} was scheduled past its side rows")
            step = -1
        return self.side[step]


def ends_of(batch: Sequence[ScheduledSequence], sequences: Sequence[SequenceRows]) -> list[np.ndarray | None] | None:
    """`BatchLayout.ends` of a batch; None where no token of it sees a later one."""
    ends = [rows.ends(item.start, item.start + item.count) for item, rows in zip(batch, sequences, strict=True)]
    return None if all(each is None for each in ends) else ends
