"""The codec scheduler's policy. No torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.engines.ageing import AGEING_STEPS
from omnistage.engines.codec.component import CodecLayout
from omnistage.engines.codec.costs import CostModel, Pace
from omnistage.engines.codec.requests import SchedulerOutput
from omnistage.engines.codec.scheduler import CodecScheduler

LAYOUT = CodecLayout(block_codes=3, codebook_size=100, max_codes=10_000, history_blocks=2, max_lookahead_blocks=9)


@dataclass(frozen=True)
class Limits:
    max_batch: int = 4
    max_batch_blocks: int = 64
    max_running: int = 8
    first_chunk_blocks: int = 1
    max_chunk_blocks: int = 4
    lookahead_blocks: int = 1
    max_hold_seconds: float = 0.0


def run(scheduler: CodecScheduler) -> SchedulerOutput:
    """One step, whose sound goes out at once; a code is 20 ms of it."""
    output = scheduler.schedule()
    scheduler.update(output, (), {w.request_id: 0.02 * w.emit for w in output.windows})
    scheduler.release()
    return output


def emitted(output: SchedulerOutput) -> dict[str, tuple[int, ...]]:
    return {w.request_id: w.codes[w.history : w.history + w.emit] for w in output.windows}


def test_it_imports_without_torch() -> None:
    code = "import sys, omnistage.engines.codec.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_window_waits_for_its_chunk_and_its_lookahead() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None)
    scheduler.extend("a", range(5), final=False)
    assert not scheduler.has_work()
    scheduler.extend("a", [5], final=False)
    assert scheduler.has_work()
    (window,) = run(scheduler).windows
    assert (window.codes, window.history, window.emit, window.last) == ((0, 1, 2, 3, 4, 5), 0, 3, False)
    assert scheduler.starved == 1


def sizes(codes: int, feed: int, *, end_late: bool = False) -> list[int]:
    """Codes of each window of an utterance that comes `feed` codes at a time, its end perhaps after its last code."""
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None)
    emits = []
    for at in range(0, codes, feed):
        done = at + feed >= codes
        scheduler.extend("a", range(at, min(at + feed, codes)), final=done and not end_late)
        while scheduler.has_work():
            emits += [w.emit for w in run(scheduler).windows]
    scheduler.extend("a", (), final=True)
    while scheduler.has_work():
        emits += [w.emit for w in run(scheduler).windows]
    return emits


def test_each_chunk_is_as_long_as_all_before_it_up_to_the_largest() -> None:
    assert sizes(60, 60) == [3, 3, 6, 12, 12, 12, 12]


@pytest.mark.parametrize("codes", [*range(1, 40), 60])
def test_where_an_utterance_is_cut_does_not_depend_on_when_its_codes_come(codes: int) -> None:
    expected = sizes(codes, codes)
    assert sum(expected) == codes
    for feed in (1, 2, 5, 7, 30):
        assert sizes(codes, feed) == expected
        assert sizes(codes, feed, end_late=True) == expected


def test_where_an_utterance_is_cut_does_not_depend_on_the_load() -> None:
    """Neither on how long the device takes nor on who else is served."""

    def cut(others: int, seconds: float) -> list[int]:
        now = 0.0
        scheduler = CodecScheduler(replace(LAYOUT, mixed_windows=True), Limits(max_batch=2), clock=lambda: now)
        for i in range(others):
            scheduler.add(str(i), None)
        scheduler.add("a", None)
        emits = []
        for code in range(70):
            now += 0.004
            for name in ("a", *map(str, range(others))):
                scheduler.extend(name, [code], final=code == 69)
            while scheduler.has_work():
                output = scheduler.schedule()
                now += seconds
                scheduler.update(output, (), {w.request_id: 0.02 * w.emit for w in output.windows})
                scheduler.release()
                emits += [w.emit for w in output.windows if w.request_id == "a"]
        return emits

    assert cut(0, 0.0) == cut(0, 0.3) == cut(5, 0.02) == cut(5, 0.3) == sizes(70, 70)


def test_windows_carry_bounded_history() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None)
    scheduler.extend("a", range(60), final=False)
    assert [w.history for _ in range(6) for w in run(scheduler).windows] == [0, 3, 6, 6, 6, 6]


def test_the_first_chunk_has_as_many_blocks_as_give_sound() -> None:
    layout = CodecLayout(block_codes=3, codebook_size=9, max_codes=99, max_lookahead_blocks=9, first_blocks=2)
    scheduler = CodecScheduler(layout, Limits())
    scheduler.add("a", None)
    scheduler.extend("a", range(8), final=False)
    assert not scheduler.has_work()
    scheduler.extend("a", [8], final=False)
    assert run(scheduler).windows[0].emit == 6


def test_a_window_that_reaches_the_end_emits_its_lookahead_too() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None)
    scheduler.extend("a", range(5), final=True)
    (window,) = run(scheduler).windows
    assert (window.emit, window.last) == (5, True)


@pytest.mark.parametrize(
    ("codes", "emits"), [(5, [5]), (6, [3, 3]), (11, [3, 3, 5]), (12, [3, 3, 6]), (24, [3, 3, 6, 12])]
)
def test_the_last_window_takes_what_is_less_than_a_chunk_and_its_lookahead(codes: int, emits: list[int]) -> None:
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None)
    scheduler.extend("a", range(codes), final=True)
    windows = [window for _ in emits for window in run(scheduler).windows]
    assert [window.emit for window in windows] == emits
    assert [window.last for window in windows] == [False] * (len(emits) - 1) + [True]


def test_whole_utterances_wait_for_the_end_and_run_as_one_window() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None, streaming=False)
    scheduler.extend("a", range(50), final=False)
    assert not scheduler.has_work()
    scheduler.extend("a", range(50, 55), final=True)
    (window,) = run(scheduler).windows
    assert (len(window.codes), window.emit, window.last) == (55, 55, True)


def test_a_causal_decoder_gets_no_lookahead_and_an_empty_last_window_to_flush() -> None:
    scheduler = CodecScheduler(CodecLayout(block_codes=3, codebook_size=9, max_codes=99), Limits(lookahead_blocks=2))
    scheduler.add("a", None)
    scheduler.extend("a", range(3), final=False)
    assert run(scheduler).windows[0].emit == 3
    scheduler.extend("a", [], final=True)
    (window,) = run(scheduler).windows
    assert (window.codes, window.emit, window.last) == ((), 0, True)


def test_only_equal_shapes_and_groups_share_a_batch() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits())
    for name, group, count in (("a", 1, 6), ("b", 1, 7), ("c", 2, 6), ("d", 1, 3)):
        scheduler.add(name, group)
        scheduler.extend(name, range(count), final=name == "d")
    assert [list(emitted(run(scheduler))) for _ in range(3)] == [["a", "b"], ["c"], ["d"]]


def test_lower_priority_values_go_first_then_the_oldest() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits(max_batch=1))
    for name, priority in (("late", 5), ("old", 0), ("young", 0), ("urgent", -1)):
        scheduler.add(name, None, priority=priority)
        scheduler.extend(name, [1], final=True)
    assert [next(iter(emitted(run(scheduler)))) for _ in range(4)] == ["urgent", "old", "young", "late"]


def playing(dry_in: dict[str, float], *, fixed: float = 0.05, block: float = 0.01) -> CodecScheduler:
    """Requests whose players run dry after so many seconds, each with a window of 3 blocks at hand."""
    limits = Limits(first_chunk_blocks=2)
    scheduler = CodecScheduler(replace(LAYOUT, mixed_windows=True), limits, clock=lambda: 0.0)
    for name in dry_in:
        scheduler.add(name, None)
        scheduler.extend(name, range(15), final=False)
    output = scheduler.schedule()
    scheduler.update(output, (), dry_in)
    assert set(scheduler.release()) == set(dry_in)
    scheduler.costs = CostModel()
    for blocks in (1, 10, 100):
        scheduler.costs.observe(blocks, fixed + block * blocks)
    return scheduler


def test_the_player_that_runs_dry_first_comes_first() -> None:
    scheduler = playing({"late": 0.9, "soon": 0.1, "later": 2.0}, block=1.0)
    assert [list(emitted(run(scheduler))) for _ in range(3)] == [["soon"], ["late"], ["later"]]


def test_a_window_joins_a_batch_unless_that_makes_a_player_run_dry() -> None:
    assert list(emitted(run(playing({"a": 0.2, "b": 0.5})))) == ["a", "b"]
    assert list(emitted(run(playing({"a": 0.1, "b": 0.5})))) == ["a"]


def test_a_batch_leaves_time_for_a_player_whose_codes_are_still_to_come() -> None:
    dry_in = {"now": 0.3, "then": 0.5, "starved": 0.4}
    for starved, batch in ((False, ["now", "starved"]), (True, ["now"])):
        # A window takes 0.05 s and 0.024 s for each of its 5 blocks; "starved" must begin at 0.28 s.
        scheduler = playing(dry_in, fixed=0.05, block=0.024)
        if starved:
            scheduler._requests["starved"].codes = scheduler._requests["starved"].codes[:9]
        assert list(emitted(run(scheduler))) == batch


class ExactCosts(CostModel):
    """1/16 s and 1/64 s for each block: times that floating point has no error in."""

    def seconds(self, blocks: int) -> float:
        return 1 / 16 + blocks / 64


def test_a_player_that_a_batch_serves_just_in_time_is_not_behind() -> None:
    scheduler = playing({"a": 1.0, "b": 9.0})
    scheduler.costs = ExactCosts()
    scheduler._requests["a"].dry_at = scheduler.costs.seconds(5)  # a window of 2 blocks, 2 before and 1 ahead
    assert list(emitted(run(scheduler))) == ["a"]


def test_a_player_whose_window_must_begin_as_the_batch_ends_is_not_late() -> None:
    scheduler = playing({"a": 1.0, "b": 1.5, "starved": 2.0})
    scheduler.costs = costs = ExactCosts()
    starved = scheduler._requests["starved"]
    starved.codes = starved.codes[:9]
    starved.dry_at = costs.seconds(5) + costs.seconds(scheduler.blocks(scheduler._codes_for_next(starved)))
    assert list(emitted(run(scheduler))) == ["a"]


def test_a_new_listener_comes_before_players_with_much_to_play_and_after_others() -> None:
    for dry_in, first in ((3.0, "new"), (0.1, "old")):
        scheduler = playing({"old": dry_in}, block=1.0)
        scheduler.add("new", None)
        scheduler.extend("new", range(9), final=False)
        assert list(emitted(run(scheduler))) == [first]


def test_first_sound_waits_until_what_follows_is_expected_in_time() -> None:
    now = 0.0
    limits = Limits(max_hold_seconds=2.0)
    scheduler = CodecScheduler(replace(LAYOUT, mixed_windows=True), limits, clock=lambda: now)
    for name in "ab":
        scheduler.add(name, None)
        scheduler.extend(name, range(30), final=False)
    output = scheduler.schedule()
    scheduler.update(output, (), {"a": 0.6, "b": 0.6})
    scheduler.costs = CostModel()
    for blocks in (2, 20):
        scheduler.costs.observe(blocks, 0.2 * blocks)
    assert scheduler.release() == []  # two windows of 2 blocks take 0.8 s
    now = 1.9375
    assert scheduler.release() == []
    now = 2.0  # the longest that sound may be held back
    assert scheduler.release() == ["a", "b"]


def test_first_sound_goes_out_once_what_follows_has_the_device_for_itself() -> None:
    scheduler = CodecScheduler(replace(LAYOUT, mixed_windows=True), Limits(max_hold_seconds=2.0), clock=lambda: 0.0)
    for name in "ab":
        scheduler.add(name, None)
        scheduler.extend(name, range(30), final=False)
    scheduler.update(scheduler.schedule(), (), {"a": 0.6, "b": 0.6})
    scheduler.costs = CostModel()
    for blocks in (2, 20):
        scheduler.costs.observe(blocks, 0.2 * blocks)
    assert scheduler.release() == []
    scheduler.remove("b")
    assert scheduler.release() == ["a"]
    assert scheduler.playing("a")


def test_first_sound_waits_where_a_later_window_would_be_late() -> None:
    """Codes come at twice the speed of sound: the next window is in time, and the one of 4 blocks is not."""
    now = 0.0
    layout = replace(LAYOUT, mixed_windows=True, code_seconds=0.02)
    scheduler = CodecScheduler(layout, Limits(max_chunk_blocks=8, max_hold_seconds=9.0), clock=lambda: now)
    for blocks in (2, 20):
        scheduler.costs.observe(blocks, 0.01 * blocks)
    scheduler.add("a", None)
    released = []
    for code in range(60):
        scheduler.extend("a", [code], final=False)
        now += 0.01
        while scheduler.has_work():
            output = scheduler.schedule()
            now += 0.001
            scheduler.update(output, (), {w.request_id: 0.02 * w.emit for w in output.windows})
            released += [code] * len(scheduler.release())
    (first,) = released
    assert first > 6  # the first window was there with the sixth code


@pytest.mark.parametrize(("now", "block"), [(0.3, 0.0), (0.001, 0.07)], ids=["codes", "device"])
def test_nothing_is_held_back_where_codes_or_the_device_are_slower_than_sound(now: float, block: float) -> None:
    at = 0.0
    layout = replace(LAYOUT, mixed_windows=True, code_seconds=0.02)
    scheduler = CodecScheduler(layout, Limits(max_hold_seconds=9.0), clock=lambda: at)
    scheduler.add("a", None)
    scheduler.extend("a", range(6), final=False)
    at = now
    output = scheduler.schedule()
    scheduler.update(output, (), {"a": 0.06})
    scheduler.costs = CostModel()
    for blocks in (2, 20):
        scheduler.costs.observe(blocks, block * blocks)
    assert scheduler.release() == ["a"]


def shared_device(codes: int, batch_seconds: float) -> tuple[CodecScheduler, list[float]]:
    """A scheduler and its clock: "a" got a code every 10 ms while the codec was idle, and none beside its batches."""
    now = [0.0]
    layout = replace(LAYOUT, mixed_windows=True, code_seconds=0.02)
    limits = Limits(max_chunk_blocks=8, max_hold_seconds=9.0)
    scheduler = CodecScheduler(layout, limits, clock=lambda: now[0])
    for blocks in (2, 20):
        scheduler.costs.observe(blocks, batch_seconds * blocks / 4)
    scheduler.add("a", None)
    for code in range(codes):
        scheduler.extend("a", [code], final=False)
        while scheduler.has_work():
            output = scheduler.schedule()
            now[0] += batch_seconds * bool(output.windows)
            scheduler.update(output, (), {w.request_id: 0.02 * w.emit for w in output.windows})
            scheduler.release()
        now[0] += 0.01
    return scheduler, now


def test_codes_that_a_batch_has_kept_back_are_not_taken_for_slow_ones() -> None:
    scheduler, _ = shared_device(30, 0.05)
    pace = scheduler._requests["a"].pace
    assert pace.free == pytest.approx(0.01)
    assert pace.slowdown == pytest.approx(6.0)


def test_windows_with_time_to_spare_wait_for_company_where_the_device_is_shared() -> None:
    scheduler, now = shared_device(12, 0.01)
    request = scheduler._requests["a"]
    request.dry_at = now[0] + 2.0
    scheduler.extend("a", range(30), final=False)
    assert scheduler.has_work()  # nobody to wait for
    scheduler.add("b", None)
    scheduler.extend("b", [1], final=False)
    assert scheduler.has_work()  # nothing is known of utterances yet
    scheduler.pace.learn(request.pace)
    assert not scheduler.has_work()
    limit = scheduler.wait_limit()
    assert limit is not None
    assert 1.0 < limit < 1.5
    now[0] += limit
    assert scheduler.has_work()
    now[0] -= limit
    scheduler.extend("b", range(30), final=False)
    assert scheduler.has_work()  # a first sound does not wait, and takes the others along
    assert set(emitted(scheduler.schedule())) == {"a", "b"}


def test_first_windows_wait_a_moment_for_those_of_listeners_who_came_almost_together() -> None:
    scheduler, now = shared_device(12, 0.01)
    scheduler.pace.learn(scheduler._requests["a"].pace)
    scheduler.remove("a")
    for name in "bc":
        scheduler.add(name, None)
    scheduler.extend("b", range(6), final=False)
    scheduler.extend("c", range(4), final=False)  # two codes, 20 ms, behind
    assert not scheduler.has_work()
    limit = scheduler.wait_limit()
    assert limit is not None
    assert 0.02 < limit < 0.1
    now[0] += limit
    assert scheduler.has_work()  # it waits no longer
    now[0] -= limit
    scheduler.extend("c", range(2), final=False)
    assert scheduler.has_work()
    assert set(emitted(scheduler.schedule())) == {"b", "c"}


@pytest.mark.parametrize(
    ("codes", "seconds", "waits"), [(2, 1.5, True), (1, 1.5, False), (5, 1.5, True), (1, 0.0, True)]
)
def test_a_first_window_waits_for_listeners_whose_codes_come_within_the_moment(
    codes: int, seconds: float, waits: bool
) -> None:
    """Four codes come in 60 ms: one who lacks as many is waited for, one who lacks five is not. Where a hundred came
    at once, all are."""
    scheduler = CodecScheduler(LAYOUT, Limits(), clock=lambda: 0.0)
    scheduler.pace = Pace(free_codes=100, free_seconds=seconds, beside_codes=100, beside_seconds=15.0)
    scheduler.costs.observe(2, 0.1)
    for name, count in (("ready", 6), ("next", codes)):
        scheduler.add(name, None)
        scheduler.extend(name, range(count), final=False)
    assert scheduler.has_work() is not waits


@pytest.mark.parametrize(("codes", "final"), [(0, False), (4, True)])
def test_a_first_window_does_not_wait_for_listeners_without_codes_or_with_all_of_them(codes: int, final: bool) -> None:
    """Six codes come in 60 ms; the other listener lacks no more, but nothing says that they come."""
    scheduler = CodecScheduler(LAYOUT, Limits(), clock=lambda: 0.0)
    scheduler.pace = Pace(free_codes=100, free_seconds=1.0, beside_codes=100, beside_seconds=10.0)
    scheduler.costs.observe(2, 0.1)
    scheduler.add("other", None)
    if codes:
        scheduler.extend("other", range(codes), final=final)
    scheduler.add("ready", None)
    scheduler.extend("ready", range(6), final=False)
    assert scheduler.has_work()


def test_first_sound_does_not_wait_for_long() -> None:
    now = 0.0
    scheduler = CodecScheduler(LAYOUT, Limits(max_hold_seconds=2.0), clock=lambda: now)
    scheduler.add("a", None)
    scheduler.extend("a", range(6), final=False)
    now = 0.1  # codes come hardly faster than they sound
    output = scheduler.schedule()
    scheduler.update(output, (), {"a": 0.06})
    assert scheduler.release() == []
    assert not scheduler.has_work()
    assert scheduler.wait_limit() == pytest.approx(1.9)
    now = 2.0
    assert scheduler.has_work()
    assert scheduler.schedule().windows == ()
    assert scheduler.release() == ["a"]
    assert scheduler.wait_limit() is None


def test_windows_of_different_shapes_share_a_batch_where_the_component_takes_them() -> None:
    scheduler = CodecScheduler(replace(LAYOUT, mixed_windows=True), Limits(max_batch_blocks=6))
    for name, group, count in (("a", 1, 6), ("b", 1, 5), ("c", 2, 6), ("d", 1, 6), ("e", 1, 6)):
        scheduler.add(name, group)
        scheduler.extend(name, range(count), final=name == "b")
    assert [list(emitted(run(scheduler))) for _ in range(3)] == [["a", "b", "d"], ["c"], ["e"]]


@pytest.mark.parametrize(("fixed", "block"), [(0.09, 0.006), (0.0, 0.01), (0.1, 0.0)])
def test_the_cost_of_a_batch_is_learned(fixed: float, block: float) -> None:
    costs = CostModel()
    assert costs.seconds(8) == 0.0
    costs.observe(8, 5.0)  # the first one sets things up
    for blocks in (3, 8, 20, 4, 12, 90) * 10:
        costs.observe(blocks, fixed + block * blocks)
    for blocks in (1, 10, 150):
        assert costs.seconds(blocks) == pytest.approx(fixed + block * blocks, rel=0.1, abs=0.01)
    costs.observe(20, 60.0)  # a stall is no reason to expect another
    assert costs.seconds(20) < 2 * (fixed + 20 * block)


def test_a_passed_over_request_runs_despite_its_priority() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits(max_batch=1))
    scheduler.add("meek", None, priority=3)
    scheduler.extend("meek", [1], final=True)
    for step in range(3 * AGEING_STEPS + 1):
        scheduler.add(str(step), None)
        scheduler.extend(str(step), [1], final=True)
        if "meek" in emitted(run(scheduler)):
            return
    pytest.fail("starved")


def test_no_more_requests_are_started_than_may_run() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits(max_running=1))
    for name in "ab":
        scheduler.add(name, None)
        scheduler.extend(name, range(6), final=False)
    assert run(scheduler).started == ("a",)
    assert not scheduler.has_work()
    assert run(scheduler).windows == ()
    assert (scheduler.running, scheduler.waiting) == (1, 1)
    scheduler.remove("a")
    assert run(scheduler).started == ("b",)


def test_failed_requests_are_forgotten_and_unknown_ids_ignored() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None)
    scheduler.extend("a", range(6), final=False)
    scheduler.update(scheduler.schedule(), {"a"}, {})
    scheduler.extend("a", [1], final=True)
    scheduler.remove("nobody")
    assert scheduler.length("a") is None
    assert not scheduler.has_work()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(0, 5), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 5), st.just(0), st.just(False)),
        st.tuples(st.just("step"), st.just(0), st.just(0), st.just(False)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    actions=ACTIONS,
    priorities=st.lists(st.integers(-3, 3), min_size=6, max_size=6),
    streaming=st.lists(st.booleans(), min_size=6, max_size=6),
    max_batch=st.integers(1, 4),
    max_running=st.integers(1, 6),
    lookahead=st.integers(0, 3),
)
def test_every_request_ends_once_with_its_codes_in_order(
    actions: list[tuple[str, int, int, bool]],
    priorities: list[int],
    streaming: list[bool],
    max_batch: int,
    max_running: int,
    lookahead: int,
) -> None:
    limits = Limits(max_batch=max_batch, max_running=max_running, lookahead_blocks=lookahead)
    scheduler = CodecScheduler(LAYOUT, limits)
    fed: dict[str, list[int]] = {str(i): [] for i in range(6)}
    got: dict[str, list[int]] = {str(i): [] for i in range(6)}
    ended: set[str] = set()
    aborted: set[str] = set()
    started: set[str] = set()
    final: set[str] = set()
    for i in range(6):
        scheduler.add(str(i), None, priority=priorities[i], streaming=streaming[i])

    def step() -> None:
        busy = scheduler.has_work()
        output = run(scheduler)
        assert busy == bool(output.windows or output.empty)
        assert len(output.windows) <= max_batch
        assert scheduler.running <= max_running
        assert len({(w.history, len(w.codes), w.emit, w.last) for w in output.windows}) <= 1
        assert not started & set(output.started)
        started.update(output.started)
        for window in output.windows:
            done = len(got[window.request_id])
            assert window.request_id in started - ended - aborted
            assert list(window.codes) == fed[window.request_id][done - window.history :][: len(window.codes)]
            got[window.request_id].extend(window.codes[window.history : window.history + window.emit])
        finished = [*output.empty, *(w.request_id for w in output.windows if w.last)]
        assert not ended & set(finished)
        ended.update(finished)

    for action, index, count, last in actions:
        name = str(index)
        if action == "step":
            step()
        elif action == "abort":
            scheduler.remove(name)
            aborted.update({name} - ended)
        else:
            if name not in ended | aborted | final:
                fed[name].extend(range(len(fed[name]), len(fed[name]) + count))
                final.update({name} if last else ())
            scheduler.extend(name, range(len(fed[name]) - count, len(fed[name])), final=last)
    for name in fed:
        scheduler.extend(name, [], final=True)
    for _ in range(1000):
        if not scheduler.has_work():
            break
        step()
    assert ended | aborted == set(fed)
    assert all(got[name] == fed[name] for name in ended)
