"""The composition root of a process that runs some stages of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omnistage.config import OmniEngineArgs, ResolvedConfig, resolve
from omnistage.core.family import Bridge
from omnistage.core.graph import PipelineGraph
from omnistage.core.registry import Registry
from omnistage.core.stage import Stage
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import Report, bridges_of, build_stages, load_plan
from omnistage.pipeline.phases import PhaseTimes
from omnistage.placement.devices import place
from omnistage.placement.messages import Start
from omnistage.placement.needs import NeedsReader


@dataclass(frozen=True, slots=True)
class GroupParts:
    """All that a process needs to run its stages."""

    graph: PipelineGraph
    """Of the whole model."""
    stages: Mapping[str, Stage]
    bridges: Mapping[str, Bridge]
    max_step_seconds: float | None


def build_group(
    args: OmniEngineArgs, start: Start, report: Report | None = None, *, registry: Registry = REGISTRY
) -> GroupParts:
    """Build the stages that `start` names, from the arguments of the service itself."""
    resolved = resolve(args, registry=registry)
    here = _as_started(resolved, start)
    stages = build_stages(here, load_plan(here, registry), registry, PhaseTimes(), report, visible=False)
    return GroupParts(
        resolved.graph,
        stages.stages,
        bridges_of(resolved.graph, registry),
        resolved.config.deployment.max_step_seconds,
    )


def prepare_group(arguments: str, stages: Sequence[str], *, registry: Registry = REGISTRY) -> None:
    """Build the networks of these stages without data: what that reads and imports, forks of this process have.

    `arguments` are `OmniEngineArgs` as JSON. Does nothing where there are GPUs, which a fork cannot use after its
    parent, and where the family builds nothing without data.
    """
    import torch

    if torch.cuda.is_available():
        return
    here = resolve(OmniEngineArgs.model_validate_json(arguments), registry=registry).restricted(stages)
    if not registry.family(here.model.family).plans_memory:
        return
    deployment, threads = here.config.deployment, torch.get_num_threads()
    reader = NeedsReader(here.model, registry, deployment.dtype)
    torch.set_num_threads(1)  # more would be started, which forks do not have
    try:
        for name, stage in here.config.pipeline.local_stages.items():
            with torch.device("cpu"):
                reader.outline(name, stage, *place(name, stage, deployment))
    finally:
        torch.set_num_threads(threads)


def _as_started(resolved: ResolvedConfig, start: Start) -> ResolvedConfig:
    """With the device and the threads of this process."""
    here = resolved.restricted(start.stages)
    pipeline, deployment = here.config.pipeline, here.config.deployment
    if start.device is not None:
        stages = {name: stage.model_copy(update={"device": start.device}) for name, stage in pipeline.stages.items()}
        pipeline = pipeline.model_copy(update={"stages": stages})
    if start.torch_threads is not None:
        deployment = deployment.model_copy(update={"torch_threads": start.torch_threads})
    return replace(here, config=here.config.model_copy(update={"pipeline": pipeline, "deployment": deployment}))
