"""What rank 0 of a context parallel stage tells the others before they compute together. No torch: it is sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorShape:
    """An argument that follows by broadcast."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TransformerCall:
    """Call the transformer of this number."""

    number: int
    tensors: tuple[TensorShape, ...]
    others: str
    """Its other arguments, as a Python literal: shapes are tuples in lists."""
