"""Calls into an event loop from other threads."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

from omnistage.core.failures import log_defect

_MAX_PAUSE_SECONDS = 0.02


class LoopCalls:
    """Calls that wait for one event loop; they are given the loop, which would otherwise live as long as they do.

    Each call into a loop is a write to a socket, for which a thread gives the interpreter away, so that one stands for
    all that come until it is made. The next ones are made `pause` seconds later for each of the last ones, and no more
    than 20 ms later: where there are many, the other threads get their share of the interpreter.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self._pause = pause
        self._waiting: deque[Callable[[], object]] = deque()
        self._called = False
        self._not_before = 0.0

    def add(self, loop: AbstractEventLoop, callback: Callable[[], object]) -> None:
        """Call soon, from any thread. Raises `RuntimeError` if the loop is closed."""
        self._waiting.append(callback)
        if not self._called:
            self._called = True
            try:
                loop.call_soon_threadsafe(self._make, loop)
            except RuntimeError:
                self._called = False
                self._waiting.clear()
                raise

    def _make(self, loop: AbstractEventLoop) -> None:
        if (wait := self._not_before - loop.time()) > 0:
            loop.call_later(wait, self._make, loop)
            return
        self._called = False  # first: what is added from here on calls again
        count = 0
        while self._waiting:
            try:
                self._waiting.popleft()()
            except Exception as error:  # the boundary of one call: the others still have to be made
                log_defect("a call from another thread", error)
            count += 1
        self._not_before = loop.time() + min(count * self._pause, _MAX_PAUSE_SECONDS)


_calls: WeakKeyDictionary[AbstractEventLoop, LoopCalls] = WeakKeyDictionary()


def call_soon(loop: AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call in the loop, from any thread; not at all if it is closed."""
    if (calls := _calls.get(loop)) is None:
        calls = _calls.setdefault(loop, LoopCalls())
    try:
        calls.add(loop, callback)
    except RuntimeError:  # it is closed
        return
