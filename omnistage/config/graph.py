"""Builds the graph of a configured pipeline and checks its registry names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from omnistage.config.deployment import GroupConfig
from omnistage.config.remote import RemoteStageConfig
from omnistage.config.schema import PipelineConfig, StageConfig
from omnistage.core.errors import ConfigError
from omnistage.core.graph import Edge, PipelineGraph, did_you_mean
from omnistage.core.registry import Registry
from omnistage.core.validation import short_repr

_REGISTRY_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


_GROUP_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def graph_of(pipeline: PipelineConfig, text_bridges: Collection[str] = ()) -> PipelineGraph:
    """The checked graph of a configured pipeline. `text_bridges` never read hidden states."""
    outputs = {name: stage.output for name, stage in pipeline.stages.items()}
    edges = [Edge(edge.source, edge.to, edge.bridge, edge.bridge not in text_bridges) for edge in pipeline.edges]
    return PipelineGraph.build(outputs, edges, pipeline.entry)


def check_names(pipeline: PipelineConfig, registry: Registry) -> None:
    """Raise unless every component and bridge is registered. Nothing is ever imported by its name."""
    for name, stage in pipeline.stages.items():
        if isinstance(stage, RemoteStageConfig):
            continue  # it has none
        _check_registered("component", stage.component, registry.component_names(), f"pipeline.stages.{name}.component")
    for index, edge in enumerate(pipeline.edges):
        _check_registered("bridge", edge.bridge, registry.bridge_names(), f"pipeline.edges.{index}.bridge")
        remote = [name for name in edge.source if isinstance(pipeline.stages[name], RemoteStageConfig)]
        if remote and edge.bridge not in registry.text_bridges():
            raise ConfigError(
                f"stage {edge.to!r} reads hidden states of {remote[0]!r} (bridge {edge.bridge!r}), and a stage on a "
                f"remote server gives text only; run {remote[0]!r} on the autoregressive engine, or take {edge.to!r} "
                "out of the pipeline",
                param=f"pipeline.edges.{index}",
            )


def check_placement(placement: Mapping[str, GroupConfig], stages: Mapping[str, StageConfig]) -> None:
    """Raise unless every group has stages of the pipeline, and no two groups the same one."""
    paths: dict[str, str] = {}
    for name, group in placement.items():
        path = f"deployment.placement.{name}.stages"
        if not _GROUP_NAME.fullmatch(name):
            raise ConfigError(
                f"{short_repr(name)} is not a name of a group; use letters, digits, - and _",
                param="deployment.placement",
            )
        for stage in group.stages:
            if stage not in stages:
                raise ConfigError(f"there is no stage {short_repr(stage)}; {did_you_mean(stage, stages)}", param=path)
            if isinstance(stages[stage], RemoteStageConfig) and group.kind != "inline":
                raise ConfigError(f"stage {stage!r} runs on a server of its own; take it out of the group", param=path)
            if stage in paths:
                where = "twice" if paths[stage] == name else f"in group {paths[stage]!r} as well"
                raise ConfigError(f"stage {stage!r} is {where}; name it in one group, once", param=path)
            paths[stage] = name


def _check_registered(kind: str, name: str, names: list[str], path: str) -> None:
    if not _REGISTRY_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} looks like an import path or a file; code is never imported from a configuration, "
            f"so register the {kind} and give its registry name; {did_you_mean(name, names, limit=3)}",
            param=path,
        )
    if name not in names:
        near = did_you_mean(name, names, limit=3)
        raise ConfigError(
            f"unknown {kind} {name!r} (a registry name; import paths are never followed); {near}", param=path
        )
