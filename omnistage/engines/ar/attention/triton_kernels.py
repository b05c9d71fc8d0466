"""The Triton kernels that write K and V and prefill; `triton_paged.py` launches them and has the shapes.

Triton compiles what it reads here, so a kernel calls only what its file defines.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl

LOG2_E = math.log2(math.e)
_METADATA = ["query_start_loc_ptr", "seq_lens_ptr", "block_tables_ptr", "slot_mapping_ptr"]
_METADATA += ["partial_m_ptr", "partial_norm_ptr"]
_COUNTS = ["num_seqs", "num_splits", "stride_table", "table_width"]


def _jit(fn: Callable[..., None] | Callable[..., Any]) -> Any:
    """`triton.jit`, without recompiling (which a graph capture would not survive) for another batch size."""
    if not HAS_TRITON:
        return fn
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return triton.jit(
        fn,
        do_not_specialize=[name for name in names if name in _COUNTS],
        do_not_specialize_on_alignment=[name for name in names if name in _METADATA],
    )


@functools.cache
def has_small_shared_memory(device: torch.device) -> bool:
    """True on chips with about 100 KB of shared memory a block (consumer ones), where Hopper has 227."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) < 160 * 1024  # type: ignore[attr-defined]  # not in the stub


# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any.
# fmt: off


@_jit
def _write_kv_kernel(  # type: ignore[no-untyped-def]  # kernel
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr,
    stride_key_t, stride_key_h, stride_value_t, stride_value_h, stride_block, stride_slot, stride_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < NUM_HEADS) & (dim < HEAD_DIM)
    key = tl.load(key_ptr + token * stride_key_t + head * stride_key_h + dim, mask=mask)
    value = tl.load(value_ptr + token * stride_value_t + head * stride_value_h + dim, mask=mask)
    base = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    tl.store(k_cache_ptr + base + head * stride_head + dim, key, mask=mask)
    tl.store(v_cache_ptr + base + head * stride_head + dim, value, mask=mask)


@_jit
def _attend_tile(  # type: ignore[no-untyped-def]  # kernel
    acc,  # [M, DIM_PAD] float32, not normalised
    m,  # [M] float32, running maximum in units of log2
    norm,  # [M] float32, running sum of the weights
    q,  # [M, DIM_PAD]
    q_pos,  # [M] absolute position of each row's query
    tile_start, kv_end, table_ptr, k_ptr, v_ptr,
    stride_block, stride_slot,
    qk_scale,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,  # the tile may pass kv_end
    CAUSAL: tl.constexpr,  # the tile may hold keys that some row must not see
):
    """One online-softmax step over keys [tile_start, tile_start + TILE_N)."""
    pos = tile_start + tl.arange(0, TILE_N)
    dim = tl.arange(0, DIM_PAD)
    load_mask = (dim < HEAD_DIM)[None, :]
    if BOUNDED:
        block = tl.load(table_ptr + pos // BLOCK_SIZE, mask=pos < kv_end, other=0).to(tl.int64)
        load_mask = load_mask & (pos < kv_end)[:, None]
    else:
        block = tl.load(table_ptr + pos // BLOCK_SIZE).to(tl.int64)
    offset = (block * stride_block + (pos % BLOCK_SIZE) * stride_slot)[:, None] + dim[None, :]
    # Masked to zero and not only to weight 0: a slot never written may hold NaN.
    k = tl.load(k_ptr + offset, mask=load_mask, other=0.0)
    v = tl.load(v_ptr + offset, mask=load_mask, other=0.0)

    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    if BOUNDED:
        scores = tl.where((pos < kv_end)[None, :], scores, float("-inf"))
    if CAUSAL:
        seen = pos[None, :] <= q_pos[:, None]
        if WINDOW > 0:
            seen = seen & (pos[None, :] > q_pos[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    # A row that has seen no key yet still has -inf; subtracting it from itself would give NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores - m_safe[:, None])
    decay = tl.exp2(m - m_safe)
    norm = norm * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, m_new, norm


@_jit
def _prefill_kernel(  # type: ignore[no-untyped-def]  # kernel
    query_ptr, k_cache_ptr, v_cache_ptr, out_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, num_seqs,
    qk_scale,
    stride_query_t, stride_query_h, stride_out_t, stride_out_h, stride_block, stride_slot, stride_head,
    stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr,
    MIN_QUERIES: tl.constexpr,
):
    """Program (kv_head, b): BLOCK_Q tokens of one sequence, as BLOCK_M rows of (token, head of the group)."""
    # Sequence i owns programs from query_start_loc[i] // BLOCK_Q + i on: at least as many as it has blocks.
    block_id = tl.program_id(1)
    left = num_seqs * 0
    right = num_seqs
    while right - left > 1:
        middle = (left + right) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= block_id:
            left = middle
        else:
            right = middle
    seq = left.to(tl.int64)
    q_start = tl.load(query_start_loc_ptr + seq)
    q_len = tl.load(query_start_loc_ptr + seq + 1) - q_start
    token_start = (block_id - (q_start // BLOCK_Q + left)) * BLOCK_Q
    if token_start >= q_len or q_len < MIN_QUERIES:
        return

    seq_len = tl.load(seq_lens_ptr + seq)
    kv_head = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    token = token_start + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    dim = tl.arange(0, DIM_PAD)
    mask = ((rows < BLOCK_Q * GROUP) & (token < q_len))[:, None] & (dim < HEAD_DIM)[None, :]
    q_row = (q_start + token).to(tl.int64)[:, None]
    q_ptrs = query_ptr + q_row * stride_query_t + head[:, None] * stride_query_h + dim[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    q_pos = seq_len - q_len + token

    first_pos = tl.maximum(seq_len - q_len + token_start, 0)
    kv_end = tl.minimum(seq_len, seq_len - q_len + token_start + BLOCK_Q)
    tile_start = first_pos * 0
    whole_end = (first_pos + 1) // TILE_N * TILE_N  # tiles before it are seen whole by every row
    if WINDOW > 0:
        tile_start = tl.maximum(first_pos - WINDOW + 1, 0) // TILE_N * TILE_N
        whole_end = tile_start

    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    table_ptr = block_tables_ptr + seq * stride_table
    k_ptr = k_cache_ptr + kv_head * stride_head
    v_ptr = v_cache_ptr + kv_head * stride_head
    for tile in range(tile_start, whole_end, TILE_N):
        acc, m, norm = _attend_tile(
            acc, m, norm, q, q_pos, tile, kv_end, table_ptr, k_ptr, v_ptr, stride_block, stride_slot, qk_scale,
            HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_N, WINDOW, False, False,
        )
    for tile in range(whole_end, kv_end, TILE_N):
        acc, m, norm = _attend_tile(
            acc, m, norm, q, q_pos, tile, kv_end, table_ptr, k_ptr, v_ptr, stride_block, stride_slot, qk_scale,
            HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_N, WINDOW, True, True,
        )
    result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    out_ptrs = out_ptr + q_row * stride_out_t + head[:, None] * stride_out_h + dim[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


# fmt: on
