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
import math
import os
from dataclasses import dataclass

import torch

from omnistage.engines.ar.attention.triton_decode import new_counters, paged_decode
from omnistage.engines.ar.attention.triton_kernels import (
    HAS_TRITON,
    _decode_kernel,
    _prefill_kernel,
    _reduce_kernel,
    _write_kv_kernel,
)

LOG2_E = math.log2(math.e)
# Fixed for every call: a sequence must be cut, and its pieces summed, the same way whatever shares its batch.
MIN_SPLIT = 128  # keys; a multiple of every decode tile
MAX_SPLITS = 32  # bounds the workspace; longer sequences get longer splits
REDUCE_WAVE = 8  # splits that are summed at a time
ONE_LAUNCH_DECODE = True  # `triton_decode`, which also writes K and V, instead of three launches
# Enough programs to fill any GPU; past it a program takes several splits rather than adding idle ones to the grid.
MAX_DECODE_PROGRAMS = 4096


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
    _check_new(key, value, slot_mapping, k_cache)
    tokens, heads, head_dim = key.shape
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
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    counters: torch.Tensor | None = None,
) -> None:
    """Causal attention of `query` [T, num_q_heads, head_dim] over the cached keys, into `out` of the same shape.

    Query i of a sequence with n queries sits at position `seq_len - n + i` and sees the keys up to its own
    position, the last `sliding_window` of them where that is given. `max_query_len` and `max_seq_len` are upper
    bounds known on the host; a loose `max_seq_len` costs idle programs and workspace, no arithmetic. Rows of a
    sequence with `seq_len` 0 become zero; rows past `query_start_loc[-1]` are left as they are.

    `new`: this step's key, value and slot mapping, stored first as `write_kv` does; None where they have been.
    `counters`: at least num_seqs * num_kv_heads zeros, which are zeros again afterwards; None: they are allocated.
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
    if new is not None:
        if max_query_len > 1 or not ONE_LAUNCH_DECODE:
            write_kv(new[0], new[1], k_cache, v_cache, new[2])
            new = None
        else:
            _check_new(*new, k_cache)
    window = sliding_window or 0
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # not annotated by torch
        # A lone sequence needs one launch only; under a loose bound its single query is a prefill of one.
        both = max_query_len > 1 and num_seqs > 1
        if max_query_len > 1:
            _prefill(query, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables, scale, window, 1 + both)
        if (max_query_len <= 1 or both) and ONE_LAUNCH_DECODE:
            if counters is None:
                counters = new_counters(num_seqs, kv_heads, query.device)
            paged_decode(
                query, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables, counters,
                scale=scale, max_seq_len=max_seq_len, window=window, new=new,
            )  # fmt: skip
        elif max_query_len <= 1 or both:
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
            head_dim, dim_pad, tiles.keys, window, MIN_SPLIT, MAX_SPLITS, REDUCE_WAVE, num_warps=2,
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


def _check_new(key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor) -> None:
    if value.shape != key.shape or k_cache.shape[2:] != key.shape[1:] or slot_mapping.shape != key.shape[:1]:
        raise ValueError(
            f"key {list(key.shape)}, value {list(value.shape)}, slot_mapping {list(slot_mapping.shape)} and "
            f"k_cache {list(k_cache.shape)} do not agree"
        )
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("the last dimension of key and value must have stride 1")
