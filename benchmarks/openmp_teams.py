"""The cost of an idle second thread that has computed with torch before.

    python benchmarks/openmp_teams.py

OpenMP keeps a team of threads for every thread that computes. While the teams together have more threads than the
machine has cores, libgomp does not wait awake for the next operator: every one ends with threads going to sleep. That
is why stages on the CPU share a thread, and why models are loaded in one that ends.
"""

from __future__ import annotations

import resource
import statistics
import threading
import time

import torch

_OPERATORS = 2000


def operators() -> None:
    weight, row, long = torch.randn(1536, 576), torch.randn(1, 576), torch.randn(200_000)
    with torch.inference_mode():
        for _ in range(_OPERATORS // 2):
            torch.nn.functional.linear(row, weight)
            long.add_(1)


def measured(label: str) -> float:
    seconds, switches = [], []
    for _ in range(5):
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.perf_counter()
        operators()
        seconds.append(time.perf_counter() - begun)
        switches.append(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
    each = statistics.median(seconds) / _OPERATORS * 1e6
    print(f"{label:34s} {each:6.1f} µs an operator, {statistics.median(switches) / _OPERATORS:.2f} sleeps each")
    return each


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    computed, leave = threading.Event(), threading.Event()

    def other() -> None:
        operators()
        computed.set()
        leave.wait()

    alone = measured("one thread computes")
    thread = threading.Thread(target=other)
    thread.start()
    computed.wait()
    beside = measured("another has computed, and waits")
    leave.set()
    thread.join()
    measured("the other has ended")
    print(f"a second team: {beside / alone:.2f} times as long")


if __name__ == "__main__":
    main()
