"""Memory of the machine and of this process, as the operating system tells it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's `mallopt`, from malloc.h."""
_LARGEST_BLOCK = 32 << 20
"""glibc takes no larger threshold."""
_USER_SETTINGS = frozenset({"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"})
KEPT_HEAP = 64 << 20
"""What `keep_heap` has each of the heaps keep at most."""


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
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def keep_heap() -> bool:
    """Have the C library keep freed memory for the next tensors, up to `KEPT_HEAP`; False where it does not take that.

    By default glibc gives it back after each large tensor, and the kernel clears every page of the next one anew.
    Thresholds that the user has set in the environment stay.
    """
    if not _USER_SETTINGS.isdisjoint(os.environ):
        return False
    set_option = _of_libc("mallopt") if _of_libc("gnu_get_libc_version") is not None else None
    if set_option is None:
        return False
    return bool(set_option(_M_TRIM_THRESHOLD, KEPT_HEAP)) and bool(set_option(_M_MMAP_THRESHOLD, _LARGEST_BLOCK))


def _of_libc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None where it has none of that name, like musl many of glibc's."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # Windows has no library without a name
        return None
