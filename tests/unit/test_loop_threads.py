"""Which threads stages run in: several loops in one thread, and what torch makes of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, FinishReason, RequestInfo, StageChunk, StageInput
from omnistage.engines import threads
from omnistage.pipeline import loop_threads as stage_loops
from omnistage.pipeline.loop import StageLoop
from omnistage.pipeline.loop_threads import LoopThread, loop_threads, sharing
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import FakeStage

pytestmark = pytest.mark.timeout(300)


class Shared:
    """Stages `a` and `b` in one thread; what they step through is written down in order."""

    def __init__(self, *, seconds: dict[str, float] | None = None) -> None:
        self.now = 0.0
        """What a patched clock reads; a step takes it further by its `seconds`."""
        self.on_step: Callable[[], None] = lambda: None
        self.order: list[str] = []
        self.threads: set[str] = set()
        self.finished: dict[str, FinishReason] = {}
        self.changed = threading.Condition()
        seconds = seconds or {}
        self.loops: dict[str, StageLoop[str]] = {}
        for name in ("a", "b"):
            stage = FakeStage(name)
            stage.before_step = lambda name=name: self._step(name, seconds.get(name, 0.0))
            self.loops[name] = StageLoop(stage, self._take, changed=self.changed)
        self.thread: LoopThread[str] = LoopThread("shared", list(self.loops.values()))

    def _step(self, name: str, seconds: float) -> None:
        self.order.append(name)
        self.threads.add(threading.current_thread().name)
        self.now += seconds
        self.on_step()

    def _take(self, owner: str, chunk: StageChunk) -> None:
        if chunk.finish is not None:
            with self.changed:
                self.finished[owner] = chunk.finish
                self.changed.notify_all()

    def submit(self, stage: str, request_id: str, tokens: int) -> None:
        payload = ARInput((tokens,))
        self.loops[stage].submit(StageInput(RequestInfo(request_id), SamplingParams(), payload), request_id)

    def wait(self, *request_ids: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(name in self.finished for name in request_ids), HANG_SECONDS)

    def end(self) -> None:
        for loop in self.loops.values():
            loop.stop()
        assert all(loop.join(HANG_SECONDS) for loop in self.loops.values())


@pytest.fixture
def shared() -> Iterator[Shared]:
    rig = Shared()
    yield rig
    rig.end()


def test_loops_share_a_thread_and_both_get_on(shared: Shared) -> None:
    shared.submit("a", "x", 5)
    shared.submit("b", "y", 5)
    shared.thread.start()
    shared.wait("x", "y")
    assert shared.threads == {"shared"}
    assert sorted(shared.order) == ["a"] * 5 + ["b"] * 5
    assert all(loop.wait_resting(HANG_SECONDS) for loop in shared.loops.values())


def test_a_resting_thread_wakes_for_either_loop(shared: Shared) -> None:
    shared.thread.start()
    for number, stage in enumerate("abba"):
        assert shared.loops[stage].wait_resting(HANG_SECONDS)
        shared.submit(stage, f"{stage}{number}", 2)
        shared.wait(f"{stage}{number}")


def test_a_resting_thread_wakes_for_work_that_came_from_elsewhere(shared: Shared) -> None:
    shared.thread.start()
    stage, loop = shared.loops["a"].stage, shared.loops["a"]
    assert loop.wait_resting(HANG_SECONDS)
    arrived, stepped = threading.Event(), threading.Event()
    stage.has_work = lambda: arrived.is_set() and not stepped.is_set()  # type: ignore[method-assign]
    stage.step = lambda: stepped.set() or []  # type: ignore[method-assign, func-returns-value]
    arrived.set()
    assert stage.wake is not None
    stage.wake()
    assert stepped.wait(HANG_SECONDS)


def clocked(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> Shared:
    """Stages whose steps take exactly so long, whatever else the machine does."""
    rig = Shared(seconds=seconds)
    monkeypatch.setattr(stage_loops, "time", SimpleNamespace(perf_counter=lambda: rig.now))
    return rig


def test_a_stage_with_long_steps_leaves_as_much_time_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = clocked(monkeypatch, a=0.1, b=0.002)
    rig.submit("a", "x", 4)
    rig.submit("b", "y", 20)
    rig.thread.start()
    rig.wait("x", "y")
    # Turn about, `b` would have made three steps before the fourth of `a`; by time it has made all of them by then.
    last = max(place for place, name in enumerate(rig.order) if name == "a")
    assert rig.order[:last].count("b") == 20
    rig.end()


def test_time_without_work_is_not_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = clocked(monkeypatch, a=0.01, b=0.01)
    rig.thread.start()
    rig.submit("a", "alone", 20)
    rig.wait("alone")
    rig.order.clear()
    rig.on_step = lambda: rig.submit("b", "y", 10) if len(rig.order) == 3 else None
    rig.submit("a", "x", 30)
    rig.wait("x", "y")
    first = rig.order.index("b")
    # `a` has had twenty steps' time before; still `b` does not make all its steps first.
    assert "a" in rig.order[first : first + 4]
    rig.end()


def test_one_loop_can_end_while_the_other_goes_on(shared: Shared) -> None:
    shared.thread.start()
    shared.loops["a"].stop()
    assert shared.loops["a"].join(HANG_SECONDS)
    shared.submit("b", "y", 3)
    shared.wait("y")
    assert shared.finished == {"y": FinishReason.STOP}


def test_a_defect_of_one_stage_leaves_the_other_alone(shared: Shared) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    stage = shared.loops["a"].stage
    assert isinstance(stage, FakeStage)
    stage.before_step = fail
    shared.submit("a", "x", 3)
    shared.submit("b", "y", 3)
    shared.thread.start()
    shared.wait("x", "y")
    assert shared.finished == {"x": FinishReason.ERROR, "y": FinishReason.STOP}


def test_loops_of_different_conditions_cannot_share_a_thread() -> None:
    loops: list[StageLoop[str]] = [StageLoop(FakeStage(name), lambda *_: None) for name in "ab"]
    with pytest.raises(ValueError, match="share"):
        LoopThread("no", loops)


@pytest.mark.parametrize(
    ("each", "cores", "shared"), [(2, 2, True), (2, 3, True), (2, 4, False), (1, 1, False), (0, 2, False)]
)
def test_stages_share_a_thread_where_their_threads_would_crowd_the_cores(
    monkeypatch: pytest.MonkeyPatch, each: int, cores: int, shared: bool
) -> None:
    monkeypatch.setattr(stage_loops, "usable_cores", lambda: cores)
    stages = [FakeStage(name) for name in ("hear", "think", "speak", "draw")]
    stages[1].cpu_threads = stages[3].cpu_threads = each
    together = sharing(stages)
    assert together == (frozenset({"think", "draw"}) if shared else frozenset())
    changed = threading.Condition()
    loops: list[StageLoop[str]] = [
        StageLoop(stage, lambda *_: None, changed=changed if stage.name in together else None) for stage in stages
    ]
    names = sorted(thread.name for thread in loop_threads(loops, together))
    own = {"omnistage-hear", "omnistage-speak"}
    assert names == sorted(own | ({"omnistage-cpu"} if shared else {"omnistage-think", "omnistage-draw"}))


def test_a_stage_that_cannot_enter_its_thread_is_run_all_the_same(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    entered: list[str] = []

    def fail() -> None:
        raise RuntimeError("no")

    shared.loops["a"].stage.enter_thread = fail
    shared.loops["b"].stage.enter_thread = lambda: entered.append(threading.current_thread().name)
    shared.thread.start()
    assert entered == ["shared"]  # before `start` returns
    shared.submit("a", "x", 2)
    shared.submit("b", "y", 2)
    shared.wait("x", "y")
    assert "enter_thread of stage 'a'" in caplog.text


def test_a_loop_does_not_wait_for_itself(shared: Shared) -> None:
    found: list[bool] = []
    stage = shared.loops["a"].stage
    assert isinstance(stage, FakeStage)
    stage.before_step = lambda: found.append(shared.loops["b"].join(HANG_SECONDS))
    shared.submit("a", "x", 1)
    shared.thread.start()
    shared.wait("x")
    assert found == [False]


# --------------------------------------------------------------------------------------------------- torch's


@pytest.fixture
def three() -> Iterator[None]:
    """Three of torch's threads, here and in threads to come."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def elsewhere(function: Callable[[], object]) -> int:
    """What torch's number is in a new thread, behind a call there."""
    found: list[int] = []

    def run() -> None:
        function()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("three")
def test_computing_alone_is_for_one_thread_only() -> None:
    assert elsewhere(threads.set_single_threaded) == 1
    assert elsewhere(lambda: None) == 3
    assert torch.get_num_threads() == 3
    assert elsewhere(lambda: threads.set_threads(2)) == 2


@pytest.mark.usefixtures("three")
def test_being_alone_ends() -> None:
    with threads.single_threaded() as usual:
        assert (usual, torch.get_num_threads()) == (3, 1)
        # Whoever comes to it meanwhile finds what is usual all the same.
        assert elsewhere(beside := _Beside()) == 3
        assert beside.usual == 3
    assert torch.get_num_threads() == 3
    assert elsewhere(lambda: None) == 3


class _Beside:
    usual = 0

    def __call__(self) -> None:
        with threads.single_threaded() as self.usual:
            pass


@pytest.mark.usefixtures("three")
def test_threads_that_are_made_alone_at_one_time_leave_others_as_they_are() -> None:
    for _ in range(100):
        ready = threading.Barrier(4)

        def enter(ready: threading.Barrier = ready) -> None:
            ready.wait()
            threads.set_single_threaded()

        entering = [threading.Thread(target=enter) for _ in range(4)]
        for thread in entering:
            thread.start()
        for thread in entering:
            thread.join()
        assert elsewhere(lambda: None) == 3
