"""Sequences that one forward of a model's own computes: a batch as transformers' `generate` has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnistage.engines.streams import upload


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences with as many new tokens each, as transformers' `generate` has a batch: padding stands first."""

    count: int
    """New tokens of each."""
    lengths: tuple[int, ...]
    """Of the sequences, new tokens included."""
    slots: torch.Tensor
    """int64 `[B, longest]`: of all their tokens; padding repeats one of the same sequence."""

    @classmethod
    def of(cls, count: int, lengths: Sequence[int], slots: Sequence[np.ndarray], device: torch.device) -> Group:
        longest = max(lengths)
        padded = np.empty((len(lengths), longest), dtype=np.int64)
        for row, length, own in zip(padded, lengths, slots, strict=True):
            row[: longest - length] = own[0]
            row[longest - length :] = own[:length]
        return cls(count, tuple(lengths), upload(padded, device))

    @property
    def longest(self) -> int:
        return self.slots.shape[1]

    def new_slots(self) -> torch.Tensor:
        """int64 `[B * count]`"""
        return self.slots[:, -self.count :].reshape(-1)

    def mask(self) -> torch.Tensor:
        """int64 `[B, longest]`: zeros for padding."""
        places = torch.arange(self.longest, device=self.slots.device)
        starts = upload(np.array([self.longest - length for length in self.lengths]), self.slots.device)
        return (places >= starts[:, None]).long()

    def positions(self) -> torch.Tensor:
        """int64 `[B, count]`"""
        starts = upload(np.array([length - self.count for length in self.lengths]), self.slots.device)
        return starts[:, None] + torch.arange(self.count, device=self.slots.device)
