"""What the runner remembers of each sequence: tokens, positions, prompt rows, side rows, slots. No policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from omnistage.core.errors import InternalError
from omnistage.core.types import ARInput

_EMPTY_SLOTS = np.empty(0, dtype=np.int64)
_EMPTY_TABLE = np.empty(0, dtype=np.int32)
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
    side: torch.Tensor | None = None
    side_count: int = 0
    side_final: bool = False
    emitted: int = 0
    sampled_row: int = 0
    """Where its unread token stands among those that the last step samples."""
    slots: np.ndarray = field(default_factory=lambda: _EMPTY_SLOTS)
    table: np.ndarray = field(default_factory=lambda: _EMPTY_TABLE)

    @classmethod
    def open(
        cls, key: str, payload: ARInput, capacity: int, emit: bool, device: torch.device, dtype: torch.dtype
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
        )

    def append(self, token_id: int) -> None:
        """A token was sampled, or is being sampled (`UNREAD`)."""
        if self.length == len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
        self.tokens[self.length] = token_id
        self.length += 1

    def position(self, index: int) -> int | np.ndarray:
        """Position of a generated token: one for all dimensions, or `[dims]` where the payload gives it."""
        if self.positions is not None and index < self.positions.shape[1]:
            return self.positions[:, index]
        return index + self.payload.position_delta

    def fill_positions(self, out: np.ndarray, start: int, end: int) -> None:
        """Write the positions of tokens [start, end) into `out [dims, end - start]`."""
        known_length = self.prompt_length if self.positions is None else self.positions.shape[1]
        split = min(max(known_length, start), end)
        if split > start:
            known = self.positions
            out[:, : split - start] = np.arange(start, split) if known is None else known[:, start:split]
        if end > split:
            out[:, split - start :] = np.arange(split, end) + self.payload.position_delta

    # --------------------------------------------------------------------------------------------- blocks

    def sync_blocks(self, blocks: Sequence[int], block_size: int) -> None:
        """Take over blocks appended since the last call."""
        known = len(self.table)
        if len(blocks) > known:
            new = np.asarray(blocks[known:], dtype=np.int64)
            self.table = np.concatenate((self.table, new.astype(np.int32)))
            fresh = (new[:, None] * block_size + np.arange(block_size)[None, :]).reshape(-1)
            self.slots = np.concatenate((self.slots, fresh))

    def forget_blocks(self) -> None:
        self.table, self.slots = _EMPTY_TABLE, _EMPTY_SLOTS

    # ------------------------------------------------------------------------------------------ side rows

    def feed(self, rows: torch.Tensor, *, final: bool, device: torch.device, dtype: torch.dtype) -> None:
        """Append side rows; they are copied, so that the upstream's memory is free again."""
        count = len(rows)
        if self.side is None:
            capacity = max(64, count)
            self.side = torch.empty(capacity, rows.shape[1], device=device, dtype=dtype)
        if self.side_count + count > len(self.side):
            capacity = max(2 * len(self.side), self.side_count + count)
            buffer = torch.empty(capacity, self.side.shape[1], device=device, dtype=dtype)
            buffer[: self.side_count] = self.side[: self.side_count]
            self.side = buffer
        self.side[self.side_count : self.side_count + count] = rows.to(device=device, dtype=dtype)
        self.side_count += count
        self.side_final = self.side_final or final

    def side_row(self, index: int) -> torch.Tensor:
        """The row for the generated token at sequence index `index`."""
        step = index - self.prompt_length
        if step >= self.side_count:
            if not self.side_final or self.side_count == 0:
                raise InternalError(f"sequence {self.key!r} was scheduled past its side rows")
            step = self.side_count - 1
        if self.side is None:
            raise InternalError(f"sequence {self.key!r} has no side rows")
        return self.side[step]
