"""Whether the work for a request is still wanted, for the threads and processes that prepare it.

A request that is being prepared (media decoded, text tokenised, a grammar compiled) has not reached the orchestrator
yet. Its deadline and its abort reach that work through here: long work calls `check` between its pieces, and what
blocks registers with `on_cancel` how it is ended from outside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from omnistage.core.errors import CancelledRequestError, DeadlineExceededError

_Result = TypeVar("_Result")
_LOCK_POLL_SECONDS = 0.05


class Cancellation:
    """One request's deadline and abort. Thread-safe.

    Deadlines are times of `time.monotonic`. Nothing happens by itself when one passes: `check` and `result` notice it,
    and the code that waits for the request calls `cancel` then.
    """

    def __init__(self, deadline: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.deadline = deadline
        self._clock = clock
        self._lock = threading.Lock()
        self._cancelled: Future[None] = Future()
        self._aborts: list[Callable[[], object]] = []
        self._working = 0
        self._idle_callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled.done()

    def cancel(self) -> None:
        """End the work: every registered `abort` is called, and every `check` from now on raises."""
        with self._lock:
            if not self._cancelled.done():
                self._cancelled.set_result(None)
            aborts = list(self._aborts)
        for abort in aborts:
            abort()

    def remaining(self) -> float | None:
        """Seconds until the deadline, 0 once it has passed; None without one."""
        return None if self.deadline is None else max(self.deadline - self._clock(), 0.0)

    def check(self) -> None:
        """Raise `DeadlineExceededError` or `CancelledRequestError` if the work is no longer wanted."""
        if self.deadline is not None and self._clock() >= self.deadline:
            raise DeadlineExceededError(
                "the deadline passed while the request was prepared; allow more time", param="timeout"
            )
        if self._cancelled.done():
            raise CancelledRequestError("the request was cancelled")

    def result(self, future: Future[_Result], timeout: float | None = None) -> _Result:
        """The result of work elsewhere. Raises as `check` does, and `TimeoutError` after `timeout` seconds.

        The work itself is not ended; that is for `on_cancel`.
        """
        remaining = self.remaining()
        limits = [limit for limit in (timeout, remaining) if limit is not None]
        awaited: tuple[Future[Any], ...] = (future, self._cancelled)
        wait(awaited, timeout=min(limits, default=None), return_when=FIRST_COMPLETED)
        if future.done():
            return future.result()
        self.check()
        raise TimeoutError

    @contextmanager
    def on_cancel(self, abort: Callable[[], object]) -> Iterator[None]:
        """Inside the block `abort` ends what the thread is waiting for; called at once if nothing is wanted already.

        It is called from another thread, and must neither block nor raise.
        """
        with self._lock:
            self._aborts.append(abort)
            cancelled = self._cancelled.done()
        if cancelled:
            abort()
        try:
            yield
        finally:
            with self._lock:
                self._aborts.remove(abort)

    def begin_work(self) -> None:
        """A thread or process has begun to work for the request."""
        with self._lock:
            self._working += 1

    def end_work(self) -> None:
        """It has really ended, whether anybody still waits for it or not."""
        with self._lock:
            self._working -= 1
            callbacks = [] if self._working else self._idle_callbacks
            if callbacks:
                self._idle_callbacks = []
        for callback in callbacks:
            callback()

    @property
    def idle(self) -> bool:
        """Whether nothing works for the request."""
        return not self._working

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call once nothing works for the request any longer: at once, or later from a worker's thread."""
        with self._lock:
            if self._working:
                self._idle_callbacks.append(callback)
                return
        callback()


_CURRENT: ContextVar[Cancellation | None] = ContextVar("omnistage_cancellation", default=None)


def current_cancellation() -> Cancellation:
    """That of the request which this thread or task works for; outside of any, one that never ends anything."""
    return _CURRENT.get() or Cancellation()


@contextmanager
def cancellation_scope(cancellation: Cancellation | None = None) -> Iterator[Cancellation]:
    """Work inside the block, and in threads started from it with its context, belongs to one request.

    Leaving the block cancels it: what is still running then is not awaited any more. Without an argument an
    enclosing scope is used where there is one.
    """
    enclosing = _CURRENT.get()
    if cancellation is None and enclosing is not None:
        yield enclosing
        return
    cancellation = cancellation or Cancellation()
    token = _CURRENT.set(cancellation)
    try:
        yield cancellation
    finally:
        _CURRENT.reset(token)
        cancellation.cancel()


@contextmanager
def locked(lock: threading.Lock) -> Iterator[None]:
    """Hold `lock` inside the block. Waiting for it ends with the request: raises as `Cancellation.check` does."""
    cancellation = current_cancellation()
    while not lock.acquire(timeout=_LOCK_POLL_SECONDS):
        cancellation.check()
    try:
        cancellation.check()
        yield
    finally:
        lock.release()
