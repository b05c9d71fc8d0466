"""What may go wrong in a stage: everything that can be raised, and calls that do not return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from omnistage.core.types import FinishReason
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import Recorder

SECRET = "what the user said"


class PanicException(BaseException):
    """Like `pyo3_runtime.PanicException`, which a panic of a Rust extension raises."""


def raising(fault: type[BaseException]) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> object:
        raise fault(SECRET)

    return call


def elsewhere(work: Callable[[], object]) -> None:
    """Run in a thread that is not the main one, as loops do: Ctrl-C is the main thread's alone."""
    escaped: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # to be raised here instead
            escaped.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    if escaped:
        raise AssertionError("an error escaped") from escaped[0]


def ended(sink: Recorder) -> FinishReason:
    """Why a request ended; fails unless it did exactly once."""
    return sink.final.finish_reason  # type: ignore[return-value]


class Hang:
    """A call that does not return until it is released; it fails where it never is, and whoever waited for it too."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self, *_: object, **__: object) -> None:
        self.entered.set()
        if not self.go.wait(HANG_SECONDS):
            raise TimeoutError
