"""Linear layers of a decode step: cuBLAS against a Triton kernel that reads weights once and splits long sums.

    python benchmarks/gpu/linears.py [--rows 1 8 64] [--out linears.json]

Needs a CUDA device. Shapes are those of Qwen2.5-Omni-7B, in bfloat16; each replay of a CUDA graph goes over so many
copies of the weights that they leave the L2 cache. `--all` writes every configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

SHAPES = {
    "qkv": (4608, 3584),
    "o": (3584, 3584),
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "head": (152064, 3584),
    "talker qkv": (2048 + 512, 896),
    "talker gate_up": (37888, 896),
    "talker down": (896, 18944),
}


BFLOAT16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


class Tiles(NamedTuple):
    outputs: int
    depth: int
    splits: int
    stages: int
    warps: int


@triton.jit  # type: ignore[untyped-decorator]
def linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, sums, counts, rows, outputs, depth,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_DEPTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """`out[rows, outputs] = x[rows, depth] @ weight[outputs, depth].T`, the sum in `SPLITS` pieces."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_ROWS)
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    step = tl.arange(0, BLOCK_DEPTH)
    per_split = tl.cdiv(tl.cdiv(depth, BLOCK_DEPTH), SPLITS) * BLOCK_DEPTH
    start = split * per_split
    w = weight + column[:, None].to(tl.int64) * depth + (start + step)[None, :]
    a = x + row[None, :] * depth + (start + step)[:, None]
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    inside = (row < rows)[None, :]
    for at in range(start, min(start + per_split, depth), BLOCK_DEPTH):
        left = depth - at
        values = tl.load(
            w, mask=(step < left)[None, :] & (column < outputs)[:, None], other=0.0, eviction_policy="evict_first"
        )
        inputs = tl.load(a, mask=inside & (step < left)[:, None], other=0.0)
        total = tl.dot(values, inputs, total)
        w += BLOCK_DEPTH
        a += BLOCK_DEPTH
    place = row[None, :] * outputs + column[:, None]
    valid = inside & (column < outputs)[:, None]
    if SPLITS == 1:
        tl.store(out + place, total.to(out.dtype.element_ty), mask=valid)
    else:
        tl.store(sums + split * rows * outputs + place, total, mask=valid)
        # The program that comes last adds all pieces, in their order.
        if tl.atomic_add(counts + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
            for piece in range(SPLITS):
                total += tl.load(sums + piece * rows * outputs + place, mask=valid, other=0.0, cache_modifier=".cg")
            tl.store(out + place, total.to(out.dtype.element_ty), mask=valid)
            tl.store(counts + tile, 0)


def block_rows(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def configurations(outputs: int, depth: int) -> list[Tiles]:
    found = []
    for block, step, stages, warps in (
        (64, 64, 6, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (64, 256, 3, 4), (64, 256, 3, 8),
        (128, 64, 4, 4), (128, 64, 6, 4), (128, 128, 3, 4), (128, 128, 4, 8), (128, 64, 5, 8),
    ):  # fmt: skip
        for splits in (1, 2, 3, 4, 8):
            programs = triton.cdiv(outputs, block) * splits
            if (splits == 1 or programs <= 132 * 4) and programs >= 56 and depth // splits >= 4 * step:
                found.append(Tiles(block, step, splits, stages, warps))
    return found


def launch(x: Any, weight: Any, out: Any, sums: Any, counts: Any, tiles: Tiles, rows: int) -> None:
    outputs, depth = weight.shape
    grid = (triton.cdiv(outputs, tiles.outputs), tiles.splits)
    linear_kernel[grid](
        x, weight, out, sums, counts, rows, outputs, depth, block_rows(rows), tiles.outputs, tiles.depth, tiles.splits,
        num_stages=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip


def graph_time(run: Callable[[int], None], copies: int) -> float:
    """Microseconds of a call, in a graph over all copies; the best of some replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            run(index)
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * sorted(times)[1] / copies


def compile_all(jobs: list[tuple[int, Tiles]]) -> None:
    """In a process of its own: the code goes to Triton's cache."""
    for rows, tiles in jobs:
        depth = 16 * tiles.depth * tiles.splits
        weight, x = torch.zeros(tiles.outputs, depth, **BFLOAT16), torch.zeros(rows, depth, **BFLOAT16)
        sums = torch.empty(tiles.splits, rows, tiles.outputs, device="cuda")
        counts = torch.zeros(1, dtype=torch.int32, device="cuda")
        with contextlib.suppress(OutOfResources):
            launch(x, weight, torch.empty(rows, tiles.outputs, **BFLOAT16), sums, counts, tiles, rows)
    torch.cuda.synchronize()


def measure(name: str, rows: int, every: bool) -> dict[str, Any]:
    outputs, depth = SHAPES[name]
    copies = max(2, min(12, int(400e6 // (2 * outputs * depth))))
    weights = [torch.randn(outputs, depth, **BFLOAT16) / depth**0.5 for _ in range(copies)]
    x, out = torch.randn(rows, depth, **BFLOAT16), torch.empty(rows, outputs, **BFLOAT16)
    sums, counts = torch.empty(8, rows, outputs, device="cuda"), torch.zeros(4096, dtype=torch.int32, device="cuda")
    reference = torch.nn.functional.linear(x.float(), weights[0].float())

    def library(index: int) -> None:
        torch.mm(x, weights[index].T, out=out)

    def ours(tiles: Tiles, index: int) -> None:
        launch(x, weights[index], out, sums, counts, tiles, rows)

    results = []
    for tiles in configurations(outputs, depth):
        with contextlib.suppress(OutOfResources):
            ours(tiles, 0)
            error = float((out.float() - reference).abs().max() / reference.abs().max())
            results.append((round(graph_time(partial(ours, tiles), copies), 2), *tiles, round(error, 5)))
    results.sort()
    floor = 2 * outputs * depth / 4.3e6
    return {"cublas": graph_time(library, copies), "triton": results if every else results[:4], "floor": floor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    jobs = {
        (block_rows(rows), tiles)
        for name in options.shapes
        for tiles in configurations(*SHAPES[name])
        for rows in options.rows
    }
    many, workers = sorted(jobs), min(14, os.cpu_count() or 1)
    print(f"{len(many)} kernels to compile", flush=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_all, [many[i::workers] for i in range(workers)])
    table: dict[str, Any] = {}
    for name in options.shapes:
        for rows in options.rows:
            table[f"{name} {rows}"] = figures = measure(name, rows, options.all)
            floor, cublas = figures["floor"], figures["cublas"]
            print(
                f"{name:14} x{rows:<4} floor {floor:6.1f} cublas {cublas:6.1f} triton {figures['triton'][0]}",
                flush=True,
            )
            if options.out is not None:
                options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
