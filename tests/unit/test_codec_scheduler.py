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
from omnistage.engines.codec.scheduler import CodecScheduler, SchedulerOutput

LAYOUT = CodecLayout(block_codes=3, codebook_size=100, max_codes=10_000, history_blocks=2, max_lookahead_blocks=9)


@dataclass(frozen=True)
class Limits:
    max_batch: int = 4
    max_running: int = 8
    first_chunk_blocks: int = 1
    max_chunk_blocks: int = 4
    lookahead_blocks: int = 1


def run(scheduler: CodecScheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update(output, ())
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


def growing(seconds_a_code: float, seconds_a_window: float = 0.0) -> list[int]:
    """Blocks of each window of an utterance whose codes, each 20 ms of sound, come one at a time at this pace."""
    layout = replace(LAYOUT, code_seconds=0.02)
    now = 0.0
    scheduler = CodecScheduler(layout, Limits(max_chunk_blocks=8), clock=lambda: now)
    scheduler.add("a", None)
    blocks = []
    for code in range(90):
        scheduler.extend("a", [code], final=code == 89)
        while scheduler.has_work():
            output = scheduler.schedule()
            now += seconds_a_window
            scheduler.update(output, ())
            blocks += [w.emit // layout.block_codes for w in output.windows]
        now += seconds_a_code
    return blocks


def test_chunks_double_while_codes_come_much_faster_than_they_sound() -> None:
    assert growing(0.004) == [1, 2, 4, 8, 8, 7]


def test_chunks_stay_small_when_waiting_would_make_a_gap() -> None:
    assert set(growing(0.019)[:-1]) == {1}


def test_chunks_double_when_decoding_small_ones_takes_too_long() -> None:
    assert growing(0.019, seconds_a_window=0.05) == [1, 2, 4, 4, 4, 4, 4, 4, 3]  # 0.05 s is little of 4 blocks' 0.24 s
    assert set(growing(0.019, seconds_a_window=0.02)[:-1]) == {1}


def test_later_chunks_grow_with_what_is_there_and_carry_bounded_history() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None)
    scheduler.extend("a", range(60), final=False)
    sizes = [(w.emit, w.history) for _ in range(6) for w in run(scheduler).windows]
    assert sizes == [(3, 0), (12, 3), (12, 6), (12, 6), (12, 6), (6, 6)]


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


@pytest.mark.parametrize(("codes", "sizes"), [(6, [6]), (7, [3, 4]), (18, [3, 15]), (19, [3, 12, 4])])
def test_the_last_window_takes_what_a_full_chunk_and_its_lookahead_hold(codes: int, sizes: list[int]) -> None:
    # A first chunk of 3 codes, later ones of 12 at most, each with a look-ahead of 3.
    scheduler = CodecScheduler(LAYOUT, Limits())
    scheduler.add("a", None)
    scheduler.extend("a", range(codes), final=True)
    windows = [window for _ in sizes for window in run(scheduler).windows]
    assert [window.emit for window in windows] == sizes
    assert [window.last for window in windows] == [False] * (len(sizes) - 1) + [True]


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


def test_equals_take_turns_so_that_a_new_request_is_heard_soon() -> None:
    scheduler = CodecScheduler(LAYOUT, Limits(max_batch=1, max_chunk_blocks=1))
    scheduler.add("old", None)
    scheduler.extend("old", range(90), final=True)
    run(scheduler)
    scheduler.add("new", None)
    scheduler.extend("new", range(90), final=True)
    assert [next(iter(emitted(run(scheduler)))) for _ in range(4)] == ["old", "new", "old", "new"]


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
    scheduler.update(scheduler.schedule(), {"a"})
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


def test_a_request_that_waits_for_a_longer_chunk_says_when_it_stops_waiting() -> None:
    layout = replace(LAYOUT, code_seconds=0.02)
    now = 0.0
    scheduler = CodecScheduler(layout, Limits(max_chunk_blocks=8), clock=lambda: now)
    scheduler.add("a", None)
    scheduler.extend("a", range(6), final=False)
    run(scheduler)
    assert scheduler.wait_limit() is None
    scheduler.extend("a", range(3), final=False)
    assert not scheduler.has_work()
    limit = scheduler.wait_limit()
    assert limit is not None
    now += limit
    assert scheduler.has_work()
    assert [w.emit for w in run(scheduler).windows] == [layout.block_codes]
