"""Threads for work that cannot be interrupted: few, with a short queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from omnistage.core.errors import QueueFullError, ShutdownError
from omnistage.core.threads import DaemonThreads
from omnistage.pipeline.event_loop import call_soon

T = TypeVar("T")
Work = Callable[[threading.Event], T]
"""The event is set once the result is not awaited any longer; work may check it and stop early."""
Place = asyncio.Future[None]
"""In the queue; done once its work is submitted, or will not be."""


class Workers:
    """At most `max_queued` pieces of work, `threads` of them at a time. Used from one event loop.

    Work whose request is over runs until it ends by itself. In asyncio's shared threads it would block the work of
    all other requests.
    """

    def __init__(self, threads: int, max_queued: int, name: str, unit: str = "clips") -> None:
        self._pool = DaemonThreads(threads, name)
        self._max_queued = max_queued
        self._unit = unit
        self._queued = 0
        self._awaited: set[asyncio.Future[Any]] = set()
        """Work that requests wait for, and places of requests that still prepare theirs."""
        self._closing = False
        self._closed = False

    def reserve(self, resources: ExitStack) -> Place:
        """A place in the queue, which is freed with `resources`: taken before the work is prepared, not after.

        Raises `QueueFullError` where there is none.
        """
        if self._closing:
            raise ShutdownError("the service is stopping and accepts no more requests")
        if self._queued >= self._max_queued:
            raise QueueFullError(f"{self._queued} {self._unit} are queued already, the maximum; try again soon")
        self._queued += 1
        place: Place = asyncio.get_running_loop().create_future()
        self._awaited.add(place)
        resources.callback(self._leave, place)
        return place

    async def run(self, work: Work[T], place: Place, resources: ExitStack) -> T:
        """The result of `work`.

        Where this is left before the thread is done, the thread takes over `resources`, which close once it has really
        ended.
        """
        if self._closed:
            raise ShutdownError("the service is stopping; send the request again")
        over = threading.Event()
        job = self._pool.submit(work, over)
        waiting = asyncio.wrap_future(job)
        self._awaited.add(waiting)
        self._prepared(place)
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ShutdownError("the service is stopping; send the request again") from None  # `close` cancelled it
        finally:
            self._awaited.discard(waiting)
            over.set()
            if not job.cancel() and not job.done():
                loop, stack = asyncio.get_running_loop(), resources.pop_all()
                job.add_done_callback(lambda _: call_soon(loop, stack.close))

    async def close(self, timeout: float) -> None:
        """Take no more work; what has a place has `timeout` seconds to end, and is then abandoned."""
        self._closing = True
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while self._awaited and (remaining := end - loop.time()) > 0:
            await asyncio.wait(self._awaited, timeout=remaining)
        self._closed = True
        for waiting in tuple(self._awaited):
            waiting.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepared(self, place: Place) -> None:
        self._awaited.discard(place)
        if not place.done():
            place.set_result(None)

    def _leave(self, place: Place) -> None:
        self._prepared(place)
        self._queued -= 1
