"""Paged attention on our Triton kernels. Its plan is static tensors, so decode can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnistage.core.errors import StageError
from omnistage.engines.ar.attention import (
    AttentionBackend,
    AttentionPlan,
    BatchLayout,
    GraphPlan,
    KVCache,
    PagedContext,
    PrefillGraphPlan,
    ScoreOptions,
    current,
)
from omnistage.engines.ar.attention.sdpa import SdpaBackend, SdpaPlan
from omnistage.engines.streams import upload


def triton_available() -> bool:
    try:
        from omnistage.engines.ar.attention import triton_paged
    except ImportError:
        return False
    return triton_paged.is_available()


@dataclass(slots=True)
class TritonPlan(AttentionPlan):
    """int32 tensors; see `triton_paged.paged_attention`. The two bounds are host numbers, fixed in a graph."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_seq_len: int
    _counters: torch.Tensor | None = None

    def counters(self, kv_heads: int) -> torch.Tensor:
        """Zeros for `paged_attention`; the same ones for every layer, and for every replay of a graph."""
        count = self.seq_lens.shape[0] * kv_heads
        if self._counters is None or self._counters.shape[0] < count:
            self._counters = torch.zeros(count, dtype=torch.int32, device=self.seq_lens.device)
        return self._counters


class TritonGraphPlan(GraphPlan):  # pragma: no cover  (needs CUDA; tests/gpu)
    """Lengths and block tables in one buffer on the device."""

    def __init__(self, size: int, length: int, block_size: int, device: torch.device) -> None:
        self._size, self._width = size, -(-length // block_size)
        self._device = torch.zeros(size * (1 + self._width), dtype=torch.int32, device=device)
        self.plan = TritonPlan(
            torch.arange(size + 1, dtype=torch.int32, device=device),
            self._device[:size],
            self._device[size:].view(size, self._width),
            1,
            self._width * block_size,
        )

    def fill(self, lengths: Sequence[int], block_tables: Sequence[np.ndarray]) -> None:
        # Fresh pinned memory: the last replay's copy may still be waiting for its turn on the device.
        pinned = torch.zeros(self._device.shape, dtype=torch.int32, pin_memory=True)
        host, size, width = pinned.numpy(), self._size, self._width
        host[: len(lengths)] = lengths
        for row, table in enumerate(block_tables):
            entries = table[:width]
            host[size + row * width : size + row * width + len(entries)] = entries
        self._device.copy_(pinned, non_blocking=True)


class TritonPrefillGraphPlan(PrefillGraphPlan):
    """Where queries start, lengths and block tables in one buffer on the device."""

    def __init__(self, tokens: int, sequences: int, length: int, block_size: int, device: torch.device) -> None:
        self._count, self._width = sequences, -(-length // block_size)
        self._device = torch.zeros(2 * sequences + 1 + sequences * self._width, dtype=torch.int32, device=device)
        starts, rest = self._device[: sequences + 1], self._device[sequences + 1 :]
        tables = rest[sequences:].view(sequences, self._width)
        self.plan = TritonPlan(starts, rest[:sequences], tables, tokens, self._width * block_size)

    def fill_layout(self, layout: BatchLayout) -> None:
        # Fresh pinned memory: the last replay's copy may still be waiting for its turn on the device.
        pinned = torch.zeros(self._device.shape, dtype=torch.int32, pin_memory=self._device.is_cuda)
        host, count, total = pinned.numpy(), len(layout.query_lengths), int(layout.query_lengths.sum())
        host[1 : count + 1] = np.cumsum(layout.query_lengths)
        host[count + 1 : self._count + 1] = total  # sequences without queries
        host[self._count + 1 : self._count + 1 + count] = layout.sequence_lengths
        tables = host[2 * self._count + 1 :].reshape(self._count, self._width)
        for row, table in enumerate(layout.block_tables):
            entries = table[: self._width]
            tables[row, : len(entries)] = entries
        self._device.copy_(pinned, non_blocking=True)


class TritonBackend(AttentionBackend):
    name = "triton"
    supports_graphs = True

    def __init__(self) -> None:
        self._reference = SdpaBackend()

    def plan(self, layout: BatchLayout, device: torch.device) -> AttentionPlan:
        if layout.ends is not None:  # the kernels look at no later token
            return self._reference.plan(layout, device)
        queries, lengths = layout.query_lengths, layout.sequence_lengths
        count = len(queries)
        width = max(len(table) for table in layout.block_tables)
        # One host-to-device copy for all the metadata.
        packed = np.zeros(2 * count + 1 + count * width, dtype=np.int32)
        packed[1 : count + 1] = np.cumsum(queries)
        packed[count + 1 : 2 * count + 1] = lengths
        tables = packed[2 * count + 1 :].reshape(count, width)
        for row, table in enumerate(layout.block_tables):
            tables[row, : len(table)] = table
        on_device = upload(packed, device)
        return TritonPlan(
            on_device[: count + 1],
            on_device[count + 1 : 2 * count + 1],
            on_device[2 * count + 1 :].view(count, width),
            int(queries.max()),
            int(lengths.max()),
        )

    def graph_plan(self, size: int, length: int, block_size: int, device: torch.device) -> TritonGraphPlan:
        return TritonGraphPlan(size, length, block_size, device)

    def prefill_graph_plan(
        self, tokens: int, sequences: int, length: int, block_size: int, device: torch.device
    ) -> TritonPrefillGraphPlan:
        return TritonPrefillGraphPlan(tokens, sequences, length, block_size, device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        paged: PagedContext,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        del paged  # the operator takes it from `current`
        if scores.softcap is not None or scores.sinks is not None:
            raise StageError("the triton attention backend has no soft caps and no sinks; set attention: sdpa")
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _attend_op(query, key, value, cache[0], cache[1], out, scores.scale, scores.window or 0, scores.ahead)
        return out


@torch.library.custom_op("omnistage::paged_attention", mutates_args=("k_cache", "v_cache", "out"))
def _attend_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    ahead: bool,
) -> None:
    """One opaque operator, so that `torch.compile` of a layer does not break or look inside."""
    paged: PagedContext = current.paged
    plan = paged.plan
    if isinstance(plan, SdpaPlan):
        how = ScoreOptions(scale, window or None, ahead=ahead)
        out.copy_(SdpaBackend().attend(query, key, value, (k_cache, v_cache), paged, how))
        return
    if not isinstance(plan, TritonPlan):
        raise TypeError(f"plan of another backend: {type(plan).__name__}")
    from omnistage.engines.ar.attention import triton_paged

    triton_paged.paged_attention(
        query,
        k_cache,
        v_cache,
        out,
        plan.query_start_loc,
        plan.seq_lens,
        plan.block_tables,
        scale=scale,
        max_query_len=plan.max_query_len,
        max_seq_len=plan.max_seq_len,
        sliding_window=window or None,
        new=(key, value, paged.slot_mapping),
        counters=plan.counters(k_cache.shape[2]),
    )


@_attend_op.register_fake
def _attend_fake(*args: object) -> None:
    return None
