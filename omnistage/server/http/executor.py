"""Threads for work that cannot be ended from outside: few, with a short queue, and no others than these."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from omnistage.core.errors import QueueFullError, ShutdownError

T = TypeVar("T")
Work = Callable[[threading.Event], T]
"""Is told by the event that nobody waits for it any longer, and may look at it whenever it likes."""


class Workers:
    """At most `most` pieces of work, `threads` of them at a time. Used from one event loop.

    Work whose request is over goes on until it ends by itself. In the threads that asyncio lends to everybody it would
    keep all other requests from theirs.
    """

    def __init__(self, threads: int, most: int, name: str, things: str = "sounds") -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = most
        self._things = things
        self._taken = 0
        self._awaited: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def run(self, work: Work[T], held: ExitStack) -> T:
        """What `work` gives; raises `QueueFullError` where there is no place for it.

        Its place is given back with `held`. Where this is left before the thread is done, the thread takes all that
        `held` holds with it, and it is let go when that has really ended.
        """
        if self._closed:
            raise ShutdownError("the service is stopping and takes no more requests")
        if self._taken >= self._most:
            raise QueueFullError(
                f"{self._taken} {self._things} are worked on or wait already, the most there may be; try again soon"
            )
        self._taken += 1
        held.callback(self._leave)
        over = threading.Event()
        order = [work]
        job = self._pool.submit(lambda: order.pop()(over))
        waiting = asyncio.wrap_future(job)
        self._awaited.add(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ShutdownError("the service is stopping; send the request again") from None  # `close` ended it
        finally:
            self._awaited.discard(waiting)
            over.set()
            if job.cancel():
                order.clear()  # the queue keeps what is cancelled until its turn comes: let it keep none of the data
            elif not job.done():
                _closed_after(job, held.pop_all())

    async def close(self, timeout: float) -> None:
        """Take no more; what is there has `timeout` seconds to end, then nobody waits for it."""
        self._closed = True
        if self._awaited:
            await asyncio.wait(self._awaited, timeout=timeout)
        for waiting in tuple(self._awaited):
            waiting.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self) -> None:
        self._taken -= 1


def _closed_after(job: Future[Any], held: ExitStack) -> None:
    """Close `held` in this event loop, once the thread is done."""
    loop = asyncio.get_running_loop()

    def done(_job: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is gone, and the service with it
            loop.call_soon_threadsafe(held.close)

    job.add_done_callback(done)
