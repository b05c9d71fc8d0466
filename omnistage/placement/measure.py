"""What a stage took of a GPU, beside what was planned."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from omnistage.core.stage_memory import gib
from omnistage.placement.memory_plan import PlannedStage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """Bytes of torch's allocator."""

    planned: PlannedStage
    loaded: int
    """After loading: weights, KV cache, captured graphs."""
    peak: int
    """The most that was taken while it warmed up."""

    def __str__(self) -> str:
        memory = self.planned.memory
        return (
            f"{self.planned.name}: planned {gib(memory.total)}, of which weights and KV cache "
            f"{gib(memory.weights + memory.kv_cache)}; measured {gib(self.loaded)} after loading, {gib(self.peak)} at "
            "the peak of the warm-up"
        )


class Meter:
    """Reads torch's allocator around the building of one stage."""

    def __init__(self, planned: PlannedStage) -> None:
        import torch

        self._planned = planned
        self._device = torch.device(planned.device)
        self._before = torch.cuda.memory_allocated(self._device)
        self._loaded = 0

    def mark_loaded(self) -> None:
        """The stage is built; what is taken from now on is the warm-up's."""
        import torch

        torch.cuda.synchronize(self._device)
        self._loaded = torch.cuda.memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)

    def result(self) -> MeasuredStage:
        import torch

        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        measured = MeasuredStage(self._planned, self._loaded, peak)
        logger.info("memory of %s", measured)
        return measured


def meter_for(planned: PlannedStage | None) -> Meter | None:
    """A meter for a stage on a GPU; None elsewhere, where nothing is measured and nothing has to warm up."""
    return Meter(planned) if planned is not None and planned.device.startswith("cuda") else None
