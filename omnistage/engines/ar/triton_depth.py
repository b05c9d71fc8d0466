"""Triton kernels for a decoder that has one new row of each sequence and a short past: see `depth_decoder.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from omnistage.engines.ar.attention.triton_kernels import has_small_shared_memory
from omnistage.engines.triton_jit import HAS_TRITON, LAUNCH_ERRORS, jit

if HAS_TRITON:
    import triton
    import triton.language as tl

__all__ = ["FEW_ROWS", "LAUNCH_ERRORS", "attend", "fits", "linear"]

FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a program: the fewest that the tensor cores take, and more for large batches, which read weights as often."""

_NARROW = 2048
NARROW, WIDE = (16, 512, 4, 3), (32, 256, 4, 4)
"""Columns of a program, how deep a tile of weights is, warps, stages: of up to so many columns, and of more."""
_MANY, _SMALL = (32, 256, 8, 3), (16, 128, 4, 3)
"""Of large batches, and of devices with less shared memory; neither depends on how many columns there are."""


def fits(width: int, head_dim: int, positions: int) -> bool:
    """Whether the kernels take such a decoder."""
    return HAS_TRITON and width % 16 == 0 and head_dim >= 8 and head_dim & (head_dim - 1) == 0 and positions <= 64


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """`x` `[S, K]` times `weight` `[N, K]`, transposed.

    `norm`: weight and epsilon of an RMS norm of `x` before it. `residual` `[S, N]` is added. `gated`: the upper half of
    `weight` makes gates, and SiLU(gate) * up is given.
    """
    rows, depth = x.shape
    columns = len(weight) // 2 if gated else len(weight)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    exact = x.dtype == torch.float32
    block_rows = FEW_ROWS if rows <= FEW_ROWS else _MANY_ROWS
    if has_small_shared_memory(x.device):
        config = _SMALL
    elif rows > FEW_ROWS:
        config = _MANY
    else:
        config = NARROW if columns <= _NARROW else WIDE
    block_columns, block_depth, warps, stages = config
    block_depth = 32 if exact else min(block_depth, triton.next_power_of_2(depth))
    norm_weight, epsilon = norm if norm is not None else (x, 0.0)
    _linear_kernel[(triton.cdiv(columns, block_columns), triton.cdiv(rows, block_rows))](
        x, weight, norm_weight, x if residual is None else residual, out, rows, columns, depth, epsilon,
        weight.stride(0), weight.stride(1),
        NORM=norm is not None, WHOLE=block_depth >= depth, RESIDUAL=residual is not None, GATED=gated,
        ROWS=block_rows, COLUMNS=block_columns, DEPTH=block_depth,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def attend(
    qkv: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: int,
    heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
    scale: float,
) -> Tensor:
    """Attention of row `place` of each sequence over its rows so far, whose keys and values are in `kv`.

    `qkv` `[S, (heads + 2 * kv heads) * D]` is this row's, `kv` `[2, S, kv heads, positions, D]` is written.
    """
    sequences, kv_heads, positions, head_dim = kv.shape[1:]
    out = torch.empty(sequences, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    group = heads // kv_heads
    normed = query_norm is not None and key_norm is not None
    _attend_kernel[(sequences, kv_heads)](
        qkv, kv[0], kv[1], cos, sin, query_norm if normed else qkv, key_norm if normed else qkv, out, place,
        epsilon, scale,
        NORM=normed, HEADS=heads, KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group),
        POSITIONS=positions, POSITIONS_PAD=max(16, triton.next_power_of_2(positions)), HEAD_DIM=head_dim, num_warps=4,
    )  # fmt: skip
    return out


# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any.
# fmt: off


@jit(counts=("rows",), metadata=("residual_ptr", "norm_ptr"))
def _linear_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, weight_ptr, norm_ptr, residual_ptr, out_ptr, rows, columns, depth, epsilon, stride_column, stride_depth,
    NORM: tl.constexpr, WHOLE: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = (row < rows)[:, None], (column < columns)[:, None]
    kind = out_ptr.dtype.element_ty
    x_ptr += row[:, None] * depth
    weight_ptr += column[:, None] * stride_column
    scale = tl.zeros([ROWS], tl.float32)
    if NORM and not WHOLE:
        for start in range(0, depth, DEPTH):
            place = start + tl.arange(0, DEPTH)[None, :]
            x = tl.load(x_ptr + place, mask=row_mask & (place < depth), other=0.0).to(tl.float32)
            scale += tl.sum(x * x, 1)
        scale = tl.rsqrt(scale / depth + epsilon)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        place = start + tl.arange(0, DEPTH)[None, :]
        inside = place < depth
        x = tl.load(x_ptr + place, mask=row_mask & inside, other=0.0)
        if NORM:
            if WHOLE:
                squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
                scale = tl.rsqrt(squares / depth + epsilon)
            # Rounded where the module rounds.
            factor = tl.load(norm_ptr + place, mask=inside, other=0.0).to(tl.float32)
            x = ((x.to(tl.float32) * scale[:, None]).to(kind).to(tl.float32) * factor).to(kind)
        weight = tl.load(weight_ptr + place * stride_depth, mask=column_mask & inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if GATED:
            weight = tl.load(
                weight_ptr + columns * stride_column + place * stride_depth, mask=column_mask & inside, other=0.0
            )
            up = tl.dot(x, tl.trans(weight), up, input_precision="ieee")
    acc = acc.to(kind).to(tl.float32)
    if GATED:
        acc = (acc / (1.0 + tl.exp(-acc))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    cell, mask = row[:, None] * columns + column[None, :], row_mask & (column < columns)[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + cell, acc.to(kind), mask=mask)


@jit()
def _rotated(ptr, offset, norm_ptr, cos, sin, epsilon, NORM: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """Heads at `offset` `[G, 1]`, normed and rotated by the row's place."""
    dim = tl.arange(0, HEAD_DIM)
    other = (dim + HEAD_DIM // 2) % HEAD_DIM
    kind = ptr.dtype.element_ty
    x = tl.load(ptr + offset + dim[None, :]).to(tl.float32)
    partner = tl.load(ptr + offset + other[None, :]).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + epsilon)[:, None]
        factor = tl.load(norm_ptr + dim)[None, :].to(tl.float32)
        factor_turned = tl.load(norm_ptr + other)[None, :].to(tl.float32)
        x = ((x * scale).to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
        partner = ((partner * scale).to(kind).to(tl.float32) * factor_turned).to(kind).to(tl.float32)
    partner = tl.where(dim[None, :] < HEAD_DIM // 2, -partner, partner)
    return (x * cos[None, :] + partner * sin[None, :]).to(kind)


@jit(counts=("place",), metadata=("cos_ptr", "sin_ptr"))
def _attend_kernel(  # type: ignore[no-untyped-def]  # kernel
    qkv_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, out_ptr, place, epsilon, qk_scale,
    NORM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    POSITIONS: tl.constexpr, POSITIONS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, HEAD_DIM)
    cos, sin = tl.load(cos_ptr + dim).to(tl.float32), tl.load(sin_ptr + dim).to(tl.float32)
    qkv_ptr += sequence.to(tl.int64) * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    member = tl.arange(0, GROUP_PAD)
    query = head * GROUP + tl.minimum(member, GROUP - 1)
    q = _rotated(qkv_ptr, query[:, None] * HEAD_DIM, query_norm_ptr, cos, sin, epsilon, NORM, HEAD_DIM).to(tl.float32)
    one = tl.zeros([1, 1], tl.int32) + (HEADS + head) * HEAD_DIM
    key = _rotated(qkv_ptr, one, key_norm_ptr, cos, sin, epsilon, NORM, HEAD_DIM)
    value = tl.load(qkv_ptr + (HEADS + KV_HEADS + head) * HEAD_DIM + dim[None, :])
    past = (sequence.to(tl.int64) * KV_HEADS + head) * POSITIONS * HEAD_DIM
    tl.store(k_ptr + past + place * HEAD_DIM + dim[None, :], key)
    tl.store(v_ptr + past + place * HEAD_DIM + dim[None, :], value)
    # This row's own key and value come from the projection: what was just stored is not read back.
    position = tl.arange(0, POSITIONS_PAD)
    cells, mask = past + position[:, None] * HEAD_DIM + dim[None, :], (position < place)[:, None]
    k = tl.load(k_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    own = tl.sum(q * key.to(tl.float32), 1) * qk_scale
    scores = tl.sum(q[:, None, :] * k[None, :, :], 2) * qk_scale
    scores = tl.where((position < place)[None, :], scores, float("-inf"))
    largest = tl.maximum(tl.max(scores, 1), own)
    weights, own = tl.exp(scores - largest[:, None]), tl.exp(own - largest)
    out = tl.sum(weights[:, :, None] * v[None, :, :], 1) + own[:, None] * value.to(tl.float32)
    out = out / (tl.sum(weights, 1) + own)[:, None]
    cell = (sequence.to(tl.int64) * HEADS + head * GROUP + member[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + cell, out.to(out_ptr.dtype.element_ty), mask=(member < GROUP)[:, None])
