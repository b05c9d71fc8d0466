"""What a stage took of a GPU, beside what was planned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from omnistage.core.memory import resident_memory
from omnistage.core.stage_memory import gib
from omnistage.placement.memory_plan import PlannedStage

logger = logging.getLogger(__name__)

_REPORTED_BYTES = 256 << 20
"""Fewer weights are there at once."""
_LOOK_SECONDS = 0.25
WEIGHTS_SHARE = 0.6
"""Of a stage's start; what follows takes the rest."""


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


class LoadingProgress:
    """Reports how much of a stage's weights has come, by what its device holds more than before.

    Libraries that read weights say nothing meanwhile, so that a thread looks now and then.
    """

    def __init__(self, planned: PlannedStage | None, report: Callable[[str, float], None] | None) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if report is not None and planned is not None and planned.memory.weights >= _REPORTED_BYTES:
            self._thread = threading.Thread(
                target=self._watch, args=(planned, report), name="loading-progress", daemon=True
            )

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()  # nothing is reported of the weights once they are there

    def _watch(self, planned: PlannedStage, report: Callable[[str, float], None]) -> None:
        before = _allocated_bytes(planned.device)
        while not self._stop.wait(_LOOK_SECONDS):
            share = (_allocated_bytes(planned.device) - before) / planned.memory.weights
            report("weights", WEIGHTS_SHARE * min(max(share, 0.0), 1.0))


def _allocated_bytes(device: str) -> int:
    """Bytes on a device: torch's, or for the CPU all of this process."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.memory_allocated(device)
    return resident_memory() or 0


def meter_for(planned: PlannedStage | None) -> Meter | None:
    """A meter for a stage on a GPU; None elsewhere, where nothing is measured and nothing has to warm up."""
    return Meter(planned) if planned is not None and planned.device.startswith("cuda") else None
