"""Linear layers of few rows on the CPU: a plain layer against ours, which takes the product the other way round.

    python benchmarks/few_rows.py [--threads 2] [--rounds 12]

All linear layers of a small language model (SmolLM2-135M: 30 layers, hidden size 576), so that the weights come from
memory as they do in a model; both sides in turn, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from omnistage.engines.ar.cpu_kernels import WeightFirstLinear, apply_cpu_kernels

_SHAPES = ((576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576))
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63, 64, 96, 128)


def layers_of_a_model() -> list[nn.Linear]:
    return [nn.Linear(*shape, bias=False).requires_grad_(False) for _ in range(30) for shape in _SHAPES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain, quick = layers_of_a_model(), layers_of_a_model()
    for layer in quick:
        apply_cpu_kernels(layer)
    if not isinstance(quick[0], WeightFirstLinear):
        raise SystemExit("this torch has no MKL, so layers are left as they are")
    table = Table(title=f"{options.threads} threads, torch {torch.__version__}")
    for heading in ("rows", "plain, ms", "ours, ms", "times as fast"):
        table.add_column(heading, justify="right")
    for rows in _ROWS:
        given = {size: torch.randn(1, rows, size) for size in (576, 1536)}
        seconds: dict[str, list[float]] = {"plain": [], "ours": []}
        for _ in range(options.rounds + 1):
            for name, layers in (("plain", plain), ("ours", quick)):
                begun = time.perf_counter()
                with torch.inference_mode():
                    for layer in layers:
                        layer(given[layer.in_features])
                seconds[name].append(time.perf_counter() - begun)
        theirs, ours = (statistics.median(seconds[name][1:]) * 1e3 for name in ("plain", "ours"))
        table.add_row(str(rows), f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
