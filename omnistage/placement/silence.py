"""How long a process has given no sign of life although it could have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK_SECONDS = 0.1
"""Between two looks at a process."""
BUSY_FACTOR = 5
"""A process may be silent that many times longer where the machine or this process is what is slow."""
FREE_SHARE = 0.25
"""Of the time after which a process is taken for hung; signs of life come that often."""
_REST_SHARE = 0.5
"""The same; what one look adds at most for a process that rests: this machine may have been asleep with it."""
_MAX_STEP = 2 * LOOK_SECONDS
"""What one look adds at most for a process that does not rest: who looks may have been late."""
_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """A thread as the scheduler of Linux sees it."""

    state: str
    """R: it runs or is ready to; S: it waits; D: it waits for a disk; T: it is stopped."""
    ran: float
    """Seconds on a processor."""
    waited: float
    """Seconds ready to run while others ran; not the wait that it is in."""
    turns: int
    """How often it got a processor."""


_NEW = ThreadTimes("S", 0.0, 0.0, 0)


class Silence:
    """Tells a process that hangs from one that the machine gives no processor, and from one whose signs of life have
    not been read yet. Called by one thread."""

    def __init__(self, pid: int | None) -> None:
        """`pid` is a process of this machine, or None."""
        self._pid = pid
        self._sign: float | None = None
        """The last sign of life, after which the following was seen."""
        self._seconds = 0.0
        self._looked = 0.0
        self._threads: Mapping[int, ThreadTimes] = {}

    def look(self, sign: float, now: float, limit: float, *, drained: bool) -> float:
        """The seconds since its last `sign` of life in which another one could have been heard.

        To be called every `LOOK_SECONDS`; signs come `FREE_SHARE` of `limit` apart. `drained`: all that has come from
        it has been read.
        """
        threads = {} if self._pid is None else thread_times(self._pid)
        if sign != self._sign:
            stopped = bool(threads) and all(each.state in "Tt" for each in threads.values())
            # What it could have done before the first look is not known.
            self._seconds = min(now - sign, limit * (_REST_SHARE if stopped else FREE_SHARE))
        else:
            step = now - self._looked
            if not drained:
                self._seconds += min(step / BUSY_FACTOR, _MAX_STEP)
            elif rests(self._threads, threads):
                self._seconds += min(step, limit * _REST_SHARE)
            else:
                free = step - delay(self._threads, threads, step)
                self._seconds += min(max(free, step / BUSY_FACTOR), _MAX_STEP)
        self._sign, self._looked, self._threads = sign, now, threads
        return self._seconds


def rests(before: Mapping[int, ThreadTimes], now: Mapping[int, ThreadTimes]) -> bool:
    """Whether no thread of a process has run meanwhile or wants to: no timer of it went off, or it is stopped."""
    return (
        bool(now)
        and before.keys() == now.keys()
        and all(each.state not in "RD" and each.turns == before[thread].turns for thread, each in now.items())
    )


def delay(before: Mapping[int, ThreadTimes], now: Mapping[int, ThreadTimes], step: float) -> float:
    """Of the last `step` seconds, those in which threads of a process waited for a processor or a disk.

    Those of its threads are added up: one that needs Python's lock waits for the one that has it, which waits for a
    processor.
    """
    total = 0.0
    for thread, each in now.items():
        past = before.get(thread, _NEW)
        if each.state == "D":
            total += step
        elif each.state == "R":  # the wait that it is in is not counted yet
            total += max(step - (each.ran - past.ran), 0.0)
        else:
            total += each.waited - past.waited
    return min(total, step)


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """By thread of a process; empty where the system does not say."""
    times: dict[int, ThreadTimes] = {}
    folder = Path(f"/proc/{pid}/task")
    try:
        threads = os.listdir(folder)
    except OSError:  # it has ended, or this is another system than Linux
        return times
    for thread in threads:
        with suppress(OSError, IndexError, ValueError):  # it has ended, or the system does not count this
            times[int(thread)] = _times(folder / thread)
    return times


def _times(folder: Path) -> ThreadTimes:
    ran, waited, turns = map(int, (folder / "schedstat").read_bytes().split())
    state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()  # its name may have brackets
    return ThreadTimes(state, ran / _NANOSECONDS, waited / _NANOSECONDS, turns)


def turns_of(thread: int) -> int | None:
    """How often a thread of this process got a processor; None where the system does not say."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[2])
    except (OSError, IndexError, ValueError):
        return None
