"""Which threads torch computes in on the CPU: as few as can be (`omnistage.pipeline.loop.LoopThread` says why)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_passing(function: Callable[[], Result]) -> Result:
    """The result of a call in a thread that ends with it, and OpenMP's team with the thread."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, name="omnistage-passing", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()


def compute_alone() -> None:
    """Have torch use no other threads in this one: what computes a little beside others needs no team."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # It also set what new threads begin with; that goes back to what it was.
    in_passing(lambda: torch.set_num_threads(before))
