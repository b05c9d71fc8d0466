"""Whatever the graph, the scripts, the failures and the aborts: every request ends exactly once, nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.core.errors import QueueFullError, StageError
from omnistage.core.family import Bridge, BridgeResult
from omnistage.core.graph import PipelineGraph
from omnistage.core.types import FinishReason, Modality, RequestInfo, StageChunk
from tests.unit.fakes import AUDIO, TEXT, Pipeline, Recorder, make_graph, stream_into

pytestmark = pytest.mark.timeout(300)
IDS = ["r0", "r1", "r2", "r3"]
FAILURES = ["submit_failure", "feed", "step", "request", "bridge"]


@dataclass(frozen=True)
class Action:
    kind: str
    request: str = "r0"
    stage: int = 0
    tokens: int = 0
    timeout: float | None = None
    modalities: tuple[Modality, ...] = (TEXT,)


@st.composite
def graphs(draw: st.DrawFn) -> PipelineGraph:
    names = tuple(f"s{index}" for index in range(draw(st.integers(1, 5))))
    edges = {
        name: tuple(sorted(draw(st.sets(st.sampled_from(names[:index]), min_size=1))))
        for index, name in enumerate(names)
        if index
    }
    outputs = {TEXT: names[0]}
    if len(names) > 1:
        outputs[AUDIO] = draw(st.sampled_from(names[1:]))
        # An audio stage gives no tokens, so nothing may follow it.
        audio = outputs[AUDIO]
        edges = {name: tuple(s for s in sources if s != audio) or (names[0],) for name, sources in edges.items()}
    # A stage that leads to no output is not a valid pipeline.
    live = set(outputs.values())
    for name in reversed(names):
        live.update(edges.get(name, ()) if name in live else ())
    names = tuple(name for name in names if name in live)
    edges = {name: sources for name, sources in edges.items() if name in live}
    return make_graph(names, edges, outputs)


def actions(graph: PipelineGraph) -> st.SearchStrategy[list[Action]]:
    stage = st.integers(0, len(graph.order) - 1)
    modalities = st.sampled_from([(TEXT,), (AUDIO,), (TEXT, AUDIO)] if AUDIO in graph.outputs else [(TEXT,)])
    submit = st.builds(
        Action,
        kind=st.just("submit"),
        request=st.sampled_from(IDS),
        tokens=st.integers(0, 4),
        timeout=st.sampled_from([None, 1.0, 3.0]),
        modalities=modalities,
    )
    fail = st.builds(Action, kind=st.sampled_from(FAILURES), request=st.sampled_from(IDS), stage=stage)
    other = st.builds(
        Action, kind=st.sampled_from(["turn", "tick", "abort"]), request=st.sampled_from(IDS), stage=stage
    )
    return st.lists(st.one_of(submit, submit, other, other, fail), max_size=30)


def failing(inner: Bridge, doomed: set[tuple[str, str]], target: str) -> Bridge:
    def bridge(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        if (request.request_id, target) in doomed:
            raise RuntimeError("bridge")
        return inner(request, state, chunk)

    return bridge


def make(graph: PipelineGraph, doomed: set[tuple[str, str]]) -> Pipeline:
    bridges = {
        name: failing(
            stream_into(audio=name == graph.outputs.get(AUDIO), sources=len(graph.sources(name))), doomed, name
        )
        for name in graph.order[1:]
    }
    return Pipeline(graph, bridges=bridges, max_inflight=3)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_request_ends_exactly_once(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    doomed: set[tuple[str, str]] = set()
    pipeline = make(graph, doomed)
    live: dict[str, Recorder] = {}
    sinks: list[tuple[Recorder, Action]] = []

    def submit(action: Action) -> None:
        current = live.get(action.request)
        if current is not None and not current.finals:
            return
        try:
            sink = pipeline.submit(
                action.request, tokens=action.tokens, timeout=action.timeout, modalities=action.modalities
            )
        except QueueFullError:
            return
        live[action.request] = sink
        sinks.append((sink, action))

    def fail(action: Action) -> None:
        stage = pipeline.stages[graph.order[action.stage]]
        if action.kind == "submit_failure":
            stage.fail_submit[action.request] = StageError("submit")
        elif action.kind == "feed":
            stage.fail_feed[action.request] = StageError("feed")
        elif action.kind == "step":
            stage.fail_step = RuntimeError("step")
        elif action.kind == "request":
            stage.fail_request[action.request] = StageError("request")
        else:
            doomed.add((action.request, stage.name))

    def tick(action: Action) -> None:
        pipeline.clock.now += 1.0

    handlers: dict[str, Callable[[Action], object]] = {
        "submit": submit,
        "turn": lambda action: pipeline.orchestrator._loops[graph.order[action.stage]].run_pending(),
        "tick": tick,
        "abort": lambda action: pipeline.orchestrator.abort(action.request),
    }
    for action in data.draw(actions(graph)):
        handlers.get(action.kind, fail)(action)
    pipeline.run()

    for sink, action in sinks:
        final = sink.final  # exactly one, and the last item
        assert (final.error is not None) == (final.finish_reason is FinishReason.ERROR)
        text = "".join(f"a{token} " for token in range(action.tokens))
        if TEXT in action.modalities:
            assert final.text == sink.text
            assert text.startswith(final.text)
            if final.finish_reason is FinishReason.STOP:
                assert final.text == text
        if action.timeout is None:
            assert final.finish_reason is not FinishReason.DEADLINE
        assert {item.modality for item in sink.items} <= set(action.modalities)
    assert len(sinks) == pipeline.orchestrator.stats().admitted
    assert sum(pipeline.orchestrator.stats().finished.values()) == len(sinks)
    pipeline.orchestrator.check_idle()
