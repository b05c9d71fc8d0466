"""How much memory this process holds, for the gauges. Read from the system, so that nothing has to be counted."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; None: the system does not say."""

    process: int | None
    """Resident memory of this process."""
    host: int | None
    """What the machine, or the container, has."""
    device: int | None = None
    """Used on the current CUDA device, by whomever."""
    device_total: int | None = None


def memory_now() -> Memory:
    free, total = _cuda()
    used = None if free is None or total is None else total - free
    return Memory(_resident(), _host(), used, total)


def _resident() -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("VmRSS:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def _host() -> int | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = "max"
    return min(total, int(limit)) if limit.isdigit() else total


def _cuda() -> tuple[int | None, int | None]:
    """Free and all bytes of the device, if this process computes on one: asking must not be what starts CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)
