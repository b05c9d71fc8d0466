"""Times of one machine in another's: `time.monotonic` counts from a machine's start."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

from omnistage.core.types import RequestInfo

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The same in all processes of a machine that share its clock."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def clock_offset(boot: str, now: float) -> float:
    """What to add to times of a process for them to be ours; it has just said where it runs and what time it was.

    Between machines it is wrong by as long as that took to arrive.
    """
    return 0.0 if boot == boot_id() else time.monotonic() - now


def shifted(info: RequestInfo, seconds: float) -> RequestInfo:
    deadline = None if info.deadline is None else info.deadline + seconds
    return replace(info, arrival=info.arrival + seconds, deadline=deadline)
