"""One timer for the deadlines of all requests."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from omnistage.core.failures import log_defect

Owner = TypeVar("Owner")


class DeadlineTimer(Generic[Owner]):
    """Calls `expire(owner)` once a deadline has passed: one heap, at most one thread, however many requests.

    `add` returns a token for `discard`. Without `start` nothing happens until `tick` is called.
    """

    def __init__(self, expire: Callable[[Owner], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._expire = expire
        self._clock = clock
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        # By token, and only here: what has been discarded keeps no request's media in memory until its time.
        self._owners: dict[int, Owner] = {}
        self._next_token = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, deadline: float, owner: Owner) -> int:
        with self._changed:
            token = self._next_token
            self._next_token += 1
            self._owners[token] = owner
            heapq.heappush(self._heap, (deadline, token))
            if self._heap[0][1] == token:
                self._changed.notify_all()
            return token

    def discard(self, token: int) -> None:
        with self._changed:
            self._owners.pop(token, None)
            # Entries stay in the heap until their time, so it is swept once most of it is stale.
            if len(self._heap) > 2 * len(self._owners) + 16:
                self._heap = [entry for entry in self._heap if entry[1] in self._owners]
                heapq.heapify(self._heap)

    def tick(self) -> bool:
        """Expire everything whose time has come; whether there was any."""
        due = self._pop_due()
        for owner in due:
            try:
                self._expire(owner)
            except BaseException as error:  # the boundary of one owner: the deadlines of all others still count
                log_defect("a deadline", error)
        return bool(due)

    def _pop_due(self) -> list[Owner]:
        due: list[Owner] = []
        now = self._clock()
        with self._changed:
            while self._heap and (self._heap[0][0] <= now or self._heap[0][1] not in self._owners):
                _, token = heapq.heappop(self._heap)
                if token in self._owners:
                    due.append(self._owners.pop(token))
        return due

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="omnistage-deadlines", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            self.tick()
            with self._changed:
                if self._stopping:
                    return
                wait = self._heap[0][0] - self._clock() if self._heap else None
                if wait is None or wait > 0:
                    # A wait longer than a lock can express is cut short; the next turn waits on.
                    self._changed.wait(None if wait is None else min(wait, threading.TIMEOUT_MAX))
