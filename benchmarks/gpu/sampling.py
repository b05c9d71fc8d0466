"""Microseconds to sample a batch on the device: the kernels in a CUDA graph, and one launch after the other.

    python benchmarks/gpu/sampling.py

Needs a CUDA device, and the package installed or PYTHONPATH set to the repository. "graph" is the device's time for the
kernels that a captured decode step ends with; "launch" is the host's time for `Sampler.launch` where they are launched
one by one; "in graph" is the host's time for `Sampler.block` and `Sampler.launch` beside a captured step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling import triton_sample
from omnistage.engines.ar.sampling.sampler import Sampler
from omnistage.engines.streams import upload

DEVICE = torch.device("cuda")
VOCABULARIES = (152_064, 8_448)
ROWS = (1, 8, 64)
REPEATS = 50
KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9},
    "talker": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
        "min_tokens": 10_000,
        "max_tokens": 20_000,
    },
}


def device_time(replay: Callable[[], None]) -> float:
    """Median, with the L2 cache overwritten before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def host_time(step: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(vocab: int, rows: int, kind: str, scale: float) -> tuple[float, float, float]:
    sampler = Sampler(vocab, DEVICE, eos_token_ids=[0])
    keys = [str(i) for i in range(rows)]
    for i, key in enumerate(keys):
        sampler.add(key, SamplingParams.parse({"seed": i, **KINDS[kind]}), [1, 2, 3])
    logits = (torch.randn(rows, vocab, device=DEVICE) * scale).bfloat16()
    ids = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    numbers = sampler.block(keys)
    if numbers is None:
        raise RuntimeError("no sampling kernels; install triton and a C compiler")
    block = upload(numbers, DEVICE)
    triton_sample.sample(logits, block, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_sample.sample(logits, block, ids)

    def beside_a_graph() -> None:
        sampler.block(keys)
        sampler.launch(logits, keys, ids)

    return (
        device_time(graph.replay),
        host_time(lambda: sampler.launch(logits, keys)),
        host_time(beside_a_graph),
    )


@torch.inference_mode()
def main() -> None:
    print(f"{'vocabulary':>10} {'rows':>5} {'logits':>7} {'kind':>12} {'graph':>9} {'launch':>9} {'in graph':>9}  (us)")
    for vocab in VOCABULARIES:
        for rows in ROWS:
            for name, scale in (("flat", 0.5), ("peaked", 4.0)):
                for kind in KINDS:
                    graph, launch, beside = measure(vocab, rows, kind, scale)
                    print(f"{vocab:>10} {rows:>5} {name:>7} {kind:>12} {graph:>9.1f} {launch:>9.1f} {beside:>9.1f}")


if __name__ == "__main__":
    main()
