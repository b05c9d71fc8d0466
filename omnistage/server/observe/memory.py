"""Memory of this process, for the gauges; read from the operating system."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from omnistage.core.memory import host_memory

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes; None: unknown."""

    process: int | None
    """Resident memory of this process."""
    host: int | None
    """Memory of the machine, or of the container."""
    device: int | None = None
    """Used on the current CUDA device, by all processes."""
    device_total: int | None = None


def memory_usage() -> MemoryUsage:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # the query must not initialise CUDA
        return MemoryUsage(_resident(), host_memory())
    free, total = torch.cuda.mem_get_info()
    return MemoryUsage(_resident(), host_memory(), int(total) - int(free), int(total))


def _resident() -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("VmRSS:")), None)
    return None if line is None else int(line.split()[1]) * 1024
