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


class GrammarThreads:
    """Runs jobs in daemon threads: `threads` at once, not counting those whose job turned out to be slow.

    A slow job cannot be ended. Another thread takes its place, up to `max_threads` in all; its own thread gets a lower
    priority, where the system allows it, and ends with it. Jobs must not raise.
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
        self._kept = threads
        self._max_threads = max_threads
        self._clock = clock
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._done = threading.Condition(lock)
        self._late = threading.Condition(lock)
        self._watcher: threading.Thread | None = None
        self._watching = False
        """A queued job waits for jobs that may turn out to be slow."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._running: dict[int, float] = {}
        """When the job of a thread began, by the thread's native id."""
        self._slow: set[int] = set()
        self._threads = 0
        self._idle = 0
        self._waiters = 0

    def submit(self, job: Callable[[], None]) -> None:
        with self._work:
            self._jobs.append(job)
            self._assign()

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait until `done`, which is asked after every job; whether it was in time."""
        with self._done:
            self._waiters += 1
            try:
                return self._done.wait_for(done, seconds)
            finally:
                self._waiters -= 1
                self._assign()

    @property
    def exhausted(self) -> bool:
        """Every thread that there may be is busy with a slow job."""
        with self._work:
            self._assign()
            return len(self._slow) >= self._max_threads

    def _assign(self) -> None:
        """See to it that a thread takes what is queued; called with the lock held."""
        now = self._clock()
        for thread, start in self._running.items():
            if thread not in self._slow and now - start > self._slow_seconds:
                self._slow.add(thread)
                lower_priority(thread)
        if not self._jobs:
            return
        if self._idle:
            self._work.notify()
        elif self._threads < min(self._kept + len(self._slow), self._max_threads):
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
            job()
            del job  # while the thread waits for more, it keeps no request's state

    def _next(self, thread: int) -> Callable[[], None] | None:
        with self._work:
            if self._running.pop(thread, None) is not None and self._waiters:
                self._done.notify_all()
            if thread in self._slow:  # its priority cannot be raised again
                self._slow.discard(thread)
                self._threads -= 1
                self._assign()
                return None
            self._idle += 1
            while not self._jobs:
                self._work.wait()
            self._idle -= 1
            self._running[thread] = self._clock()
            job = self._jobs.popleft()
            self._assign()  # several may have come for one thread that was idle
            return job


def lower_priority(thread: int) -> None:
    """Let all other threads of the machine go first, where the system knows priorities of threads."""
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)
