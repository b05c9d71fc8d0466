"""One order for requests that compete: priority, then the longest wait; waiting makes up for priority."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.engines.ageing import Turn, Turns, arrival_rank


def test_lower_priorities_run_first_and_equals_take_turns() -> None:
    turns = Turns(4)
    first, second, urgent = turns.new(0), turns.new(0), turns.new(-1)
    assert sorted([first, second, urgent], key=turns.rank) == [urgent, first, second]
    turns.take(first)
    assert sorted([first, second], key=turns.rank) == [second, first]


@pytest.mark.parametrize(("waited", "is_first"), [(7, False), (8, True)])
def test_every_so_many_steps_of_waiting_are_worth_one_level(waited: int, is_first: bool) -> None:
    turns = Turns(4)
    low = turns.new(2)
    low.age = waited
    newcomer = turns.new(0)
    assert (turns.rank(low) < turns.rank(newcomer)) == is_first


def test_a_wait_starts_anew_with_every_turn() -> None:
    turns = Turns(4)
    turn = turns.new(1)
    turn.age = 40
    turns.take(turn)
    assert turns.rank(turn)[0] == 1


@given(priorities=st.lists(st.integers(-3, 3), min_size=1, max_size=6), steps=st.integers(1, 5))
def test_nothing_starves_while_urgent_requests_keep_coming(priorities: list[int], steps: int) -> None:
    turns = Turns(steps)
    waiting: list[Turn] = [turns.new(priority) for priority in priorities]
    watched = list(waiting)
    bound = (max(priorities) + 4) * steps + len(priorities) + 1
    for _ in range(bound):
        waiting.append(turns.new(-3))
        chosen = min(waiting, key=turns.rank)
        waiting.remove(chosen)
        for turn in waiting:
            turn.age += 1
    assert not [turn for turn in watched if any(turn is other for other in waiting)]


def test_an_arrival_s_rank_orders_by_level_then_arrival() -> None:
    early, late = arrival_rank(0, 5, 1, 8), arrival_rank(0, 5, 2, 8)
    assert early < late < arrival_rank(1, 5, 3, 8)
    assert arrival_rank(1, 0, 1, 8) < arrival_rank(0, 9, 2, 8), "nine steps of eight make up for one level"
