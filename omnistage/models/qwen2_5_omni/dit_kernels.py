"""Triton kernels for the layers of token2wav's DiT, with blocks as rows: attention, and what lies between the products.

`add_norm` is gate, residual, layer norm, modulation and cast in one pass; `block_attention` finds the neighbours of a
block by their rows, so that no keys are gathered and no masks are made. Both are deterministic, read nothing back from
the device, and can be captured in a CUDA graph once a first call outside it has compiled the kernels. A row's result
depends, bit for bit, on that row and its neighbours alone.

Triton compiles what it reads here, so a kernel calls only what this file defines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omnistage.engines.triton_jit import HAS_TRITON, jit

if HAS_TRITON:
    import triton.language as tl

_LOG2_E = math.log2(math.e)
_METADATA = ("before_ptr", "after_ptr", "valid_ptr")
_MIN_TILE = 16  # the least that the matrix units take


# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any.
# fmt: off


@jit(counts=("num_rows",), metadata=_METADATA)
def _add_norm_kernel(  # type: ignore[no-untyped-def]  # kernel
    rows_ptr, product_ptr, gate_ptr, shift_ptr, scale_ptr, norm_ptr, eps,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ADD: tl.constexpr,
):
    """Program (frame): its row of the stream, in float32 whatever the tensors hold."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH_PAD)
    mask = place < WIDTH
    x = tl.load(rows_ptr + start + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        product = tl.load(product_ptr + start + place, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
        x = x + gate * product
        tl.store(rows_ptr + start + place, x.to(rows_ptr.dtype.element_ty), mask=mask)
    shift = tl.load(shift_ptr + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / WIDTH
    norm = centred * (1.0 / tl.sqrt(variance + eps))
    tl.store(norm_ptr + start + place, (norm * scale + shift).to(norm_ptr.dtype.element_ty), mask=mask)


@jit(counts=("num_rows",), metadata=_METADATA)
def _block_attention_kernel(  # type: ignore[no-untyped-def]  # kernel
    qkv_ptr,  # [num_rows + kept, FRAMES, 3, WIDTH]
    out_ptr,  # [num_rows, FRAMES, WIDTH]
    cos_ptr, sin_ptr,  # [positions, HEAD_DIM] float32
    before_ptr, after_ptr,  # [num_rows]
    valid_ptr,  # [num_rows, FRAMES] uint8
    num_rows, qk_scale,
    FRAMES: tl.constexpr, FRAMES_PAD: tl.constexpr, KEYS: tl.constexpr, KEYS_PAD: tl.constexpr,
    FIRST: tl.constexpr,  # position of the block's own first frame: FRAMES where the block before is seen, else 0
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PRECISION: tl.constexpr,
):
    """Program (row, head): all queries of a block over all keys that it sees, in one tile."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    frame = tl.arange(0, FRAMES_PAD)
    dim = tl.arange(0, DIM_PAD)
    place = tl.arange(0, KEYS_PAD)

    source = tl.zeros([KEYS_PAD], tl.int64) + row  # the row of each key
    if FIRST > 0:
        source = tl.where(place < FIRST, tl.load(before_ptr + row).to(tl.int64), source)
    if KEYS > FIRST + FRAMES:
        source = tl.where(place >= FIRST + FRAMES, tl.load(after_ptr + row).to(tl.int64), source)
    own = (place >= FIRST) & (place < FIRST + FRAMES)
    mask = (place < KEYS) & (own | (source != row))  # a block without a neighbour names itself
    key_frame = place % FRAMES
    # A row from num_rows on is a kept one, which has all its frames.
    valid = tl.load(valid_ptr + source * FRAMES + key_frame, mask=mask & (source < num_rows), other=1)
    mask = mask & (valid != 0)

    q_mask = (frame < FRAMES)[:, None] & (dim < HEAD_DIM)[None, :]
    k_mask = mask[:, None] & (dim < HEAD_DIM)[None, :]
    q_start = qkv_ptr + (row * FRAMES + frame)[:, None] * (3 * WIDTH) + head * HEAD_DIM
    k_start = qkv_ptr + (source * FRAMES + key_frame)[:, None] * (3 * WIDTH) + head * HEAD_DIM + WIDTH
    q = tl.load(q_start + dim[None, :], mask=q_mask, other=0.0)
    # Masked to zero and not only to weight 0: frames that do not exist may hold NaN.
    k = tl.load(k_start + dim[None, :], mask=k_mask, other=0.0)
    v = tl.load(k_start + WIDTH + dim[None, :], mask=k_mask, other=0.0)
    if head == 0:  # the one head that knows positions
        other = (dim ^ 1)[None, :]
        q_place = (FIRST + frame)[:, None] * HEAD_DIM + dim[None, :]
        k_place = place[:, None] * HEAD_DIM + dim[None, :]
        q_turned = tl.load(q_start + other, mask=q_mask, other=0.0).to(tl.float32)
        k_turned = tl.load(k_start + other, mask=k_mask, other=0.0).to(tl.float32)
        q_cos = tl.load(cos_ptr + q_place, mask=q_mask, other=0.0)
        q_sin = tl.load(sin_ptr + q_place, mask=q_mask, other=0.0)
        k_cos = tl.load(cos_ptr + k_place, mask=k_mask, other=0.0)
        k_sin = tl.load(sin_ptr + k_place, mask=k_mask, other=0.0)
        q = (q.to(tl.float32) * q_cos + q_turned * q_sin).to(q.dtype)
        k = (k.to(tl.float32) * k_cos + k_turned * k_sin).to(k.dtype)

    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
    scores = tl.where(mask[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    top = tl.where(top == float("-inf"), 0.0, top)  # a row without any key: -inf from itself would be NaN
    weights = tl.exp2(scores - top[:, None])
    total = tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    out_start = out_ptr + (row * FRAMES + frame)[:, None] * WIDTH + head * HEAD_DIM
    tl.store(out_start + dim[None, :], mixed.to(out_ptr.dtype.element_ty), mask=q_mask)


# fmt: on


def _pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def add_norm(
    rows: Tensor, gated: tuple[Tensor, Tensor] | None, shift: Tensor, scale: Tensor, out: Tensor, eps: float
) -> None:
    """`out = layer_norm(rows) * scale + shift`, after `rows += gate * product` where `gated` has the two.

    `rows`, `product` and `out` are `[..., width]` and contiguous, of any dtypes; the others are `[width]`.
    """
    gate, product = (shift, rows) if gated is None else gated
    if rows.shape != product.shape or rows.shape != out.shape:
        raise ValueError(f"rows {list(rows.shape)}, {list(product.shape)} and {list(out.shape)} do not agree")
    if not (rows.is_contiguous() and product.is_contiguous() and out.is_contiguous()):
        raise ValueError("rows, product and out must be contiguous")
    width = rows.shape[-1]
    if not rows.numel() or rows.is_meta:
        return
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]  # not annotated by torch
        _add_norm_kernel[(rows.numel() // width,)](
            rows, product, gate, shift, scale, out, eps,
            width, _pow2(width), gated is not None, num_warps=4,
        )  # fmt: skip


def block_attention(
    qkv: Tensor,
    heads: int,
    rotation: tuple[Tensor, Tensor],
    before: Tensor | None,
    after: Tensor | None,
    valid: Tensor,
) -> Tensor:
    """Attention of n blocks over themselves and their neighbours: `[n, frames, width]`.

    `qkv [n + kept, frames, 3 × width]` has queries, keys and values side by side; `rotation` is cosines and signed
    sines `[positions, head_dim]`, float32; `before` and `after` are `Neighbours`' where the layer sees them; `valid
    [n, frames]` is bool.
    """
    count, frames = valid.shape
    width = qkv.shape[-1] // 3
    head_dim = width // heads
    if not (qkv.is_contiguous() and valid.is_contiguous()):
        raise ValueError("qkv and valid must be contiguous")
    keys = frames * (1 + (before is not None) + (after is not None))
    if rotation[0].shape[0] < keys or rotation[0].shape[1] != head_dim:
        raise ValueError(f"rotation {list(rotation[0].shape)} is too small for {keys} keys of {head_dim}")
    keys_pad = max(_MIN_TILE, _pow2(keys))
    # The switch is read as cuBLAS reads it, when a kernel is launched or captured.
    tf32 = qkv.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    out = qkv.new_empty(count, frames, width)
    if not count or qkv.is_meta:
        return out
    flags = valid.view(torch.uint8)
    with torch.cuda.device_of(qkv):  # type: ignore[no-untyped-call]  # not annotated by torch
        _block_attention_kernel[(count, heads)](
            qkv, out, *rotation,
            flags if before is None else before, flags if after is None else after, flags,
            count, head_dim**-0.5 * _LOG2_E,
            frames, max(_MIN_TILE, _pow2(frames)), keys, keys_pad, 0 if before is None else frames,
            width, head_dim, max(_MIN_TILE, _pow2(head_dim)), "tf32" if tf32 else "ieee",
            num_warps=4 if keys_pad <= 64 else 8,  # with fewer, registers leave room for fewer programs at once
        )  # fmt: skip
    return out
