"""Faults at every call of a stage, a bridge and a sink: each request ends once, others go on, and the truth is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from omnistage.core.errors import (
    BridgeError,
    InternalError,
    OmniError,
    StageError,
)
from omnistage.core.failures import isolate
from omnistage.core.stage import StageStats
from omnistage.core.types import AudioChunk, FinishReason, StageChunk, TokenChunk
from omnistage.pipeline.deadlines import DeadlineTimer
from omnistage.pipeline.outputs import OutputChunk
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import AUDIO, TEXT, FakeClock, FakeStage, Pipeline
from tests.unit.faults import SECRET, Hang, PanicException, elsewhere, ended, raising

pytestmark = pytest.mark.timeout(300)


FAULTS = [RuntimeError, MemoryError, RecursionError, SystemExit, KeyboardInterrupt, GeneratorExit, PanicException]
anything = pytest.mark.parametrize("fault", FAULTS)


# --------------------------------------------------------------------------------------- whatever is raised


@anything
@pytest.mark.parametrize("call", ["submit", "feed", "step", "has_work"])
def test_what_a_call_raises_ends_the_requests_in_the_stage_and_no_others(
    call: str, fault: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Pipeline()
    spoken, text = pipeline.submit("spoken"), pipeline.submit("text", modalities=(TEXT,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.stages["talker"], call, raising(fault))
        elsewhere(pipeline.orchestrator.run_once)
        elsewhere(pipeline.orchestrator.run_once)
    elsewhere(pipeline.run)
    assert ended(spoken) is FinishReason.ERROR
    assert isinstance(spoken.final.error, StageError)
    assert ended(text) is FinishReason.STOP
    assert SECRET not in caplog.text + str(spoken.final.error)
    assert "'talker'" in caplog.text
    again = pipeline.submit("again")
    elsewhere(pipeline.run)
    assert ended(again) is FinishReason.STOP
    pipeline.orchestrator.check_idle()


@anything
def test_an_abort_that_raises_ends_its_request_all_the_same(fault: type[BaseException]) -> None:
    pipeline = Pipeline()
    sink, other = pipeline.submit("a", tokens=9), pipeline.submit("b")
    pipeline.orchestrator.run_once()
    forget = pipeline.stages["talker"].abort

    def abort(request_id: str) -> None:
        forget(request_id)
        raise fault(SECRET)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.stages["talker"], "abort", abort)
        assert pipeline.orchestrator.abort("a")
        elsewhere(pipeline.run)
    assert ended(sink) is FinishReason.ABORT
    assert ended(other) is FinishReason.STOP
    pipeline.orchestrator.check_idle()


@anything
@pytest.mark.parametrize("call", ["check", "check_params"])
def test_a_check_that_raises_refuses_the_request(call: str, fault: type[BaseException]) -> None:
    pipeline = Pipeline()
    pipeline.stages["thinker"].__dict__[call] = raising(fault)

    def refused() -> None:
        with pytest.raises(InternalError) as caught:
            pipeline.submit()
        assert SECRET not in str(caught.value)

    elsewhere(refused)
    pipeline.orchestrator.check_idle()


@anything
def test_counters_that_cannot_be_read_are_the_last_ones(fault: type[BaseException]) -> None:
    pipeline = Pipeline()
    pipeline.submit()
    pipeline.run()
    before = pipeline.orchestrator.stats().stages["talker"]
    pipeline.stages["talker"].stats = raising(fault)  # type: ignore[method-assign]
    elsewhere(lambda: pipeline.orchestrator.stats().stages["talker"] == before or pytest.fail("changed"))
    pipeline.stages["talker"].stats = lambda: None  # type: ignore[method-assign,assignment,return-value]
    assert pipeline.orchestrator.stats().stages["talker"] == before


@anything
def test_a_bridge_that_raises_ends_its_request(fault: type[BaseException]) -> None:
    pipeline = Pipeline(bridges={"talker": raising(fault)})
    spoken, text = pipeline.submit("spoken"), pipeline.submit("text", modalities=(TEXT,))
    elsewhere(pipeline.run)
    assert isinstance(spoken.final.error, BridgeError)
    assert ended(text) is FinishReason.STOP
    pipeline.orchestrator.check_idle()


@anything
@pytest.mark.parametrize("last", [False, True])
def test_a_sink_that_raises_ends_its_request_alone(fault: type[BaseException], last: bool) -> None:
    pipeline = Pipeline()
    got: list[OutputChunk] = []

    def sink(item: OutputChunk) -> None:
        got.append(item)
        if (item.final is not None) is last:
            raise fault(SECRET)

    pipeline.orchestrator.submit(pipeline.request("a"), sink)
    other = pipeline.submit("b")
    elsewhere(pipeline.run)
    assert sum(item.final is not None for item in got) == 1
    assert ended(other) is FinishReason.STOP
    pipeline.orchestrator.check_idle()


@anything
def test_a_deadline_that_raises_leaves_the_others_in_force(fault: type[BaseException]) -> None:
    clock, expired = FakeClock(), list[str]()

    def expire(owner: str) -> None:
        expired.append(owner)
        if owner == "bad":
            raise fault(SECRET)

    timer: DeadlineTimer[str] = DeadlineTimer(expire, clock=clock)
    timer.add(clock() + 1, "bad")
    timer.add(clock() + 2, "good")
    clock.now += 3
    elsewhere(timer.tick)
    assert expired == ["bad", "good"]


@anything
def test_one_item_of_a_batch_that_raises_anything_fails_alone(fault: type[BaseException]) -> None:
    def double(batch: Any) -> list[int]:
        if 13 in batch:
            raise fault(SECRET)
        return [2 * item for item in batch]

    results: list[tuple[int, int | OmniError]] = []
    elsewhere(lambda: results.extend(isolate([1, 13, 3], double, "doubling")))
    assert [isinstance(result, StageError) for _, result in results] == [False, True, False]


def test_ctrl_c_in_the_main_thread_is_not_taken_for_a_defect_of_a_stage() -> None:
    pipeline = Pipeline()
    pipeline.submit()
    pipeline.stages["thinker"].step = raising(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        pipeline.orchestrator.run_once()


# ------------------------------------------------------------------------------------------ malformed chunks


def chunk(**changes: Any) -> StageChunk:
    return StageChunk(**{"request_id": "bad", "stage": "thinker", "payload": TokenChunk((1,)), **changes})


@pytest.mark.parametrize(
    "malformed",
    [
        chunk(stage="vocoder"),
        chunk(index=7),
        chunk(index="0"),
        chunk(payload=SECRET),
        chunk(payload=TokenChunk(None)),  # type: ignore[arg-type]
        chunk(payload=AudioChunk([0.0], 100)),  # type: ignore[arg-type]
        chunk(finish="stop?"),
        chunk(error=ValueError(SECRET)),
        chunk(time=None),
    ],
)
def test_a_malformed_chunk_ends_its_request_alone(malformed: StageChunk, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline()
    bad, good = pipeline.submit("bad"), pipeline.submit("good")
    stage, step = pipeline.stages["thinker"], pipeline.stages["thinker"].step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "step", lambda: [malformed, *(c for c in step() if c.request_id != "bad")])
        pipeline.orchestrator.run_once()
    pipeline.run()
    assert ended(bad) is FinishReason.ERROR
    assert isinstance(bad.final.error, OmniError)
    assert ended(good) is FinishReason.STOP
    assert "thinker" in caplog.text + str(bad.final.error)
    assert SECRET not in caplog.text + str(bad.final.error)
    pipeline.orchestrator.check_idle()


@pytest.mark.parametrize(
    "chunks", [None, 5, "text", [None], [SECRET], [chunk(request_id="unknown")], [chunk(request_id=[])]]
)
def test_a_step_that_returns_nonsense_ends_the_requests_in_the_stage(
    chunks: object, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Pipeline()
    sinks = [pipeline.submit(name) for name in "ab"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.stages["thinker"], "step", lambda: chunks)
        pipeline.orchestrator.run_once()
    pipeline.run()
    assert [ended(sink) for sink in sinks] == [FinishReason.ERROR] * 2
    assert "'thinker'" in caplog.text
    assert SECRET not in caplog.text
    again = pipeline.submit("again")
    pipeline.run()
    assert ended(again) is FinishReason.STOP
    pipeline.orchestrator.check_idle()


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), float("-inf"), "soon", 1e30])
def test_a_wait_limit_that_is_no_time_does_not_end_the_thread(limit: object) -> None:
    pipeline = Pipeline(threads=True)
    pipeline.stages["thinker"].wait_limit = lambda: limit  # type: ignore[method-assign,assignment,return-value]
    for number in range(2):
        assert pipeline.submit(str(number)).wait().finish_reason is FinishReason.STOP
    pipeline.orchestrator.shutdown()


# ------------------------------------------------------------------------------------------------ with threads


@anything
@pytest.mark.parametrize("call", ["enter_thread", "wait_limit", "stats", "close"])
def test_a_thread_survives_what_a_stage_raises_beside_its_steps(call: str, fault: type[BaseException]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeStage, call, raising(fault))
        pipeline = Pipeline(threads=True)
        sinks = [pipeline.submit(str(number)) for number in range(3)]
        assert [sink.wait().finish_reason for sink in sinks] == [FinishReason.STOP] * 3
        elsewhere(pipeline.orchestrator.shutdown)
    assert all(loop.ended for loop in pipeline.orchestrator._loops.values())


def until_called(pipeline: Pipeline, stage: str, call: str) -> None:
    pause = threading.Event()
    while call not in pipeline.calls(stage):
        pause.wait(0.005)


def let_deadline_pass(pipeline: Pipeline, request_id: str) -> None:
    """Give a running request a deadline that has passed: the timer's thread ends it."""
    orchestrator = pipeline.orchestrator
    orchestrator._timer.add(0.0, orchestrator._runs[request_id])


@pytest.mark.parametrize("call", ["submit", "feed", "abort", "step", "has_work", "wait_limit"])
def test_requests_in_a_call_that_hangs_end_at_their_deadline_and_others_go_on(call: str) -> None:
    pipeline = Pipeline(threads=True)
    hang = Hang()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.stages["talker"], call, hang)
        if call == "abort":  # it hangs once the deadline has passed
            patch.setattr(pipeline.stages["talker"], "has_work", lambda: False)
        if call == "wait_limit":  # it is asked when the stage rests after a request
            pipeline.submit("before").wait()
            assert hang.entered.wait(HANG_SECONDS)
        spoken = pipeline.submit("spoken")
        if call == "abort":
            until_called(pipeline, "talker", "submit")
        else:
            assert hang.entered.wait(HANG_SECONDS)
        let_deadline_pass(pipeline, "spoken")
        assert spoken.wait().finish_reason is FinishReason.DEADLINE
        assert hang.entered.wait(HANG_SECONDS)
        assert pipeline.submit("text", modalities=(TEXT,)).wait().finish_reason is FinishReason.STOP
        hang.go.set()
        pipeline.orchestrator.shutdown(drain=False)


def test_a_shutdown_does_not_wait_for_a_step_that_hangs() -> None:
    pipeline = Pipeline(threads=True)
    hang = Hang()
    pipeline.stages["talker"].before_step = hang
    spoken = pipeline.submit("spoken")
    assert hang.entered.wait(HANG_SECONDS)
    pipeline.orchestrator.shutdown(drain=False, timeout=0.1)
    assert ended(spoken) is FinishReason.ABORT
    assert {name: stage.closed for name, stage in pipeline.stages.items()} == {"thinker": 1, "talker": 0, "vocoder": 1}
    hang.go.set()


def test_a_sink_that_hangs_holds_up_neither_deadlines_nor_aborts() -> None:
    pipeline = Pipeline(threads=True)
    hang, finals = Hang(), list[OutputChunk]()

    def sink(item: OutputChunk) -> None:
        if item.final is not None:
            finals.append(item)
        else:
            hang()

    request = pipeline.request("stuck", modalities=(AUDIO,))
    pipeline.orchestrator.submit(request, sink)
    assert hang.entered.wait(HANG_SECONDS)
    let_deadline_pass(pipeline, "stuck")
    # The vocoder's thread is in that sink; requests for text alone run, and deadlines count.
    other = pipeline.submit("other", tokens=10**6, modalities=(TEXT,))
    let_deadline_pass(pipeline, "other")
    assert other.wait().finish_reason is FinishReason.DEADLINE
    assert finals == []
    hang.go.set()
    pipeline.orchestrator.check_idle()
    assert [item.final.finish_reason for item in finals if item.final] == [FinishReason.DEADLINE]
    pipeline.orchestrator.shutdown()


def test_counters_that_hang_hold_up_their_first_reader_alone() -> None:
    pipeline = Pipeline(threads=True)
    hang = Hang()

    def stats() -> StageStats:
        hang()
        return StageStats()

    pipeline.stages["talker"].stats = stats  # type: ignore[method-assign]
    reader = threading.Thread(target=pipeline.orchestrator.stats)
    reader.start()
    assert hang.entered.wait(HANG_SECONDS)
    assert pipeline.orchestrator.stats().stages["talker"] == StageStats()
    assert pipeline.submit().wait().finish_reason is FinishReason.STOP
    hang.go.set()
    reader.join(HANG_SECONDS)
    pipeline.orchestrator.shutdown()


def test_a_shutdown_does_not_wait_for_a_stage_that_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.pipeline.orchestrator._CLOSE_SECONDS", 0.1)
    pipeline = Pipeline(threads=True)
    hang = Hang()
    pipeline.stages["talker"].close = hang  # type: ignore[method-assign]
    pipeline.orchestrator.shutdown(timeout=0.1)
    assert hang.entered.wait(HANG_SECONDS)
    hang.go.set()


def test_a_real_rust_panic_ends_its_request_and_the_thread_goes_on() -> None:
    decoders = pytest.importorskip("tokenizers.decoders")
    pipeline = Pipeline(threads=True)
    stage = pipeline.stages["thinker"]
    stage.before_step = lambda: decoders.Strip("a", 5, 5).decode(["a"])  # an index that is out of bounds
    error = pipeline.submit().wait().error
    assert isinstance(error, StageError)
    assert "PanicException" in str(error)
    assert not isinstance(error.__cause__, Exception)
    stage.before_step = None
    assert pipeline.submit("next").wait().finish_reason is FinishReason.STOP
    pipeline.orchestrator.check_idle()
    pipeline.orchestrator.shutdown()
