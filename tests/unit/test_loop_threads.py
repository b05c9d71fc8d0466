"""Which threads stages run in: several loops in one thread, and what torch makes of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from omnistage.engines.threads import compute_alone, in_passing
from omnistage.pipeline.loop import LoopThread, StageLoop, loop_threads
from omnistage.types import ARInput, FinishReason, RequestInfo, SamplingParams, StageChunk, StageInput
from tests.unit.fakes import FakeStage

pytestmark = pytest.mark.timeout(60)


class Shared:
    """Stages `a` and `b` in one thread; what they step through is written down in order."""

    def __init__(self, *, seconds: dict[str, float] | None = None) -> None:
        self.order: list[str] = []
        self.threads: set[str] = set()
        self.finished: dict[str, FinishReason] = {}
        self.changed = threading.Condition()
        seconds = seconds or {}
        self.loops: dict[str, StageLoop[str]] = {}
        for name in ("a", "b"):
            stage = FakeStage(name)
            stage.on_cpu = True
            stage.before_step = lambda name=name: self._step(name, seconds.get(name, 0.0))
            self.loops[name] = StageLoop(stage, self._take, changed=self.changed)
        self.thread: LoopThread[str] = LoopThread("shared", list(self.loops.values()))

    def _step(self, name: str, seconds: float) -> None:
        self.order.append(name)
        self.threads.add(threading.current_thread().name)
        time.sleep(seconds)

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
            assert self.changed.wait_for(lambda: all(name in self.finished for name in request_ids), 30)

    def end(self) -> None:
        for loop in self.loops.values():
            loop.stop()
        assert all(loop.join(30) for loop in self.loops.values())


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
    assert all(loop.wait_resting(30) for loop in shared.loops.values())


def test_a_resting_thread_wakes_for_either_loop(shared: Shared) -> None:
    shared.thread.start()
    for number, stage in enumerate("abba"):
        assert shared.loops[stage].wait_resting(30)
        shared.submit(stage, f"{stage}{number}", 2)
        shared.wait(f"{stage}{number}")


def test_a_stage_with_long_steps_leaves_as_much_time_to_the_other() -> None:
    rig = Shared(seconds={"a": 0.1, "b": 0.002})
    rig.submit("a", "x", 4)
    rig.submit("b", "y", 20)
    rig.thread.start()
    rig.wait("x", "y")
    # Turn about, `b` would have made three steps before the fourth of `a`; by time it has made all of them by then.
    last = max(place for place, name in enumerate(rig.order) if name == "a")
    assert rig.order[:last].count("b") == 20
    rig.end()


def test_time_without_work_is_not_saved_up() -> None:
    rig = Shared(seconds={"a": 0.01, "b": 0.01})
    rig.thread.start()
    rig.submit("a", "alone", 20)
    rig.wait("alone")
    rig.order.clear()
    rig.submit("a", "x", 30)
    while len(rig.order) < 3:
        time.sleep(0.001)
    rig.submit("b", "y", 10)
    rig.wait("x", "y")
    first = rig.order.index("b")
    # `a` has had twenty steps' time before; still `b` does not make all its steps first.
    assert "a" in rig.order[first : first + 4]
    rig.end()


def test_one_loop_can_end_while_the_other_goes_on(shared: Shared) -> None:
    shared.thread.start()
    shared.loops["a"].stop()
    assert shared.loops["a"].join(30)
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


def test_stages_on_the_cpu_share_a_thread_and_others_have_their_own() -> None:
    changed = threading.Condition()
    stages = [FakeStage(name) for name in ("hear", "think", "speak", "draw")]
    stages[1].on_cpu = stages[3].on_cpu = True
    loops: list[StageLoop[str]] = [
        StageLoop(stage, lambda *_: None, changed=changed if stage.on_cpu else None) for stage in stages
    ]
    names = sorted(thread.name for thread in loop_threads(loops))
    assert names == ["omnistage-cpu", "omnistage-hear", "omnistage-speak"]


# --------------------------------------------------------------------------------------------------- torch's


def test_a_call_in_passing_gives_its_result_and_leaves_no_thread() -> None:
    before = threading.active_count()
    assert in_passing(lambda: threading.current_thread().name) == "omnistage-passing"
    assert threading.active_count() == before


def test_a_call_in_passing_raises_what_it_raised() -> None:
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        in_passing(fail)


def test_computing_alone_is_for_one_thread_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:

        def alone() -> int:
            compute_alone()
            return torch.get_num_threads()

        assert in_passing(alone) == 1
        assert in_passing(torch.get_num_threads) == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
