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

import os
from dataclasses import dataclass

import torch

from omnistage.engines.ar.attention.triton_decode import new_counters, paged_decode
from omnistage.engines.ar.attention.triton_kernels import (
    HAS_TRITON,
    LOG2_E,
    _prefill_kernel,
    _write_kv_kernel,
    has_small_shared_memory,
)
from omnistage.engines.triton_jit import has_c_compiler


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the prefill kernel is cut and launched: rows and keys of a tile, warps, software-pipelining stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_tiles(head_dim: int, dtype: torch.dtype, group: int, device: torch.device) -> Tiles:
    """Tiles for many queries a sequence: bound by the matrix units. Measured on an H200."""
    if dtype == torch.float32:
        return Tiles(max(32, _pow2(group)), 32 if head_dim <= 128 else 16, 4, 1)
    if head_dim <= 128:
        return Tiles(max(64, _pow2(group)), 64, 4, 2)
    if has_small_shared_memory(device):
        return Tiles(max(64, _pow2(group)), 32, 4, 1)
    return Tiles(max(128, _pow2(group)), 64, 8, 2)


def _pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def is_available() -> bool:
    """Whether these kernels can run here: Triton with a CUDA device, or with its interpreter switched on."""
    return HAS_TRITON and (
        os.environ.get("TRITON_INTERPRET") == "1" or (torch.cuda.is_available() and has_c_compiler())
    )


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

    `new`: this step's key, value and slot mapping, stored as by `write_kv` before; rows of padding and of no sequence
    must have slot -1. None: they are in the caches already.
    `counters`: int32, at least num_seqs * num_kv_heads zeros, which are zeros again afterwards; calls that may run at
    the same time must not share them. None: they are allocated.
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
    if counters is not None and counters.numel() < num_seqs * kv_heads:
        raise ValueError(
            f"{counters.numel()} counters for {num_seqs} sequences of {kv_heads} KV heads; give one for each"
        )
    if new is not None:
        _check_new(*new, k_cache)
        if new[0].shape[0] != tokens:
            raise ValueError(f"key {list(new[0].shape)} and query {list(query.shape)} do not agree")
    if tokens == 0 or num_seqs == 0:
        return
    if new is not None and max_query_len > 1:
        write_kv(new[0], new[1], k_cache, v_cache, new[2])
        new = None
    window = sliding_window or 0
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # not annotated by torch
        # A lone sequence needs one launch only; under a loose bound its single query is a prefill of one.
        both = max_query_len > 1 and num_seqs > 1
        if max_query_len > 1:
            _prefill(query, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables, scale, window, 1 + both)
        if max_query_len <= 1 or both:
            if counters is None:
                counters = new_counters(num_seqs, kv_heads, query.device)
            paged_decode(
                query, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables, counters,
                scale=scale, max_seq_len=max_seq_len, window=window, new=new,
            )  # fmt: skip


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
