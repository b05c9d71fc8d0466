"""Keys and values in float8: half of the memory of 16 bits, and so twice the tokens in the same pool.

Each token's numbers of each head are divided by a power of two, so that the largest lies in [128, 256), and rounded to
e4m3; the exponent is one byte beside them. A token's numbers depend on nothing else: not on what shares its batch, nor
on how its prompt was cut. All that is read comes from the cache, so that a token sees itself as others will see it.

A cache is `[num_blocks, block_size, heads, dim]` of `float8_e4m3fn` whose blocks end with the exponents
`[block_size, heads]` of their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omnistage.engines.ar.attention import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from omnistage.engines.ar.component import ARSpec

FLOAT8 = torch.float8_e4m3fn
TOP_EXPONENT = 7
"""Of the largest number after the division: 2^7 to 2^8, where e4m3 ends at 448."""
MAX_EXPONENT = 100
"""Of the power of two, up and down."""
_MANTISSA_BITS, _BIAS = 23, 127
"""Of float32."""


def float8_bytes(spec: ARSpec) -> int:
    """Bytes of a token's keys and values."""
    return sum(heads * (key_dim + value_dim + 2) for heads, key_dim, value_dim in spec.kv_shapes)


def new_caches(
    spec: ARSpec,
    blocks: int,
    size: int,
    dtype: torch.dtype,
    new: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
) -> list[KVCache]:
    """Caches of all attention modules in `dtype`, which may be float8; `new` makes a tensor."""
    if dtype != FLOAT8:
        return spec.empty_caches(blocks, size, lambda shape: new(shape, dtype))
    return [
        (_cache(blocks, size, heads, key_dim, new), _cache(blocks, size, heads, value_dim, new))
        for heads, key_dim, value_dim in spec.kv_shapes
    ]


def _cache(
    blocks: int, size: int, heads: int, dim: int, new: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
) -> torch.Tensor:
    width = size * heads * (dim + 1)
    storage = new((blocks, width), torch.uint8).view(FLOAT8)
    return storage.as_strided((blocks, size, heads, dim), (width, heads * dim, dim, 1))


def exponents_of(cache: torch.Tensor) -> torch.Tensor:
    """int8 `[num_blocks, block_size, heads]`, a view."""
    blocks, size, heads, dim = cache.shape
    start = cache.storage_offset() + size * heads * dim
    return cache.view(torch.int8).as_strided((blocks, size, heads), (cache.stride(0), heads, 1), start)


def to_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[T, heads, d]` as float8, and their exponents, int8 `[T, heads]`."""
    values = rows.float()
    largest = values.abs().amax(-1)
    # By the bits: exact on every device.
    exponents = (largest.view(torch.int32) >> _MANTISSA_BITS) - _BIAS - TOP_EXPONENT
    exponents = exponents.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    # x - x is NaN where x is infinite, else 0: rounding alone would hide an overflow behind a finite number.
    scaled = values * _power(-exponents)[..., None] + (largest - largest)[..., None]
    return scaled.to(FLOAT8), exponents.to(torch.int8)


def from_float8(numbers: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `to_float8` gave, as numbers of `dtype`."""
    return (numbers.float() * _power(exponents.int())[..., None]).to(dtype)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to the int32 exponents, exactly."""
    return ((exponents + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def write_slots(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Store rows `[T, heads, d]` at slots `[T]` of a cache in any dtype."""
    if cache.dtype != FLOAT8:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
        return
    numbers, exponents = to_float8(rows)
    size = cache.shape[1]
    block, offset = slots // size, slots % size
    # Bytes can be indexed on every device.
    cache.view(torch.uint8)[block, offset] = numbers.view(torch.uint8)
    exponents_of(cache)[block, offset] = exponents


def read_slots(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `[n, heads, d]` of slots `[n]`; what a cache in float8 holds, as `dtype`."""
    if cache.dtype != FLOAT8:
        return cache.view(-1, *cache.shape[2:]).index_select(0, slots)
    size = cache.shape[1]
    block, offset = slots // size, slots % size
    numbers = cache.view(torch.uint8)[block, offset].view(FLOAT8)
    return from_float8(numbers, exponents_of(cache)[block, offset], dtype)
