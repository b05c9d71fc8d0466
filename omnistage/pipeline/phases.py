"""How long each phase of a start takes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

_SHOWN_SECONDS = 0.05


class PhaseTimes:
    """Seconds by phase; a phase ends where the next one begins. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._phase: str | None = None
        self._began = clock()
        self._lock = threading.Lock()

    def begin(self, phase: str) -> None:
        """From now on it is this phase; nothing where it is already."""
        with self._lock:
            if phase != self._phase:
                self._end()
                self._phase = phase

    def end(self) -> None:
        """End the phase; what follows until the next belongs to none."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        now = self._clock()
        if self._phase is not None:
            seconds = now - self._began
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + seconds
            _log.info("start: %s took %.2f s", self._phase, seconds)
        self._phase, self._began = None, now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {secs:.1f} s" for phase, secs in self.seconds.items() if secs >= _SHOWN_SECONDS)
