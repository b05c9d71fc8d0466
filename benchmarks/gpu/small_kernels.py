"""The kernels of a decode step's experts and of code predictors on a GPU, by configuration, beside `transformers`' way.

    python benchmarks/gpu/small_kernels.py [--quick]

Qwen3-Omni-30B-A3B's shapes, random weights in bfloat16, enough copies of them that none is in the L2 cache, in a CUDA
graph. Microseconds a launch (two for experts), median of 10 replays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from omnistage.engines.ar import experts, triton_depth, triton_experts
from omnistage.hf import transformers

CHAIN = 12
"""Launches in a graph, each with weights of its own."""
CONFIGS = (
    *((16, 128, 4, 4), (16, 256, 4, 3), (16, 256, 4, 4), (32, 64, 4, 5), (32, 128, 4, 3), (32, 128, 4, 4)),
    *((32, 128, 8, 4), (32, 256, 4, 3), (32, 256, 8, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 4)),
)
DEEP = (
    *((16, 512, 4, 2), (16, 512, 4, 3), (16, 1024, 4, 1), (16, 1024, 4, 2), (16, 1024, 8, 2), (32, 512, 4, 2)),
    *((32, 512, 8, 3), (32, 1024, 4, 1), (32, 1024, 8, 1), (32, 1024, 8, 2), (16, 256, 4, 4), (32, 256, 4, 4)),
)
"""Columns of a program, depth of a tile, warps, stages."""

EVERYTHING: dict[str, list[float]] = {}
"""All measurements of each configuration, in the order of the cases."""


def timed(run: Callable[[int], Any]) -> float:
    """Microseconds of `run(i)` in a graph of `CHAIN`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(CHAIN):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CHAIN):
            run(i)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CHAIN)
    return statistics.median(times)


def best(
    measure: Callable[[], float], owner: Any, name: str, configs: Sequence[tuple[int, ...]]
) -> tuple[float, tuple[int, ...], float]:
    """The fastest configuration of `owner.name`, and the one that is there."""
    there = getattr(owner, name)
    default, found = measure(), (float("inf"), there)
    for config in configs:
        setattr(owner, name, config)
        try:
            microseconds = measure()
            found = min(found, (microseconds, config))
            EVERYTHING.setdefault(f"{name} {config}", []).append(microseconds)
        except Exception as error:  # a boundary: what does not fit the device is left out
            print(f"  {config}: {type(error).__name__}")
    setattr(owner, name, there)
    return found[0], found[1], default


def expert_rows(name: str, width: int, inner: int, top_k: int, quick: bool) -> None:
    config = transformers.Qwen3MoeConfig(hidden_size=width, moe_intermediate_size=inner, num_experts=128)
    config._experts_implementation = "grouped_mm"
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    with torch.device("cuda"):
        modules = [Qwen3MoeExperts(config).to(torch.bfloat16).requires_grad_(False) for _ in range(CHAIN)]
    for module in modules:
        for weight in module.parameters():
            weight.normal_(0, 0.02)
    for tokens in (1, 8, 64):
        hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        index = torch.stack([torch.randperm(128, device="cuda")[:top_k] for _ in range(tokens)])
        weights = torch.rand(tokens, top_k, device="cuda", dtype=torch.bfloat16)
        stock = timed(lambda i: modules[i](hidden, index, weights))  # noqa: B023
        read = len(index.unique()) * 3 * width * inner * 2 / 4.3e6

        def ours() -> float:
            return timed(lambda i: experts._by_kernels(modules[i], hidden, index, weights))  # noqa: B023

        print(f"{name}, {tokens} tokens: bound {read:.1f}, grouped_mm {stock:.1f}", flush=True)
        for part in ("GATE_UP", "DOWN"):
            least, chosen, default = best(ours, triton_experts, part, () if quick else CONFIGS)
            print(f"  with the sum {default:.1f}; best {part} {chosen}: {least:.1f}", flush=True)


def linear_rows(quick: bool) -> None:
    shapes = {"qkv": (4096, 1024), "out": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
    shapes |= {"head": (2048, 1024)}
    for (name, (columns, depth)), rows in itertools.product(shapes.items(), (1, 8, 64)):
        copies = [torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) for _ in range(CHAIN)]
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        norm = (torch.ones(depth, device="cuda", dtype=torch.bfloat16), 1e-6)
        normed, gated = name in ("qkv", "gate_up", "head"), name == "gate_up"

        def ours() -> float:
            return timed(
                lambda i: triton_depth.linear(x, copies[i], norm=norm if normed else None, gated=gated)  # noqa: B023
            )

        cublas = timed(lambda i: torch.nn.functional.linear(x, copies[i]))  # noqa: B023
        width = columns // 2 if gated else columns
        part = "NARROW" if width <= triton_depth._NARROW else "WIDE"
        least, chosen, default = best(ours, triton_depth, part, () if quick else DEEP)
        bound = columns * depth * 2 / 4.3e6
        print(
            f"{name}, {rows} rows: bound {bound:.1f}, cuBLAS alone {cublas:.1f}, ours {default:.1f}; "
            f"best {part} {chosen}: {least:.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the configurations that are there")
    parser.add_argument("--only", choices=("experts", "linears"), default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.only != "linears":
        expert_rows("talker", 1024, 384, 6, options.quick)
        expert_rows("thinker", 2048, 768, 8, options.quick)
    if options.only != "experts":
        linear_rows(options.quick)
    if options.out is not None:
        options.out.write_text(json.dumps(EVERYTHING, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
