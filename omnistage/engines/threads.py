"""How many threads torch has on the CPU, and where (`omnistage.pipeline.loop.LoopThread` says why it matters).

torch keeps the number for each thread, and another for threads to come: setting one sets the other as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_held = 0
_usual = 1


@contextmanager
def alone() -> Iterator[int]:
    """Until the end torch uses no other threads in this one, so that none are left behind; gives the usual number.

    Several threads may be in here at a time: what is usual is what the first of them found.
    """
    global _held, _usual
    with _lock:
        if _held == 0:
            _usual = torch.get_num_threads()
        _held += 1
        usual = _usual
        torch.set_num_threads(1)
    try:
        yield usual
    finally:
        with _lock:
            _held -= 1
            torch.set_num_threads(usual)


def use(threads: int) -> None:
    """Have torch use so many threads in this one, whatever other threads are about."""
    with _lock:
        torch.set_num_threads(threads)


def compute_alone() -> None:
    """Have torch use no other threads in this one from now on: what computes a little beside others needs none."""
    with _lock:
        usual = _usual if _held else torch.get_num_threads()
        torch.set_num_threads(1)
        # It also set what new threads begin with; a thread that ends at once puts that back.
        restoring = threading.Thread(target=torch.set_num_threads, args=(usual,))
        restoring.start()
        restoring.join()
