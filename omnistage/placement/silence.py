"""How long a process has given no sign of life although it could have."""

from __future__ import annotations

import os
from pathlib import Path

BUSY_FACTOR = 5
"""A process may be silent that many times longer while it waits for a processor."""
_NANOSECONDS = 1e9


class Silence:
    """Tells a process that hangs from one that the machine gives no processor: what any of its threads has waited for
    one does not count. Called by one thread."""

    def __init__(self, pid: int | None) -> None:
        """`pid` is a process of this machine, or None."""
        self._pid = pid
        self._last_sign: float | None = None
        self._waits: dict[int, float] = {}
        """By thread, when it was first asked about this silence."""

    def unexplained(self, last_sign: float, silent: float) -> float:
        """Of so many seconds since its `last_sign`, those in which it could have been heard again.

        To be called now and then during the silence: what was waited before the first call is not known.
        """
        if self._pid is None:
            return silent
        if last_sign != self._last_sign:
            self._last_sign, self._waits = last_sign, processor_waits(self._pid)
        now = processor_waits(self._pid)
        waited = max((now[thread] - before for thread, before in self._waits.items() if thread in now), default=0.0)
        return max(silent - waited, silent / BUSY_FACTOR)


def processor_waits(pid: int) -> dict[int, float]:
    """By thread of a process, the seconds that it was ready to run and others ran; empty where the system does not
    say."""
    waits = {}
    folder = Path(f"/proc/{pid}/task")
    try:
        for thread in os.listdir(folder):
            waits[int(thread)] = int((folder / thread / "schedstat").read_bytes().split()[1]) / _NANOSECONDS
    except (OSError, IndexError, ValueError):  # it has ended, or this is another system than Linux
        return {}
    return waits
