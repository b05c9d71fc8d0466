"""Memory of this process, for the gauges; read from the operating system."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from omnistage.core.memory import host_memory, resident_memory


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
        return MemoryUsage(resident_memory(), host_memory())
    free, total = torch.cuda.mem_get_info()
    return MemoryUsage(resident_memory(), host_memory(), int(total) - int(free), int(total))
