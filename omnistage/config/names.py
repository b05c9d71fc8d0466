"""Builds the graph of a configured pipeline and checks its registry names."""

from __future__ import annotations

import re

from omnistage.config.schema import PipelineConfig
from omnistage.core.errors import ConfigError
from omnistage.core.graph import Edge, PipelineGraph, did_you_mean
from omnistage.core.registry import Registry

_REGISTRY_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


def graph_of(pipeline: PipelineConfig) -> PipelineGraph:
    """The checked graph of a configured pipeline."""
    outputs = {name: stage.output for name, stage in pipeline.stages.items()}
    edges = [Edge(edge.source, edge.to, edge.bridge) for edge in pipeline.edges]
    return PipelineGraph.build(outputs, edges, pipeline.entry)


def check_names(pipeline: PipelineConfig, registry: Registry) -> None:
    """Raise unless every component and bridge is registered. Nothing is ever imported by its name."""
    for name, stage in pipeline.stages.items():
        _check_registered("component", stage.component, registry.component_names(), f"pipeline.stages.{name}.component")
    for index, edge in enumerate(pipeline.edges):
        _check_registered("bridge", edge.bridge, registry.bridge_names(), f"pipeline.edges.{index}.bridge")


def _check_registered(kind: str, name: str, known: list[str], path: str) -> None:
    if not _REGISTRY_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} looks like an import path or a file; code is never imported from a configuration, "
            f"so register the {kind} and give its registry name; {did_you_mean(name, known, limit=3)}",
            param=path,
        )
    if name not in known:
        near = did_you_mean(name, known, limit=3)
        raise ConfigError(
            f"unknown {kind} {name!r} (a registry name; import paths are never followed); {near}", param=path
        )
