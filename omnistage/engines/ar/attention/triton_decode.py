"""Paged attention of one query a sequence, in one launch: writes this step's K and V, attends, sums the splits.

Shapes and conventions are those of `triton_paged.py`. Short contexts are bound by latency, not by bandwidth, so:

- a sequence is cut only where it is long (`DecodeConfig.min_split`), and the keys of a split are loaded in tiles, of
  which several are in flight; the block table's entries are loaded a tile ahead of the keys;
- this step's own key and value come from the projection, not from the cache: they start the softmax, and the program
  that uses them writes them into the cache;
- the program that finishes a sequence's last split sums them, in the order of the splits, without a second launch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from omnistage.engines.ar.attention.triton_kernels import HAS_TRITON, LOG2_E, _jit, has_small_shared_memory

if HAS_TRITON:
    import triton.language as tl

MAX_SPLITS = 32  # bounds the workspace; longer sequences get longer splits
# Enough programs to fill any GPU; past it a program takes several splits rather than adding idle ones to the grid.
MAX_PROGRAMS = 4096


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How sequences are cut and the kernel is launched.

    It depends on the model and the device alone: a sequence must be cut, and its pieces summed, the same way whatever
    shares its batch.
    """

    keys: int
    """Keys of a tile."""
    warps: int
    stages: int
    min_split: int
    """Keys of a split, while these give at most `MAX_SPLITS`; a multiple of `keys`."""


@functools.cache
def decode_config(head_dim: int, dtype: torch.dtype, device: torch.device) -> DecodeConfig:
    """The last was chosen on an H200 with benchmarks/gpu/decode_attention.py; the others are not measured."""
    if dtype == torch.float32:
        return DecodeConfig(32, 8, 2, 256) if head_dim <= 128 else DecodeConfig(16, 4, 2, 256)
    small = has_small_shared_memory(device)
    if head_dim > 128:
        return DecodeConfig(32 if small else 64, 4, 2, 256)
    return DecodeConfig(64, 4, 2 if small else 3, 512)


def split_count(max_seq_len: int, window: int, config: DecodeConfig) -> int:
    """Splits that the workspace has room for, for sequences of at most `max_seq_len` keys (`window` 0: no window)."""
    visible = min(max_seq_len, window) if window else max_seq_len
    return max(1, min(MAX_SPLITS, -(-(visible - 1) // config.min_split)))


def new_counters(num_seqs: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """Zeros for `paged_decode`, which leaves zeros. One launch at a time may use them."""
    return torch.zeros(num_seqs * kv_heads, dtype=torch.int32, device=device)


def paged_decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    counters: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    window: int = 0,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of the sequences that have one query; the others are skipped.

    `new`: this step's key and value `[T, kv_heads, head_dim]` and their `slot_mapping` `[T]`, which are written into
    the caches here; None: the caches have them already. The result is the same bit for bit.
    """
    num_q_heads, head_dim = query.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    num_seqs = seq_lens.shape[0]
    group = num_q_heads // kv_heads
    config = config or decode_config(head_dim, query.dtype, query.device)
    num_splits = split_count(max_seq_len, window, config)
    programs = max(1, min(num_splits, MAX_PROGRAMS // (num_seqs * kv_heads)))
    cells = (num_seqs * kv_heads, num_splits, group) if num_splits > 1 else (0,)
    partial_acc = torch.empty((*cells, head_dim), dtype=torch.float32, device=query.device)
    partial_ml = torch.empty((2, *cells), dtype=torch.float32, device=query.device)
    key, value, slots = new if new is not None else (k_cache[0], v_cache[0], seq_lens)
    group_pad = 1 << (group - 1).bit_length()
    _paged_decode_kernel[(num_seqs, kv_heads, programs)](
        query, key, value, k_cache, v_cache, out, partial_acc, partial_ml[0], partial_ml[1], counters,
        query_start_loc, seq_lens, block_tables, slots, num_splits, block_tables.shape[1], scale * LOG2_E,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        out.stride(0), out.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        GROUP=group, GROUP_PAD=group_pad, ROWS=max(16, group_pad), HEAD_DIM=head_dim,
        DIM_PAD=max(16, 1 << (head_dim - 1).bit_length()), BLOCK_SIZE=block_size, TILE_N=config.keys, WINDOW=window,
        MIN_SPLIT=config.min_split, MAX_SPLITS=MAX_SPLITS, WRITE=new is not None, LOOP=programs < num_splits,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any.
# fmt: off


@_jit
def _split_state(  # type: ignore[no-untyped-def]  # kernel
    q,  # [ROWS, DIM_PAD]
    k_new, v_new,  # [DIM_PAD], zero without one
    new_keys,  # 1 or 0
    blocks,  # [TILE_N] the table's entries of the first tile
    start, end, table_ptr, k_ptr, v_ptr, stride_block, stride_slot, qk_scale,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Keys [start, end) and the new one: acc [ROWS, DIM_PAD], not normalised, and maximum (log2) and sum [ROWS]."""
    dim = tl.arange(0, DIM_PAD)
    column = tl.arange(0, TILE_N)
    score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * qk_scale
    m = tl.where(new_keys > 0, score, float("-inf"))
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32) + v_new.to(tl.float32)[None, :]
    # Summed over the columns at the end only: a sum in every tile would be one more exchange between the warps.
    norms = tl.zeros([ROWS, TILE_N], tl.float32) + tl.where(column < new_keys, 1.0, 0.0)[None, :]
    for tile in range(start, end, TILE_N):
        pos = tile + column
        offset = (blocks.to(tl.int64) * stride_block + (pos % BLOCK_SIZE) * stride_slot)[:, None] + dim[None, :]
        # Masked to zero and not only to weight 0: a slot never written may hold NaN.
        mask = (pos < end)[:, None]
        if HEAD_DIM < DIM_PAD:
            mask = mask & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offset, mask=mask, other=0.0)
        v = tl.load(v_ptr + offset, mask=mask, other=0.0)
        blocks = tl.load(table_ptr + (pos + TILE_N) // BLOCK_SIZE, mask=pos + TILE_N < end, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
        scores = tl.where((pos < end)[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))  # finite: a tile has at least one key
        weights = tl.exp2(scores - m_new[:, None])
        decay = tl.exp2(m - m_new)
        norms = norms * decay[:, None] + weights
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        m = m_new
    return acc, m, tl.sum(norms, 1)


@_jit
def _sum_splits(  # type: ignore[no-untyped-def]  # kernel
    acc_ptr, m_ptr, norm_ptr,  # of one sequence and KV head: [num_splits, GROUP, HEAD_DIM], [num_splits, GROUP] twice
    out_ptr, stride_out_h, parts,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):
    """The result of `parts` splits. Other programs wrote them, so they are read past L1, which may hold older ones."""
    member = tl.arange(0, GROUP_PAD)
    row = tl.minimum(member, GROUP - 1)
    dim = tl.arange(0, DIM_PAD)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for first in range(0, parts, 4):
        for i in tl.static_range(4):  # unrolled, so that the loads of four splits are in flight together
            present = tl.where(first + i < parts, 1, 0)
            cell = (first + i) * GROUP + row
            m = tl.load(m_ptr + cell, mask=member < GROUP_PAD * present, other=float("-inf"), cache_modifier=".cg")
            norm = tl.load(norm_ptr + cell, mask=member < GROUP_PAD * present, other=0.0, cache_modifier=".cg")
            acc_ptrs = acc_ptr + cell[:, None] * HEAD_DIM + dim[None, :]
            acc = tl.load(acc_ptrs, mask=(dim < HEAD_DIM * present)[None, :], other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, m)
            decay = tl.exp2(top - new_top)
            scale = tl.exp2(m - new_top)
            total = total * decay + norm * scale
            result = result * decay[:, None] + acc * scale[:, None]
            top = new_top
    out_ptrs = out_ptr + member[:, None] * stride_out_h + dim[None, :]
    result = (result / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, result, mask=(member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :])


@_jit
def _attend_split(  # type: ignore[no-untyped-def]  # kernel
    split, parts, first, split_len, past, seq_len, row, kv_head, cells, blocks, guess,
    query_ptr, key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, out_ptr, partial_acc_ptr, partial_m_ptr, partial_norm_ptr,
    table_ptr, slot_mapping_ptr, qk_scale,
    stride_query_t, stride_query_h, stride_key_t, stride_key_h, stride_value_t, stride_value_h,
    stride_out_t, stride_out_h, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr, WRITE: tl.constexpr,
):
    """One split into the workspace, or into the output where it is the only one."""
    member = tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_PAD)
    rows_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_ptrs = query_ptr + row * stride_query_t + head[:, None] * stride_query_h + dim[None, :]
    q = tl.load(q_ptrs, mask=rows_mask, other=0.0)
    start = first + split * split_len
    # The last split takes what is left, so that a bound set too low costs time and not a wrong result.
    end = tl.where(split == parts - 1, past, start + split_len)
    if start != guess:
        pos = start + tl.arange(0, TILE_N)
        blocks = tl.load(table_ptr + pos // BLOCK_SIZE, mask=pos < end, other=0)

    new_keys = tl.where(split == parts - 1, tl.minimum(seq_len, 1), 0)
    new_mask = dim < HEAD_DIM * new_keys
    k_cache_ptr += kv_head * stride_head
    v_cache_ptr += kv_head * stride_head
    if WRITE:
        k_new = tl.load(key_ptr + row * stride_key_t + kv_head * stride_key_h + dim, mask=new_mask, other=0.0)
        v_new = tl.load(value_ptr + row * stride_value_t + kv_head * stride_value_h + dim, mask=new_mask, other=0.0)
        slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
        new_offset = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot + dim
        written = dim < tl.where(slot >= 0, HEAD_DIM * new_keys, 0)
        tl.store(k_cache_ptr + new_offset, k_new, mask=written)
        tl.store(v_cache_ptr + new_offset, v_new, mask=written)
    else:
        block = tl.load(table_ptr + past // BLOCK_SIZE, mask=new_keys > 0, other=0).to(tl.int64)
        new_offset = block * stride_block + (past % BLOCK_SIZE) * stride_slot + dim
        k_new = tl.load(k_cache_ptr + new_offset, mask=new_mask, other=0.0)
        v_new = tl.load(v_cache_ptr + new_offset, mask=new_mask, other=0.0)
    acc, m, norm = _split_state(
        q, k_new, v_new, new_keys, blocks, start, end, table_ptr, k_cache_ptr, v_cache_ptr,
        stride_block, stride_slot, qk_scale, ROWS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_N,
    )
    if parts == 1:
        result = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
        out_ptrs = out_ptr + row * stride_out_t + head[:, None] * stride_out_h + dim[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=rows_mask)
    else:
        cell = cells + split * GROUP + member
        tl.store(partial_acc_ptr + cell[:, None] * HEAD_DIM + dim[None, :], acc, mask=rows_mask)
        tl.store(partial_m_ptr + cell, m, mask=member < GROUP)
        tl.store(partial_norm_ptr + cell, norm, mask=member < GROUP)


@_jit
def _paged_decode_kernel(  # type: ignore[no-untyped-def]  # kernel
    query_ptr, key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, out_ptr,
    partial_acc_ptr,  # [S * kv_heads, num_splits, GROUP, HEAD_DIM] float32
    partial_m_ptr, partial_norm_ptr,  # [S * kv_heads, num_splits, GROUP] float32
    counters_ptr,  # [S * kv_heads] splits that have been written; zero between launches
    query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, slot_mapping_ptr, num_splits, table_width, qk_scale,
    stride_query_t, stride_query_h, stride_key_t, stride_key_h, stride_value_t, stride_value_h,
    stride_out_t, stride_out_h, stride_block, stride_slot, stride_head, stride_table,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, WRITE: tl.constexpr, LOOP: tl.constexpr,
):
    """Program (s, kv_head, p): splits p, p + P, ... of sequence s for all query heads of one KV head."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    program = tl.program_id(2)
    table_ptr = block_tables_ptr + seq * stride_table
    row = tl.load(query_start_loc_ptr + seq).to(tl.int64)
    next_row = tl.load(query_start_loc_ptr + seq + 1)
    seq_len = tl.load(seq_lens_ptr + seq)
    # Loaded before the length is known, from where the split begins unless there is a window or the sequence is long.
    guess = program * MIN_SPLIT
    entry = (guess + tl.arange(0, TILE_N)) // BLOCK_SIZE
    blocks = tl.load(table_ptr + entry, mask=entry < table_width, other=0)
    if next_row - row != 1:
        return
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    # Splits are cut from the keys of earlier steps; this step's own belongs to the last.
    past = tl.maximum(seq_len - 1, 0)
    split_len = tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(past - first, MAX_SPLITS), TILE_N) * TILE_N)
    parts = tl.minimum(tl.maximum(tl.cdiv(past - first, split_len), 1), num_splits)
    if program >= parts:
        return
    pair = seq * tl.num_programs(1) + kv_head
    cells = pair * num_splits * GROUP
    # A loop around the loop over tiles doubles the registers, so there is one only where it is needed.
    if LOOP:
        for split in range(program, parts, tl.num_programs(2)):
            _attend_split(
                split, parts, first, split_len, past, seq_len, row, kv_head, cells, blocks, guess,
                query_ptr, key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, out_ptr, partial_acc_ptr, partial_m_ptr,
                partial_norm_ptr, table_ptr, slot_mapping_ptr, qk_scale, stride_query_t, stride_query_h, stride_key_t,
                stride_key_h, stride_value_t, stride_value_h, stride_out_t, stride_out_h, stride_block, stride_slot,
                stride_head, GROUP, ROWS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_N, WRITE,
            )
    else:
        _attend_split(
            program, parts, first, split_len, past, seq_len, row, kv_head, cells, blocks, guess,
            query_ptr, key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, out_ptr, partial_acc_ptr, partial_m_ptr,
            partial_norm_ptr, table_ptr, slot_mapping_ptr, qk_scale, stride_query_t, stride_query_h, stride_key_t,
            stride_key_h, stride_value_t, stride_value_h, stride_out_t, stride_out_h, stride_block, stride_slot,
            stride_head, GROUP, ROWS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_N, WRITE,
        )
    if parts > 1:
        # Whoever adds the last split sees all of them: the barrier orders this program's stores before the release,
        # the release (one thread's, for the GPU) before the last one's acquire, and that before the loads below.
        tl.debug_barrier()
        mine = tl.cdiv(parts - program, tl.num_programs(2))
        if tl.atomic_add(counters_ptr + pair, mine, sem="acq_rel", scope="gpu") + mine == parts:
            tl.debug_barrier()
            tl.store(counters_ptr + pair, 0)
            _sum_splits(
                partial_acc_ptr + cells * HEAD_DIM, partial_m_ptr + cells, partial_norm_ptr + cells,
                out_ptr + row * stride_out_t + kv_head * GROUP * stride_out_h, stride_out_h, parts,
                GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD,
            )


# fmt: on
