"""The Triton kernel of BigVGAN's anti-aliased activation: upsample by 2, SnakeBeta, downsample by 2, in one pass.

A lane has `_CHUNK` consecutive samples of one row (request × channel). It reads them with their halo, keeps the
upsampled signal in registers, and writes the samples: what neighbours share is computed twice, which costs less than
exchanging it. Chunks of all rows are numbered through, so that short rows leave no lanes idle.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from omnistage.engines.codec.snake import snake
from omnistage.engines.triton_jit import HAS_TRITON, jit

if HAS_TRITON:
    import triton
    import triton.language as tl

TAPS = 12
"""Of each of the two filters; the kernel's window is written for them and for a ratio of 2."""
_CHUNK = 16
_LANES, _WARPS = 128, 4


# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any.
# fmt: off


@jit()
def _load_four(x_ptr, base, first, length, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """Samples first .. first + 3 of each lane's row; 0 outside of it."""
    place = first[:, None] + tl.arange(0, 4)[None, :]
    x = tl.load(x_ptr + base[:, None] + place, mask=(place >= 0) & (place < length[:, None]), other=0.0)
    even, odd = tl.split(tl.reshape(x, [LANES, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@jit()
def _store_four(out_ptr, base, first, length, y0, y1, y2, y3, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    place = first[:, None] + tl.arange(0, 4)[None, :]
    y = tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), [LANES, 4])
    tl.store(out_ptr + base[:, None] + place, y, mask=place < length[:, None])


@jit(counts=("rows", "channels", "units"))
@no_type_check  # its tuples grow while Triton unrolls the loops
def _activation_kernel(
    x_ptr, out_ptr,  # [rows, length] float32
    alpha_ptr, scale_ptr,  # [channels] float32
    rows, channels, units,
    UP: tl.constexpr, DOWN: tl.constexpr,  # taps; those of UP include the factor of the ratio
    UNIT: tl.constexpr,  # length = units * UNIT: so many samples are aligned in every row
    CHUNK: tl.constexpr, LANES: tl.constexpr,
):
    length = units * UNIT
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    chunks = tl.cdiv(length, CHUNK)
    row = lane // chunks
    start = (lane % chunks) * CHUNK
    base = row.to(tl.int64) * length
    size = tl.where(row < rows, length, 0)  # a lane beyond the last row has no samples
    alpha = tl.load(alpha_ptr + row % channels)
    scale = tl.load(scale_ptr + row % channels)

    window = ()  # samples start - 8 .. start + CHUNK + 7
    for piece in tl.static_range(CHUNK // 4 + 4):
        window += _load_four(x_ptr, base, start + (4 * piece - 8), size, LANES)
    # Both ends repeat their last sample. Only a row's first chunk begins there, and no chunk begins past the end.
    x = ()  # samples start - 5 .. start + CHUNK + 4
    for i in tl.static_range(3, 8):
        x += (tl.where(start == 0, window[8], window[i]),)
    x += (window[8],)
    for i in tl.static_range(9, CHUNK + 13):
        x += (tl.where(start + (i - 8) >= size, x[i - 4], window[i]),)

    active = ()  # the upsampled signal from 2 * start - 5 on
    for n in tl.static_range(2 * CHUNK + 10):
        up = x[n // 2 + 5] * UP[n % 2]
        for tap in tl.static_range(1, 6):
            up = tl.fma(x[n // 2 + 5 - tap], UP[n % 2 + 2 * tap], up)
        active += (snake(up, alpha, scale),)
    # The same for its ends.
    a = ()
    for n in tl.static_range(5):
        a += (tl.where(start == 0, active[5], active[n]),)
    a += (active[5], active[6])
    for n in tl.static_range(7, 2 * CHUNK + 10):
        a += (tl.where(start + (n - 5) // 2 >= size, a[n - 1], active[n]),)

    y = ()
    for t in tl.static_range(CHUNK):
        down = a[2 * t] * DOWN[0]
        for tap in tl.static_range(1, 12):
            down = tl.fma(a[2 * t + tap], DOWN[tap], down)
        y += (down,)
    for i in tl.static_range(0, CHUNK, 4):
        _store_four(out_ptr, base, start + i, size, y[i], y[i + 1], y[i + 2], y[i + 3], LANES)


# fmt: on


def fused_activation(x: Tensor, alpha: Tensor, scale: Tensor, up: tuple[float, ...], down: tuple[float, ...]) -> Tensor:
    """The activation over `x [batch, channels, length]`, float32.

    `alpha` and `scale` (`[channels]`, contiguous) are the factors before and after the squared sine, `up` and `down`
    the filters' taps, with the ratio's factor in `up`.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    batch, channels, length = x.shape
    rows = batch * channels
    unit = 1 if length % 4 else 4
    if x.numel() and not x.is_meta:
        grid = (triton.cdiv(rows * triton.cdiv(length, _CHUNK), _LANES),)
        _activation_kernel[grid](
            *(x, out, alpha, scale, rows, channels, length // unit),
            *(up, down, unit, _CHUNK, _LANES),
            num_warps=_WARPS,
        )
    return out
