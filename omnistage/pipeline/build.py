"""From a resolved configuration to running parts: where each stage runs, its component, its engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from omnistage.config import (
    ARStageConfig,
    DeploymentConfig,
    DiffusionStageConfig,
    GroupConfig,
    LimitsConfig,
    OmniEngineArgs,
    OmniModelConfig,
    RemoteStageConfig,
    ResolvedConfig,
    StageConfig,
    resolve,
)
from omnistage.core.family import AnyProcessor, Bridge, LoadContext, WholePrompts
from omnistage.core.graph import PipelineGraph
from omnistage.core.memory import free_host_memory
from omnistage.core.params import StageParams
from omnistage.core.registry import Registry
from omnistage.core.stage import Stage
from omnistage.core.threads import usable_cores
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.adapters import adapter_library
from omnistage.pipeline.engine_stage import engine_stage
from omnistage.pipeline.hosts import hosts_of
from omnistage.pipeline.links import links_within
from omnistage.pipeline.load_errors import enough_memory, reading_checkpoint
from omnistage.pipeline.phases import PhaseTimes
from omnistage.pipeline.quantised import check_quantised, load_quantised, make_quantiser
from omnistage.pipeline.supervision import Rebuild
from omnistage.placement.devices import available_memory, limit_process, place, place_anywhere
from omnistage.placement.group import StageGroup
from omnistage.placement.launch import make_group
from omnistage.placement.measure import WEIGHTS_SHARE, LoadingProgress, MeasuredStage, meter_for
from omnistage.placement.memory_plan import MemoryPlan, PlannedStage, make_plan
from omnistage.placement.needs import weights_on_disk

if TYPE_CHECKING:
    from omnistage.engines.adapters.library import AdapterLibrary
    from omnistage.engines.quantisation.transform import Quantiser

_PLANNED_SHARE = 0.5
"""Models whose weights take less of the free host memory are put there without a plan."""

_WARM_UP_SHARE = 0.85

Report = Callable[[str, float], None]
"""Called with what is being done for a stage and the share of its start that is done."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """All that `Omni` and `AsyncOmni` need to run a model."""

    graph: PipelineGraph
    stages: Mapping[str, Stage]
    bridges: Mapping[str, Bridge]
    defaults: Mapping[str, StageParams]
    processor: AnyProcessor
    deployment: DeploymentConfig
    limits: LimitsConfig
    model: str = ""
    """Its name, as pictures carry it."""
    rebuilds: Mapping[str, Rebuild] = field(default_factory=dict)
    """For each stage what builds it anew after it has failed."""
    memory: tuple[MeasuredStage, ...] = ()
    """Of the stages on GPUs: what was planned, and what they took."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    """Of the start."""
    groups: tuple[StageGroup, ...] = ()
    """Of stages that run in processes of their own."""
    links: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Those that follow a stage in its process, and get their input there."""
    adapters: Mapping[str, AdapterLibrary] = field(default_factory=dict)
    """Of the stages in this process that take adapters."""


def build_parts(args: OmniEngineArgs, *, progress: bool | Report = True, registry: Registry = REGISTRY) -> EngineParts:
    """Resolve the configuration and load every stage; stages that were loaded are closed if a later one fails.

    On a terminal there are progress bars unless `progress` is False; where it is a function it is told as well.
    """
    times = PhaseTimes()
    times.begin("configuration")
    resolved = resolve(args, registry=registry)
    config, graph = resolved.config, resolved.graph
    remote_groups = {name: group for name, group in config.deployment.placement.items() if group.kind != "inline"}
    elsewhere = {stage for group in remote_groups.values() for stage in group.stages}
    here = resolved.restricted(name for name in graph.order if name not in elsewhere)
    times.begin("memory plan")
    plan = load_plan(here, registry)
    times.begin("processor")
    with reading_checkpoint(resolved.model.folder, "the processor"):
        processor = registry.family(resolved.model.family).processor(resolved.model)
    report = progress if callable(progress) else None
    with ExitStack() as undo:
        groups = [_spawn_group(name, group, args, resolved, undo) for name, group in remote_groups.items()]
        in_process = build_stages(here, plan, registry, times, report, visible=progress is not False)
        stages = dict(in_process.stages)
        for stage in in_process.stages.values():
            undo.callback(stage.close)
        for group in groups:
            times.begin(f"group {group.name}")
            group.start(report)
            times.end()
            stages |= group.stages
        entry = stages[graph.order[0]].stats().extra
        if isinstance(processor, WholePrompts) and entry.get("whole_media"):
            processor.use_whole_prompts(rows=not (entry["one_by_one"] or entry["in_groups"]))
        undo.pop_all()
    return EngineParts(
        graph,
        {name: stages[name] for name in graph.order},
        bridges_of(graph, registry),
        {name: stage.params for name, stage in config.pipeline.stages.items()},
        processor,
        config.deployment,
        config.limits,
        resolved.model.name,
        in_process.rebuilds,
        in_process.memory,
        times,
        tuple(groups),
        {name: targets for group in groups for name, targets in links_within(graph, group.stages).items()},
        in_process.adapters,
    )


def _spawn_group(
    name: str, group: GroupConfig, args: OmniEngineArgs, resolved: ResolvedConfig, undo: ExitStack
) -> StageGroup:
    """The processes of a group, which will build its stages from the same arguments."""
    configs = resolved.config.pipeline.stages
    stages = {stage: type(configs[stage].params) for stage in resolved.graph.order if stage in group.stages}
    deployment = resolved.config.deployment
    threads = _torch_threads(group, deployment)
    processes = make_group(name, group, stages, args, *hosts_of(group, deployment), threads)
    for stage in processes.stages.values():
        undo.callback(stage.close)
    return processes


def _torch_threads(group: GroupConfig, deployment: DeploymentConfig) -> int | None:
    """Of each process of a group: replicas on one machine share its cores.

    With torch's choice each would have a thread for every core, which then wait for each other behind every operator.
    """
    threads = group.torch_threads or deployment.torch_threads
    if threads is None and group.kind == "process" and group.replicas > 1:
        return max(1, usable_cores() // group.replicas)
    return threads


def bridges_of(graph: PipelineGraph, registry: Registry) -> dict[str, Bridge]:
    """The bridge into each stage that has sources."""
    names = {name: graph.bridge(name) for name in graph.order}
    return {name: registry.bridge(bridge) for name, bridge in names.items() if bridge is not None}


@dataclass(frozen=True, slots=True)
class BuiltStages:
    stages: Mapping[str, Stage]
    rebuilds: Mapping[str, Rebuild]
    memory: tuple[MeasuredStage, ...]
    adapters: Mapping[str, AdapterLibrary]


def build_stages(
    resolved: ResolvedConfig,
    plan: MemoryPlan | None,
    registry: Registry,
    times: PhaseTimes,
    report: Report | None,
    *,
    visible: bool,
) -> BuiltStages:
    """Load all stages of a configuration into this process."""
    deployment, order, stage_cfgs = resolved.config.deployment, resolved.graph.order, resolved.config.pipeline.stages
    if deployment.torch_threads is not None:
        import torch

        torch.set_num_threads(deployment.torch_threads)
    if plan is not None:
        local = resolved.config.pipeline.local_stages
        stage_cfgs = {**stage_cfgs, **{name: plan.applied(name, stage) for name, stage in local.items()}}
    factories = {name: StageFactory(resolved.model, name, stage_cfgs[name], deployment, registry) for name in order}
    stages, memory = _build_stages(factories, plan, report, times, visible=visible)
    check_quantised([factory.quantiser for factory in factories.values()], stages, deployment)
    adapters = {name: each.adapters for name, each in factories.items() if each.adapters is not None}
    rebuilds = {name: factory.rebuild for name, factory in factories.items()}
    return BuiltStages(stages, rebuilds, tuple(memory), adapters)


def load_plan(resolved: ResolvedConfig, registry: Registry) -> MemoryPlan | None:
    """The plan that stages are loaded by; None in host memory that is far larger than the model, or without stages.

    Raises `CapacityError` where the model cannot fit.
    """
    deployment, stages = resolved.config.deployment, resolved.config.pipeline.local_stages
    placements = [place(name, stage, deployment) for name, stage in stages.items()]
    for device, _dtype in placements:
        limit_process(device, deployment)
    if all(device.type == "cpu" for device, _dtype in placements):
        item_size = max((dtype.itemsize for _device, dtype in placements), default=0)
        weights = weights_on_disk(resolved.model.folder, item_size)
        if weights < _PLANNED_SHARE * free_host_memory():
            return None
    plan = plan_memory(resolved, registry=registry)
    plan.check()
    return plan


def plan_memory(resolved: ResolvedConfig, *, registry: Registry = REGISTRY, anywhere: bool = False) -> MemoryPlan:
    """The memory plan of a model, from its configuration alone.

    `anywhere` is for another machine: whether its devices exist is not checked.
    """
    deployment = resolved.config.deployment
    place_stage = partial(place_anywhere if anywhere else place, deployment=deployment)
    stages = resolved.config.pipeline.local_stages
    devices = {str(place_stage(name, stage)[0]) for name, stage in stages.items()}
    available = {device: available_memory(device, deployment) for device in devices}
    with reading_checkpoint(resolved.model.folder, "the memory plan"):
        return make_plan(resolved, registry, place_stage, available)


def _build_stages(
    factories: Mapping[str, StageFactory],
    plan: MemoryPlan | None,
    notify: Report | None,
    times: PhaseTimes,
    *,
    visible: bool,
) -> tuple[dict[str, Stage], list[MeasuredStage]]:
    """The stages, and what those on a GPU took of it."""
    if plan is not None and any(factories[name].may_compile(planned) for name, planned in plan.stages.items()):
        from omnistage.engines.compiling import prepare_compiler

        compiler = prepare_compiler()
        for factory in factories.values():
            factory.compiler = compiler
    stages: dict[str, Stage] = {}
    measured: list[MeasuredStage] = []
    console = Console(stderr=True)
    hidden = not (visible and console.is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[doing]}"), TimeElapsedColumn())
    with ExitStack() as undo, Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        for name, factory in factories.items():
            task = bar.add_task(f"loading {name}", total=1.0, doing="")

            def report(doing: str, fraction: float, task: TaskID = task, name: str = name) -> None:
                if doing:
                    times.begin(f"{name}: {doing}")
                bar.update(task, completed=fraction, doing=doing)
                if notify is not None:
                    notify(f"{name}: {doing or 'loaded'}", fraction)

            planned = None if plan is None else plan.stages.get(name)
            meter = meter_for(planned)
            stage = factory.build(report, planned)
            undo.callback(stage.close)
            if meter is not None:
                meter.mark_loaded()
                report("warming up", _WARM_UP_SHARE)
                factory.warm_up(stage)
                measured.append(meter.result())
            stages[name] = stage
            times.end()
            report("", 1.0)
        undo.pop_all()
    return stages, measured


class StageFactory:
    """Builds one stage of a model, and builds it anew after it has failed."""

    def __init__(
        self,
        model: OmniModelConfig,
        name: str,
        stage_cfg: StageConfig,
        deployment: DeploymentConfig,
        registry: Registry,
    ) -> None:
        self._registry = registry
        self._component: object | None = None
        """Kept where a new stage can run it again: stages of the other engines close theirs."""
        self._keeps_component = isinstance(stage_cfg, ARStageConfig) and stage_cfg.ranks == 1
        self._planned: PlannedStage | None = None
        self._name = name
        self._on_gpu = (
            not isinstance(stage_cfg, RemoteStageConfig) and place(name, stage_cfg, deployment)[0].type == "cuda"
        )
        self._compiles = (
            isinstance(stage_cfg, ARStageConfig | DiffusionStageConfig) and stage_cfg.budget.compile is not False
        )
        self.compiler: threading.Thread | None = None
        """Imports what compiles while weights are read; engines and warm-ups may import parts of it, too."""
        self.quantiser = make_quantiser(model, name, stage_cfg, deployment, registry)
        self.adapters = adapter_library(name, deployment)
        """Kept when the stage is built anew: those that were loaded at run time are still there."""
        self._build = partial(build_stage, model, name, stage_cfg, deployment, load=self._load, adapters=self.adapters)

    def may_compile(self, planned: PlannedStage) -> bool:
        """Whether the stage's engine is likely to compile its network."""
        from omnistage.engines.compiling import MIN_BYTES

        return self._on_gpu and self._compiles and planned.memory.weights >= MIN_BYTES

    def build(self, progress: Report, planned: PlannedStage | None) -> Stage:
        self._planned = planned
        return self._build(progress)

    def warm_up(self, stage: Stage) -> None:
        """Run what requests will, on a GPU: compiled and captured code is there before the first comes."""
        if self._on_gpu:
            with enough_memory(self._name):
                stage.warm_up()

    def rebuild(self, attempts: int) -> Stage:
        """The first attempt uses the component that is loaded; the next load the checkpoint again."""
        import torch

        if attempts > 0:
            self._component = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # what the failed stage held: the new one plans with what is free
        with ExitStack() as undo:
            stage = self._build()
            undo.callback(stage.close)
            self.warm_up(stage)
            undo.pop_all()
        return stage

    def _load(self, context: LoadContext) -> object:
        component = self._component
        if component is None:
            with LoadingProgress(self._planned, context.progress):
                component = load_component(context, registry=self._registry, quantiser=self.quantiser)
            self._component = component if self._keeps_component else None
        if self.compiler is not None:
            self.compiler.join()
        return component


def build_stage(
    model: OmniModelConfig,
    name: str,
    stage_cfg: StageConfig,
    deployment: DeploymentConfig,
    progress: Report | None = None,
    *,
    registry: Registry = REGISTRY,
    load: Callable[[LoadContext], object] | None = None,
    adapters: AdapterLibrary | None = None,
) -> Stage:
    """Load a stage's component where the configuration says and put it on its engine."""
    if isinstance(stage_cfg, RemoteStageConfig):
        from omnistage.engines.remote.stage import RemoteStage

        return RemoteStage(name, stage_cfg, progress)
    load = load or partial(load_component, registry=registry)
    device, dtype = place(name, stage_cfg, deployment)
    context = LoadContext(
        model, name, stage_cfg, device, dtype, progress, deployment.torch_threads, requested_dtype=deployment.dtype
    )

    def build() -> Stage:
        if progress is not None:
            progress("weights", 0.0)
        if isinstance(stage_cfg, ARStageConfig | DiffusionStageConfig) and stage_cfg.ranks > 1:
            from omnistage.pipeline.ranks import parallel_stage

            with enough_memory(name):
                return parallel_stage(context, stage_cfg, load)
        component = load(context)
        if progress is not None:
            progress("compiling" if device.type == "cuda" else "engine", WEIGHTS_SHARE)
        with enough_memory(name):
            return engine_stage(name, stage_cfg, component, adapters)

    if device.type != "cpu":
        return build()
    from omnistage.engines.threads import set_single_threaded, set_threads, single_threaded

    with single_threaded() as threads:  # loading a model leaves no idle OpenMP team behind
        stage = build()
    if stage.uses_torch:
        stage.cpu_threads = threads
        stage.enter_thread = partial(set_threads, threads)
    else:
        stage.enter_thread = set_single_threaded
    return stage


def load_component(
    context: LoadContext, *, registry: Registry = REGISTRY, quantiser: Quantiser | None = None
) -> object:
    """A stage's component from its checkpoint; whatever goes wrong in there comes out as an `OmniError`."""
    with reading_checkpoint(context.model.folder, f"stage {context.stage_name!r}"):
        return load_quantised(context, registry.component(context.stage.component), registry, quantiser)
