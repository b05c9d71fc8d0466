"""Which pictures take their next step together, and in which order work items are taken. No torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.engines.diffusion.request_queue import RequestQueue
from omnistage.engines.diffusion.scheduler import DiffusionScheduler, LaneKey


@dataclass
class Limits:
    max_batch_tokens: int = 1000
    max_batch: int = 16
    max_running: int = 16
    ageing_steps: int = 16


def scheduler(**limits: int) -> DiffusionScheduler:
    return DiffusionScheduler(Limits(**limits))


def key(name: str, index: int = 0) -> LaneKey:
    return LaneKey(name, index)


def start(made: DiffusionScheduler, name: str, *groups: Hashable, tokens: int = 10, priority: int = 0) -> None:
    """Add a request of one picture and open whatever is admitted then; rows of group "a" unless said."""
    made.add(name, 1, priority=priority)
    for admitted in made.admit():
        made.set_next(admitted, groups or ("a",), tokens)


def names(batch: tuple[LaneKey, ...]) -> list[str]:
    return [lane.request_id for lane in batch]


@pytest.mark.parametrize("module", ["scheduler", "request_queue"])
def test_it_imports_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import omnistage.engines.diffusion.{module}"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------- sharing a step


def test_nothing_to_do_is_an_empty_step() -> None:
    made = scheduler()
    assert made.schedule() == ()
    assert made.admit() == ()
    assert not made.has_work()


def test_lanes_that_agree_share_a_step_whatever_step_each_is_at() -> None:
    made = scheduler()
    start(made, "old")
    for _ in range(5):
        assert names(made.schedule()) == ["old"]
    start(made, "new")
    assert sorted(names(made.schedule())) == ["new", "old"]


def test_lanes_that_do_not_agree_take_turns() -> None:
    made = scheduler()
    start(made, "wide", "a")
    start(made, "tall", "b")
    assert [names(made.schedule()) for _ in range(4)] == [["wide"], ["tall"], ["wide"], ["tall"]]


def test_an_unguided_lane_joins_a_guided_one_that_has_its_group() -> None:
    made = scheduler()
    start(made, "guided", "a", "b")
    start(made, "plain", "a")
    assert names(made.schedule()) == ["guided", "plain"]


def test_a_guided_lane_does_not_join_a_leader_that_lacks_one_of_its_groups() -> None:
    made = scheduler()
    start(made, "plain", "a")
    start(made, "guided", "a", "b")
    assert names(made.schedule()) == ["plain"]
    assert names(made.schedule()) == ["guided", "plain"]


def test_a_lane_follows_its_groups_when_they_change_on_the_way() -> None:
    made = scheduler()
    start(made, "x", "a")
    start(made, "y", "b")
    made.set_next(key("y"), ("a",), 10)
    assert sorted(names(made.schedule())) == ["x", "y"]


def test_a_request_of_several_pictures_has_as_many_lanes() -> None:
    made = scheduler()
    made.add("r", 3)
    assert made.waiting == 3
    for lane in made.admit():
        made.set_next(lane, ("a",), 10)
    assert made.schedule() == (key("r", 0), key("r", 1), key("r", 2))
    made.finish([key("r", 1)])
    assert made.schedule() == (key("r", 0), key("r", 2))
    assert "r" in made


def test_a_removed_request_leaves_at_once_and_whole() -> None:
    made = scheduler()
    made.add("gone", 2)
    start(made, "stays")
    assert len(made.schedule()) == 3
    made.remove("gone")
    assert names(made.schedule()) == ["stays"]
    assert "gone" not in made
    assert made.running == 1
    made.remove("gone")
    made.finish([key("gone")])
    made.finish([key("stays")])
    assert not made.has_work()
    assert made.schedule() == ()


def test_a_lane_that_is_not_open_is_not_scheduled() -> None:
    made = scheduler()
    made.add("r", 1)
    assert made.schedule() == ()
    assert made.admit() == (key("r"),)
    assert made.schedule() == ()
    made.set_next(key("r"), ("a",), 10)
    assert names(made.schedule()) == ["r"]


# -------------------------------------------------------------------------------------------------- budgets


def test_rows_stay_within_the_batch() -> None:
    made = scheduler(max_batch=5)
    for name in "xyz":
        start(made, name, "a", "a")
    assert names(made.schedule()) == ["x", "y"]
    assert names(made.schedule()) == ["z", "x"]


def test_tokens_stay_within_the_budget_and_guidance_counts() -> None:
    made = scheduler(max_batch_tokens=40)
    start(made, "guided", "a", "a")
    start(made, "plain", "a")
    start(made, "late", "a", "a")
    assert names(made.schedule()) == ["guided", "plain"]
    assert names(made.schedule()) == ["late", "guided"]


def test_exactly_the_budget_fits() -> None:
    made = scheduler(max_batch_tokens=30, max_batch=3)
    for name in "xyz":
        start(made, name)
    assert names(made.schedule()) == ["x", "y", "z"]


def test_a_smaller_lane_fills_what_a_larger_one_leaves() -> None:
    made = scheduler(max_batch_tokens=25)
    start(made, "first", tokens=10)
    start(made, "large", tokens=20)
    start(made, "small", tokens=15)
    assert names(made.schedule()) == ["first", "small"]
    assert names(made.schedule()) == ["large"]


def test_a_leader_over_the_budget_runs_alone() -> None:
    """The runner splits its rows; it would wait for ever otherwise."""
    made = scheduler(max_batch_tokens=15, max_batch=1)
    start(made, "guided", "a", "a")
    start(made, "plain", "a")
    assert names(made.schedule()) == ["guided"]
    assert names(made.schedule()) == ["plain"]


def test_no_more_run_than_may() -> None:
    made = scheduler(max_running=2)
    made.add("r", 3)
    assert made.admit() == (key("r", 0), key("r", 1))
    assert made.admit() == ()
    assert (made.running, made.waiting) == (2, 1)
    made.finish([key("r", 0)])
    assert made.admit() == (key("r", 2),)


# ------------------------------------------------------------------------------------ priorities, fairness


def test_the_most_urgent_is_admitted_first_then_the_first_that_came() -> None:
    made = scheduler(max_running=1)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        made.add(name, 1, priority=priority)
    order = []
    while admitted := made.admit():
        order += names(admitted)
        made.finish(admitted)
    assert order == ["urgent", "first", "second", "late"]


def test_a_request_of_many_pictures_does_not_keep_a_later_one_out() -> None:
    made = scheduler(max_running=4, ageing_steps=2)
    made.add("many", 64)
    for lane in made.admit():
        made.set_next(lane, ("a",), 10)
    for _ in range(20):  # long enough to be worth many levels, if the pictures that wait did age
        made.schedule()
    made.add("one", 1)
    assert made.admit() == ()
    made.finish([key("many", 0)])
    assert made.admit() == (key("one"),)
    made.finish([key("many", 1)])
    assert made.admit() == (key("many", 4),)


def test_places_are_shared_evenly_within_a_priority() -> None:
    made = scheduler(max_running=6)
    made.add("many", 10)
    made.add("few", 2)
    made.add("calm", 2, priority=1)
    made.add("urgent", 2, priority=-1)
    assert names(made.admit()) == ["urgent", "urgent", "many", "few", "many", "few"]


def test_the_most_urgent_leads() -> None:
    made = scheduler()
    start(made, "calm", "a", priority=0)
    start(made, "urgent", "b", priority=-1)
    assert [names(made.schedule()) for _ in range(3)] == [["urgent"]] * 3


def test_waiting_is_worth_a_priority_level() -> None:
    made = scheduler(ageing_steps=4)
    start(made, "calm", "a", priority=1)
    start(made, "urgent", "b", priority=0)
    steps = [names(made.schedule())[0] for _ in range(15)]
    # After four steps it is as urgent, and has waited longer.
    assert steps == (["urgent"] * 4 + ["calm"]) * 3


def test_a_turn_resets_the_age() -> None:
    made = scheduler(ageing_steps=1)
    start(made, "calm", "a", priority=3)
    start(made, "urgent", "b", priority=0)
    steps = [names(made.schedule())[0] for _ in range(8)]
    assert steps == (["urgent"] * 3 + ["calm"]) * 2


def test_a_stream_of_urgent_ones_cannot_starve_one_that_waits_for_admission() -> None:
    made = scheduler(ageing_steps=4, max_running=1)
    made.add("calm", 1, priority=2)
    for number in range(100):
        made.add(f"urgent{number}", 1)
        admitted = made.admit()
        if names(admitted) == ["calm"]:
            break
        made.set_next(admitted[0], ("a",), 10)
        made.finish(made.schedule())
    else:
        pytest.fail("it was never admitted")
    assert number <= 8


def test_many_that_agree_do_not_shut_out_one_that_does_not() -> None:
    made = scheduler()
    for number in range(10):
        start(made, f"same{number}", "a")
    start(made, "other", "b")
    steps = [names(made.schedule()) for _ in range(20)]
    assert sum(step == ["other"] for step in steps) == 10


# ----------------------------------------------------------------------------------------------- properties


@dataclass(frozen=True)
class Asked:
    arrival: int
    priority: int
    pictures: int
    steps: int
    groups: tuple[str, ...]
    tokens: int
    stays: int | None
    """Turns after its arrival at which it is aborted."""


@dataclass
class Watched:
    """What must come of one lane."""

    steps: int
    done: int = 0
    waited: int = 0


ASKED = st.builds(
    Asked,
    arrival=st.integers(0, 30),
    priority=st.integers(-2, 2),
    pictures=st.integers(1, 3),
    steps=st.integers(1, 8),
    groups=st.sampled_from([("a",), ("b",), ("c",), ("a", "a"), ("a", "b"), ("b", "b"), ("d", "e")]),
    tokens=st.integers(1, 40),
    stays=st.none() | st.integers(0, 20),
)
LIMITS = st.builds(
    Limits,
    max_batch_tokens=st.integers(1, 120),
    max_batch=st.integers(1, 8),
    max_running=st.integers(1, 6),
    ageing_steps=st.sampled_from([1, 3, 16]),
)


@settings(max_examples=300, deadline=None)
@given(requests=st.lists(ASKED, min_size=1, max_size=8), limits=LIMITS)
def test_every_lane_gets_exactly_its_steps_within_the_budget_and_none_waits_for_ever(
    requests: list[Asked], limits: Limits
) -> None:
    made = DiffusionScheduler(limits)
    lanes = {key(str(i), n): Watched(r.steps) for i, r in enumerate(requests) for n in range(r.pictures)}
    asked = {lane: requests[int(lane.request_id)] for lane in lanes}
    here: set[LaneKey] = set()
    opened: set[LaneKey] = set()
    gone: set[LaneKey] = set()
    # Once a lane has aged past every priority, only those that were here before it can still go first.
    spread = max(r.priority for r in requests) - min(r.priority for r in requests)
    patience = (spread + 1) * limits.ageing_steps + len(lanes)
    last = 30 + 20
    for turn in range(last + patience * sum(watched.steps for watched in lanes.values())):
        for number, request in enumerate(requests):
            mine = {lane for lane in lanes if lane.request_id == str(number)}
            if request.arrival == turn:
                made.add(str(number), request.pictures, priority=request.priority)
                here |= mine
            if request.stays is not None and request.arrival + request.stays == turn:
                made.remove(str(number))
                here -= mine
                opened -= mine
                gone |= {lane for lane in mine if lanes[lane].done < lanes[lane].steps}
        for lane in made.admit():
            assert lane in here - opened
            made.set_next(lane, asked[lane].groups, asked[lane].tokens)
            opened.add(lane)
            lanes[lane].waited = 0
        assert made.running == len(opened) <= limits.max_running
        assert made.running + made.waiting == len(here)
        assert made.has_work() is bool(here)
        batch = made.schedule()
        assert bool(batch) is bool(opened), "lanes that can run must not stand still"
        assert len(set(batch)) == len(batch)
        check_batch([asked[lane] for lane in batch], limits)
        for lane in opened:
            watched = lanes[lane]
            watched.waited = 0 if lane in batch else watched.waited + 1
            assert watched.waited <= patience
        for lane in batch:
            assert lane in opened
            lanes[lane].done += 1
            if lanes[lane].done == lanes[lane].steps:
                made.finish([lane])
                here.discard(lane)
                opened.discard(lane)
        if turn > last and not here:
            break
    else:
        pytest.fail(f"lanes were left: {here}")
    for lane, watched in lanes.items():
        assert watched.done == watched.steps or lane in gone
    assert not made.has_work()


def check_batch(batch: list[Asked], limits: Limits) -> None:
    if not batch:
        return
    assert all(set(lane.groups) <= set(batch[0].groups) for lane in batch)
    if len(batch) > 1:
        assert sum(len(lane.groups) for lane in batch) <= limits.max_batch
        assert sum(len(lane.groups) * lane.tokens for lane in batch) <= limits.max_batch_tokens


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 12), ageing=st.sampled_from([1, 16]))
def test_lanes_that_never_agree_take_turns_one_by_one(count: int, ageing: int) -> None:
    made = scheduler(ageing_steps=ageing)
    for number in range(count):
        start(made, str(number), number)
    for _ in range(3):
        assert sorted(lane.request_id for _ in range(count) for lane in made.schedule()) == sorted(
            str(number) for number in range(count)
        )


# --------------------------------------------------------------------------------------------------- a queue


def whole(queue: RequestQueue[str], most: int = 1) -> list[str]:
    taken = []
    while batch := queue.take(most, lambda item: item[0]):
        taken.append("".join(item[1] for _, item in batch))
    return taken


def test_a_line_is_first_come_first_served_within_a_priority() -> None:
    queue: RequestQueue[str] = RequestQueue(100)
    for request, item, priority in (("r", "x1", 1), ("s", "x2", 0), ("t", "x3", 0), ("u", "x4", -1)):
        queue.put(request, item, priority)
    assert whole(queue) == ["4", "2", "3", "1"]
    assert len(queue) == 0
    assert queue.take(1, lambda item: item) == []


def test_a_line_gives_what_agrees_with_the_most_urgent() -> None:
    queue: RequestQueue[str] = RequestQueue(100)
    for item in ("x1", "y2", "x3", "x4", "y5"):
        queue.put(item, item, 0)
    assert whole(queue, most=2) == ["13", "25", "4"]


def test_being_passed_over_is_worth_a_priority_level() -> None:
    queue: RequestQueue[str] = RequestQueue(3)
    queue.put("calm", "x-", 2)
    taken = []
    for _ in range(8):
        queue.put("urgent", "y+", 0)
        taken += [request_id for request_id, _ in queue.take(1, lambda item: item)]
    assert taken == ["urgent"] * 6 + ["calm", "urgent"]


def test_a_line_forgets_a_request_or_some_of_its_items() -> None:
    queue: RequestQueue[str] = RequestQueue(3)
    for request, item in (("r", "x1"), ("r", "x2"), ("s", "x3"), ("r", "y4")):
        queue.put(request, item, 0)
    assert queue.drop("r", lambda item: item[0] == "x") == 2
    assert queue.drop("s", lambda item: item[0] == "y") == 0
    assert "r" in queue
    queue.remove("r")
    assert "r" not in queue
    assert queue.take(9, lambda item: 0) == [("s", "x3")]


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 2)), max_size=20),
    most=st.integers(1, 4),
    ageing=st.integers(1, 5),
)
def test_a_line_gives_each_item_once_in_batches_that_agree(
    items: list[tuple[int, int]], most: int, ageing: int
) -> None:
    queue: RequestQueue[tuple[int, int]] = RequestQueue(ageing)
    for number, (group, priority) in enumerate(items):
        queue.put(str(number), (number, group), priority)
    taken: list[int] = []
    while batch := queue.take(most, lambda item: item[1]):
        assert len(batch) <= most
        assert len({group for _, (_, group) in batch}) == 1
        taken += [number for _, (number, _) in batch]
    assert sorted(taken) == list(range(len(items)))
