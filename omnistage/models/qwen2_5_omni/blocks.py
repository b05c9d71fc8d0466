"""The blocks of many windows as the rows of one batch, and the way back: from rows to each window's result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omnistage.engines.graphs import bucket
from omnistage.engines.streams import upload

Context = dict[bool, Tensor]
"""`[intervals, evaluations, look-back layers, g, frames, hidden]` of one block, by whether these evaluations ask for
guidance; g is 2 where they get it, else 1."""
_WINDOW_BLOCKS = 3
"""A padded batch has room for one window in so many blocks: the smallest that is emitted with its look-ahead."""


@dataclass(frozen=True, slots=True)
class WindowRows:
    """A window: new codes and look-ahead."""

    codes: Sequence[int]
    noise: Tensor
    """`[frames, mel]`."""
    cond: Tensor
    """`[1, enc_emb_dim]`."""
    reference: Tensor
    """`[1, enc_dim + 1]`."""
    context: Context | None
    """Of the block before; None at the beginning of an utterance."""
    emit_blocks: int
    """Blocks after which the next window begins; 0: there is none."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A window's mel, look-ahead included (`[frames, mel]`), and what the next window needs."""

    mel: Tensor
    context: Context | None


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of a batch: blocks, and windows that may keep or have kept something."""

    blocks: int
    windows: int

    @classmethod
    def padded(cls, blocks: int, windows: int) -> Size:
        """The next of few sizes, each of which is one captured graph."""
        blocks = bucket(blocks, 4)
        while (room := max(1, blocks // _WINDOW_BLOCKS)) < windows:
            blocks = bucket(blocks + 1, 4)
        return cls(blocks, room)


def padded_sizes(max_blocks: int) -> list[Size]:
    """Those of all batches of at most so many blocks."""
    return sorted({Size.padded(blocks, 1) for blocks in range(1, max_blocks + 1)}, key=lambda size: size.blocks)


class BlockBatch:
    """Tensors for `velocity`. With `padded` they have one of few sizes; rows that are not needed change nothing."""

    def __init__(
        self, windows: Sequence[WindowRows], block_codes: int, repeats: int, device: torch.device, *, padded: bool
    ) -> None:
        self._windows = windows
        self._frames = frames = block_codes * repeats
        counts = [-(-len(window.codes) // block_codes) for window in windows]
        self._starts = [sum(counts[:i]) for i in range(len(counts))]
        self._previous = [window.context for window in windows if window.context is not None]
        self._keepers = [i for i, window in enumerate(windows) if window.emit_blocks]
        blocks = sum(counts)
        size = Size.padded(blocks, len(windows)) if padded else Size(blocks, len(self._previous))
        self.size = size
        # In numpy: calls into torch give the interpreter away, and other stages' threads want it.
        before, after = np.arange(size.blocks), np.arange(size.blocks)
        valid = np.ones((size.blocks, frames), dtype=np.bool_)
        codes = np.zeros((size.blocks, block_codes), dtype=np.int64)
        noise = np.zeros((size.blocks, frames, windows[0].noise.shape[1]), dtype=np.float32)
        offset = 0
        for window, start, count in zip(windows, self._starts, counts, strict=True):
            before[start + 1 : start + count] = range(start, start + count - 1)
            after[start : start + count - 1] = range(start + 1, start + count)
            if window.context is not None:
                before[start] = size.blocks + offset
                offset += 1
            length = len(window.codes)
            codes[start : start + count].reshape(-1)[:length] = window.codes
            noise[start : start + count].reshape(count * frames, -1)[: length * repeats] = window.noise.numpy()
            valid[start : start + count].reshape(-1)[length * repeats :] = False
        self._device = device
        self._repeats = repeats
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        owners += [0] * (size.blocks - blocks)  # padding speaks with any voice
        self.cond = torch.cat([windows[i].cond for i in owners])
        self.reference = torch.cat([windows[i].reference for i in owners])
        keep = [self._starts[i] + windows[i].emit_blocks - 1 for i in self._keepers]
        keep += [0] * (size.windows - len(keep)) if padded else []
        self.noise = torch.from_numpy(noise)
        count, rest = size.blocks, (2 + block_codes) * size.blocks
        numbers = upload(np.concatenate((before, after, codes.reshape(-1), np.array(keep, dtype=np.int64))), device)
        self.neighbours = (numbers[:count], numbers[count : 2 * count], upload(valid, device))
        self.codes, self.keep = numbers[2 * count : rest].view(codes.shape), numbers[rest:]

    @property
    def keepers(self) -> int:
        """Windows that will be followed by another one: the first rows of what is kept are theirs."""
        return len(self._keepers)

    def contexts(self, guided: bool, intervals: int, empty: Tensor) -> Iterator[Tensor]:
        """For each interval the kept rows for those of its evaluations that do, or do not, ask for guidance.

        `empty` is `[0, evaluations, look-back layers, g, frames, hidden]`; they have as many rows as there is room for
        windows. One buffer serves all intervals.
        """
        count, shape = len(self._previous), (self.size.windows, *empty.shape[1:])
        rows = empty.new_zeros(shape) if count else empty.new_zeros(1, *shape[1:]).expand(shape)
        for i in range(intervals):
            if count:
                torch.stack([states[guided][i] for states in self._previous], out=rows[:count])
            yield rows

    def solutions(self, mel: Tensor, rows: dict[bool, Tensor]) -> list[Solution]:
        """Each window's share of the state at the end, and of `rows` (`Context`, of those that keep something).

        Empties `rows`, whose tensors are large.
        """
        shares: dict[int, Context] = {i: {} for i in self._keepers}
        for guided in list(rows):
            # A copy for each window: where one ends earlier, nothing of it stays.
            copies: tuple[Tensor, ...] = torch.unbind_copy(rows.pop(guided))  # type: ignore[func-returns-value,assignment]
            for i, share in zip(shares, copies, strict=True):
                shares[i][guided] = share
        frames = mel.flatten(0, 1)
        result = []
        for i, (window, start) in enumerate(zip(self._windows, self._starts, strict=True)):
            first = start * self._frames
            result.append(Solution(frames[first : first + len(window.codes) * self._repeats], shares.get(i)))
        return result
