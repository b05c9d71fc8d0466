"""The stage loop and the deadline timer, mostly turn by turn."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest

from omnistage.core.errors import InvalidRequestError, ShutdownError, StageError
from omnistage.core.params import SamplingParams
from omnistage.core.stage import StageStats
from omnistage.core.types import ARInput, FinishReason, RequestInfo, SideRows, StageChunk, StageInput, TokenChunk
from omnistage.pipeline.commands import Feed
from omnistage.pipeline.deadlines import DeadlineTimer
from omnistage.pipeline.loop import StageLoop
from omnistage.pipeline.loop_threads import LoopThread
from tests.hang_guard import HANG_SECONDS
from tests.unit.fakes import FakeClock, FakeStage, _Rows

pytestmark = pytest.mark.timeout(300)


class Rig:
    def __init__(self) -> None:
        self.stage = FakeStage("s")
        self.got: list[tuple[object, StageChunk]] = []
        self.ended = threading.Condition()
        self.loop: StageLoop[object] = StageLoop(self.stage, self.take)

    def take(self, owner: object, chunk: StageChunk) -> None:
        with self.ended:
            self.got.append((owner, chunk))
            self.ended.notify_all()

    def submit(
        self, request_id: str, tokens: int = 2, *, owner: object = None, n: int = 1, stream: bool = False
    ) -> None:
        payload = ARInput((tokens,), streaming=stream)
        self.loop.submit(StageInput(RequestInfo(request_id), SamplingParams(n=n), payload), owner or request_id)

    def finishes(self, request_id: str) -> list[FinishReason]:
        return [chunk.finish for _, chunk in self.got if chunk.request_id == request_id and chunk.finish is not None]

    def wait_finish(self, request_id: str) -> None:
        with self.ended:
            assert self.ended.wait_for(lambda: self.finishes(request_id), HANG_SECONDS)


def rows(count: int, final: bool = False) -> SideRows:
    return SideRows(_Rows(count), final)  # type: ignore[arg-type]


def test_a_turn_applies_every_command_and_makes_one_step() -> None:
    rig = Rig()
    rig.submit("a")
    rig.submit("b")
    assert rig.loop.run_pending()
    assert rig.stage.calls == [("submit", "a"), ("submit", "b")]
    assert rig.stage.steps == 1
    assert rig.loop.run_pending()
    assert not rig.loop.run_pending()
    assert rig.finishes("a") == rig.finishes("b") == [FinishReason.STOP]
    assert rig.loop.leftovers() == []


def test_chunks_are_handed_over_in_the_order_of_the_step() -> None:
    rig = Rig()
    rig.submit("a", 3)
    while rig.loop.run_pending():
        pass
    tokens = [t for _, c in rig.got if isinstance(c.payload, TokenChunk) for t in c.payload.token_ids]
    assert tokens == [0, 1, 2]


def test_an_abort_takes_effect_before_the_next_step() -> None:
    rig = Rig()
    rig.submit("a", 5)
    rig.loop.run_pending()
    seen = len(rig.got)
    rig.loop.abort("a", "a")
    assert rig.loop.run_pending()
    assert len(rig.got) == seen
    assert rig.stage.steps == 1
    assert rig.stage.jobs == {}


def test_an_id_in_use_again_gets_nothing_of_its_predecessor() -> None:
    rig = Rig()
    rig.submit("a", 5, owner="first", stream=True)
    rig.loop.abort("a", "first")
    rig.submit("a", 1, owner="second", stream=True)
    rig.loop.feed("a", rows(4), "first")
    rig.loop.abort("a", "first")
    rig.loop.feed("a", rows(1, final=True), "second")
    while rig.loop.run_pending():
        pass
    assert {owner for owner, _ in rig.got} == {"second"}
    assert sum(chunk.payload is not None for _, chunk in rig.got) == 1


def test_a_submit_that_raises_ends_only_that_request() -> None:
    rig = Rig()
    problem = InvalidRequestError("too long")
    rig.stage.fail_submit = {"bad": problem, "worse": RuntimeError("secret")}
    rig.submit("bad")
    rig.submit("worse")
    rig.submit("good")
    while rig.loop.run_pending():
        pass
    errors = {chunk.request_id: chunk.error for _, chunk in rig.got if chunk.error is not None}
    assert errors["bad"] is problem
    assert isinstance(errors["worse"], StageError)
    assert "secret" not in str(errors["worse"])
    assert rig.finishes("good") == [FinishReason.STOP]


def test_a_feed_that_raises_ends_the_request_and_frees_its_place() -> None:
    rig = Rig()
    rig.stage.fail_feed = {"a": InvalidRequestError("wrong code")}
    rig.submit("a", stream=True)
    rig.loop.feed("a", rows(1), "a")
    rig.loop.feed("a", rows(1), "a")
    rig.loop.run_pending()
    assert rig.finishes("a") == [FinishReason.ERROR]
    assert rig.stage.jobs == {}
    assert rig.stage.calls.count(("feed", "a")) == 1


def test_a_step_that_raises_ends_its_requests_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.submit("a")
    rig.submit("b")
    rig.stage.fail_step = ValueError("the user said hello")
    with caplog.at_level(logging.DEBUG):
        assert rig.loop.run_pending()
    assert rig.finishes("a") == rig.finishes("b") == [FinishReason.ERROR]
    assert all(isinstance(chunk.error, StageError) for _, chunk in rig.got)
    assert "ValueError" in caplog.text
    assert "hello" not in caplog.text
    rig.submit("c")
    while rig.loop.run_pending():
        pass
    assert rig.finishes("c") == [FinishReason.STOP]
    assert rig.loop.leftovers() == []


def test_a_stage_that_raises_while_idle_does_not_spin() -> None:
    rig = Rig()

    def broken() -> bool:
        raise RuntimeError

    rig.stage.has_work = broken  # type: ignore[method-assign]
    assert not rig.loop.run_pending()


def test_a_stage_that_is_broken_for_good_neither_spins_nor_keeps_the_loop_from_ending() -> None:
    rig = Rig()
    rig.stage.has_work = lambda: True  # type: ignore[method-assign]

    def broken() -> list[StageChunk]:
        raise RuntimeError

    rig.stage.step = broken  # type: ignore[method-assign]
    rig.submit("a")
    assert rig.loop.run_pending()
    assert rig.finishes("a") == [FinishReason.ERROR]
    assert not rig.loop.run_pending()


def test_an_abort_that_raises_is_survived() -> None:
    rig = Rig()
    rig.stage.fail_abort = RuntimeError("x")
    rig.submit("a", 5)
    rig.loop.run_pending()
    rig.loop.abort("a", "a")
    rig.loop.run_pending()
    assert rig.loop.leftovers() == []


def test_a_receiver_that_raises_does_not_end_the_loop() -> None:
    stage = FakeStage("s")

    def refuse(owner: object, chunk: StageChunk) -> None:
        raise RuntimeError("receiver")

    loop: StageLoop[str] = StageLoop(stage, refuse)
    loop.submit(StageInput(RequestInfo("a"), SamplingParams(), ARInput((1,))), "a")
    assert loop.run_pending()
    assert not loop.run_pending()


def test_each_answer_ends_by_itself_and_an_error_ends_them_all() -> None:
    rig = Rig()
    rig.submit("a", 1, n=3)
    rig.loop.run_pending()
    assert rig.finishes("a") == [FinishReason.STOP] * 3
    rig.submit("b", 2, n=3)
    rig.stage.fail_request = {"b": StageError("numbers")}
    rig.loop.run_pending()
    assert rig.finishes("b") == [FinishReason.ERROR]
    assert not rig.loop.run_pending()
    assert rig.loop.leftovers() == []


def test_late_chunks_of_requests_that_have_ended_are_dropped() -> None:
    rig = Rig()
    rig.submit("gone")
    rig.loop.abort("gone", "gone")
    rig.submit("a")
    rig.stage.step = lambda: [StageChunk("gone", "s", TokenChunk((1,)))]  # type: ignore[method-assign]
    rig.loop.run_pending()
    assert rig.got == []


def test_leftovers_name_what_is_left() -> None:
    rig = Rig()
    rig.submit("a", stream=True)
    rig.loop.run_pending()
    rig.loop.run_pending()
    rig.submit("b")
    assert rig.loop.leftovers() == ["1 commands for s", "request a in the loop of s", "1 requests in stage s"]
    assert not rig.loop.wait_resting()


def test_stopping_with_drain_finishes_what_can_run_and_aborts_the_starved() -> None:
    rig = Rig()
    rig.submit("a", 4)
    rig.submit("starved", stream=True)
    rig.loop.stop(drain=True)
    assert rig.finishes("a") == [FinishReason.STOP]
    assert rig.finishes("starved") == [FinishReason.ABORT]
    with pytest.raises(ShutdownError):
        rig.submit("late")


def test_a_reader_of_statistics_that_is_late_does_not_replace_the_last_ones() -> None:
    rig = Rig()
    rig.submit("a", 5)
    rig.loop.run_pending()
    count, counted, ended = rig.stage.stats, threading.Event(), threading.Event()

    def slow() -> StageStats:
        stats = count()
        if threading.current_thread() is reader:
            counted.set()
            ended.wait(HANG_SECONDS)
        return stats

    rig.stage.stats = slow  # type: ignore[method-assign]
    reader = threading.Thread(target=rig.loop.stats)
    reader.start()
    counted.wait(HANG_SECONDS)
    rig.loop.stop(drain=False)
    ended.set()
    reader.join()
    assert rig.loop.stats().running == 0


def test_stopping_without_drain_ends_queued_and_running_requests() -> None:
    rig = Rig()
    rig.submit("a", 4)
    rig.loop.run_pending()
    rig.submit("queued")
    rig.loop.feed("a", rows(1), "a")
    rig.loop.stop(drain=False)
    assert rig.finishes("a") == rig.finishes("queued") == [FinishReason.ABORT]
    assert rig.stage.steps == 1
    assert rig.loop.join()


def test_the_thread_rests_without_work_and_wakes_for_it() -> None:
    rig = Rig()
    LoopThread("test", [rig.loop]).start()
    assert rig.loop.wait_resting(HANG_SECONDS)
    steps = rig.stage.steps
    rig.submit("a", 3)
    rig.wait_finish("a")
    assert rig.loop.wait_resting(HANG_SECONDS)
    assert rig.stage.steps == steps + 3
    assert rig.loop.stats().running == 0
    rig.loop.stop()
    assert rig.loop.join(HANG_SECONDS)


@pytest.mark.parametrize("drain", [True, False])
def test_a_stopping_thread_drains_only_if_told_to(drain: bool) -> None:
    rig = Rig()
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go.wait(HANG_SECONDS)

    rig.stage.before_step = hold
    LoopThread("test", [rig.loop]).start()
    rig.submit("a", 3)
    assert entered.wait(HANG_SECONDS)
    rig.loop.stop(drain=drain)
    go.set()
    assert rig.loop.join(HANG_SECONDS)
    assert rig.finishes("a") == [FinishReason.STOP if drain else FinishReason.ABORT]


# --------------------------------------------------------------------------------------------------- timer


def test_the_timer_expires_in_order_and_only_what_is_due() -> None:
    clock, expired = FakeClock(), list[str]()
    timer: DeadlineTimer[str] = DeadlineTimer(expired.append, clock=clock)
    timer.add(clock() + 2, "second")
    timer.add(clock() + 1, "first")
    gone = timer.add(clock() + 1.5, "gone")
    timer.add(clock() + 9, "later")
    timer.discard(gone)
    assert not timer.tick()
    clock.now += 2
    assert timer.tick()
    assert expired == ["first", "second"]
    assert len(timer) == 1


def test_discarded_deadlines_do_not_pile_up() -> None:
    timer: DeadlineTimer[int] = DeadlineTimer(lambda owner: None, clock=FakeClock())
    for number in range(10_000):
        timer.discard(timer.add(1e9, number))
    assert len(timer._heap) < 32


def test_a_discarded_deadline_holds_its_owner_no_longer() -> None:
    class Owner:
        pass

    timer: DeadlineTimer[Owner] = DeadlineTimer(lambda owner: None, clock=FakeClock())
    owner = Owner()
    gone = weakref.ref(owner)
    timer.discard(timer.add(1e9, owner))
    del owner
    gc.collect()
    assert gone() is None


def test_the_timer_thread_wakes_for_an_earlier_deadline() -> None:
    done, order = threading.Event(), list[str]()

    def expire(owner: str) -> None:
        order.append(owner)
        done.set()

    timer: DeadlineTimer[str] = DeadlineTimer(expire)
    timer.start()
    now = RequestInfo("now").arrival
    timer.add(now + 3600, "far")
    timer.add(now + 0.01, "near")
    assert done.wait(HANG_SECONDS)
    assert order == ["near"]
    timer.stop(30)


def test_a_stage_that_cannot_say_how_long_to_wait_goes_on_serving() -> None:
    rig = Rig()
    asked = threading.Event()

    def broken() -> float | None:
        asked.set()
        raise RuntimeError("no idea")

    rig.stage.wait_limit = broken  # type: ignore[method-assign]
    LoopThread("test", [rig.loop]).start()
    assert asked.wait(HANG_SECONDS)
    rig.submit("a")
    rig.wait_finish("a")
    rig.loop.stop()
    assert rig.loop.join(HANG_SECONDS)
    assert rig.finishes("a") == [FinishReason.STOP]


def test_what_one_turn_feeds_to_another_loop_arrives_together() -> None:
    """Else the receiver would run part of its batch, again and again."""
    source, target = Rig(), Rig()
    waiting: list[int] = []

    def route(owner: object, chunk: StageChunk) -> None:
        target.loop.feed(chunk.request_id, SideRows(_Rows(1)), owner)  # type: ignore[arg-type]
        waiting.append(len(target.loop._inbox))

    source.loop._emit = route
    for name in "abc":
        source.submit(name)
    source.loop.run_pending()
    fed = [command.request_id for command in target.loop._inbox if isinstance(command, Feed)]
    assert sorted(set(fed)) == ["a", "b", "c"]
    assert set(waiting) == {0}
    target.loop.feed("d", SideRows(_Rows(1)), "d")  # type: ignore[arg-type]
    assert len(target.loop._inbox) == len(fed) + 1


def test_what_was_fed_before_a_chunk_that_breaks_its_stage_still_arrives() -> None:
    source, target = Rig(), Rig()
    source.loop._emit = lambda owner, chunk: target.loop.feed(chunk.request_id, SideRows(_Rows(1)), owner)  # type: ignore[arg-type]
    source.submit("a")
    step = source.stage.step
    source.stage.step = lambda: [*step(), "no chunk"]  # type: ignore[list-item,method-assign]
    source.loop.run_pending()
    assert "a" in {command.request_id for command in target.loop._inbox if isinstance(command, Feed)}


def test_what_two_stages_feed_a_request_comes_in_the_order_in_which_it_was_fed() -> None:
    """One of them is still delivering when the other, which fed later, is done."""
    target = Rig()
    first_fed, second_done = threading.Event(), threading.Event()

    def feed_first(owner: object, chunk: StageChunk) -> None:
        if chunk.payload is not None:
            target.loop.feed("a", rows(1), "a")
            first_fed.set()
            assert second_done.wait(HANG_SECONDS)

    def feed_second(owner: object, chunk: StageChunk) -> None:
        if chunk.payload is not None:
            target.loop.feed("a", rows(2, final=True), "a")

    first: StageLoop[object] = StageLoop(FakeStage("first"), feed_first)
    second: StageLoop[object] = StageLoop(FakeStage("second"), feed_second)
    for source in (first, second):
        source.submit(StageInput(RequestInfo("a"), SamplingParams(), ARInput((1,))), "a")
    thread = threading.Thread(target=first.run_pending)
    thread.start()
    assert first_fed.wait(HANG_SECONDS)
    second.run_pending()
    second_done.set()
    thread.join(HANG_SECONDS)
    assert [(len(c.feed.rows), c.feed.final) for c in target.loop._inbox if isinstance(c, Feed)] == [  # type: ignore[union-attr]
        (1, False),
        (2, True),
    ]
