"""The start of `omnistage serve` in two checkouts: time and processor time until it is ready, and what it holds then.

    python benchmarks/start_trees.py before=../base after=. --rounds 5
    python benchmarks/start_trees.py before=../base after=. --models causal_lm qwen2_5_omni

Starts of the checkouts alternate; a ratio is taken within a round, and the median over the rounds is what counts. The
first round, which writes bytecode and caches, is left out. Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from serve_trees import run, serve

FIGURES = ("seconds", "processor seconds", "resident MiB")


def start(tree: str, folder: Path) -> tuple[float, float, float]:
    """One start, by `FIGURES`."""
    began = time.perf_counter()
    with serve(tree, folder) as (_port, pid):
        seconds = time.perf_counter() - began
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # of the user and of the system
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return seconds, ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="checkouts; the first is the reference")
    parser.add_argument("--models", nargs="+", default=["qwen2_5_omni"], metavar="FAMILY", help="served together")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in args.trees)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for family in args.models:
            run(list(trees.values())[-1], "tiny", family, str(folder / family))
        for turn in range(args.rounds + 1):
            for name, tree in trees.items() if turn % 2 else reversed(trees.items()):
                figures = start(tree, folder)
                if turn:
                    found[name].append(figures)
                    print(f"round {turn}: {name}: {figures[0]:.1f} s", file=sys.stderr)
    reference = next(iter(found))
    print("| | " + " | ".join((*trees, *(f"{name}, ratio" for name in list(trees)[1:]))) + " |")
    for place, figure in enumerate(FIGURES):
        medians = [statistics.median(each[place] for each in figures) for figures in found.values()]
        ratios = [
            statistics.median(own[place] / base[place] for own, base in zip(found[name], found[reference], strict=True))
            for name in list(found)[1:]
        ]
        print(f"| {figure} | " + " | ".join(f"{value:.2f}" for value in (*medians, *ratios)) + " |")


if __name__ == "__main__":
    main()
