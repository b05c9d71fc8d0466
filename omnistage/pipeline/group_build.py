"""The composition root of a process that runs some stages of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omnistage.config import OmniEngineArgs, ResolvedConfig, resolve
from omnistage.core.family import Bridge
from omnistage.core.graph import PipelineGraph
from omnistage.core.registry import Registry
from omnistage.core.stage import Stage
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import Report, bridges_of, build_stages, load_plan
from omnistage.pipeline.phases import PhaseTimes
from omnistage.placement.messages import Start


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
