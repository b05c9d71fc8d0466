"""What a stage needs of a device's memory, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields

GIB = 2**30


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage by what they are for. `caches` are bounds that fill up with use."""

    weights: int = 0
    kv_cache: int = 0
    activations: int = 0
    """The peak of the largest step, beyond what stays."""
    media: int = 0
    """What encoding media takes more than that; it never runs beside a step."""
    graphs: int = 0
    """CUDA graphs: static buffers, outputs that are kept, what the driver takes. On the CPU TorchScript programs."""
    caches: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def gib(size: float) -> str:
    """For people: `12.3 GiB`, `240 MiB`."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"
