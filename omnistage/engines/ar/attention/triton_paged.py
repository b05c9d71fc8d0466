"""Paged attention in Triton: write K and V into the block pool, then attend through block tables.

Shapes, with T tokens of S sequences in one flattened batch:

    query, out            [T, num_q_heads, head_dim]       num_q_heads is a multiple of num_kv_heads
    key, value            [T, num_kv_heads, head_dim]
    k_cache, v_cache      [num_blocks, block_size, num_kv_heads, head_dim]
    query_start_loc       [S + 1]  int32    first row of each sequence's queries, then T
    seq_lens              [S]      int32    keys of each sequence, those of this step included; 0 is padding
    block_tables          [S, max_blocks]  int32
    slot_mapping          [T]      int64    block * block_size + offset; -1 is not written

The last dimension of every tensor has stride 1; the others are free. Nothing is read back from the device, so
both functions can be captured in a CUDA graph, once a first call outside it has compiled the kernels.

A sequence's result depends, bit for bit, on that sequence alone, given `max_query_len` 1 for a lone decode. One
query goes through split-KV decoding, where the sequence's own length decides the splits; more queries go through
the tiled prefill kernel. A mixed batch launches both, and each skips the sequences of the other.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl

LOG2_E = math.log2(math.e)
# Fixed for every call: a sequence must be cut, and its pieces summed, the same way whatever shares its batch.
MIN_SPLIT = 128  # keys; a multiple of every decode tile
MAX_SPLITS = 32  # bounds the workspace; longer sequences get longer splits
# Enough programs to fill any GPU; past it a program takes several splits rather than adding idle ones to the grid.
MAX_DECODE_PROGRAMS = 4096

_METADATA = ["query_start_loc_ptr", "seq_lens_ptr", "block_tables_ptr", "slot_mapping_ptr"]
_COUNTS = ["num_seqs", "num_splits", "stride_table"]


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
def _decode_kernel(  # type: ignore[no-untyped-def]  # kernel
    query_ptr, k_cache_ptr, v_cache_ptr,
    out_ptr,  # written where DIRECT, else the workspace is
    partial_acc_ptr,  # [S, num_q_heads, num_splits, head_dim] float32
    partial_ml_ptr,  # [S, num_q_heads, num_splits, 2] float32
    query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, num_splits, qk_scale,
    stride_query_t, stride_query_h, stride_out_t, stride_out_h, stride_block, stride_slot, stride_head,
    stride_table,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, DIRECT: tl.constexpr,
):
    """Program (s, kv_head, p): splits p, p + P, ... of sequence s for all query heads of one KV head."""
    seq = tl.program_id(0).to(tl.int64)
    row = tl.load(query_start_loc_ptr + seq).to(tl.int64)
    next_row = tl.load(query_start_loc_ptr + seq + 1)
    seq_len = tl.load(seq_lens_ptr + seq)
    if next_row - row != 1:
        return
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    split_len = tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(seq_len - first, MAX_SPLITS), TILE_N) * TILE_N)
    used = tl.minimum(tl.cdiv(seq_len - first, split_len), num_splits)
    if DIRECT:
        used = num_splits  # 1, also for padding: its zeros must be written
    if tl.program_id(2) >= used:
        return

    kv_head = tl.program_id(1)
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_PAD)
    mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_ptrs = query_ptr + row * stride_query_t + head[:, None] * stride_query_h + dim[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    q_pos = tl.zeros([GROUP_PAD], tl.int32) + seq_len - 1
    table_ptr = block_tables_ptr + seq * stride_table
    for split in range(tl.program_id(2), used, tl.num_programs(2)):
        start = first + split * split_len
        # The last split takes what is left, so that a bound set too low costs time and not a wrong result.
        end = tl.where(split == used - 1, seq_len, start + split_len)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        norm = tl.zeros([GROUP_PAD], tl.float32)
        for tile in range(start, end, TILE_N):
            acc, m, norm = _attend_tile(
                acc, m, norm, q, q_pos, tile, end, table_ptr, k_cache_ptr + kv_head * stride_head,
                v_cache_ptr + kv_head * stride_head, stride_block, stride_slot, qk_scale,
                HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_N, WINDOW, True, False,
            )
        if DIRECT:
            result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
            out_ptrs = out_ptr + row * stride_out_t + head[:, None] * stride_out_h + dim[None, :]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            cell = (seq * tl.num_programs(1) * GROUP + head) * num_splits + split
            tl.store(partial_acc_ptr + cell[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)
            tl.store(partial_ml_ptr + cell * 2, m, mask=member < GROUP)
            tl.store(partial_ml_ptr + cell * 2 + 1, norm, mask=member < GROUP)


@_jit
def _reduce_kernel(  # type: ignore[no-untyped-def]  # kernel
    partial_acc_ptr, partial_ml_ptr, out_ptr, query_start_loc_ptr, seq_lens_ptr, num_splits,
    stride_out_t, stride_out_h,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):
    """Program (s, head): sums the splits, always as a tree over MAX_SPLITS of them, absent ones being zero."""
    seq = tl.program_id(0).to(tl.int64)
    row = tl.load(query_start_loc_ptr + seq).to(tl.int64)
    next_row = tl.load(query_start_loc_ptr + seq + 1)
    length = tl.load(seq_lens_ptr + seq)
    if next_row - row != 1:
        return
    if WINDOW > 0:
        length = tl.minimum(length, WINDOW)
    split_len = tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(length, MAX_SPLITS), TILE_N) * TILE_N)
    used = tl.minimum(tl.cdiv(length, split_len), num_splits)

    head = tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    dim = tl.arange(0, DIM_PAD)
    cell = (seq * tl.num_programs(1) + head) * num_splits + split
    m = tl.load(partial_ml_ptr + cell * 2, mask=split < used, other=float("-inf"))
    norm = tl.load(partial_ml_ptr + cell * 2 + 1, mask=split < used, other=0.0)
    mask = (split < used)[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.load(partial_acc_ptr + cell[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    top = tl.max(m, 0)
    scale = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(norm * scale, 0)
    result = tl.sum(acc * scale[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_ptrs = out_ptr + row * stride_out_t + head * stride_out_h + dim
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


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
# Host side


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut and launched: rows and keys of a tile, warps, software-pipelining stages."""

    rows: int
    keys: int
    warps: int
    stages: int


@functools.cache
def _small_shared_memory(device: torch.device) -> bool:
    """True on chips with about 100 KB of shared memory a block (consumer ones), where Hopper has 227."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) < 160 * 1024  # type: ignore[attr-defined]  # not in the stub


def decode_tiles(head_dim: int, dtype: torch.dtype, group: int, device: torch.device) -> Tiles:
    """Tiles for one query a sequence: memory-bound, so the aim is loads in flight. Measured on an H200."""
    rows = max(16, _pow2(group))  # 16 is the least that the matrix units take
    if dtype == torch.float32:
        return Tiles(rows, 32 if head_dim <= 128 else 16, 4, 2)
    if _small_shared_memory(device):
        return Tiles(rows, 64 if head_dim <= 128 else 32, 4, 2)
    if head_dim > 128:
        return Tiles(rows, 64, 4, 2)
    return Tiles(rows, 128, 4 if head_dim <= 64 else 8, 2)


def prefill_tiles(head_dim: int, dtype: torch.dtype, group: int, device: torch.device) -> Tiles:
    """Tiles for many queries a sequence: bound by the matrix units. Measured on an H200."""
    if dtype == torch.float32:
        return Tiles(max(32, _pow2(group)), 32 if head_dim <= 128 else 16, 4, 1)
    if head_dim <= 128:
        return Tiles(max(64, _pow2(group)), 64, 4, 2)
    if _small_shared_memory(device):
        return Tiles(max(64, _pow2(group)), 32, 4, 1)
    return Tiles(max(128, _pow2(group)), 64, 8, 2)


def _pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def is_available() -> bool:
    """Whether these kernels can run here: Triton with a CUDA device, or with its interpreter switched on."""
    return HAS_TRITON and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store `key` and `value` [T, num_kv_heads, head_dim] at `slot_mapping` [T] of the caches; -1 is skipped.

    The slots of one call are distinct.
    """
    _check_caches(k_cache, v_cache)
    tokens, heads, head_dim = key.shape
    if value.shape != key.shape or k_cache.shape[2:] != key.shape[1:] or slot_mapping.shape != (tokens,):
        raise ValueError(
            f"key {list(key.shape)}, value {list(value.shape)}, slot_mapping {list(slot_mapping.shape)} and "
            f"k_cache {list(k_cache.shape)} do not agree"
        )
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("the last dimension of key and value must have stride 1")
    if tokens == 0:
        return
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]  # not annotated by torch
        _write_kv_kernel[(tokens,)](
            key, value, k_cache, v_cache, slot_mapping,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            heads, head_dim, k_cache.shape[1], _pow2(heads), _pow2(head_dim), num_warps=4,
        )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None = None,
) -> None:
    """Causal attention of `query` [T, num_q_heads, head_dim] over the cached keys, into `out` of the same shape.

    Query i of a sequence with n queries sits at position `seq_len - n + i` and sees the keys up to its own
    position, the last `sliding_window` of them where that is given. `max_query_len` and `max_seq_len` are upper
    bounds known on the host; a loose `max_seq_len` costs idle programs and workspace, no arithmetic. Rows of a
    sequence with `seq_len` 0 become zero; rows past `query_start_loc[-1]` are left as they are.
    """
    _check_caches(k_cache, v_cache)
    tokens, num_q_heads, head_dim = query.shape
    num_seqs = seq_lens.shape[0]
    kv_heads = k_cache.shape[2]
    if out.shape != query.shape or k_cache.shape[3] != head_dim or num_q_heads % kv_heads != 0:
        raise ValueError(
            f"query {list(query.shape)}, out {list(out.shape)} and k_cache {list(k_cache.shape)} do not agree"
        )
    if query_start_loc.shape[0] != num_seqs + 1 or block_tables.shape[0] != num_seqs:
        raise ValueError(
            f"query_start_loc {list(query_start_loc.shape)} and block_tables {list(block_tables.shape)} do not fit "
            f"seq_lens [{num_seqs}]"
        )
    if query.dtype != k_cache.dtype:
        raise ValueError(f"query is {query.dtype} and the cache {k_cache.dtype}; they must be the same")
    if query.stride(2) != 1 or out.stride(2) != 1 or block_tables.stride(1) != 1:
        raise ValueError("the last dimension of query, out and block_tables must have stride 1")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; give a positive number or None")
    if tokens == 0 or num_seqs == 0:
        return
    window = sliding_window or 0
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # not annotated by torch
        # A lone sequence needs one launch only; under a loose bound its single query is a prefill of one.
        both = max_query_len > 1 and num_seqs > 1
        if max_query_len > 1:
            _prefill(query, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables, scale, window, 1 + both)
        if max_query_len <= 1 or both:
            _decode(query, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables, scale, window, max_seq_len)


def _prefill(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int,
    min_queries: int,
) -> None:
    tokens, num_q_heads, head_dim = query.shape
    block_size, kv_heads = k_cache.shape[1:3]
    num_seqs = seq_lens.shape[0]
    group = num_q_heads // kv_heads
    tiles = prefill_tiles(head_dim, query.dtype, group, query.device)
    block_q = tiles.rows // group
    _prefill_kernel[(kv_heads, tokens // block_q + num_seqs)](
        query, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables, num_seqs, scale * LOG2_E,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        group, head_dim, max(16, _pow2(head_dim)), block_size, tiles.rows, block_q, tiles.keys, window, min_queries,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int,
    max_seq_len: int,
) -> None:
    _, num_q_heads, head_dim = query.shape
    block_size, kv_heads = k_cache.shape[1:3]
    num_seqs = seq_lens.shape[0]
    group = num_q_heads // kv_heads
    tiles = decode_tiles(head_dim, query.dtype, group, query.device)
    dim_pad = max(16, _pow2(head_dim))
    num_splits = decode_splits(max_seq_len, window)
    direct = num_splits == 1
    programs = max(1, min(num_splits, MAX_DECODE_PROGRAMS // (num_seqs * kv_heads)))
    cells = (0,) if direct else (num_seqs, num_q_heads, num_splits)
    partial_acc = torch.empty((*cells, head_dim), dtype=torch.float32, device=query.device)
    partial_ml = torch.empty((*cells, 2), dtype=torch.float32, device=query.device)
    _decode_kernel[(num_seqs, kv_heads, programs)](
        query, k_cache, v_cache, out, partial_acc, partial_ml, query_start_loc, seq_lens, block_tables, num_splits,
        scale * LOG2_E, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        group, tiles.rows, head_dim, dim_pad, block_size, tiles.keys, window, MIN_SPLIT, MAX_SPLITS, direct,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if not direct:
        _reduce_kernel[(num_seqs, num_q_heads)](
            partial_acc, partial_ml, out, query_start_loc, seq_lens, num_splits, out.stride(0), out.stride(1),
            head_dim, dim_pad, tiles.keys, window, MIN_SPLIT, MAX_SPLITS, num_warps=4,
        )  # fmt: skip


def decode_splits(max_seq_len: int, window: int = 0) -> int:
    """Splits that the workspace has room for, for sequences of at most `max_seq_len` keys (`window` 0: no window)."""
    visible = min(max_seq_len, window) if window else max_seq_len
    return max(1, min(MAX_SPLITS, -(-visible // MIN_SPLIT)))


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.dtype != v_cache.dtype:
        raise ValueError("k_cache and v_cache must have the same shape, strides and dtype")
    if k_cache.stride(3) != 1:
        raise ValueError("the last dimension of the caches must have stride 1")
