"""The orchestrator over fake stages, without threads: routing, ending, admission, traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omnistage.core.errors import (
    BridgeError,
    ConfigError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    PromptTooLongError,
    QueueFullError,
    ShutdownError,
    StageError,
    UnsupportedModalityError,
)
from omnistage.core.family import BridgeResult
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.stage import StageStats
from omnistage.core.types import (
    ARInput,
    AudioChunk,
    CodecFrames,
    CodecInput,
    FinishReason,
    RequestInfo,
    StageChunk,
    StageFeed,
    TokenChunk,
)
from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.outputs import OutputChunk
from omnistage.pipeline.request import RequestRun, count_tokens
from tests.unit.fakes import AUDIO, TEXT, Pipeline, Recorder, make_graph, stream_into

pytestmark = pytest.mark.timeout(300)


# ------------------------------------------------------------------------------------------------- routing


def test_a_linear_pipeline_gives_text_and_audio() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(tokens=3)
    pipeline.run()
    final = sink.final
    assert final.finish_reason is FinishReason.STOP
    assert final.text == sink.text == "a0 a1 a2 "
    assert final.token_ids == [0, 1, 2]
    assert final.outputs[0].finish_reason is FinishReason.STOP
    assert final.audio is not None
    assert final.audio.samples.tolist() == np.repeat([0, 1, 2], 10).tolist()
    assert final.audio.sample_rate == 100
    assert final.usage.prompt_tokens == 1
    assert final.usage.completion_tokens == 3
    assert final.usage.audio_seconds == pytest.approx(0.3)
    assert final.usage.stage_tokens == {"thinker": 3, "talker": 3, "vocoder": 0}
    ends = {item.modality: item.finish_reason for item in sink.items if item.finish_reason is not None}
    assert ends == {TEXT: FinishReason.STOP, AUDIO: FinishReason.STOP}
    pipeline.orchestrator.check_idle()


def test_stages_overlap_the_downstream_starts_before_the_upstream_ends() -> None:
    pipeline = Pipeline()
    pipeline.submit(tokens=5)
    pipeline.orchestrator.run_once()
    assert "submit" in pipeline.calls("talker")
    assert pipeline.stages["thinker"].jobs


def test_text_alone_never_touches_the_talker() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(modalities=(TEXT,))
    pipeline.run()
    assert sink.final.text == "a0 a1 a2 "
    assert sink.final.audio is None
    assert pipeline.calls("talker") == pipeline.calls("vocoder") == []
    assert not pipeline.stages["thinker"].inputs["r"].emit_hidden
    assert list(sink.final.trace.stages) == ["thinker"]  # type: ignore[union-attr]


def test_hidden_rows_are_asked_for_where_somebody_reads_them() -> None:
    pipeline = Pipeline()
    pipeline.submit()
    pipeline.run()
    hidden = {name: stage.inputs["r"].emit_hidden for name, stage in pipeline.stages.items()}
    assert hidden == {"thinker": True, "talker": True, "vocoder": False}


def test_audio_alone_runs_the_thinker_and_keeps_its_text_back() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(modalities=(AUDIO,))
    pipeline.run()
    assert sink.final.outputs == []
    assert sink.final.audio is not None
    assert {item.modality for item in sink.items} == {AUDIO}


def test_fan_out_gives_a_chunk_to_every_target() -> None:
    graph = make_graph(("a", "b", "c"), {"b": ("a",), "c": ("a", "b")}, {TEXT: "a", AUDIO: "c"})
    pipeline = Pipeline(graph)
    sink = pipeline.submit(tokens=2)
    pipeline.run()
    # Two tokens of a and two of b reach c: fan-out of a, fan-in of c.
    assert sink.final.audio is not None
    assert len(sink.final.audio.samples) == 4 * 10
    pipeline.orchestrator.check_idle()


def test_fan_in_folds_one_state_over_chunks_tagged_by_stage() -> None:
    graph = make_graph(("a", "b", "c", "d"), {"b": ("a",), "c": ("a",), "d": ("b", "c")}, {TEXT: "a", AUDIO: "d"})
    seen: list[tuple[str, bool]] = []
    inner = stream_into(audio=True, sources=2)

    def spy(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        seen.append((chunk.stage, chunk.finish is not None))
        return inner(request, state, chunk)

    pipeline = Pipeline(graph, bridges={"d": spy})
    sink = pipeline.submit(tokens=2)
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.STOP
    for stage in "bc":
        ends = [end for name, end in seen if name == stage]
        assert ends[-1]
        assert not any(ends[:-1])
    assert pipeline.calls("d").count("submit") == 1


def test_markers_of_a_first_step_do_not_reach_bridges() -> None:
    seen: list[StageChunk] = []
    inner = stream_into()

    def spy(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        seen.append(chunk)
        return inner(request, state, chunk)

    pipeline = Pipeline(bridges={"talker": spy})
    pipeline.submit()
    pipeline.run()
    assert all(chunk.payload is not None or chunk.finish is not None for chunk in seen)


def test_an_empty_reply_ends_the_targets_that_were_never_started() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(tokens=0)
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.STOP
    assert sink.final.audio is None
    assert [item.modality for item in sink.items if item.finish_reason] == [TEXT, AUDIO]
    assert pipeline.calls("talker") == pipeline.calls("vocoder") == []
    trace = pipeline.orchestrator.trace("r")
    assert trace is not None
    assert trace.stages["vocoder"].finish is FinishReason.STOP
    assert trace.stages["vocoder"].submitted is trace.stages["vocoder"].started is None
    pipeline.orchestrator.check_idle()


def test_parameters_are_merged_per_stage() -> None:
    pipeline = Pipeline(
        defaults={"thinker": SamplingParams(max_tokens=9, top_k=4), "vocoder": CodecParams(num_steps=3)}
    )
    pipeline.submit(params={"thinker": SamplingParams(top_k=7), "talker": SamplingParams(seed=1)}, priority=5)
    pipeline.run()
    params = {name: stage.inputs["r"].params for name, stage in pipeline.stages.items()}
    assert params["thinker"] == SamplingParams(max_tokens=9, top_k=7)
    assert params["talker"] == SamplingParams(seed=1)
    assert params["vocoder"] == CodecParams(num_steps=3)
    assert {stage.inputs["r"].info.priority for stage in pipeline.stages.values()} == {5}


def test_several_answers_are_kept_apart() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(modalities=(TEXT,), tokens=2, params={"thinker": SamplingParams(n=3)})
    pipeline.run()
    assert [answer.text for answer in sink.final.outputs] == ["a0 a1 ", "b0 b1 ", "c0 c1 "]
    assert [answer.index for answer in sink.final.outputs] == [0, 1, 2]
    assert sink.final.usage.completion_tokens == 6
    pipeline.orchestrator.check_idle()


def test_the_reason_is_the_entry_stages_own() -> None:
    pipeline = Pipeline()
    pipeline.stages["thinker"].finish = FinishReason.LENGTH
    sink = pipeline.submit()
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.LENGTH


def test_an_answer_whose_speech_is_cut_is_not_whole() -> None:
    """The text has ended by itself, and the talker at its limit."""
    pipeline = Pipeline()
    pipeline.stages["talker"].finish = FinishReason.LENGTH
    sink = pipeline.submit()
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.LENGTH
    assert [answer.finish_reason for answer in sink.final.outputs] == [FinishReason.LENGTH]


# ----------------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"modalities": ()}, InvalidRequestError, "at least one"),
        ({"modalities": ("image",)}, UnsupportedModalityError, "its outputs: text, audio"),
        ({"params": {"thinker": SamplingParams(n=2)}}, InvalidRequestError, r"modalities=\['text'\]"),
        ({"params": {"singer": SamplingParams()}}, InvalidRequestError, "stages: thinker, talker, vocoder"),
        ({"params": {"vocoder": SamplingParams()}}, InvalidRequestError, "takes CodecParams"),
        ({"timeout": 0.0}, DeadlineExceededError, "deadline"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_nothing_queued(
    kwargs: dict[str, object], error: type[Exception], words: str
) -> None:
    pipeline = Pipeline()
    with pytest.raises(error, match=words):
        pipeline.submit(**kwargs)  # type: ignore[arg-type]
    pipeline.orchestrator.check_idle()
    assert pipeline.calls("thinker") == []


def test_the_entry_stage_is_asked_before_anything_is_queued() -> None:
    pipeline = Pipeline()
    pipeline.stages["thinker"].fail_check = PromptTooLongError("too long")
    with pytest.raises(PromptTooLongError):
        pipeline.submit()
    assert pipeline.orchestrator.stats().admitted == 0


def test_an_id_in_use_is_refused_and_free_again_at_the_end() -> None:
    pipeline = Pipeline()
    first = pipeline.submit()
    with pytest.raises(InvalidRequestError, match="id"):
        pipeline.submit()
    pipeline.run()
    second = pipeline.submit()
    pipeline.run()
    assert first.final.text == second.final.text


def test_an_aborted_id_can_be_used_at_once() -> None:
    pipeline = Pipeline()
    first = pipeline.submit(tokens=9)
    pipeline.orchestrator.run_once()
    pipeline.orchestrator.abort("r")
    second = pipeline.submit(tokens=2)
    pipeline.run()
    assert first.final.finish_reason is FinishReason.ABORT
    assert second.final.text == "a0 a1 "
    assert second.final.audio is not None
    assert len(second.final.audio.samples) == 20
    pipeline.orchestrator.check_idle()


def test_a_full_service_refuses_and_says_when_to_come_back() -> None:
    pipeline = Pipeline(max_inflight=2)
    pipeline.submit("a")
    pipeline.submit("b")
    with pytest.raises(QueueFullError) as refusal:
        pipeline.submit("c")
    assert refusal.value.retry_after == 1.0
    assert not pipeline.orchestrator.wait_for_room(0)
    pipeline.run()
    assert pipeline.orchestrator.wait_for_room(0)
    for name in "defg":
        pipeline.submit(name)
        pipeline.clock.now += 4.0
        pipeline.run()
    pipeline.submit("x")
    pipeline.submit("y")
    with pytest.raises(QueueFullError) as refusal:
        pipeline.orchestrator.check_room("z")
    assert 2.0 < refusal.value.retry_after < 4.0
    assert pipeline.orchestrator.stats().rejected == 2


def test_a_request_for_several_answers_counts_as_many() -> None:
    pipeline = Pipeline(max_inflight=4)
    several = {"thinker": SamplingParams(n=3)}
    pipeline.submit("a", modalities=(TEXT,), params=several)
    with pytest.raises(QueueFullError, match="3 requests of 4"):
        pipeline.submit("b", modalities=(TEXT,), params=several)
    assert pipeline.orchestrator.wait_for_room(0)
    assert not pipeline.orchestrator.wait_for_room(0, answers=3)
    pipeline.submit("c")
    with pytest.raises(QueueFullError):
        pipeline.submit("d")
    pipeline.run()
    pipeline.submit("e", modalities=(TEXT,), params=several)
    with pytest.raises(LimitExceededError, match="5 answers are over the limit of 4"):
        pipeline.submit("f", modalities=(TEXT,), params={"thinker": SamplingParams(n=5)})


def test_parts_that_do_not_fit_the_graph_are_refused() -> None:
    pipeline = Pipeline()
    with pytest.raises(ConfigError, match="none was built"):
        Orchestrator(pipeline.graph, {}, {}, {}, threads=False)
    with pytest.raises(ConfigError, match="no bridge"):
        Orchestrator(pipeline.graph, pipeline.stages, {}, {}, threads=False)


# -------------------------------------------------------------------------------------------------- ending


def test_an_abort_reaches_every_stage_within_one_step() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(tokens=9)
    other = pipeline.submit("other", tokens=4)
    for _ in range(3):
        pipeline.orchestrator.run_once()
    assert pipeline.orchestrator.abort("r")
    assert not pipeline.orchestrator.abort("r")
    steps = {name: stage.steps for name, stage in pipeline.stages.items()}
    pipeline.orchestrator.run_once()
    for name, stage in pipeline.stages.items():
        assert "r" not in stage.jobs
        assert stage.steps <= steps[name] + 1
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.ABORT
    assert sink.final.text == "a0 a1 a2 "
    assert sink.final.outputs[0].finish_reason is FinishReason.ABORT
    assert other.final.finish_reason is FinishReason.STOP
    pipeline.orchestrator.check_idle()


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(tokens=9, timeout=5.0)
    pipeline.orchestrator.run_once()
    pipeline.orchestrator.run_once()
    assert sink.finals == []
    pipeline.clock.now += 5.0
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.DEADLINE
    assert sink.final.error is None
    assert sink.final.text == "a0 a1 "
    pipeline.orchestrator.check_idle()


def test_a_request_in_time_leaves_no_deadline_behind() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(timeout=5.0)
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.STOP
    pipeline.orchestrator.check_idle()


def test_a_request_that_is_aborted_while_it_is_admitted_leaves_no_deadline_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between its admission and its timer another thread may end it; nobody would discard that timer."""

    class AbortedFirst:
        """A lock that another thread gets first, and aborts the request."""

        def __init__(self, run: RequestRun) -> None:
            self.inner, run.lock = run.lock, self  # type: ignore[assignment]
            self.run, self.waiting = run, True

        def __enter__(self) -> None:
            if self.waiting:
                self.waiting = False
                pipeline.orchestrator.cancel(self.run)
            self.inner.acquire()

        def __exit__(self, *_: object) -> None:
            self.inner.release()

    def admitted(*args: object) -> RequestRun:
        run = RequestRun(*args)  # type: ignore[arg-type]
        AbortedFirst(run)
        return run

    monkeypatch.setattr("omnistage.pipeline.orchestrator.RequestRun", admitted)
    pipeline = Pipeline()
    sink = pipeline.submit(timeout=5.0)
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.ABORT
    assert pipeline.calls("thinker") == []
    pipeline.orchestrator.check_idle()


@pytest.mark.parametrize("reason", [FinishReason.DEADLINE, FinishReason.ABORT])
def test_a_stage_may_end_a_request_by_its_deadline_itself(reason: FinishReason) -> None:
    pipeline = Pipeline()
    pipeline.stages["talker"].finish = reason
    sink = pipeline.submit()
    pipeline.run()
    assert sink.final.finish_reason is reason
    pipeline.orchestrator.check_idle()


@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
@pytest.mark.parametrize("way", ["submit", "feed", "step", "request", "silent"])
def test_what_fails_in_a_stage_ends_only_its_request(stage: str, way: str) -> None:
    pipeline = Pipeline()
    fake = pipeline.stages[stage]
    problem = StageError("numbers")
    if way == "submit":
        fake.fail_submit = {"r": problem}
    elif way == "feed":
        fake.fail_feed = {"r": problem}
    elif way == "step":
        fake.fail_step = RuntimeError("x")
    else:
        fake.fail_request = {"r": problem if way == "request" else None}
    sink = pipeline.submit()
    pipeline.run()
    other = pipeline.submit("other")
    pipeline.run()
    if way == "feed" and stage == "thinker":
        assert sink.final.finish_reason is FinishReason.STOP  # nobody feeds the entry
    else:
        assert sink.final.finish_reason is FinishReason.ERROR
        assert isinstance(sink.final.error, StageError)
        assert pipeline.orchestrator.trace("r").stages[stage].finish is FinishReason.ERROR  # type: ignore[union-attr]
    assert other.final.finish_reason is FinishReason.STOP
    assert not any(stage.jobs for stage in pipeline.stages.values())
    pipeline.orchestrator.check_idle()


def _raise(error: Exception) -> BridgeResult:
    raise error


BAD_BRIDGES: dict[str, Callable[[RequestInfo, object, StageChunk], Any]] = {
    "raises": lambda request, state, chunk: _raise(ValueError("secret")),
    "raises ours": lambda request, state, chunk: _raise(InvalidRequestError("no such voice")),
    "returns nothing": lambda request, state, chunk: None,
    "returns no list": lambda request, state, chunk: (state, CodecInput()),
    "returns garbage": lambda request, state, chunk: (state, ["codes"]),
    "feeds before it starts": lambda request, state, chunk: (state, [CodecFrames((1,))]),
    "starts twice": lambda request, state, chunk: (state, [CodecInput(), CodecInput()]),
    "mixes kinds": lambda request, state, chunk: (state, [ARInput((1,), streaming=True), CodecFrames((1,))]),
    "never closes": lambda request, state, chunk: (True, [] if state else [CodecInput((1,))]),
}


@pytest.mark.parametrize("name", BAD_BRIDGES)
def test_a_bad_bridge_ends_only_its_request(name: str) -> None:
    good, bad = stream_into(), BAD_BRIDGES[name]

    def bridge(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        return bad(request, state, chunk) if request.request_id == "r" else good(request, state, chunk)

    pipeline = Pipeline(bridges={"talker": bridge})
    sink, other = pipeline.submit(), pipeline.submit("other")
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.ERROR
    assert isinstance(sink.final.error, BridgeError)
    assert "talker" in str(sink.final.error)
    assert "secret" not in str(sink.final.error)
    assert other.final.finish_reason is FinishReason.STOP
    pipeline.orchestrator.check_idle()


def test_a_bridge_is_not_called_for_a_target_that_has_ended() -> None:
    calls: list[str] = []

    def bridge(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        calls.append(chunk.stage)
        return True, [] if state else [ARInput((1,))]

    pipeline = Pipeline(bridges={"talker": bridge})
    sink = pipeline.submit(tokens=9)
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.STOP
    assert len(calls) < 9


@pytest.mark.parametrize("chunks_before", [0, 1])
def test_what_a_bridge_gives_for_a_request_that_ended_meanwhile_goes_nowhere(chunks_before: int) -> None:
    inner, seen = stream_into(), list[StageChunk]()

    def bridge(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        seen.append(chunk)
        if len(seen) > chunks_before:
            pipeline.orchestrator.abort("r")  # as another thread might, while this call runs
        return inner(request, state, chunk)

    pipeline = Pipeline(bridges={"talker": bridge})
    sink = pipeline.submit()
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.ABORT
    assert pipeline.calls("talker") == ["submit", "feed", "abort"][: 3 * chunks_before]
    pipeline.orchestrator.check_idle()


@pytest.mark.parametrize("what", ["the request", "the stage"])
def test_nothing_is_queued_for_a_stage_that_ended_while_the_bridge_ran(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, seen, queued = stream_into(), list[StageChunk](), list[str]()

    def bridge(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        seen.append(chunk)
        if len(seen) == 1:  # a stage that needs no more input than this
            return True, [ARInput((1,))]
        if what == "the request":
            pipeline.orchestrator.abort("r")
        else:
            loop.run_pending()  # as the talker's own thread might
        return inner(request, (True, 0), chunk)

    pipeline = Pipeline(bridges={"talker": bridge})
    loop = pipeline.orchestrator._loops["talker"]
    monkeypatch.setattr(loop, "feed", lambda request_id, *_: queued.append(request_id))
    sink = pipeline.submit()
    pipeline.orchestrator._loops["thinker"].run_pending()  # the token that starts the talker
    pipeline.orchestrator._loops["thinker"].run_pending()
    assert (len(seen), queued) == (2, [])
    pipeline.run()
    assert sink.final.finish_reason is (FinishReason.ABORT if what == "the request" else FinishReason.STOP)
    pipeline.orchestrator.check_idle()


def test_input_is_queued_under_the_lock_that_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline()
    loop, held = pipeline.orchestrator._loops["talker"], list[bool]()
    feed = loop.feed

    def note_lock(request_id: str, given: StageFeed, run: RequestRun) -> None:
        held.append(run.lock.locked())  # or an abort could be queued before this and the stage be fed after it
        feed(request_id, given, run)

    monkeypatch.setattr(loop, "feed", note_lock)
    pipeline.submit(tokens=3)
    pipeline.run()
    assert len(held) >= 3
    assert all(held)


def test_the_first_end_is_the_only_one() -> None:
    pipeline = Pipeline()
    sink = Recorder()
    run = pipeline.orchestrator.start(pipeline.orchestrator.plan(pipeline.request()), sink)
    assert pipeline.orchestrator.cancel(run)
    assert not pipeline.orchestrator.cancel(run)
    assert sink.final.finish_reason is FinishReason.ABORT


def test_a_sink_that_raises_ends_its_request_only() -> None:
    pipeline = Pipeline()
    seen: list[OutputChunk] = []

    def broken(item: OutputChunk) -> None:
        seen.append(item)
        raise RuntimeError("the reader is gone")

    pipeline.orchestrator.submit(pipeline.request("bad"), broken)
    other = pipeline.submit("other")
    pipeline.run()
    assert len(seen) == 2
    assert isinstance(seen[-1].final.error, InternalError)  # type: ignore[union-attr]
    assert other.final.finish_reason is FinishReason.STOP
    pipeline.orchestrator.check_idle()


def test_a_sink_may_abort_its_own_request() -> None:
    pipeline = Pipeline()
    sink = Recorder()

    def impatient(item: OutputChunk) -> None:
        sink(item)
        if item.final is None:
            pipeline.orchestrator.abort("r")

    pipeline.orchestrator.submit(pipeline.request(), impatient)
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.ABORT
    assert len(sink.items) == 2
    pipeline.orchestrator.check_idle()


def test_a_sample_rate_that_changes_is_a_stages_defect() -> None:
    pipeline = Pipeline()
    vocoder = pipeline.stages["vocoder"]
    vocoder._payload = lambda unit, index: AudioChunk(np.zeros(1, np.float32), 100 + unit)  # type: ignore[method-assign]
    sink = pipeline.submit()
    pipeline.run()
    assert isinstance(sink.final.error, StageError)
    assert "sample rate" in str(sink.final.error)
    assert sink.final.audio is not None


def test_an_output_that_cannot_be_assembled_still_ends_the_request() -> None:
    pipeline = Pipeline()
    pipeline.stages["thinker"]._payload = lambda unit, index: TokenChunk((1,), text=b"x")  # type: ignore[arg-type, method-assign]
    sink = pipeline.submit(modalities=(TEXT,))
    pipeline.run()
    assert sink.final.finish_reason is FinishReason.ERROR
    assert isinstance(sink.final.error, InternalError)
    pipeline.orchestrator.check_idle()


def test_a_defect_in_routing_ends_the_request() -> None:
    pipeline = Pipeline()
    thinker = pipeline.stages["thinker"]
    sink = pipeline.submit()
    broken = TokenChunk(None)  # type: ignore[arg-type]
    thinker.step = lambda: [StageChunk("r", "thinker", broken)]  # type: ignore[method-assign]
    pipeline.orchestrator.run_once()
    pipeline.run()
    assert isinstance(sink.final.error, InternalError)
    pipeline.orchestrator.check_idle()


# -------------------------------------------------------------------------------------- traces and the rest


def test_a_trace_says_what_ran_when() -> None:
    pipeline = Pipeline()
    request = pipeline.request(tokens=2)
    pipeline.clock.now += 1.0
    sink = Recorder()
    pipeline.orchestrator.submit(request, sink)
    for _ in range(3):
        pipeline.clock.now += 1.0
        pipeline.orchestrator.run_once()
    trace = pipeline.orchestrator.trace("r")
    assert trace is not None
    assert trace is sink.final.trace
    assert (trace.admitted, trace.finished) == (1.0, 3.0)
    thinker = trace.stages["thinker"]
    assert (thinker.submitted, thinker.started, thinker.first_chunk, thinker.last_chunk) == (1.0, 2.0, 2.0, 3.0)
    assert (thinker.chunks, thinker.tokens, thinker.finish) == (2, 2, FinishReason.STOP)
    assert thinker.queue == 1.0
    assert trace.stages["vocoder"].chunks == 2
    assert "vocoder" in str(trace)


def test_a_running_request_has_a_trace_that_does_not_change_under_its_reader() -> None:
    pipeline = Pipeline()
    pipeline.submit()
    pipeline.orchestrator.run_once()
    trace = pipeline.orchestrator.trace("r")
    assert trace is not None
    pipeline.run()
    assert trace.finished is None
    assert trace.stages["thinker"].chunks == 1


def test_only_the_last_traces_are_kept() -> None:
    pipeline = Pipeline(trace_history=2)
    for name in "abc":
        pipeline.submit(name)
        pipeline.run()
    assert [pipeline.orchestrator.trace(name) is not None for name in "abc"] == [False, True, True]


def test_an_aborted_stage_says_so_in_the_trace() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit(tokens=9)
    pipeline.orchestrator.abort("r")
    pipeline.run()
    trace = sink.final.trace
    assert trace is not None
    assert trace.stages["thinker"].finish is FinishReason.ABORT
    assert trace.stages["talker"].finish is None


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (StageStats(capacity=8), 0.0),
        (StageStats(running=2, capacity=8), 0.25),
        (StageStats(running=2, starved=2, capacity=8), 0.5),
        (StageStats(running=8, waiting=4, capacity=8), 1.5),
        (StageStats(running=2, waiting=4, capacity=8), 3.0),  # memory allows no more: its places are two
        (StageStats(waiting=1, capacity=8), 1.0),
        (StageStats(running=3), 0.0),  # it does not say how many it can run
    ],
)
def test_a_stage_that_keeps_requests_waiting_is_utilised_beyond_its_places(stats: StageStats, expected: float) -> None:
    assert stats.utilization == expected


def test_stats_count_requests_by_reason() -> None:
    pipeline = Pipeline()
    pipeline.submit("a")
    pipeline.submit("b")
    pipeline.orchestrator.abort("b")
    assert pipeline.orchestrator.stats().inflight == 1
    pipeline.run()
    stats = pipeline.orchestrator.stats()
    assert stats.admitted == 2
    assert stats.finished[FinishReason.STOP] == stats.finished[FinishReason.ABORT] == 1
    assert stats.stages["thinker"].steps == 3


def test_check_idle_names_what_is_left() -> None:
    pipeline = Pipeline()
    pipeline.submit(timeout=9.0)
    with pytest.raises(InternalError, match=r"request r; 1 deadlines; 1 commands for thinker"):
        pipeline.orchestrator.check_idle()


def test_prompt_tokens_of_other_payloads() -> None:
    assert count_tokens(ARInput((1, 2), embeds=np.zeros((5, 3)))) == 5  # type: ignore[arg-type]
    assert count_tokens(CodecInput((1, 2, 3))) == 3


def test_shutdown_drains_then_refuses() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit()
    pipeline.orchestrator.shutdown()
    assert sink.final.finish_reason is FinishReason.STOP
    with pytest.raises(ShutdownError):
        pipeline.submit("late")
    pipeline.orchestrator.shutdown()
    assert [stage.closed for stage in pipeline.stages.values()] == [1, 1, 1]


def test_shutdown_without_drain_aborts() -> None:
    pipeline = Pipeline()
    sink = pipeline.submit()
    pipeline.orchestrator.run_once()
    pipeline.orchestrator.shutdown(drain=False)
    assert sink.final.finish_reason is FinishReason.ABORT
    pipeline.orchestrator.check_idle()
