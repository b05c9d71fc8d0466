"""Threads that never keep the process from ending."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from omnistage.core.errors import InternalError
from omnistage.core.failures import log_defect

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_MAX_REST_SECONDS = 1.0


class _Released(threading.local):
    seconds = 0.0


_released = _Released()


def usable_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def interpreter_released() -> Iterator[None]:
    """Around a call of native code that leaves the interpreter to other threads: no rest is needed after it."""
    start = time.thread_time()
    try:
        yield
    finally:
        _released.seconds += time.thread_time() - start


class _Job(Future[_Result]):
    """Work that waits for a thread or has one, and its result."""

    def __init__(self, threads: DaemonThreads, owner: str | None, work: Callable[[], _Result]) -> None:
        super().__init__()
        self.owner = owner
        self._threads = threads
        self._work: Callable[[], _Result] | None = work

    def run(self) -> None:
        work, self._work = self._work, None  # its data end with it, however long the result is kept
        if not self.set_running_or_notify_cancel() or work is None:
            return
        try:
            result = work()
        except Exception as error:  # raised again where the result is awaited
            self.set_exception(error)
            del self  # the error refers to this frame: with this it would be a cycle, and keep the data of its request
        except BaseException as error:
            # An event loop that awaits a result which is SystemExit would end, and the server with it.
            log_defect(f"work in {self._threads.name}", error)
            failure = InternalError(f"failed with {type(error).__name__}")
            failure.__cause__ = error
            self.set_exception(failure)
        else:
            work = None  # first: the waiting thread may end the interpreter, and data must not end after it
            self.set_result(result)

    def cancel(self) -> bool:
        """Also leaves the queue, so that its data are released at once."""
        cancelled = super().cancel()
        if cancelled and self._threads.withdraw(self):
            self._work = None
            self.set_running_or_notify_cancel()
        return cancelled


class DaemonThreads(Executor):
    """An executor of up to `threads` daemon threads, started as they are needed.

    The interpreter waits for every thread of a `ThreadPoolExecutor` when it exits: one piece of work that does not
    return would keep the process alive. Work of one owner runs in at most half of the threads at a time, and owners
    take turns. With `max_share` a thread rests after its work, so that it holds the interpreter for no more of the time
    than that (`interpreter_released`).
    """

    def __init__(self, threads: int, name: str, max_share: float = 1.0) -> None:
        self._max_threads = threads
        self._rest_ratio = 1.0 / max_share - 1.0
        self.name = name
        self._changed = threading.Condition()
        self._jobs: dict[str | None, deque[_Job[Any]]] = {}
        """Queued, by owner; the owner whose turn it is comes first."""
        self._queued = 0
        self._running_by_owner: Counter[str | None] = Counter()
        """Threads that work, by owner."""
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, fn: Callable[_Args, _Result], /, *args: _Args.args, **kwargs: _Args.kwargs) -> Future[_Result]:
        return self.submit_for(None, fn, *args, **kwargs)

    def submit_for(
        self, owner: str | None, fn: Callable[_Args, _Result], /, *args: _Args.args, **kwargs: _Args.kwargs
    ) -> Future[_Result]:
        """`submit`, for an owner; work of None is not limited."""
        job = _Job(self, owner, partial(fn, *args, **kwargs))
        with self._changed:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._jobs.setdefault(owner, deque()).append(job)
            self._queued += 1
            if self._queued > self._idle and self._threads < self._max_threads:
                self._start_thread(job)
            else:
                self._changed.notify()
        return job

    def _start_thread(self, job: _Job[Any]) -> None:
        """One more for what is queued. Raises where the system starts none and there is no other to take the job."""
        try:
            threading.Thread(target=self._run, name=f"{self.name}-{self._threads + 1}", daemon=True).start()
        except RuntimeError:
            if not self._threads:
                self._remove(job)
                raise
        else:
            self._threads += 1

    def withdraw(self, job: _Job[Any]) -> bool:
        """Take a job out of the queue; whether it was there."""
        with self._changed:
            if job not in self._jobs.get(job.owner, ()):
                return False
            self._remove(job)
            return True

    def _remove(self, job: _Job[Any]) -> None:
        jobs = self._jobs[job.owner]
        jobs.remove(job)
        self._queued -= 1
        if not jobs:
            del self._jobs[job.owner]

    def _run(self) -> None:
        while (job := self._next()) is not None:
            start, _released.seconds = time.thread_time(), 0.0
            job.run()
            if self._rest_ratio:
                seconds = time.thread_time() - start - _released.seconds
                time.sleep(min(seconds * self._rest_ratio, _MAX_REST_SECONDS))
            with self._changed:
                self._running_by_owner[job.owner] -= 1
                if not self._running_by_owner[job.owner]:
                    del self._running_by_owner[job.owner]  # owners come and go
            del job  # while the thread waits for more, it keeps none of the data

    def _next(self) -> _Job[Any] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._closed or self._startable() is not None)
            self._idle -= 1
            job = self._startable()
            if job is not None:
                self._remove(job)
                if job.owner in self._jobs:
                    self._jobs[job.owner] = self._jobs.pop(job.owner)  # behind all others
                self._running_by_owner[job.owner] += 1
            return job

    def _startable(self) -> _Job[Any] | None:
        """The oldest work of the first owner that may have one more thread."""
        share = max(self._max_threads // 2, 1)
        for owner, jobs in self._jobs.items():
            if owner is None or self._running_by_owner[owner] < share:
                return jobs[0]
        return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work. Nobody waits for the threads, whatever `wait` says; they end with what is queued."""
        with self._changed:
            self._closed = True
            dropped = [job for jobs in self._jobs.values() for job in jobs] if cancel_futures else []
            self._changed.notify_all()
        for job in dropped:
            job.cancel()


class DaemonThreadPool(ThreadPoolExecutor):
    """Daemon threads where a `ThreadPoolExecutor` is required, as for asyncio's default executor; as many as there."""

    def __init__(self, name: str) -> None:
        threads = min(32, (os.cpu_count() or 1) + 4)
        super().__init__(threads, name)
        self._daemons = DaemonThreads(threads, name)

    def submit(self, fn: Callable[_Args, _Result], /, *args: _Args.args, **kwargs: _Args.kwargs) -> Future[_Result]:
        return self._daemons.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._daemons.shutdown(wait, cancel_futures=cancel_futures)
