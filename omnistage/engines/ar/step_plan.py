"""What rank 0 of a tensor parallel stage tells the others before they compute together. No torch: it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the decoder; embeddings and positions follow by broadcast. S sequences, as in `BatchLayout`."""

    query_lengths: np.ndarray
    """int32 [S]"""
    sequence_lengths: np.ndarray
    """int32 [S], this step's tokens included."""
    block_tables: np.ndarray
    """int32: the blocks of all sequences one after the other, as many of each as its tokens take."""
    deep_rows: int | None = None
    """Rows for deeper layers, which follow with the tokens that they belong to; None: `forward` without media."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Run the head over hidden rows, which follow by broadcast."""

    rows: int
    width: int
