"""Edges between stages of one worker process: folded there, so that what flows over them never leaves it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from omnistage.core.errors import BridgeError, OmniError
from omnistage.core.failures import internal_error
from omnistage.core.family import Bridge
from omnistage.core.graph import PipelineGraph
from omnistage.core.types import (
    Condition,
    FinishReason,
    Latents,
    LinkedStage,
    RequestInfo,
    StageChunk,
    StageFeed,
    StageInput,
    StagePayloadIn,
    TokenChunk,
)
from omnistage.pipeline.loop import StageLoop
from omnistage.pipeline.outputs import StageTrace
from omnistage.pipeline.request import Phase, StageRun
from omnistage.pipeline.routing import call_bridge


def links_within(graph: PipelineGraph, stages: Collection[str]) -> dict[str, tuple[str, ...]]:
    """For each stage of a group that others follow in it: those, and those behind them, in graph order.

    Not the lead stage, whose prompt the orchestrator counts, nor one with several sources, which it waits for.
    """
    sources = {
        name: graph.sources(name)[0]
        for name in graph.order
        if name in stages and name != graph.lead and len(graph.sources(name)) == 1 and graph.sources(name)[0] in stages
    }
    links: dict[str, list[str]] = {}
    for name in sources:
        source = sources.get(name)
        while source is not None:
            links.setdefault(source, []).append(name)
            source = sources.get(source)
    return {name: tuple(targets) for name, targets in links.items()}


@dataclass(slots=True, eq=False)
class _Link:
    """The edge into one stage, for one request."""

    info: RequestInfo
    linked: LinkedStage
    run: StageRun


class Links:
    """The edges inside a worker. `emit(key, chunk)` takes the end of a stage that its bridge never started."""

    def __init__(
        self,
        graph: PipelineGraph,
        loops: Mapping[str, StageLoop[int]],
        bridges: Mapping[str, Bridge],
        emit: Callable[[int, StageChunk], None],
    ) -> None:
        linked = {target for targets in links_within(graph, loops).values() for target in targets}
        self._targets = {name: tuple(t for t in graph.targets(name) if t in linked) for name in loops}
        self._inside = frozenset(
            name
            for name in loops
            if graph.targets(name) and self._targets[name] == graph.targets(name) and name not in graph.outputs.values()
        )
        """Stages whose output only other stages here read."""
        self._loops = loops
        self._bridges = bridges
        self._emit = emit
        self._lock = threading.Lock()
        self._links: dict[tuple[int, str], _Link] = {}

    def open(self, key: int, stage_input: StageInput) -> None:
        """A request has come whose output flows on in here."""
        with self._lock:
            for linked in stage_input.linked:
                run = StageRun(linked.name, (), set(), {0}, StageTrace(linked.name))
                self._links[key, linked.name] = _Link(stage_input.info, linked, run)

    def close(self, key: int, request_id: str, stage: str) -> None:
        """A request is over before it has ended in a stage: it is over in those behind that as well."""
        self._forget(key, stage)
        for target in self._targets[stage]:
            with self._lock:
                linked = (key, target) in self._links
            if linked:
                self._loops[target].abort(request_id, key)
                self.close(key, request_id, target)

    def pass_on(self, key: int, chunk: StageChunk) -> StageChunk:
        """Fold a chunk into the stages that follow in here; what of it is left to send."""
        stage = chunk.stage
        if chunk.error is not None or chunk.finish is FinishReason.ERROR:
            self.close(key, chunk.request_id, stage)
        elif chunk.payload is not None or chunk.finish is not None:
            for target in self._targets[stage]:
                with self._lock:
                    link = self._links.get((key, target))
                if link is not None:
                    self._fold(key, link, chunk)
        if chunk.finish is not None:
            self._forget(key, stage)
        return _without_tensors(chunk) if stage in self._inside else chunk

    def _fold(self, key: int, link: _Link, chunk: StageChunk) -> None:
        target, run = link.linked.name, link.run
        try:
            with run.fold_lock:
                if run.phase is Phase.ENDED:
                    return
                run.state, inputs = call_bridge(self._bridges[target], link.info, run.state, chunk, target)
                for value in inputs:
                    self._give(key, link, value)
                if chunk.finish is None:
                    return
                if run.phase is Phase.WAITING:
                    run.phase = Phase.ENDED
                elif run.awaiting_final_input:
                    raise BridgeError(
                        f"the bridge into {target!r} saw the end of its source and left the stage waiting"
                    )
                else:
                    return
            self._forget(key, target)
            self._emit(key, StageChunk(chunk.request_id, target, finish=FinishReason.STOP))
        except OmniError as error:
            self._fail(key, link, error)
        except BaseException as error:  # the boundary of routing: what fails ends this request
            self._fail(key, link, internal_error(f"routing a chunk of stage {chunk.stage!r}", error))

    def _give(self, key: int, link: _Link, value: StagePayloadIn | StageFeed) -> None:
        loop, run, linked = self._loops[link.linked.name], link.run, link.linked
        if run.phase is Phase.WAITING:
            if not isinstance(value, StagePayloadIn):
                raise BridgeError(f"the bridge into {linked.name!r} must start it before it gives it more input")
            run.begin(value, 0.0)
            loop.submit(StageInput(link.info, linked.params, value, emit_hidden=linked.emit_hidden), key)
        elif isinstance(value, StageFeed):
            run.accept(value)
            loop.feed(link.info.request_id, value, key)
        else:
            raise BridgeError(f"the bridge into {linked.name!r} started it a second time")

    def _forget(self, key: int, stage: str) -> None:
        with self._lock:
            self._links.pop((key, stage), None)

    def _fail(self, key: int, link: _Link, error: OmniError) -> None:
        link.run.phase = Phase.ENDED
        self._forget(key, link.linked.name)
        request_id, target = link.info.request_id, link.linked.name
        self._loops[target].abort(request_id, key)
        self._emit(key, StageChunk(request_id, target, finish=FinishReason.ERROR, error=error))


def _without_tensors(chunk: StageChunk) -> StageChunk:
    """What the service counts of a chunk that it does not read."""
    payload = chunk.payload
    if isinstance(payload, TokenChunk) and (payload.hidden is not None or payload.prompt is not None):
        return replace(chunk, payload=replace(payload, hidden=None, prompt=None))
    if isinstance(payload, Condition):
        return replace(chunk, payload=replace(payload, positive={}, negative=None, shared={}))
    if isinstance(payload, Latents):
        return replace(chunk, payload=replace(payload, picture=payload.picture.new_empty(0)))
    return chunk
