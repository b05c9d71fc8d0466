"""Threads that compile grammars and compute their token masks, so that no stage's thread ever does.

What the next mask of a grammar costs cannot be known in advance: it is tens of microseconds for most, and seconds where
the text so far can be read in many ways, with no repetition count or state count telling the two apart. It cannot be
interrupted either. But xgrammar releases the GIL, so a mask that is computed elsewhere delays nobody.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

SLOW_SECONDS = 0.02
"""A mask that takes longer is a slow one."""
_NICENESS = 10


class _Job:
    __slots__ = ("began", "owner", "work")

    def __init__(self, work: Callable[[], None], owner: str | None) -> None:
        self.work = work
        self.owner = owner
        self.began = 0.0


class GrammarThreads:
    """Runs jobs in daemon threads: `threads` at once, not counting those whose job turned out to be slow.

    A slow job cannot be ended. Another thread takes its place, up to `max_threads` in all; its own thread gets a lower
    priority, where the system allows it, and ends with it. Of one owner no more jobs begin while half of the threads
    are busy with slow ones of it. Jobs must not raise.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        max_threads: int,
        *,
        slow_seconds: float = SLOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slow_seconds = slow_seconds
        self._name = name
        self._min_threads = threads
        self._max_threads = max_threads
        self._clock = clock
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._finished = threading.Condition(lock)
        self._late = threading.Condition(lock)
        self._watcher: threading.Thread | None = None
        self._watching = False
        """A queued job waits for jobs that may turn out to be slow."""
        self._jobs: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}
        """By the native id of the thread."""
        self._slow: set[int] = set()
        self._threads = 0
        self._idle = 0
        self._waiters = 0

    def submit(self, work: Callable[[], None], owner: str | None = None) -> None:
        """Jobs of no owner have all threads."""
        with self._work:
            self._jobs.append(_Job(work, owner))
            self._assign()

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `done`, which is asked after every job; whether it was in time."""
        with self._finished:
            self._waiters += 1
            try:
                return self._finished.wait_for(condition, seconds)
            finally:
                self._waiters -= 1
                self._assign()

    def exhausted(self, owner: str | None = None) -> bool:
        """Whether every thread that the owner may have is busy with a slow job."""
        with self._work:
            self._assign()
            return len(self._slow) >= self._max_threads or not self._has_share(owner)

    def _has_share(self, owner: str | None) -> bool:
        if owner is None:
            return True
        return sum(self._running[thread].owner == owner for thread in self._slow) < max(self._max_threads // 2, 1)

    def _startable(self) -> _Job | None:
        """The oldest job whose owner may have one more thread."""
        return next((job for job in self._jobs if self._has_share(job.owner)), None)

    def _assign(self) -> None:
        """See to it that a thread takes what is queued; called with the lock held."""
        now = self._clock()
        for thread, job in self._running.items():
            if thread not in self._slow and now - job.began > self._slow_seconds:
                self._slow.add(thread)
                lower_priority(thread)
        if self._startable() is None:
            return
        if self._idle:
            self._work.notify()
        elif self._threads < min(self._min_threads + len(self._slow), self._max_threads):
            self._threads += 1
            threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
        elif self._threads < self._max_threads and not self._watching:
            self._watching = True
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True)
                self._watcher.start()
            self._late.notify()

    def _watch(self) -> None:
        """Find out which jobs are slow, even where nobody submits or waits for another meanwhile."""
        with self._late:
            while True:
                while not self._watching:
                    self._late.wait()
                self._late.wait_for(lambda: False, self._slow_seconds)
                self._watching = False
                self._assign()

    def _run(self) -> None:
        thread = threading.get_native_id()
        while (job := self._next(thread)) is not None:
            job.work()
            del job  # while the thread waits for more, it keeps no request's state

    def _next(self, thread: int) -> _Job | None:
        with self._work:
            was_slow = thread in self._slow
            self._slow.discard(thread)
            if self._running.pop(thread, None) is not None and self._waiters:
                self._finished.notify_all()
            if was_slow:  # its priority cannot be raised again
                self._threads -= 1
                self._assign()
                return None
            self._idle += 1
            while (job := self._startable()) is None:
                self._work.wait()
            self._idle -= 1
            self._jobs.remove(job)
            job.began = self._clock()
            self._running[thread] = job
            self._assign()  # several may have come for one thread that was idle
            return job


def lower_priority(thread: int) -> None:
    """Let all other threads of the machine go first, where the system knows priorities of threads."""
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)
