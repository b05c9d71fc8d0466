"""The blocks of many windows as the rows of one batch, and the way back: from rows to each window's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from omnistage.engines.graphs import bucket
from omnistage.engines.streams import upload

Kept = dict[bool, Tensor]
"""`[evaluations, look-back layers, g, frames, hidden]` of one block, by whether these evaluations ask for guidance;
g is 2 where they get it, else 1."""
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
    left: Kept | None
    """Of the block before; None at the beginning of an utterance."""
    emit_blocks: int
    """Blocks after which the next window begins; 0: there is none."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A window's mel, look-ahead included (`[frames, mel]`), and what the next window needs."""

    mel: Tensor
    kept: Kept | None


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
        self._left = [window.left for window in windows if window.left is not None]
        self._stacked: Kept = {}
        """What was kept, of all windows together."""
        self._keepers = [i for i, window in enumerate(windows) if window.emit_blocks]
        blocks = sum(counts)
        size = Size.padded(blocks, len(windows)) if padded else Size(blocks, len(self._left))
        self.size = size
        # In numpy: calls into torch give the interpreter away, and other stages' threads want it.
        before, after = np.arange(size.blocks), np.arange(size.blocks)
        valid = np.ones((size.blocks, frames), dtype=np.bool_)
        codes = np.zeros((size.blocks, block_codes), dtype=np.int64)
        noise = np.zeros((size.blocks, frames, windows[0].noise.shape[1]), dtype=np.float32)
        seen = 0
        for window, start, count in zip(windows, self._starts, counts, strict=True):
            before[start + 1 : start + count] = range(start, start + count - 1)
            after[start : start + count - 1] = range(start + 1, start + count)
            if window.left is not None:
                before[start] = size.blocks + seen
                seen += 1
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
        self.codes = upload(codes, device)
        self.neighbours = (upload(before, device), upload(after, device), upload(valid, device))
        self.keep = upload(np.array(keep, dtype=np.int64), device)

    def left(self, guided: bool, evaluation: int, empty: Tensor) -> Tensor:
        """The kept rows for one evaluation; `empty` is `[look-back layers, g, 0, frames, hidden]`."""
        if guided not in self._stacked:
            rows = [kept[guided] for kept in self._left]
            stacked = torch.stack(rows, dim=3) if rows else empty[None]
            missing = self.size.windows - stacked.shape[3]
            self._stacked[guided] = functional.pad(stacked, (0, 0, 0, 0, 0, missing)).flatten(2, 3)
        stacked = self._stacked[guided]
        return stacked[evaluation] if self._left else stacked[0]

    def solutions(self, mel: Tensor, seen: dict[bool, list[Tensor]]) -> list[Solution]:
        """Each window's share of the state at the end and of the rows that were kept in every evaluation."""
        self._stacked.clear()  # as large as what follows
        kept: dict[int, Kept] = {i: {} for i in self._keepers}
        for guided, evaluations in seen.items():
            if evaluations and self._keepers:
                together, count = torch.stack(evaluations), len(self.keep)
                together = together.view(*together.shape[:2], together.shape[2] // count, count, *together.shape[3:])
                evaluations.clear()
                for place, i in enumerate(self._keepers):
                    kept[i][guided] = together[:, :, :, place].clone()
        result = []
        for i, (window, start) in enumerate(zip(self._windows, self._starts, strict=True)):
            frames = len(window.codes) * self._repeats
            rows = mel[start : start + -(-frames // self._frames)].flatten(0, 1)[:frames]
            result.append(Solution(rows, kept.get(i)))
        return result
