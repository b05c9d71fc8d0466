"""Reference attention on torch's scaled_dot_product_attention, for every device.

Sequences that compute one token share one padded call; each longer chunk gets its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from omnistage.engines.ar.attention import (
    AttentionBackend,
    AttentionPlan,
    BatchLayout,
    KVCache,
    PagedContext,
    ScoreOptions,
)
from omnistage.engines.ar.attention.float8_cache import FLOAT8, read_slots, write_slots


@dataclass(slots=True)
class _Chunk:
    """One sequence with more than one query: rows [start, end) of the batch, its slots, its query positions."""

    start: int
    end: int
    slots: torch.Tensor
    length: int
    ends: torch.Tensor | None = None
    """int64 [queries]: past the last token that each sees where attention looks ahead; None: that is itself."""
    masks: dict[tuple[int | None, bool], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, ahead: bool) -> torch.Tensor | None:
        """bool [queries, length]; None when plain causal attention over equal lengths does."""
        queries, ahead = self.end - self.start, ahead and self.ends is not None
        if queries == self.length and (window is None or window >= self.length) and not ahead:
            return None
        if (window, ahead) not in self.masks:
            keys = torch.arange(self.length, device=self.slots.device)
            rows = keys[self.length - queries :, None]
            mask = keys[None, :] < self.ends[:, None] if ahead and self.ends is not None else keys[None, :] <= rows
            if window is not None:
                mask &= keys[None, :] > rows - window
            self.masks[window, ahead] = mask
        return self.masks[window, ahead]


@dataclass(slots=True)
class SdpaPlan(AttentionPlan):
    """`single_rows` are the batch rows of one-query sequences, None if all are; `single_slots` `[B, longest]` their
    padded slots."""

    single_rows: torch.Tensor | None
    all_single: bool
    single_slots: torch.Tensor | None
    lengths: torch.Tensor | None
    """int64 [B, 1], or None when all are equally long and no mask is needed."""
    longest: int
    chunks: list[_Chunk]
    first_slot: int | None = None
    """Of the only sequence, if its slots are adjacent: then nothing has to be gathered."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def single_mask(self, window: int | None) -> torch.Tensor | None:
        """bool [B, 1, 1, longest] over the padded slots."""
        if window is not None and window >= self.longest:
            window = None
        if self.single_slots is None or (self.lengths is None and window is None):
            return None
        if window not in self.masks:
            keys = torch.arange(self.longest, device=self.single_slots.device)[None, :]
            lengths = self.lengths if self.lengths is not None else torch.full_like(keys[:, :1], self.longest)
            mask = keys < lengths
            if window is not None:
                mask = mask & (keys >= lengths - window)
            self.masks[window] = mask[:, None, None, :]
        return self.masks[window]


def _ends(layout: BatchLayout, sequence: int, device: torch.device) -> torch.Tensor | None:
    ends = None if layout.ends is None else layout.ends[sequence]
    return None if ends is None else torch.from_numpy(ends).to(device)


def _weighted(
    how: ScoreOptions, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """`[B, kv_heads, rows, d]`, the rows of a KV group's heads one head after the other."""
    if how.softcap is None and how.sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scale)
    scores = torch.matmul(q, k.transpose(2, 3)).float() * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if how.sinks is not None:
        heads = how.sinks.float().view(k.shape[1], -1, 1)
        sinks = heads.expand(-1, -1, q.shape[2] // heads.shape[1]).reshape(1, k.shape[1], q.shape[2], 1)
        scores = torch.cat((scores, sinks.expand(len(q), -1, -1, -1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


class SdpaBackend(AttentionBackend):
    name = "sdpa"

    def plan(self, layout: BatchLayout, device: torch.device) -> SdpaPlan:
        queries, lengths = layout.query_lengths.tolist(), layout.sequence_lengths.tolist()
        starts = [0, *accumulate(queries)]
        single = [i for i, count in enumerate(queries) if count == 1]
        chunks = [
            _Chunk(
                starts[i],
                starts[i + 1],
                torch.from_numpy(layout.slots[i][: lengths[i]]).to(device),
                lengths[i],
                _ends(layout, i, device),
            )
            for i, count in enumerate(queries)
            if count > 1
        ]
        if not single:
            return SdpaPlan(None, False, None, None, 0, chunks)
        single_lengths = [lengths[i] for i in single]
        longest = max(single_lengths)
        # Padding repeats a slot of the same sequence: another's could hold NaN, and 0 x NaN is NaN.
        padded = np.empty((len(single), longest), dtype=np.int64)
        for row, i, length in zip(padded, single, single_lengths, strict=True):
            slots = layout.slots[i]
            row[:length] = slots[:length]
            if length < longest:
                row[length:] = slots[0]
        first = int(padded[0, 0])
        adjacent = len(single) == 1 and padded[0, -1] - first == longest - 1 and bool((np.diff(padded[0]) == 1).all())
        return SdpaPlan(
            torch.tensor([starts[i] for i in single], device=device) if chunks else None,
            not chunks,
            torch.from_numpy(padded).to(device),
            torch.tensor(single_lengths, device=device)[:, None] if min(single_lengths) < longest else None,
            longest,
            chunks,
            first if adjacent else None,
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        paged: PagedContext,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        plan = paged.plan
        if not isinstance(plan, SdpaPlan):
            raise TypeError(f"plan of another backend: {type(plan).__name__}")
        if plan.first_slot is not None and plan.all_single and cache[0].dtype != FLOAT8:
            return _attend_adjacent(query, key, value, cache, plan.first_slot, plan, scores)
        keys, values = cache
        write_slots(keys, paged.slot_mapping, key)
        write_slots(values, paged.slot_mapping, value)
        if plan.all_single:
            return _attend_single(query, keys, values, plan, scores)
        out = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
        if plan.single_rows is not None:
            out[plan.single_rows] = _attend_single(query[plan.single_rows], keys, values, plan, scores)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = _attend_chunk(query, keys, values, chunk, scores)
        return out


def _attend_single(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: SdpaPlan, how: ScoreOptions
) -> torch.Tensor:
    """One query a sequence: the heads of a KV group become the queries, so that nothing is repeated."""
    if plan.single_slots is None:
        raise TypeError("the plan has no one-query sequences")
    batch, heads, dim = query.shape
    flat = plan.single_slots.view(-1)
    kv_heads, value_dim = values.shape[2:]
    k = read_slots(keys, flat, query.dtype).view(batch, plan.longest, kv_heads, dim).transpose(1, 2)
    v = read_slots(values, flat, query.dtype).view(batch, plan.longest, kv_heads, value_dim).transpose(1, 2)
    q = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    mask = plan.single_mask(how.window) if plan.lengths is not None or how.window is not None else None
    return _weighted(how, q, k, v, mask).reshape(batch, heads, value_dim)


def _attend_adjacent(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KVCache,
    first: int,
    plan: SdpaPlan,
    how: ScoreOptions,
) -> torch.Tensor:
    """A single sequence with adjacent slots from `first` on: its keys and values are read in place.

    As few operators as possible: for a small model on the CPU they cost more than the attention.
    """
    length = plan.longest
    k, v = _adjacent_slots(cache[0], first, length), _adjacent_slots(cache[1], first, length)
    k.select(2, length - 1).copy_(key)
    v.select(2, length - 1).copy_(value)
    heads, kv_heads = query.shape[1], k.shape[1]
    q = query.reshape(1, kv_heads, heads // kv_heads, k.shape[3])
    mask = plan.single_mask(how.window) if how.window is not None else None
    return _weighted(how, q, k, v, mask).reshape(1, heads, v.shape[3])


def _adjacent_slots(pool: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """`[1, heads, length, d]` of `[blocks, size, heads, d]`, from slot `first` on."""
    _, _, heads, dim = pool.shape
    start = pool.storage_offset() + first * heads * dim
    return pool.as_strided((1, heads, length, dim), (0, dim, heads * dim, 1), start)


def _attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: _Chunk, how: ScoreOptions
) -> torch.Tensor:
    q = query[chunk.start : chunk.end].transpose(0, 1).unsqueeze(0)
    k = read_slots(keys, chunk.slots, query.dtype).transpose(0, 1).unsqueeze(0)
    v = read_slots(values, chunk.slots, query.dtype).transpose(0, 1).unsqueeze(0)
    mask = chunk.mask(how.window, how.ahead)
    if how.softcap is not None or how.sinks is not None:
        # The heads of a KV group one after the other, as the queries of one head.
        group = q.shape[1] // k.shape[1]
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril() if mask is None else mask
        rows = q.reshape(1, k.shape[1], group * q.shape[2], q.shape[3])
        out = _weighted(how, rows, k, v, visible.repeat(group, 1)).reshape(1, q.shape[1], q.shape[2], v.shape[3])
        return out[0].transpose(0, 1)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=how.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)
