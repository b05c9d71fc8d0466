"""Memory of the machine."""

from __future__ import annotations

import os
from pathlib import Path

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
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
                    return min(free, host_memory() or free)
    except OSError:
        pass
    return 4 << 30
