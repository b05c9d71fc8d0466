"""Faults at every call of a stage, a bridge and a sink: each request ends once, others go on, and the truth is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from omnistage.core.errors import (
    BridgeError,
    InternalError,
    OmniError,
    StageError,
    StageUnavailableError,
)
from omnistage.core.failures import isolate, loses_device, stage_failure
from omnistage.core.stage import StageStats
from omnistage.core.types import AudioChunk, FinishReason, StageChunk, TokenChunk
from omnistage.pipeline import supervision
from omnistage.pipeline.deadlines import DeadlineTimer
from omnistage.pipeline.health import StageState
from omnistage.pipeline.loop import MAX_FAILED_STEPS
from omnistage.pipeline.outputs import OutputChunk
from tests.unit.fakes import AUDIO, TEXT, FakeClock, FakeStage, Pipeline, Recorder

pytestmark = pytest.mark.timeout(60)


class PanicException(BaseException):
    """Like `pyo3_runtime.PanicException`, which a panic of a Rust extension raises."""


SECRET = "what the user said"
FAULTS = [RuntimeError, MemoryError, RecursionError, SystemExit, KeyboardInterrupt, GeneratorExit, PanicException]
anything = pytest.mark.parametrize("fault", FAULTS)


def raising(fault: type[BaseException]) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> object:
        raise fault(SECRET)

    return call


def elsewhere(work: Callable[[], object]) -> None:
    """Run in a thread that is not the main one, as loops do: Ctrl-C is the main thread's alone."""
    escaped: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # to be raised here instead
            escaped.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if escaped:
        raise AssertionError("an error escaped") from escaped[0]


def ended(sink: Recorder) -> FinishReason:
    """Why a request ended; fails unless it did exactly once."""
    return sink.final.finish_reason  # type: ignore[return-value]


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


# ------------------------------------------------------------------------------------- giving up, rebuilding


def break_stage(pipeline: Pipeline, name: str = "talker") -> None:
    """Requests come and fail until the stage is given up."""
    pipeline.stages[name].step = raising(PanicException)  # type: ignore[method-assign]
    for number in range(MAX_FAILED_STEPS):
        sink = pipeline.submit(f"broken-{number}")
        while not sink.finals:
            assert pipeline.orchestrator.run_once()
        assert ended(sink) is FinishReason.ERROR


def state(pipeline: Pipeline, name: str = "talker") -> StageState:
    return pipeline.orchestrator.health()[name].state


def test_a_stage_that_keeps_failing_is_given_up_and_only_its_requests_are_refused() -> None:
    pipeline = Pipeline()
    break_stage(pipeline)
    assert state(pipeline) is StageState.FAILED
    assert pipeline.stages["talker"].closed == 1
    with pytest.raises(StageUnavailableError, match=r"'talker' .* restart the service") as caught:
        pipeline.submit("refused")
    assert (caught.value.status, caught.value.code) == (503, "stage_unavailable")
    text = pipeline.submit("text", modalities=(TEXT,))
    pipeline.run()
    assert ended(text) is FinishReason.STOP
    pipeline.orchestrator.check_idle()
    pipeline.orchestrator.shutdown()
    assert pipeline.stages["talker"].closed == 1


def test_a_step_that_succeeds_in_between_keeps_a_stage() -> None:
    pipeline = Pipeline()
    stage = pipeline.stages["talker"]
    for number in range(3 * MAX_FAILED_STEPS):
        stage.fail_step = RuntimeError(SECRET) if number % MAX_FAILED_STEPS else None
        pipeline.submit(str(number))
        pipeline.run()
    assert state(pipeline) is StageState.UP
    pipeline.orchestrator.check_idle()


def test_all_requests_that_need_a_stage_end_when_it_is_given_up() -> None:
    pipeline = Pipeline()
    upstream, text = pipeline.submit("upstream", tokens=99), pipeline.submit("text", tokens=9, modalities=(TEXT,))
    pipeline.orchestrator.run_once()
    pipeline.orchestrator._loops["vocoder"].give_up(RuntimeError(SECRET))
    assert isinstance(upstream.final.error, StageUnavailableError)
    pipeline.run()
    assert ended(text) is FinishReason.STOP
    pipeline.orchestrator.check_idle()


def test_a_request_that_was_planned_before_its_stage_failed_is_refused() -> None:
    pipeline = Pipeline()
    plan = pipeline.orchestrator.plan(pipeline.request())
    pipeline.orchestrator._loops["talker"].give_up(RuntimeError(SECRET))
    with pytest.raises(StageUnavailableError):
        pipeline.orchestrator.start(plan, Recorder())
    pipeline.orchestrator.check_idle()


def test_a_failed_stage_is_rebuilt_and_runs_again() -> None:
    attempts: list[int] = []

    def build(attempt: int) -> FakeStage:
        attempts.append(attempt)
        if not attempt:
            raise SystemExit(SECRET)
        return FakeStage("talker", clock=pipeline.clock)

    pipeline = Pipeline(rebuilds={"talker": build})
    break_stage(pipeline)
    assert state(pipeline) is StageState.REBUILDING
    with pytest.raises(StageUnavailableError, match="is being rebuilt; try again"):
        pipeline.submit("refused")
    for pause in supervision.REBUILD_PAUSES[:2]:
        assert state(pipeline) is StageState.REBUILDING
        pipeline.clock.now += pause
        elsewhere(pipeline.run)
    assert attempts == [0, 1]
    health = pipeline.orchestrator.health()["talker"]
    assert (health.state, health.failures, health.rebuilds) == (StageState.UP, 1, 1)
    spoken = pipeline.submit("spoken")
    pipeline.run()
    assert ended(spoken) is FinishReason.STOP
    pipeline.orchestrator.check_idle()


def test_a_stage_is_not_rebuilt_for_ever() -> None:
    built: list[FakeStage] = []

    def build(_: int) -> FakeStage:
        built.append(FakeStage("talker", clock=pipeline.clock))
        pipeline.stages["talker"] = built[-1]
        return built[-1]

    pipeline = Pipeline(rebuilds={"talker": build})
    for _ in range(3):
        break_stage(pipeline)
        assert state(pipeline) is StageState.REBUILDING
        pipeline.clock.now += max(supervision.REBUILD_PAUSES)
        pipeline.run()
    break_stage(pipeline)
    assert state(pipeline) is StageState.FAILED
    assert [stage.closed for stage in built] == [1, 1, 1]


def test_a_stage_that_has_run_for_long_has_all_its_attempts_again() -> None:
    def build(_: int) -> FakeStage:
        pipeline.stages["talker"] = FakeStage("talker", clock=pipeline.clock)
        return pipeline.stages["talker"]

    pipeline = Pipeline(rebuilds={"talker": build})
    for _ in range(6):
        break_stage(pipeline)
        pipeline.clock.now += max(supervision.REBUILD_PAUSES)
        pipeline.run()
        pipeline.clock.now += supervision.REBUILD_MEMORY + 1
    assert state(pipeline) is StageState.UP


@pytest.mark.parametrize("where", ["step", "submit", "chunk"])
def test_a_lost_device_is_said_to_need_a_restart(where: str) -> None:
    pipeline = Pipeline(rebuilds={"talker": lambda _: FakeStage("talker")})
    stage = pipeline.stages["talker"]
    lost = RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for ...")
    pipeline.submit("other", tokens=50)
    if where == "step":
        stage.fail_step = lost
    elif where == "submit":
        stage.fail_submit = {"r": lost}
    else:
        stage.fail_request = {"r": stage_failure(lost, "a step")}
    sink = pipeline.submit("r")
    pipeline.run()
    assert ended(sink) is FinishReason.ERROR
    assert state(pipeline) is StageState.FAILED
    pipeline.orchestrator.check_idle()


def test_only_errors_after_which_the_device_is_lost_count_as_such() -> None:
    assert loses_device(RuntimeError("CUDA error: device-side assert triggered"))
    assert not loses_device(RuntimeError("CUDA error: invalid argument"))
    assert not loses_device(RuntimeError("CUDA out of memory"))
    assert not loses_device(ValueError("CUDA error: device-side assert triggered"))


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


def test_a_stage_is_rebuilt_in_the_thread_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "REBUILD_PAUSES", (0.0,))
    entered: list[str] = []
    rebuilt = threading.Event()

    def build(_: int) -> FakeStage:
        stage = FakeStage("talker")
        stage.enter_thread = lambda: entered.append(threading.current_thread().name)
        stage.before_step = rebuilt.set
        return stage

    pipeline = Pipeline(threads=True, rebuilds={"talker": build})
    pipeline.stages["talker"].step = raising(SystemExit)  # type: ignore[method-assign]
    finishes = []
    for number in range(200):
        try:
            finishes.append(pipeline.submit(str(number)).wait().finish_reason)
        except StageUnavailableError:
            threading.Event().wait(0.01)
        if rebuilt.is_set():
            break
    assert finishes == [FinishReason.ERROR] * MAX_FAILED_STEPS + [FinishReason.STOP]
    assert entered == ["omnistage-talker"]
    pipeline.orchestrator.check_idle()
    pipeline.orchestrator.shutdown()


def test_a_stage_whose_thread_machinery_breaks_is_failed_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(threads=True, rebuilds={"talker": lambda _: FakeStage("talker")})
    loop = pipeline.orchestrator._loops["talker"]
    monkeypatch.setattr(loop, "run_pending", raising(PanicException))
    sink = pipeline.submit()
    assert isinstance(sink.wait().error, StageUnavailableError)
    assert loop.join(30)
    assert state(pipeline) is StageState.FAILED
    assert pipeline.submit("text", modalities=(TEXT,)).wait().finish_reason is FinishReason.STOP
    pipeline.orchestrator.shutdown()


class Hang:
    """A call that does not return until it is released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self, *_: object, **__: object) -> None:
        self.entered.set()
        self.go.wait(30)


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
            assert hang.entered.wait(30)
        spoken = pipeline.submit("spoken", timeout=0.2)
        assert spoken.wait().finish_reason is FinishReason.DEADLINE
        assert hang.entered.wait(30)
        assert pipeline.submit("text", modalities=(TEXT,)).wait().finish_reason is FinishReason.STOP
        pipeline.orchestrator.shutdown(drain=False, timeout=0.1)
        hang.go.set()


def test_a_sink_that_hangs_holds_up_neither_deadlines_nor_aborts() -> None:
    pipeline = Pipeline(threads=True)
    hang, finals = Hang(), list[OutputChunk]()

    def sink(item: OutputChunk) -> None:
        if item.final is not None:
            finals.append(item)
        else:
            hang()

    request = pipeline.request("stuck", timeout=0.2, modalities=(AUDIO,))
    pipeline.orchestrator.submit(request, sink)
    assert hang.entered.wait(30)
    # The vocoder's thread is in that sink; requests for text alone run, and deadlines count.
    assert (
        pipeline.submit("other", tokens=10**6, timeout=0.3, modalities=(TEXT,)).wait().finish_reason
        is FinishReason.DEADLINE
    )
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
    assert hang.entered.wait(30)
    assert pipeline.orchestrator.stats().stages["talker"] == StageStats()
    assert pipeline.submit().wait().finish_reason is FinishReason.STOP
    hang.go.set()
    reader.join(30)
    pipeline.orchestrator.shutdown()


def test_a_shutdown_does_not_wait_for_a_stage_that_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.pipeline.orchestrator._CLOSE_SECONDS", 0.1)
    pipeline = Pipeline(threads=True)
    hang = Hang()
    pipeline.stages["talker"].close = hang  # type: ignore[method-assign]
    pipeline.orchestrator.shutdown(timeout=0.1)
    assert hang.entered.wait(30)
    hang.go.set()


def test_a_step_that_takes_too_long_is_reported_once_with_its_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "WARM_UP_FACTOR", 1)
    pipeline = Pipeline(threads=True, max_step_seconds=0.05)
    hang = Hang()
    pipeline.stages["talker"].before_step = hang
    spoken = pipeline.submit("spoken")
    assert hang.entered.wait(30)
    pause = threading.Event()
    while pipeline.orchestrator.health()["talker"].overdue is None:
        pause.wait(0.01)
    with pytest.raises(StageUnavailableError, match="'talker' has been in one step"):
        pipeline.submit("refused")
    assert pipeline.submit("text", modalities=(TEXT,)).wait().finish_reason is FinishReason.STOP
    while not pipeline.orchestrator.health()["talker"].hung:
        pause.wait(0.01)
    reports = [record.getMessage() for record in caplog.records if "in one step" in record.getMessage()]
    assert len(reports) == 1
    assert "thread omnistage-talker" in reports[0]
    assert "self.go.wait(30)" in reports[0]
    hang.go.set()
    assert spoken.wait().finish_reason is FinishReason.STOP
    while not pipeline.orchestrator.health()["talker"].available:
        pause.wait(0.01)
    assert pipeline.submit("again").wait().finish_reason is FinishReason.STOP
    pipeline.orchestrator.shutdown()


def test_the_first_steps_of_a_stage_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(max_step_seconds=10.0)
    loop, supervisor = pipeline.orchestrator._loops["talker"], pipeline.orchestrator._supervisor
    monkeypatch.setattr(supervision.time, "perf_counter", lambda: 50.0)
    loop.turn_started = 0.0
    supervisor.tick()
    assert loop.health.available
    monkeypatch.setattr(supervision, "WARM_UP_STEPS", 0)
    supervisor.tick()
    assert loop.health.overdue == 50.0
    loop.turn_started = None
    supervisor.tick()
    assert loop.health.available


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
