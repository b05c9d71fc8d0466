"""Times the Triton paged attention against torch's scaled_dot_product_attention on contiguous K and V.

    python benchmarks/gpu/paged_attention.py

Needs a CUDA device, and the package installed or PYTHONPATH set to the repository. Both sides are replayed from a
CUDA graph, as the engine runs decode, so that launch overhead on the host is in neither number. GB/s counts each key
and value read once; TFLOP/s counts the causal half only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import triton.testing

from omnistage.engines.ar.attention.triton_paged import paged_attention

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 28, 4, 128, 16
GRAPH_BOUND = 32768  # max_seq_len as a captured graph sees it, far above the real lengths
L2_BYTES = 256 * 2**20  # several times any L2: rotating over this much memory keeps the cache cold


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one call, over a graph that runs each of `calls` (same work, different memory) once."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = [triton.testing.do_bench(graph.replay, return_mode="median") for _ in range(3)]
    return float(statistics.median(times)) * 1e3 / len(calls)


def layer_inputs(seqs: int, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V caches of one layer and the block tables, with the blocks in random order."""
    pages = -(-context // BLOCK_SIZE)
    shape = (seqs * pages, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    tables = torch.randperm(seqs * pages, device="cuda").to(torch.int32).view(seqs, pages)
    # A graph's tables are as wide as its bound.
    return k_cache, v_cache, torch.nn.functional.pad(tables, (0, max(0, GRAPH_BOUND // BLOCK_SIZE - pages)))


def paged_call(seqs: int, q_len: int, context: int, bound: int) -> Callable[[], object]:
    k_cache, v_cache, tables = layer_inputs(seqs, context)
    query = torch.randn((seqs * q_len, Q_HEADS, HEAD_DIM), dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    starts = torch.arange(seqs + 1, dtype=torch.int32, device="cuda") * q_len
    lengths = torch.full((seqs,), context, dtype=torch.int32, device="cuda")
    return lambda: paged_attention(
        query, k_cache, v_cache, out, starts, lengths, tables, scale=0.1, max_query_len=q_len, max_seq_len=bound
    )


def sdpa_call(seqs: int, q_len: int, context: int) -> Callable[[], object]:
    query = torch.randn((seqs, Q_HEADS, q_len, HEAD_DIM), dtype=torch.bfloat16, device="cuda")
    shape = (seqs, KV_HEADS, context, HEAD_DIM)
    key, value = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=q_len > 1, enable_gqa=True
    )


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, {Q_HEADS}/{KV_HEADS} heads of {HEAD_DIM}, bfloat16")
    print("decode   seqs context | tight bound us   GB/s | graph bound us   GB/s | sdpa us   GB/s")
    for seqs in (1, 8, 64):
        for context in (512, 4096):
            size = 2 * seqs * context * KV_HEADS * HEAD_DIM * 2
            copies = max(4, min(64, -(-L2_BYTES // size)))
            cells = []
            for make in (
                partial(paged_call, seqs, 1, context, context),
                partial(paged_call, seqs, 1, context, GRAPH_BOUND),
                partial(sdpa_call, seqs, 1, context),
            ):
                us = microseconds([make() for _ in range(copies)])
                cells.append(f"{us:10.1f} {size / us / 1e3:8.0f}")
            print(f"        {seqs:5d} {context:7d} | " + " | ".join(cells))
    print("prefill  tokens | paged us  TFLOP/s | sdpa us  TFLOP/s")
    for tokens in (512, 2048, 8192):
        flops = 2 * tokens * tokens * Q_HEADS * HEAD_DIM
        cells = []
        for call in (paged_call(1, tokens, tokens, tokens), sdpa_call(1, tokens, tokens)):
            us = microseconds([call])
            cells.append(f"{us:10.1f} {flops / us / 1e6:8.0f}")
        print(f"         {tokens:6d} | " + " | ".join(cells))


if __name__ == "__main__":
    main()
