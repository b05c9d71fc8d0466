"""Memory of the machine and of this process, as the operating system tells it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory() -> int | None:
    """Bytes of the machine, or of the container; None where the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = "max"
    return min(total, int(limit)) if limit.isdigit() else total


def free_host_memory() -> int:
    """Bytes the kernel would give without swapping; a modest guess where it does not say."""
    free = _kilobytes(_MEMINFO, "MemAvailable:")
    return 4 << 30 if free is None else min(free, host_memory() or free)


def resident_memory() -> int | None:
    """Bytes of this process in memory; None where the system does not say."""
    return _kilobytes(_STATUS, "VmRSS:")


def _kilobytes(file: Path, name: str) -> int | None:
    """A line of a file in /proc, in bytes."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith(name)), None)
    return None if line is None else int(line.split()[1]) * 1024


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can: glibc keeps much of it for later."""
    try:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    except (OSError, TypeError):  # Windows has no library without a name
        return
    if trim is not None:
        trim(0)
