"""How many threads torch has on the CPU, and where (`omnistage.pipeline.loop_threads.LoopThread` says why it matters).

torch keeps the number for each thread, and another for threads to come: setting one sets the other as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_holders = 0
_default = 1


@contextmanager
def single_threaded() -> Iterator[int]:
    """Within the block torch computes in this thread only, so that no idle OpenMP team is left behind.

    Gives the number of threads that torch had before. Several threads may be in here at a time: the number is what
    the first of them saw.
    """
    global _holders, _default
    with _lock:
        if _holders == 0:
            _default = torch.get_num_threads()
        _holders += 1
        default = _default
        torch.set_num_threads(1)
    try:
        yield default
    finally:
        with _lock:
            _holders -= 1
            torch.set_num_threads(default)


def set_threads(threads: int) -> None:
    """Set how many threads torch uses for what this thread computes."""
    with _lock:
        torch.set_num_threads(threads)


def set_single_threaded() -> None:
    """Have torch compute in this thread only, from now on."""
    with _lock:
        default = _default if _holders else torch.get_num_threads()
        torch.set_num_threads(1)
        # It also set what new threads begin with; a thread that ends at once puts that back.
        restoring = threading.Thread(target=torch.set_num_threads, args=(default,))
        restoring.start()
        restoring.join()
