"""The pipeline as a checked, immutable graph."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType

from omnistage.core.errors import ConfigError, UnsupportedModalityError
from omnistage.core.types import Modality

RESERVED_NAMES = frozenset({"pipeline", "deployment", "limits"})
"""Not usable as stage names: `--set` takes them for sections."""

_STAGE_NAME = re.compile(r"[a-z][a-z0-9_]*")


def did_you_mean(name: str, choices: Iterable[str], *, limit: int = 1) -> str:
    """`did you mean X?` where something is near, `limit` of them at most, else the list of what is known."""
    names = list(choices)
    near = difflib.get_close_matches(name, names, n=limit, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(names) or 'none'}"


@dataclass(frozen=True, slots=True)
class Edge:
    """All that flows into one stage: the chunks of one or more sources, through one bridge."""

    source: tuple[str, ...]
    to: str
    bridge: str
    reads_hidden: bool = True
    """Whether the bridge may read hidden states of its sources."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A pipeline before it is checked."""

    stages: Mapping[str, Modality | None]
    edges: Sequence[Edge]
    entry: str | None


@dataclass(frozen=True, slots=True)
class PipelineGraph:
    """Made by `build`, which checks it; all orders are stable."""

    order: tuple[str, ...]
    """Stages, each after all of its sources."""
    entry: str
    outputs: Mapping[Modality, str]
    """The stage that gives each modality."""
    incoming: Mapping[str, Edge]
    """The edge into each stage but the entry."""

    @classmethod
    def build(
        cls, stages: Mapping[str, Modality | None], edges: Sequence[Edge] = (), entry: str | None = None
    ) -> PipelineGraph:
        """Check a pipeline as a whole: its stages with what each one outputs, and the edges between them.

        Raises `ConfigError` naming the path at fault in a configuration, and the fix.
        """
        pipeline = _Plan(stages, edges, entry)
        _check_stage_names(pipeline)
        incoming = _check_edges(pipeline)
        order = _topological_order(pipeline, incoming)
        entry = _find_entry(pipeline, incoming)
        _check_reachable(pipeline, incoming, entry)
        outputs = _find_outputs(pipeline)
        graph = cls(order, entry, MappingProxyType(outputs), MappingProxyType(incoming))
        live = graph.ancestors(outputs.values())
        for name in reversed(order):  # the end of a dead branch is where to fix it
            if name not in live:
                raise ConfigError(
                    "leads to no output: set `output` on it, add an edge from it, or remove it",
                    param=f"pipeline.stages.{name}",
                )
        return graph

    @property
    def lead(self) -> str:
        """The stage that gives text, else the entry: requests are sampled, counted and ended by it."""
        return self.outputs.get(Modality.TEXT, self.entry)

    def sources(self, stage: str) -> tuple[str, ...]:
        """The stages whose chunks the edge into `stage` reads; empty for the entry."""
        edge = self.incoming.get(stage)
        return () if edge is None else edge.source

    def targets(self, stage: str) -> tuple[str, ...]:
        """The stages that read `stage`'s chunks, in topological order."""
        return tuple(name for name in self.order if stage in self.sources(name))

    def bridge(self, stage: str) -> str | None:
        """Name of the bridge on the edge into `stage`; None for the entry."""
        edge = self.incoming.get(stage)
        return None if edge is None else edge.bridge

    def stages_for(self, modalities: Collection[Modality]) -> frozenset[str]:
        """The stages that must run to give `modalities`: those that emit them and all their ancestors."""
        outputs = ", ".join(self.outputs)
        if not modalities:
            raise UnsupportedModalityError(f"is empty; ask for at least one of {outputs}", param="modalities")
        unknown = [modality for modality in modalities if modality not in self.outputs]
        if unknown:
            raise UnsupportedModalityError(
                f"this model has no {', '.join(unknown)} output; its outputs: {outputs}", param="modalities"
            )
        return self.ancestors(self.outputs[modality] for modality in modalities)

    def ancestors(self, stages: Iterable[str]) -> frozenset[str]:
        """`stages` and everything upstream of them."""
        visited: set[str] = set()
        pending = list(stages)
        while pending:
            name = pending.pop()
            if name not in visited:
                visited.add(name)
                pending.extend(self.sources(name))
        return frozenset(visited)


def _check_stage_names(pipeline: _Plan) -> None:
    if not pipeline.stages:
        raise ConfigError("is empty; name at least one stage", param="pipeline.stages")
    for name in pipeline.stages:
        path = f"pipeline.stages.{name}"
        if name in RESERVED_NAMES:
            raise ConfigError(f"{name!r} is the name of a section; call the stage something else", param=path)
        if not _STAGE_NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not a stage name; use lower-case letters, digits and _, starting with a letter",
                param=path,
            )


def _check_edges(pipeline: _Plan) -> dict[str, Edge]:
    """The edge into each stage that has one."""
    incoming: dict[str, Edge] = {}
    for index, edge in enumerate(pipeline.edges):
        path = f"pipeline.edges.{index}"
        for key, names in (("from", edge.source), ("to", (edge.to,))):
            for name in names:
                if name not in pipeline.stages:
                    raise ConfigError(
                        f"there is no stage {name!r}; {did_you_mean(name, pipeline.stages)}", param=f"{path}.{key}"
                    )
        if edge.to in edge.source:
            raise ConfigError(f"leads from {edge.to!r} to itself; remove that source", param=path)
        if len(set(edge.source)) != len(edge.source):
            raise ConfigError("names a stage twice; list each source once", param=f"{path}.from")
        if edge.to in incoming:
            both = ", ".join(dict.fromkeys((*incoming[edge.to].source, *edge.source)))
            raise ConfigError(
                f"is the second edge to {edge.to!r}; write one edge with `from: [{both}]` and one bridge", param=path
            )
        incoming[edge.to] = edge
    return incoming


def _topological_order(pipeline: _Plan, incoming: Mapping[str, Edge]) -> tuple[str, ...]:
    declared = list(pipeline.stages)
    sorter = TopologicalSorter({name: incoming[name].source if name in incoming else () for name in declared})
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise ConfigError(
            f"stages feed each other in a cycle: {cycle}; remove one of these edges", param="pipeline.edges"
        ) from None
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=declared.index)
        order += ready
        sorter.done(*ready)
    return tuple(order)


def _find_entry(pipeline: _Plan, incoming: Mapping[str, Edge]) -> str:
    roots = [name for name in pipeline.stages if name not in incoming]
    entry = pipeline.entry
    if entry is None:
        if len(roots) > 1:
            raise ConfigError(
                f"no edge leads to {', '.join(roots)}, so the entry is not clear; "
                "set pipeline.entry and add edges to the others",
                param="pipeline.entry",
            )
        return roots[0]
    if entry not in pipeline.stages:
        raise ConfigError(
            f"there is no stage {entry!r}; {did_you_mean(entry, pipeline.stages)}", param="pipeline.entry"
        )
    if entry in incoming:
        raise ConfigError(
            f"an edge from {', '.join(incoming[entry].source)} leads to {entry!r}; remove that edge, or enter at "
            f"{', '.join(roots)}",
            param="pipeline.entry",
        )
    return entry


def _check_reachable(pipeline: _Plan, incoming: Mapping[str, Edge], entry: str) -> None:
    # Without cycles every stage hangs on some root: only a root other than the entry can be out of reach.
    for name in pipeline.stages:
        if name not in incoming and name != entry:
            raise ConfigError(
                f"is not reached from the entry {entry!r}; add an edge to it or remove it",
                param=f"pipeline.stages.{name}",
            )


def _find_outputs(pipeline: _Plan) -> dict[Modality, str]:
    outputs: dict[Modality, str] = {}
    for name, output in pipeline.stages.items():
        if output is None:
            continue
        if output in outputs:
            raise ConfigError(
                f"{outputs[output]!r} gives {output} already; remove `output` from one of the two",
                param=f"pipeline.stages.{name}.output",
            )
        outputs[output] = name
    if not outputs:
        kinds = ", ".join(Modality)
        raise ConfigError(
            f"no stage has an output; set `output` on the last stage to one of {kinds}", param="pipeline.stages"
        )
    return outputs
