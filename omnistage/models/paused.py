"""A call that runs in a thread of its own, a slice at a time: `generate` has no other way to be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from omnistage.engines.streams import avoid_attention_plans
from omnistage.engines.threads import set_threads

T = TypeVar("T")


class _Cancelled(BaseException):
    """Ends the call from inside; no `except Exception` of a library catches it."""


class PausedCall(Generic[T]):
    """`function` is given this object, and calls `pause` wherever it may stop. Only one of the two threads runs."""

    def __init__(self, function: Callable[[PausedCall[T]], T], name: str) -> None:
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._cancelled = False
        self._done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        threads = torch.get_num_threads()
        # A thread begins on CUDA's default stream; what the call computes is read on the stage's own.
        initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream() if initialized else None
        if stream is not None:
            avoid_attention_plans(stream.device)

        def run() -> None:
            self._go.acquire()
            try:
                if not self._cancelled:
                    set_threads(threads)
                    with torch.cuda.stream(stream):
                        self._result = function(self)
            except _Cancelled:
                pass
            except BaseException as error:  # the boundary of the thread: it is raised again in the other
                self._error = error
            self._done = True
            self._paused.release()

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """In the call: let the other thread go on until it asks for more."""
        self._paused.release()
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled

    def advance(self) -> bool:
        """Run the call until it pauses; whether it has ended. Raises what it raised."""
        if not self._done:
            self._go.release()
            self._paused.acquire()
        if self._error is not None:
            raise self._error
        return self._done

    @property
    def done(self) -> bool:
        return self._done

    @property
    def result(self) -> T:
        """What the call returned, once it has ended."""
        if not self._done or self._error is not None or self._cancelled:
            raise RuntimeError("the call has not returned")
        return self._result  # type: ignore[return-value]

    def cancel(self) -> None:
        """End the call where it pauses."""
        self._cancelled = True
        if not self._done:
            self._go.release()
        self._thread.join()
