"""Stages that are given up, rebuilt, or stuck in a step: what is refused, what goes on, what is reported."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import pytest

from omnistage.core.errors import StageUnavailableError
from omnistage.core.failures import loses_device, stage_failure
from omnistage.core.types import FinishReason
from omnistage.pipeline import supervision
from omnistage.pipeline.health import StageState
from omnistage.pipeline.loop import MAX_FAILED_STEPS
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import TEXT, FakeStage, Pipeline, Recorder
from tests.unit.faults import SECRET, Hang, PanicException, elsewhere, ended, raising

pytestmark = pytest.mark.timeout(300)


# ------------------------------------------------------------------------------------- giving up, rebuilding


@pytest.fixture
def quick_rebuilds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilds that free no memory first: that takes a second for all that the tests have imported."""
    monkeypatch.setattr(supervision, "_freed_memory", contextlib.nullcontext)


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


def test_a_stage_that_says_it_is_unavailable_refuses_requests_that_need_it_until_it_is_back() -> None:
    pipeline = Pipeline()
    stage = pipeline.stages["talker"]
    stage.unavailable = "runs on a server that does not answer"
    pipeline.run()
    with pytest.raises(StageUnavailableError, match=r"'talker' runs on a server that does not answer; try") as caught:
        pipeline.submit("refused")
    assert caught.value.status == 503
    text = pipeline.submit("text", modalities=(TEXT,))
    stage.unavailable = None
    pipeline.run()
    assert ended(text) is FinishReason.STOP
    spoken = pipeline.submit("spoken")
    pipeline.run()
    assert ended(spoken) is FinishReason.STOP


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


def test_nothing_of_a_failed_stage_is_left_when_the_next_one_is_built() -> None:
    found: list[FakeStage | None] = []

    def build(_: int) -> FakeStage:
        found.append(old())
        return FakeStage("talker", clock=pipeline.clock)

    pipeline = Pipeline(rebuilds={"talker": build})
    pipeline.stages["talker"].cycle = pipeline.stages["talker"]  # type: ignore[attr-defined]
    old = weakref.ref(pipeline.stages["talker"])
    gc.collect()
    gc.freeze()  # as a server does once its models are loaded
    try:
        break_stage(pipeline)
        del pipeline.stages["talker"]
        pipeline.clock.now += supervision.REBUILD_PAUSES[0]
        pipeline.run()
        assert found == [None]
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_stage_is_not_rebuilt_for_ever(quick_rebuilds: None) -> None:
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


def test_a_stage_that_has_run_for_long_has_all_its_attempts_again(quick_rebuilds: None) -> None:
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
    advice = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    assert not loses_device(RuntimeError(f"CUDA error: invalid argument\n{advice}"))
    assert not loses_device(RuntimeError("CUDA out of memory"))
    assert not loses_device(ValueError("CUDA error: device-side assert triggered"))


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
    assert loop.join(HANG_SECONDS)
    assert state(pipeline) is StageState.FAILED
    assert pipeline.submit("text", modalities=(TEXT,)).wait().finish_reason is FinishReason.STOP
    pipeline.orchestrator.shutdown()


def begin_earlier(pipeline: Pipeline, stage: str, seconds: float = 3600.0) -> None:
    """Let the step that a stage is in have begun so much earlier, however long it has really taken."""
    loop = pipeline.orchestrator._loops[stage]
    assert loop.turn_started is not None
    loop.turn_started -= seconds


def test_a_step_that_takes_too_long_is_reported_once_with_its_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "WARM_UP_FACTOR", 1)
    monkeypatch.setattr(supervision, "HUNG_FACTOR", 10**6)
    monkeypatch.setattr(supervision, "_CHECK_SECONDS", (0.01, 0.05))
    pipeline = Pipeline(threads=True, max_step_seconds=60.0)
    hang = Hang()

    def step_in_another_thread() -> None:  # as a stage that runs a whole pipeline does
        thread = threading.Thread(target=hang, name="omnistage-talker-pipeline")
        thread.start()
        thread.join()

    pipeline.stages["talker"].before_step = step_in_another_thread
    spoken = pipeline.submit("spoken")
    assert hang.entered.wait(HANG_SECONDS)
    begin_earlier(pipeline, "talker")
    pause = threading.Event()
    while pipeline.orchestrator.health()["talker"].overdue is None:
        pause.wait(0.01)
    with pytest.raises(StageUnavailableError, match="'talker' has been in one step"):
        pipeline.submit("refused")
    assert pipeline.submit("text", modalities=(TEXT,)).wait().finish_reason is FinishReason.STOP
    reports = [record.getMessage() for record in caplog.records if "in one step" in record.getMessage()]
    assert len(reports) == 1
    assert "thread omnistage-talker:" in reports[0]
    assert "thread omnistage-talker-pipeline:" in reports[0]
    assert "self.go.wait(" in reports[0]
    hang.go.set()
    assert spoken.wait().finish_reason is FinishReason.STOP
    while not pipeline.orchestrator.health()["talker"].available:
        pause.wait(0.01)
    assert pipeline.submit("again").wait().finish_reason is FinishReason.STOP
    pipeline.orchestrator.shutdown()


def test_a_step_that_is_not_expected_to_end_ends_the_requests_that_need_its_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "WARM_UP_FACTOR", 1)
    monkeypatch.setattr(supervision, "_CHECK_SECONDS", (0.01, 0.05))
    pipeline = Pipeline(threads=True, max_step_seconds=60.0)
    hang = Hang()
    pipeline.stages["talker"].before_step = hang
    spoken = pipeline.submit("spoken")
    assert hang.entered.wait(HANG_SECONDS)
    begin_earlier(pipeline, "talker")
    error = spoken.wait().error
    assert isinstance(error, StageUnavailableError)
    assert "'talker' hangs; restart the service" in str(error)
    assert pipeline.orchestrator.health()["talker"].needs_restart
    assert pipeline.submit("text", modalities=(TEXT,)).wait().finish_reason is FinishReason.STOP
    hang.go.set()
    pipeline.orchestrator.check_idle()
    assert len(spoken.finals) == 1
    pipeline.orchestrator.shutdown()


def test_stages_that_share_a_thread_are_stuck_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(max_step_seconds=10.0)
    loops = pipeline.orchestrator._loops
    shared, own = threading.Thread(), threading.Thread()
    for name, loop in loops.items():
        loop.thread = own if name == "thinker" else shared
    monkeypatch.setattr(supervision.time, "perf_counter", lambda: 5000.0)
    loops["talker"].turn_started = 0.0
    pipeline.orchestrator._supervisor.tick()
    assert {name: loop.health.available for name, loop in loops.items()} == {
        "thinker": True,
        "talker": False,
        "vocoder": False,
    }


def test_a_stage_whose_thread_is_gone_is_given_up() -> None:
    pipeline = Pipeline()
    sink, text = pipeline.submit(tokens=9), pipeline.submit("text", modalities=(TEXT,))
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    pipeline.orchestrator._loops["talker"].thread = gone
    pipeline.orchestrator.run_once()
    assert isinstance(sink.final.error, StageUnavailableError)
    assert state(pipeline) is StageState.FAILED
    pipeline.run()
    assert ended(text) is FinishReason.STOP
    pipeline.orchestrator.check_idle()


def test_a_stage_whose_thread_ends_while_it_is_rebuilt_is_failed_for_good() -> None:
    pipeline = Pipeline(rebuilds={"talker": lambda _: FakeStage("talker")})
    break_stage(pipeline)
    assert state(pipeline) is StageState.REBUILDING
    pipeline.orchestrator._loops["talker"].give_up(RuntimeError(SECRET), permanent=True)
    assert state(pipeline) is StageState.FAILED


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


def test_a_stage_that_was_rebuilt_may_take_longer_at_first_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(max_step_seconds=10.0, rebuilds={"talker": lambda _: FakeStage("talker", clock=pipeline.clock)})
    monkeypatch.setattr(supervision, "WARM_UP_STEPS", 1)
    loop, supervisor = pipeline.orchestrator._loops["talker"], pipeline.orchestrator._supervisor
    pipeline.submit()
    pipeline.run()
    break_stage(pipeline)
    pipeline.clock.now += supervision.REBUILD_PAUSES[0]
    elsewhere(pipeline.run)
    assert state(pipeline) is StageState.UP
    now = time.perf_counter()
    monkeypatch.setattr(supervision.time, "perf_counter", lambda: now + 50.0)
    loop.turn_started = now
    supervisor.tick()
    assert loop.health.available


def test_a_request_that_was_checked_just_before_its_stage_hangs_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(max_step_seconds=10.0)
    orchestrator = pipeline.orchestrator
    monkeypatch.setattr(supervision.time, "perf_counter", lambda: 5000.0)
    orchestrator._loops["talker"].turn_started = 0.0
    orchestrator._supervisor.tick()
    assert orchestrator.health()["talker"].hung
    monkeypatch.setattr(orchestrator, "_check_stages", lambda _: None)
    sink = pipeline.submit()
    orchestrator._supervisor.tick()
    assert isinstance(sink.final.error, StageUnavailableError)


def test_a_stage_that_was_built_for_a_loop_that_is_over_is_closed() -> None:
    built: list[FakeStage] = []

    def build(_: int) -> FakeStage:
        built.append(FakeStage("talker", clock=pipeline.clock))
        return built[0]

    pipeline = Pipeline(rebuilds={"talker": build})
    break_stage(pipeline)
    pipeline.orchestrator._loops["talker"].close_out()  # as where its thread has ended
    pipeline.clock.now += supervision.REBUILD_PAUSES[0]
    pipeline.orchestrator._supervisor.tick()
    assert [stage.closed for stage in built] == [1]
