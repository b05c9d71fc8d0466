"""The memory plan: what every stage will take of its device, and how many requests of which length fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from omnistage.config import DeploymentConfig, LocalStageConfig, RemoteStageConfig, ResolvedConfig
from omnistage.core.errors import CapacityError
from omnistage.core.registry import Registry
from omnistage.core.stage_memory import GIB, StageMemory, gib
from omnistage.placement.needs import AutoregressiveNeeds, NeedsReader, StageNeeds

if TYPE_CHECKING:
    import torch

CUDA_CONTEXT = 576 << 20
"""What the driver and the libraries take of a GPU before a tensor is there."""
_MIN_RESERVE, _MAX_RESERVE = 512 << 20, 1 << 30
_RESERVE_SHARE = 0.03
"""Workspaces of libraries, and what the allocator loses between blocks."""
_MIN_CONTEXT = 256
_MAX_MOVES = 2
"""Stages that are proposed to run elsewhere."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    name: str
    device: str
    dtype: str
    memory: StageMemory
    estimated: bool
    kv_tokens: int | None
    """Tokens in the KV cache; None where there is none."""
    max_length: int | None
    """Tokens of the longest sequence."""
    settings: Mapping[str, int]
    """Of the stage's budget, which keep it within the plan."""


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """One device with all that it holds."""

    name: str
    available: int | None
    """Bytes for everything below; None: unknown."""
    context: int
    reserve: int
    stages: tuple[PlannedStage, ...]

    @property
    def bytes_needed(self) -> int:
        return self.context + self.reserve + sum(stage.memory.total for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.available is None or self.bytes_needed <= self.available


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A model on its devices. `concurrency` and `context` are what fits of what was asked for."""

    model: str
    family: str
    request: tuple[int, int]
    """(requests at once, tokens of each)"""
    concurrency: int
    context: int
    devices: tuple[PlannedDevice, ...]
    advice: tuple[str, ...] = ()
    """What would make it fit, where it does not."""
    remote: Mapping[str, str] = field(default_factory=dict)
    """Stages on other servers, which plan their own memory, and the addresses of these."""

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    @property
    def stages(self) -> Mapping[str, PlannedStage]:
        return {stage.name: stage for device in self.devices for stage in device.stages}

    @property
    def has_context(self) -> bool:
        """Whether any stage has a KV cache."""
        return any(stage.kv_tokens is not None for stage in self.stages.values())

    def check(self) -> None:
        """Raise `CapacityError` with the reason and what helps, where it does not fit.

        What is only estimated refuses nothing unless its weights alone are too large.
        """
        for device in self.devices:
            weights = sum(stage.memory.weights for stage in device.stages)
            if device.fits or device.available is None:
                continue
            if any(stage.estimated for stage in device.stages) and device.context + weights <= device.available:
                continue
            raise CapacityError(
                f"{self.model} does not fit: for one request it needs {gib(device.bytes_needed)} on {device.name}, of "
                f"which {gib(weights)} are weights, and {gib(device.available)} are available; "
                + "; or ".join(self.advice)
            )

    def applied(self, name: str, stage: LocalStageConfig) -> LocalStageConfig:
        """A stage's configuration with what the plan settles."""
        settings = self.stages[name].settings
        return stage.model_copy(update={"budget": stage.budget.model_copy(update=dict(settings))})


Placement = Callable[[str, LocalStageConfig], "tuple[torch.device, torch.dtype]"]
"""Device and dtype of a stage."""


def make_plan(
    resolved: ResolvedConfig, registry: Registry, place: Placement, available: Mapping[str, int | None]
) -> MemoryPlan:
    """The plan of a model. `available` is the memory for this process by device, None where it is unknown."""
    deployment = resolved.config.deployment
    reader = NeedsReader(resolved.model, registry, deployment.dtype)
    needs = []
    stages = resolved.config.pipeline.local_stages
    for name in (name for name in resolved.graph.order if name in stages):
        stage = stages[name]
        needs.append(reader.read(name, stage, *place(name, stage)))
    planner = _Planner(resolved, needs, available)
    return planner.plan(deployment)


class _Planner:
    def __init__(
        self, resolved: ResolvedConfig, needs: Sequence[StageNeeds], available: Mapping[str, int | None]
    ) -> None:
        self._resolved = resolved
        self._needs = needs
        self._available = available
        self._by_device: dict[str, list[StageNeeds]] = {}
        for each in needs:
            self._by_device.setdefault(each.device, []).append(each)

    def plan(self, deployment: DeploymentConfig) -> MemoryPlan:
        cached = [each.needs for each in self._needs if isinstance(each, AutoregressiveNeeds)]
        longest = max((needs.max_length for needs in cached), default=deployment.context)
        most = min((needs.max_running for needs in cached), default=deployment.concurrency)
        limits = (min(deployment.concurrency, most), min(deployment.context, longest))
        concurrency, context = self._largest(*limits)
        reduced = concurrency < limits[0]
        devices = tuple(
            self._device(name, stages, concurrency, context, reduced) for name, stages in self._by_device.items()
        )
        stages = self._resolved.config.pipeline.stages
        plan = MemoryPlan(
            self._resolved.model.name,
            self._resolved.model.family,
            limits,
            concurrency,
            context,
            devices,
            remote={name: stage.url for name, stage in stages.items() if isinstance(stage, RemoteStageConfig)},
        )
        return plan if plan.fits else replace(plan, advice=tuple(self._advice(plan)))

    def _largest(self, concurrency: int, context: int) -> tuple[int, int]:
        """The most requests, up to those asked for, that fit; where not even one does, one of fewer tokens."""
        count = bisect_left(range(concurrency), True, key=lambda below: not self._fits(below + 1, context))
        if count:
            return count, context
        length = context
        while length > _MIN_CONTEXT:
            length //= 2
            if self._fits(1, length):
                return 1, length
        return 1, context

    def _fits(self, concurrency: int, context: int) -> bool:
        return all(self._room(name, stages, concurrency, context) >= 0 for name, stages in self._by_device.items())

    def _room(self, name: str, stages: Sequence[StageNeeds], concurrency: int, context: int) -> int:
        """Bytes that are left on a device; negative where it is too small."""
        available = self._available[name]
        if available is None:
            return 1 << 62
        total = sum(stage.at(concurrency, context).total for stage in stages)
        return available - sum(self._overhead(name)) - total

    def _overhead(self, name: str) -> tuple[int, int]:
        """Of the driver, and the reserve."""
        if not name.startswith("cuda"):
            return 0, 0
        available = self._available[name] or 0
        return CUDA_CONTEXT, min(max(_MIN_RESERVE, int(available * _RESERVE_SHARE)), _MAX_RESERVE)

    def _device(
        self, name: str, stages: Sequence[StageNeeds], concurrency: int, context: int, reduced: bool
    ) -> PlannedDevice:
        room = self._room(name, stages, concurrency, context)
        planned = []
        for needs in stages:
            memory = needs.at(concurrency, context)
            tokens = max_length = None
            if isinstance(needs, AutoregressiveNeeds):
                # One request may be longer than those that were planned for, where there is room for it.
                memory_grown = needs.grow(memory)
                if needs.host_limit is None and memory_grown.total - memory.total <= room:
                    room -= memory_grown.total - memory.total
                    memory = memory_grown
                tokens = needs.tokens(memory)
                max_length = min(tokens, needs.needs.max_length)
            settings = needs.settings(memory, concurrency, reduced=reduced)
            planned.append(
                PlannedStage(needs.name, name, needs.dtype, memory, needs.estimated, tokens, max_length, settings)
            )
        return PlannedDevice(name, self._available[name], *self._overhead(name), tuple(planned))

    # ------------------------------------------------------------------------------------------------ advice

    def _advice(self, plan: MemoryPlan) -> list[str]:
        """Ways to make it fit, the least costly first."""
        advice = []
        for device in plan.devices:
            if device.fits or device.available is None:
                continue
            excess = device.bytes_needed - device.available
            config = self._resolved.config
            halved = [s for s in device.stages if s.dtype == "float32" and config.pipeline.stages[s.name].dtype is None]
            saved = sum(stage.memory.weights // 2 for stage in halved)
            if device.name.startswith("cuda") and saved >= excess:
                advice.append(f"use --dtype bfloat16, which halves the weights (saves {gib(saved)})")
            advice += _moves(device, excess)
            if device.name.startswith("cuda"):
                advice.append(f"use a GPU with at least {-(-device.bytes_needed // GIB)} GiB")
                count = _devices_needed(device)
                if count is not None:
                    advice.append(f"spread the stages over {count} such GPUs with --set STAGE.device=cuda:N")
            else:
                advice.append(f"use a machine with {gib(device.bytes_needed)} of free memory, or a smaller model")
        return advice


def _moves(device: PlannedDevice, excess: int) -> Iterator[str]:
    """Stages that would have to run elsewhere: single ones, or all but the largest."""
    stages = sorted(device.stages, key=lambda stage: stage.memory.total)
    moves = [[stage] for stage in stages if stage.memory.total >= excess][:_MAX_MOVES]
    if moves == [stages[-1:]]:
        moves.insert(0, stages[:-1])
    for move in moves if len(stages) > 1 else ():
        saved = sum(stage.memory.total for stage in move)
        if saved >= excess:
            settings = " ".join(f"--set {stage.name}.device=cpu" for stage in move)
            names = " and ".join(stage.name for stage in move)
            yield f"run {names} on the CPU or another GPU ({settings}; saves {gib(saved)})"


def _devices_needed(device: PlannedDevice) -> int | None:
    """How many devices of this size hold all stages, each on one of them; None: a stage is larger than a device."""
    if device.available is None or len(device.stages) < 2:
        return None
    size = device.available - device.context - device.reserve
    rooms: list[int] = []
    for size_needed in sorted((stage.memory.total for stage in device.stages), reverse=True):
        if size_needed > size:
            return None
        for index, room in enumerate(rooms):
            if size_needed <= room:
                rooms[index] -= size_needed
                break
        else:
            rooms.append(size - size_needed)
    return len(rooms)
