"""Tries tiles and splits of the paged decode kernel and prints the fastest.

python benchmarks/gpu/tune_decode.py
"""

from __future__ import annotations

import itertools
import math

import torch
from paged_attention import microseconds, paged_call

from omnistage.engines.ar.attention import triton_paged
from omnistage.engines.ar.attention.triton_paged import Tiles

CASES = ((1, 256), (1, 2048), (8, 512), (64, 192), (64, 512), (64, 2048), (256, 384))


def main() -> None:
    found: dict[tuple[int, ...], dict[tuple[int, int], float]] = {}
    chosen = triton_paged.decode_tiles(128, torch.bfloat16, 7, torch.device("cuda"))
    variants = [(chosen.keys, chosen.warps, chosen.stages, triton_paged.MIN_SPLIT)]
    variants += itertools.product((32, 64, 128), (4,), (1, 2, 3), (128, 256, 512))
    calls = {
        case: [paged_call(case[0], 1, case[1], 1024 if case[1] <= 1024 else 4096) for _ in range(6)] for case in CASES
    }
    for keys, warps, stages, split in variants:
        tiles = Tiles(16, keys, warps, stages)
        triton_paged.decode_tiles = lambda *_, tiles=tiles: tiles  # type: ignore[assignment,misc]
        triton_paged.MIN_SPLIT = split
        try:
            times = {case: microseconds(calls[case]) for case in CASES}
        except Exception as error:  # a variant that does not fit the device is left out
            print(f"{keys} {warps} {stages} {split}: {type(error).__name__}", flush=True)
            continue
        found[keys, warps, stages, split] = times
        row = "  ".join(f"{times[case]:7.1f}" for case in CASES)
        print(f"keys {keys:3} warps {warps} stages {stages} split {split:3}: {row}", flush=True)
    best = {case: min(times[case] for times in found.values()) for case in CASES}
    ranked = sorted(found, key=lambda v: sum(math.log(found[v][case] / best[case]) for case in CASES))
    print("cases (sequences, context):", CASES)
    for variant in ranked[:5]:
        print(variant, {case: round(found[variant][case], 1) for case in CASES})


if __name__ == "__main__":
    main()
