"""How far a stack of convolutions sees, worked out backwards from its output. Integer arithmetic on index ranges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution with `left` and `right` padding (whatever it pads with)."""

    kernel: int
    left: int
    right: int
    stride: int = 1
    dilation: int = 1

    def needs(self, lo: int, hi: int) -> tuple[int, int]:
        return lo * self.stride - self.left, hi * self.stride - self.left + self.dilation * (self.kernel - 1)

    @classmethod
    def same(cls, kernel: int, dilation: int = 1) -> Conv:
        pad = dilation * (kernel - 1) // 2
        return cls(kernel, pad, pad, dilation=dilation)


@dataclass(frozen=True, slots=True)
class Transposed:
    """A transposed convolution: input padded by `pad`, output cropped by `crop` on the left."""

    kernel: int
    stride: int
    crop: int
    pad: int = 0

    def needs(self, lo: int, hi: int) -> tuple[int, int]:
        first = -(-(lo + self.crop - self.kernel + 1) // self.stride)
        return first - self.pad, (hi + self.crop) // self.stride - self.pad


@dataclass(frozen=True, slots=True)
class Parallel:
    """Branches that are added up; an empty branch is a skip connection."""

    branches: tuple[tuple[Layer, ...], ...]

    def needs(self, lo: int, hi: int) -> tuple[int, int]:
        ranges = [needs(branch, lo, hi) for branch in self.branches]
        return min(r[0] for r in ranges), max(r[1] for r in ranges)


Layer = Conv | Transposed | Parallel


def needs(layers: Iterable[Layer], lo: int, hi: int) -> tuple[int, int]:
    """The input indices that the outputs `lo..hi` (inclusive) of `layers`, given in forward order, depend on."""
    for layer in reversed(tuple(layers)):
        lo, hi = layer.needs(lo, hi)
    return lo, hi


def frame_context(layers: Iterable[Layer], samples_per_frame: int) -> tuple[int, int]:
    """Input frames to the left and to the right of a frame that its own `samples_per_frame` samples depend on."""
    lo, hi = needs(layers, 0, samples_per_frame - 1)
    return -lo, hi
