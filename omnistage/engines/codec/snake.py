"""The activation of neural vocoders, x + sin²(αx) / β with a factor each for every channel, as one Triton kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from omnistage.engines.triton_jit import HAS_TRITON, jit

if HAS_TRITON:
    import triton
    import triton.language as tl

_BLOCK, _WARPS = 1024, 4


# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any.
# fmt: off


@jit()
def snake(x, alpha, scale):  # type: ignore[no-untyped-def]  # kernel
    """x + scale · sin²(alpha · x), to float32's precision for |alpha · x| below 10⁷.

    The square has period π, so that one short polynomial over ±π/2 replaces a general sine.
    """
    angle = x * alpha
    turns = (angle * 0.31830988618379067 + 12582912.0) - 12582912.0  # 1.5 · 2²³: rounds to an integer
    rest = tl.fma(turns, -3.1415927410125732, angle)
    rest = tl.fma(turns, 8.742277657347586e-08, rest)
    square = rest * rest
    series = tl.fma(square, 2.6083159809786593e-06, -0.00019810690719168633)
    series = tl.fma(square, series, 0.008333078585565090)
    series = tl.fma(square, series, -0.16666659712791443)
    sine = tl.fma(rest * square, series, rest)
    return tl.fma(sine * sine, scale, x)


@jit(counts=("size", "channels", "length"))
def _snake_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, out_ptr,  # [batch, channels, length]
    alpha_ptr, scale_ptr,  # [channels] float32
    size, channels, length,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    inside = first + lane < size
    row = first // length + ((first % length).to(tl.int32) + lane) // length
    alpha = tl.load(alpha_ptr + row % channels)
    scale = tl.load(scale_ptr + row % channels)
    x = tl.load(x_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + lane, snake(x, alpha, scale).to(out_ptr.dtype.element_ty), mask=inside)


# fmt: on


class FusedSnake(nn.Module):
    """Stands in for a SnakeBeta module (`alpha`, `beta` as logarithms, `no_div_by_zero`) over `[B, channels, n]`.

    One pass over its input instead of six, in float32 whatever the dtype. The factors are computed here, so the
    parameters must have their values.
    """

    alpha: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        with torch.no_grad():
            log_alpha, log_beta = (getattr(module, name).float() for name in ("alpha", "beta"))
            self.register_buffer("alpha", log_alpha.exp(), persistent=False)
            self.register_buffer("scale", 1.0 / (log_beta.exp() + module.no_div_by_zero), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel() and not x.is_meta:
            sizes = x.numel(), *x.shape[1:]
            grid = (triton.cdiv(x.numel(), _BLOCK),)
            _snake_kernel[grid](x, out, self.alpha, self.scale, *sizes, _BLOCK, num_warps=_WARPS)
        return out


def fused_snakes(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """A `FusedSnake` for each of the modules that is a SnakeBeta."""
    return {module: FusedSnake(module) for module in modules if type(module).__name__.endswith("SnakeBeta")}
