"""The scheduler without a network: a simulator writes into the blocks what a runner would, and reads it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omnistage.core.errors import InternalError
from omnistage.engines.ar.block_pool import BlockPool
from omnistage.engines.ar.scheduler import MIN_UNCUT_TOKENS, Scheduler, SchedulerOutput, SequenceState

SLOW_MACHINE = [HealthCheck.too_slow]

VOCABULARY = 2
"""So few tokens that prompts often share a beginning."""


@dataclass
class Simulated:
    """A request as the simulator knows it."""

    state: SequenceState
    limit: int
    tokens: list[int]
    """Those that the scheduler knows, and after them the one that nobody has read yet."""
    media: dict[int, bytes] = field(default_factory=dict)
    generated: int = 0
    started: int = 0
    computed: int = 0
    prompt: int = 0

    def content(self, upto: int) -> list[int]:
        """What the keys and values of tokens [0, upto) depend on: all that stands before each of them."""
        values: list[int] = []
        known = 0
        for index in range(upto):
            side = index - self.prompt if self.state.side_rows is not None and index >= self.prompt else None
            salt = self.state.key if not self.state.cacheable else None
            known = hash((known, self.tokens[index], self.media.get(index), side, salt))
            values.append(known)
        return values


class Simulator:
    """A scheduler with a stand-in for the runner; every step checks what must always hold."""

    def __init__(
        self,
        *,
        blocks: int = 8,
        size: int = 2,
        caching: bool = True,
        budget: int = 16,
        chunk: int | None = None,
        max_running: int = 4,
        ageing: int = 64,
        ahead: bool = False,
    ) -> None:
        """`ahead`: the tokens of a step are read after the next one was scheduled."""
        self.ahead = ahead
        self.running: tuple[SchedulerOutput, dict[str, Simulated]] | None = None
        """The step whose tokens have not been read."""
        self.pool = BlockPool(blocks, size, prefix_caching=caching)
        self.budget, self.chunk, self.max_running = budget, chunk or budget, max_running
        self.scheduler = Scheduler(
            self.pool, max_batch_tokens=budget, max_running=max_running, ageing_steps=ageing, prefill_chunk=chunk
        )
        self.live: dict[str, Simulated] = {}
        self.finished: dict[str, list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}
        """What was last written at (block, offset)."""

    @property
    def room(self) -> int:
        return self.pool.num_blocks * self.pool.block_size

    def add(
        self,
        key: str,
        prompt: Sequence[int],
        *,
        limit: int = 3,
        priority: int = 0,
        side_rows: int | None = None,
        media: dict[int, bytes] | None = None,
        cacheable: bool = True,
        runs_ahead: bool = True,
        both_ways: tuple[tuple[int, int], ...] = (),
    ) -> None:
        media = media or {}

        def media_keys(start: int, end: int) -> list[bytes]:
            return [media[i] + (i - start).to_bytes(2, "little") for i in range(start, end) if i in media]

        state = SequenceState(
            key=key,
            rank=0.0,
            token_ids=list(prompt),
            prompt_length=len(prompt),
            side_rows=None if side_rows is None else float(side_rows),
            media_keys=media_keys if media else None,
            cacheable=cacheable and side_rows is None,
            both_ways=both_ways,
            max_length=len(prompt) + limit,
            ahead=runs_ahead,
        )
        self.scheduler.add(state, priority)
        self.live[key] = Simulated(state, limit, list(prompt), media, prompt=len(prompt))

    def feed(self, key: str, rows: int, *, final: bool = False) -> None:
        self.scheduler.feed(key, rows, final=final)

    def abort(self, key: str) -> None:
        self.scheduler.remove(key)
        del self.live[key]

    def step(self) -> SchedulerOutput:
        had_work = self.scheduler.has_work()
        any_starved = any(not s.state.pending for s in self.live.values())
        ready = {key: self._ready(sim) for key, sim in self.live.items()}
        output = self.scheduler.schedule()
        self._check_plan(output, ready)
        if had_work and not any_starved:
            assert output.batch, "there was work that nothing stood in the way of, and no batch came"
        self._compute(output)
        earlier, self.running = self.running, (output, dict(self.live))
        if not self.ahead:
            self._read(*self.running)
            self.running = None
        elif earlier is not None:
            self._read(*earlier)
        self.scheduler.check()
        return output

    @staticmethod
    def _ready(mine: Simulated) -> int:
        """How many of its tokens may be computed: all that are known, as far as their rows have come."""
        rows = mine.state.side_rows
        known = mine.state.token_ids if mine.state.unread and not mine.state.ahead else mine.tokens
        return len(known) if rows is None else int(min(len(known), mine.prompt + rows))

    def _check_plan(self, output: SchedulerOutput, ready: dict[str, int]) -> None:
        keys = [item.key for item in output.batch]
        assert len(set(keys)) == len(keys)
        assert not set(keys) & set(output.preempted), "a preempted sequence is in the batch"
        assert sum(item.count for item in output.batch) <= self.budget
        assert self.scheduler.counts()[1] <= self.max_running
        for key in output.preempted:
            self.live[key].computed = 0
            assert not self.live[key].state.blocks
        for key in output.started:
            self.live[key].started += 1
            assert self.live[key].started == 1
        for item in output.batch:
            mine = self.live[item.key]
            assert mine.started == 1
            ranges = mine.state.both_ways
            assert 1 <= item.count <= max(self.chunk, *(end - start for start, end in ranges), 0)
            if mine.computed == 0:  # admitted now: it may stand on blocks that others wrote
                assert item.start % self.pool.block_size == 0
                mine.computed = item.start
            for start, end in ranges:
                edges = item.start, item.start + item.count
                assert not any(start < edge < end for edge in edges), "a range that attends both ways is cut"
            assert item.start == mine.computed, "the range does not begin where the computed part ends"
            assert item.start + item.count <= ready[item.key], "scheduled past what is ready"
            assert item.sample == (item.start + item.count == len(mine.tokens))
            assert len(mine.tokens) < mine.prompt + mine.limit, "a token too many is sampled"
            assert len(item.blocks) == self.pool.blocks_for(item.start + item.count)

    def _compute(self, output: SchedulerOutput) -> None:
        size = self.pool.block_size
        for item in output.batch:
            mine, end = self.live[item.key], item.start + item.count
            content = mine.content(end)
            for index in range(item.start, end):
                self.slots[item.blocks[index // size], index % size] = content[index]
            mine.computed = end
        for item in output.batch:
            end = item.start + item.count
            seen = [self.slots[item.blocks[index // size], index % size] for index in range(end)]
            assert seen == self.live[item.key].content(end), f"{item.key} reads what is not its own content"
            if item.sample:
                self.live[item.key].tokens.append(seen[-1] % VOCABULARY)

    def _read(self, output: SchedulerOutput, sequences: dict[str, Simulated]) -> None:
        self.scheduler.commit(output)
        for item in output.batch:
            mine = sequences[item.key]
            if not item.sample or self.live.get(item.key) is not mine:
                continue
            mine.generated += 1
            if mine.generated >= mine.limit:
                self.finished[item.key] = mine.state.token_ids
                self.abort(item.key)
            else:
                self.scheduler.append(item.key, mine.tokens[mine.prompt + mine.generated - 1])

    def drain(self, most: int = 3000) -> int:
        """Step until nothing is runnable; how many steps it took."""
        for count in range(most):
            if not self.scheduler.has_work() and self.running is None:
                return count
            if self.scheduler.has_work():
                self.step()
            elif self.running is not None:
                earlier, self.running = self.running, None
                self._read(*earlier)
        raise AssertionError(f"not done after {most} steps; still there: {sorted(self.live)}")


def batch(output: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [(item.key, item.start, item.count, item.sample) for item in output.batch]


# ---------------------------------------------------------------------------------------------- batching


def test_a_short_prompt_is_computed_at_once_and_then_a_token_a_step() -> None:
    sim = Simulator()
    sim.add("a", [0, 1, 0], limit=3)
    assert batch(sim.step()) == [("a", 0, 3, True)]
    assert batch(sim.step()) == [("a", 3, 1, True)]
    assert batch(sim.step()) == [("a", 4, 1, True)]
    assert not sim.scheduler.has_work()
    assert sim.pool.free_blocks == 8


def test_a_prompt_longer_than_the_budget_is_cut_and_sampled_only_at_its_end() -> None:
    sim = Simulator(budget=4)
    sim.add("a", [0] * 10)
    assert [batch(sim.step()) for _ in range(3)] == [[("a", 0, 4, False)], [("a", 4, 4, False)], [("a", 8, 2, True)]]


def test_a_prefill_chunk_leaves_budget_for_others() -> None:
    sim = Simulator(budget=8, chunk=3)
    sim.add("a", [0] * 6)
    sim.add("b", [1] * 4)
    assert batch(sim.step()) == [("a", 0, 3, False), ("b", 0, 3, False)]


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize(("budget", "chunk"), [(3, None), (16, 3), (16, 4), (5, 4)])
def test_where_pairs_stay_together_no_prompt_is_cut_before_its_last_token_or_after_one(
    length: int, budget: int, chunk: int | None
) -> None:
    pool = BlockPool(16, 2, prefix_caching=False)
    scheduler = Scheduler(pool, max_batch_tokens=budget, max_running=2, prefill_chunk=chunk, cut_pairs=False)
    scheduler.add(SequenceState("a", 0.0, [0] * length, length))
    counts: list[int] = []
    while sum(counts) < length:
        output = scheduler.schedule()
        scheduler.commit(output)
        counts.append(output.batch[0].count)
    assert sum(counts) == length
    assert 1 not in counts[1:]


@pytest.mark.parametrize("length", range(1, 14))
def test_two_prompts_that_share_a_budget_are_not_cut_so_either(length: int) -> None:
    """What the first leaves may be a single token, which the second cannot take then."""
    scheduler = Scheduler(
        BlockPool(32, 2, prefix_caching=False), max_batch_tokens=5, max_running=2, prefill_chunk=4, cut_pairs=False
    )
    counts: dict[str, list[int]] = {"a": [], "b": []}
    for key in counts:
        scheduler.add(SequenceState(key, 0.0, [0] * length, length))
    while any(sum(each) < length for each in counts.values()):
        output = scheduler.schedule()
        scheduler.commit(output)
        for item in output.batch:
            if item.start < length:  # not a token after the prompt
                counts[item.key].append(item.count)
    for each in counts.values():
        assert sum(each) == length
        assert min(each) > 0
        assert 1 not in each[1:]


def test_the_least_budget_for_uncut_pairs_is_enough_and_one_less_is_not() -> None:
    def first_counts(budget: int) -> list[int]:
        pool = BlockPool(16, 2, prefix_caching=False)
        scheduler = Scheduler(pool, max_batch_tokens=budget, max_running=1, cut_pairs=False)
        scheduler.add(SequenceState("a", 0.0, [0] * 7, 7))
        counts = []
        for _ in range(7):
            output = scheduler.schedule()
            scheduler.commit(output)
            counts += [item.count for item in output.batch]
        return counts

    assert sum(first_counts(MIN_UNCUT_TOKENS)) >= 7
    assert sum(first_counts(MIN_UNCUT_TOKENS - 1)) < 7


def test_a_token_that_could_not_be_sampled_runs_again() -> None:
    scheduler = Scheduler(BlockPool(8, 2), max_batch_tokens=16, max_running=2)
    scheduler.add(SequenceState("a", 0.0, [0, 1, 1], 3))
    scheduler.commit(scheduler.schedule(), {"a"})
    output = scheduler.schedule()
    assert batch(output) == [("a", 2, 1, True)]
    scheduler.commit(output)
    assert batch(scheduler.schedule()) == [("a", 3, 1, True)]  # the one that has not been read


def test_prompts_and_generated_tokens_share_a_batch() -> None:
    sim = Simulator()
    sim.add("a", [0, 1])
    sim.step()
    sim.add("b", [1, 0, 1])
    assert batch(sim.step()) == [("a", 2, 1, True), ("b", 0, 3, True)]


def test_no_more_sequences_run_than_allowed() -> None:
    sim = Simulator(max_running=2)
    for name in "abc":
        sim.add(name, [0, 1], limit=2)
    assert [item.key for item in sim.step().batch] == ["a", "b"]
    assert sim.scheduler.counts() == (1, 2, 0)
    sim.drain()
    assert sorted(sim.finished) == ["a", "b", "c"]


def test_sequences_wait_for_slots_of_their_adapters_and_none_takes_one_before_them() -> None:
    scheduler = Scheduler(BlockPool(8, 4, prefix_caching=False), max_batch_tokens=64, max_running=8, adapter_slots=2)
    adapters = {"a": b"x", "both": b"xy", "late": b"z", "behind": b"y", "plain": b""}
    for key, names in adapters.items():
        digests = frozenset(names[i : i + 1] for i in range(len(names)))
        scheduler.add(SequenceState(key, 0.0, [0, 1, 0], 3, adapters=digests))
    assert scheduler.schedule().started == ("a", "both", "plain")
    scheduler.remove("both")
    assert scheduler.schedule().started == ("late",)
    scheduler.remove("a")
    assert scheduler.schedule().started == ("behind",)


def test_a_held_sequence_samples_nothing_until_it_is_released() -> None:
    scheduler = Scheduler(BlockPool(8, 4), max_batch_tokens=64, max_running=8)
    scheduler.add(SequenceState("a", 0.0, [0, 1, 0], 3, cacheable=False))
    scheduler.hold("a")
    assert [(item.count, item.sample) for item in scheduler.schedule().batch] == [(2, False)]
    assert not scheduler.schedule().batch
    assert not scheduler.has_work()
    scheduler.release("a")
    assert scheduler.has_work()
    assert [(item.start, item.sample) for item in scheduler.schedule().batch] == [(2, True)]


def test_a_key_can_be_scheduled_only_once_at_a_time() -> None:
    sim = Simulator()
    sim.add("a", [0])
    with pytest.raises(InternalError, match="already"):
        sim.add("a", [0])
    sim.abort("a")
    sim.add("a", [0])


def test_unknown_keys_are_ignored_by_remove_and_feed() -> None:
    sim = Simulator()
    sim.scheduler.remove("nobody")
    sim.scheduler.feed("nobody", 1, final=True)
    assert not sim.scheduler.has_work()


def test_a_step_without_work_is_empty() -> None:
    assert Simulator().step() == SchedulerOutput(())


def test_a_sequence_removed_while_its_batch_runs_is_not_committed() -> None:
    sim = Simulator()
    sim.add("a", [0, 1, 0])
    output = sim.scheduler.schedule()
    sim.abort("a")
    sim.scheduler.commit(output)
    sim.scheduler.check()
    assert sim.pool.free_blocks == 8
    assert sim.scheduler.keys() == []


def test_a_block_that_no_sequence_holds_is_noticed() -> None:
    sim = Simulator()
    sim.add("a", [0, 1, 0])
    sim.step()
    sim.scheduler.check()
    sim.pool.allocate(1)
    with pytest.raises(InternalError, match="leaked"):
        sim.scheduler.check()


# -------------------------------------------------------------------------------------------- priorities


def test_a_lower_priority_number_is_admitted_first() -> None:
    sim = Simulator(max_running=1)
    sim.add("late", [0], priority=1)
    sim.add("early", [1], priority=0)
    assert sim.step().started == ("early",)


def test_equal_priorities_run_in_order_of_arrival() -> None:
    sim = Simulator(max_running=1)
    for name in "abc":
        sim.add(name, [0], limit=1)
    assert [sim.step().started for _ in range(3)] == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize("order", [("plain", "zero"), ("zero", "plain")])
def test_a_priority_that_is_not_given_is_zero(order: tuple[str, str]) -> None:
    scheduler = Scheduler(BlockPool(8, 2), max_batch_tokens=16, max_running=1)
    for key in order:
        state = SequenceState(key, 0.0, [0], 1)
        scheduler.add(state) if key == "plain" else scheduler.add(state, priority=0)
    assert scheduler.schedule().started == (order[0],)


def test_a_preempted_sequence_comes_back_before_those_that_arrived_after_it() -> None:
    sim = Simulator(blocks=4, size=2, caching=False, max_running=2)
    for key in "abc":
        sim.add(key, [0] * 4 if key == "a" else [1] * 4, limit=4)
    assert [item.key for item in sim.step().batch] == ["a", "b"]
    assert sim.step().preempted == ("b",)
    while "a" in sim.live:
        sim.step()
    assert [item.key for item in sim.step().batch] == ["b"]


def test_waiting_makes_up_for_priority() -> None:
    sim = Simulator(max_running=1, ageing=2)
    sim.add("busy", [0], limit=8)
    sim.add("patient", [1], limit=1, priority=3)
    for _ in range(8):
        sim.step()
    # Eight steps of waiting are worth four levels, one more than separates the two.
    sim.add("favoured", [1], limit=1, priority=0)
    assert sim.step().started == ("patient",)


@pytest.mark.parametrize(("steps", "first"), [(63, "favoured"), (64, "patient")])
def test_sixty_four_steps_of_waiting_are_worth_a_level_unless_it_is_said_otherwise(steps: int, first: str) -> None:
    scheduler = Scheduler(BlockPool(8, 2), max_batch_tokens=16, max_running=1)
    scheduler.add(SequenceState("patient", 0.0, [0], 1), priority=1)
    for _ in range(steps):
        scheduler.add(SequenceState("between", 0.0, [0], 1), priority=-5)
        assert scheduler.schedule().started == ("between",)
        scheduler.remove("between")
    scheduler.add(SequenceState("favoured", 0.0, [0], 1), priority=0)
    assert scheduler.schedule().started == (first,)
    assert scheduler.steps == steps + 1


@pytest.mark.parametrize("max_running", [1, 3])
def test_nothing_starves_under_a_stream_of_favoured_arrivals(max_running: int) -> None:
    sim = Simulator(max_running=max_running, ageing=4, blocks=6, size=2, budget=6)
    sim.add("patient", [0] * 4, limit=4, priority=5)
    # Arrivals of the first 5 * 4 steps outrank it. Each of them takes at most three steps on its own.
    bound = 20 * 3 + 4
    for number in range(bound):
        sim.add(f"favoured {number}", [1] * 4, limit=2, priority=0)
        sim.step()
        if "patient" in sim.finished:
            break
    assert "patient" in sim.finished


def test_the_best_ranked_keeps_its_blocks_when_they_run_out() -> None:
    sim = Simulator(blocks=4, size=2, caching=False)
    sim.add("a", [0] * 4, limit=4)
    sim.add("b", [1] * 4, limit=4)
    sim.step()
    preempted = [key for _ in range(3) for key in sim.step().preempted]
    assert preempted == ["b"]
    sim.drain()
    assert sim.scheduler.preemptions >= 1
    assert sorted(sim.finished) == ["a", "b"]


def test_preemption_does_not_change_what_is_generated() -> None:
    def outputs(blocks: int) -> tuple[dict[str, list[int]], int]:
        sim = Simulator(blocks=blocks, size=2)
        for number in range(4):
            sim.add(str(number), [number % 2] * (number + 1), limit=5)
        sim.drain()
        return sim.finished, sim.scheduler.preemptions

    tight, preemptions = outputs(5)
    roomy, none = outputs(64)
    assert preemptions > 0
    assert none == 0
    assert tight == roomy


def test_a_preempted_sequence_does_not_come_back_in_the_same_step() -> None:
    sim = Simulator(blocks=2, size=2, caching=False, max_running=2)
    sim.add("a", [0, 0], limit=3)
    sim.add("b", [1, 1], limit=3)
    sim.step()
    output = sim.step()
    assert output.preempted == ("b",)
    assert [item.key for item in output.batch] == ["a"]


def test_preemptions_are_counted_for_the_scheduler_and_for_each_sequence() -> None:
    sim = Simulator(blocks=2, size=2, caching=False, max_running=2)
    assert (sim.scheduler.preemptions, sim.scheduler.steps) == (0, 0)
    sim.add("a", [0, 0], limit=3)
    sim.add("b", [1, 1], limit=3)
    sim.step()
    assert sim.scheduler.preemptions == 0
    sim.step()
    assert sim.scheduler.preemptions == sim.live["b"].state.preemptions == 1
    assert sim.live["a"].state.preemptions == 0
    assert sim.scheduler.counts() == (1, 1, 0)
    assert sim.scheduler.keys() == ["a", "b"]


def test_a_whole_budget_is_given_to_one_prompt_unless_chunks_are_smaller() -> None:
    for chunk, counts in ((None, [16, 4]), (5, [5, 5, 5, 5])):
        scheduler = Scheduler(BlockPool(16, 2), max_batch_tokens=16, max_running=2, prefill_chunk=chunk)
        scheduler.add(SequenceState("a", 0.0, [0] * 20, 20))
        found = []
        for _ in counts:
            output = scheduler.schedule()
            found.append(sum(item.count for item in output.batch))
            scheduler.commit(output)
        assert found == counts
        assert scheduler.tokens == 20


def test_the_last_token_of_the_budget_is_given_to_a_running_sequence() -> None:
    sim = Simulator(budget=2)
    sim.add("a", [0])
    sim.add("b", [1])
    assert batch(sim.step()) == [("a", 0, 1, True), ("b", 0, 1, True)]
    assert batch(sim.step()) == [("a", 1, 1, True), ("b", 1, 1, True)]


def test_a_sequence_without_tokens_is_passed_over() -> None:
    scheduler = Scheduler(BlockPool(8, 2), max_batch_tokens=16, max_running=4)
    scheduler.add(SequenceState("empty", 0.0, [], 0))
    scheduler.add(SequenceState("a", 0.0, [0, 1], 2))
    assert batch(scheduler.schedule()) == [("a", 0, 2, True)]
    assert scheduler.counts() == (1, 1, 0)


def test_nothing_is_pending_where_more_is_computed_than_has_its_rows() -> None:
    assert SequenceState("a", 0.0, [0] * 6, 2, side_rows=1.0, computed=5).pending == 0
    assert SequenceState("a", 0.0, [0] * 6, 2, side_rows=1.0, computed=2).pending == 1


def test_a_sequence_larger_than_the_whole_pool_waits_and_holds_nothing() -> None:
    scheduler = Scheduler(BlockPool(2, 2), max_batch_tokens=16, max_running=4)
    scheduler.add(SequenceState("large", 0.0, [0] * 6, 6))
    assert scheduler.schedule() == SchedulerOutput(())
    assert scheduler.counts() == (1, 0, 0)
    assert scheduler.pool.free_blocks == 2
    assert not scheduler.has_work()


@pytest.mark.parametrize("lack", ["places", "blocks"])
def test_a_favoured_arrival_takes_the_place_of_the_worst_ranked_starved_one(lack: str) -> None:
    sim = Simulator(blocks=3 if lack == "blocks" else 8, max_running=3 if lack == "places" else 4, caching=False)
    for priority in (1, 2, 3):
        sim.add(f"starved {priority}", [0, 0], priority=priority, side_rows=0)
    sim.step()
    assert sim.scheduler.counts() == (0, 3, 3)
    sim.add("favoured", [1, 1], priority=0)
    output = sim.step()
    assert (output.started, output.preempted) == (("favoured",), ("starved 3",))


def test_a_running_sequence_that_grows_takes_the_blocks_of_the_worst_ranked() -> None:
    sim = Simulator(blocks=3, caching=False)
    for name in "abc":
        sim.add(name, [0, 0])
    sim.step()
    output = sim.step()
    # "a" grows into the block of "c"; for "b" there is then none but its own.
    assert output.preempted == ("c", "b")
    assert batch(output) == [("a", 2, 1, True)]


# -------------------------------------------------------------------------------------------- run ahead


def test_a_step_is_scheduled_before_the_tokens_of_the_last_one_are_read() -> None:
    sim = Simulator(ahead=True)
    sim.add("a", [0, 1, 0], limit=3)
    assert [batch(sim.step()) for _ in range(3)] == [[("a", 0, 3, True)], [("a", 3, 1, True)], [("a", 4, 1, True)]]
    assert not sim.scheduler.has_work(), "its last token is being sampled"
    assert sim.scheduler.counts() == (0, 1, 0), "and it is not starved"
    sim.drain()
    assert len(sim.finished["a"]) == 3 + 2


def test_a_sequence_that_does_not_run_ahead_is_left_out_until_its_token_is_read() -> None:
    sim = Simulator(ahead=True)
    sim.add("ahead", [0, 1], limit=4)
    sim.add("behind", [1, 1], limit=4, runs_ahead=False)
    keys = [[item.key for item in sim.step().batch] for _ in range(4)]
    assert keys == [["ahead", "behind"], ["ahead"], ["ahead", "behind"], ["ahead"]]


@pytest.mark.parametrize("blocks", [5, 64])
def test_reading_late_changes_nothing_that_is_generated(blocks: int) -> None:
    def outputs(ahead: bool) -> dict[str, list[int]]:
        sim = Simulator(blocks=blocks, size=2, ahead=ahead)
        for number in range(4):
            sim.add(str(number), [number % 2] * (number + 1), limit=5, runs_ahead=number != 2)
        sim.drain()
        return sim.finished

    assert outputs(ahead=True) == outputs(ahead=False)


def test_a_sequence_preempted_before_its_token_is_read_comes_back_with_it() -> None:
    sim = Simulator(blocks=4, size=2, caching=False, ahead=True)
    sim.add("a", [0] * 4, limit=4)
    sim.add("b", [1] * 4, limit=4)
    sim.step()
    assert sim.step().preempted == ("b",)
    assert sim.live["b"].state.token_ids == sim.live["b"].tokens, "it was read all the same"
    sim.drain()
    assert [len(sim.finished[key]) for key in "ab"] == [7, 7]


# ----------------------------------------------------------------------------------------- prefix reuse


def test_an_equal_beginning_is_not_computed_again() -> None:
    sim = Simulator(size=2)
    sim.add("a", [0, 1, 0, 1, 0], limit=1)
    sim.drain()
    sim.add("b", [0, 1, 0, 1, 1], limit=1)
    assert batch(sim.step()) == [("b", 4, 1, True)]
    assert (sim.pool.hits, sim.pool.lookups) == (2, 4)


def test_what_was_found_computed_at_first_is_told() -> None:
    sim = Simulator(size=2)
    sim.add("a", [0, 1, 0, 1, 0], limit=1)
    sim.drain()
    sim.add("b", [0, 1, 0, 1, 0], limit=2)
    sim.step()
    assert sim.scheduler.cached("b") == 4
    sim.add("c", [1, 1, 1], limit=2)
    sim.step()
    assert sim.scheduler.cached("c") == 0
    assert (sim.pool.lookups, sim.pool.hits) == (5, 2)


def test_a_sequence_gives_and_takes_prefixes_unless_it_is_said_otherwise() -> None:
    scheduler = Scheduler(BlockPool(8, 2), max_batch_tokens=16, max_running=4)
    found = []
    for key in ("a", "b"):
        scheduler.add(SequenceState(key, 0.0, [0] * 5, 5))
        found.append(scheduler.cached(key))
        scheduler.commit(scheduler.schedule())
        found.append(scheduler.cached(key))
        scheduler.remove(key)
    assert found == [0, 0, 0, 4]


def test_the_last_token_is_always_computed() -> None:
    sim = Simulator(size=2)
    sim.add("a", [0, 1, 0, 1], limit=1)
    sim.drain()
    sim.add("b", [0, 1, 0, 1], limit=1)
    assert batch(sim.step()) == [("b", 2, 2, True)]


def test_a_block_that_was_never_filled_is_not_reused() -> None:
    sim = Simulator(size=2, chunk=3)
    sim.add("a", [0] * 7)
    sim.step()
    sim.abort("a")
    sim.add("b", [0] * 7)
    assert batch(sim.step()) == [("b", 2, 3, False)]


def test_equal_tokens_with_other_media_are_computed_again() -> None:
    sim = Simulator(size=2)
    sim.add("a", [0, 0, 0, 0, 0], limit=1, media={1: b"cat"})
    sim.drain()
    sim.add("b", [0, 0, 0, 0, 0], limit=1, media={1: b"dog"})
    assert batch(sim.step()) == [("b", 0, 5, True)]


def test_equal_tokens_with_the_same_media_elsewhere_are_computed_again() -> None:
    sim = Simulator(size=4)
    sim.add("a", [0] * 5, limit=1, media={1: b"cat"})
    sim.drain()
    sim.add("b", [0] * 5, limit=1, media={2: b"cat"})
    assert batch(sim.step()) == [("b", 0, 5, True)]


def test_equal_tokens_with_the_same_media_are_reused() -> None:
    sim = Simulator(size=2)
    sim.add("a", [0] * 5, limit=1, media={1: b"cat"})
    sim.drain()
    sim.add("b", [0] * 5, limit=1, media={1: b"cat"})
    assert batch(sim.step()) == [("b", 4, 1, True)]


def test_generated_tokens_are_reused_by_a_prompt_that_repeats_them() -> None:
    sim = Simulator(size=2)
    sim.add("a", [0, 1], limit=5)
    sim.drain()
    answer = sim.finished["a"]
    sim.add("b", [*answer, 1], limit=1)
    assert sim.step().batch[0].start == len(answer) // 2 * 2


def test_a_sequence_whose_content_its_tokens_do_not_tell_neither_gives_nor_takes_prefixes() -> None:
    sim = Simulator(size=2)
    sim.add("rows", [0] * 6, limit=1, cacheable=False)
    sim.drain()
    sim.add("ids", [0] * 6, limit=1)
    assert batch(sim.step()) == [("ids", 0, 6, True)]
    sim.add("rows again", [0] * 6, limit=1, cacheable=False)
    assert batch(sim.step()) == [("rows again", 0, 6, True)]


def test_reuse_is_counted_once_however_long_a_sequence_waits_for_room() -> None:
    sim = Simulator(blocks=4, size=2)
    sim.add("first", [0, 1, 0], limit=4)
    sim.step()
    sim.add("second", [0, 1, 0, 1, 1, 1, 1], limit=1)
    sim.drain()
    # "first" could have reused one block and found none, "second" three and found at least the first.
    assert sim.pool.lookups == 4
    assert 1 <= sim.pool.hits <= 3


@pytest.mark.parametrize(("tokens", "reusable"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_what_a_sequence_could_reuse_is_its_full_blocks_before_the_last_token(tokens: int, reusable: int) -> None:
    sim = Simulator(size=2)
    sim.add("a", [0] * tokens)
    sim.step()
    assert (sim.pool.lookups, sim.pool.hits) == (reusable, 0)


@pytest.mark.parametrize(("cacheable", "caching"), [(True, False), (False, True), (False, False)])
def test_no_lookup_is_counted_for_a_sequence_that_cannot_reuse(cacheable: bool, caching: bool) -> None:
    sim = Simulator(size=2, caching=caching)
    sim.add("a", [0] * 6, cacheable=cacheable)
    sim.step()
    assert (sim.pool.lookups, sim.pool.hits) == (0, 0)


def test_the_blocks_of_every_chunk_are_reused() -> None:
    sim = Simulator(size=2, chunk=3)
    sim.add("a", [0] * 9, limit=1)
    sim.drain()
    sim.add("b", [0] * 9, limit=1)
    assert batch(sim.step()) == [("b", 8, 1, True)]


# ---------------------------------------------------------------------------------------------- starving


def test_a_streaming_sequence_starves_without_rows_and_goes_on_with_them() -> None:
    sim = Simulator()
    sim.add("a", [0, 1], limit=4, side_rows=0)
    assert batch(sim.step()) == [("a", 0, 2, True)]
    assert not sim.scheduler.has_work()
    assert sim.scheduler.counts() == (0, 1, 1)
    sim.feed("a", 1)
    assert batch(sim.step()) == [("a", 2, 1, True)]
    assert not sim.scheduler.has_work()
    sim.feed("a", 0, final=True)
    sim.drain()
    assert "a" in sim.finished


def test_rows_that_came_early_are_not_scheduled_past_known_tokens() -> None:
    sim = Simulator()
    sim.add("a", [0, 1], limit=4, side_rows=100)
    assert batch(sim.step()) == [("a", 0, 2, True)]
    assert batch(sim.step()) == [("a", 2, 1, True)]


def test_a_starved_sequence_does_not_hold_others_back() -> None:
    sim = Simulator()
    sim.add("starved", [0, 1], side_rows=0)
    sim.step()
    sim.add("free", [1, 1], limit=3)
    sim.drain()
    assert sorted(sim.finished) == ["free"]
    assert sim.scheduler.counts() == (0, 1, 1)


def test_a_sequence_preempted_while_starved_is_computed_again_without_sampling_twice() -> None:
    sim = Simulator(blocks=4, size=2, caching=False)
    sim.add("a", [0] * 4, limit=4)
    sim.add("b", [1] * 4, limit=4, side_rows=0)
    sim.step()
    generated = sim.live["b"].generated
    sim.drain()
    assert sim.scheduler.preemptions >= 1
    assert "a" in sim.finished
    assert sim.live["b"].generated == generated == 1
    sim.feed("b", 0, final=True)
    sim.drain()
    assert len(sim.finished["b"]) == 4 + 3


def test_work_that_does_not_fit_beside_a_better_ranked_starved_one_is_no_work_until_something_changes() -> None:
    sim = Simulator(blocks=3, size=2, caching=False)
    sim.add("starved", [0] * 4, limit=2, side_rows=0)
    sim.step()
    sim.add("large", [1] * 4, limit=1)
    assert sim.scheduler.has_work()
    assert not sim.step().batch
    assert not sim.scheduler.has_work()
    sim.feed("starved", 0, final=True)
    assert sim.scheduler.has_work()
    sim.drain()
    assert sorted(sim.finished) == ["large", "starved"]


def test_work_that_did_not_fit_is_work_again_once_another_is_gone() -> None:
    sim = Simulator(blocks=3, size=2, caching=False)
    sim.add("starved", [0] * 4, limit=2, side_rows=0)
    sim.step()
    sim.add("large", [1] * 4, limit=1)
    assert not sim.step().batch
    assert not sim.scheduler.has_work()
    sim.abort("starved")
    assert sim.scheduler.has_work()
    sim.drain()
    assert sorted(sim.finished) == ["large"]


# ---------------------------------------------------------------------------------------- state machine


def test_ranges_that_attend_both_ways_are_computed_in_one_step_each() -> None:
    sim = Simulator(blocks=20, size=4, budget=8, chunk=3)
    sim.add("pictures", [0, 1] * 10, both_ways=((2, 7), (7, 9), (14, 20)))
    cuts = [(item.start, item.count) for _ in range(7) for item in sim.step().batch if item.start < 20]
    assert cuts == [(0, 2), (2, 5), (7, 3), (10, 3), (13, 1), (14, 6)]


def test_no_prefix_ends_within_a_range_that_attends_both_ways() -> None:
    sim = Simulator(blocks=20, size=4, budget=16)
    for name in ("first", "second"):
        sim.add(name, [0, 1] * 8, both_ways=((6, 11), (11, 14)))
        [item] = sim.step().batch
        sim.drain()
    assert (item.start, item.count) == (4, 12)  # of three blocks, the third ends in a range, and the second too


def test_others_do_not_take_a_step_from_one_whose_range_does_not_fit_beside_them() -> None:
    sim = Simulator(blocks=20, size=4, budget=6, max_running=4)
    sim.add("short", [0] * 3, limit=4)
    sim.step()
    sim.add("picture", [1] * 8, both_ways=((0, 6),))
    sim.add("late", [0] * 3)
    while "short" in sim.live:
        assert {item.key for item in sim.step().batch} == {"short"}
    assert [(item.key, item.count) for item in sim.step().batch] == [("picture", 6)]


def test_a_prefix_that_is_looked_up_in_vain_is_released() -> None:
    """Its range does not fit beside the others: the blocks of its prefix may be used for something else until then."""
    sim = Simulator(blocks=20, size=4, budget=6)
    sim.add("first", [0] * 5)
    sim.drain()
    sim.add("short", [1] * 3, limit=4)
    sim.step()
    sim.add("picture", [0] * 4 + [1] * 6, both_ways=((4, 10),))
    while "short" in sim.live:
        assert {item.key for item in sim.step().batch} == {"short"}
    assert [(item.key, item.start, item.count) for item in sim.step().batch] == [("picture", 4, 6)]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, stream, are aborted and finish in any order, over pools too small for all of them."""

    @initialize(
        blocks=st.integers(1, 10),
        size=st.integers(1, 4),
        caching=st.booleans(),
        budget=st.integers(1, 12),
        chunk=st.none() | st.integers(1, 6),
        max_running=st.integers(1, 4),
        ageing=st.integers(1, 6),
        ahead=st.booleans(),
    )
    def start(
        self,
        blocks: int,
        size: int,
        caching: bool,
        budget: int,
        chunk: int | None,
        max_running: int,
        ageing: int,
        ahead: bool,
    ) -> None:
        self.sim = Simulator(
            blocks=blocks,
            size=size,
            caching=caching,
            budget=budget,
            chunk=chunk,
            max_running=max_running,
            ageing=ageing,
            ahead=ahead,
        )
        self.added = 0
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
        limit=st.integers(1, 6),
        priority=st.integers(-2, 2),
        side_rows=st.none() | st.integers(0, 2),
        media=st.dictionaries(st.integers(0, 4), st.sampled_from([b"cat", b"dog"]), max_size=2),
        cacheable=st.booleans(),
        runs_ahead=st.booleans(),
        both_ways=st.none() | st.tuples(st.integers(0, 8), st.integers(2, 6)),
    )
    def add(
        self,
        prompt: list[int],
        limit: int,
        priority: int,
        side_rows: int | None,
        media: dict[int, bytes],
        cacheable: bool,
        runs_ahead: bool,
        both_ways: tuple[int, int] | None,
    ) -> None:
        prompt = prompt[: self.sim.room]
        start, length = both_ways or (0, 0)
        end = min(start + min(length, self.sim.budget), len(prompt))
        limit = min(limit, self.sim.room - len(prompt) + 1)  # the last token is never computed
        self.added += 1
        self.sim.add(
            f"s{self.added}",
            prompt,
            limit=limit,
            priority=priority,
            side_rows=side_rows,
            media={i: key for i, key in media.items() if i < len(prompt)},
            cacheable=cacheable,
            runs_ahead=runs_ahead,
            both_ways=((start, end),) if start < end else (),
        )

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data(), rows=st.integers(0, 3), final=st.booleans())
    def feed(self, data: st.DataObject, rows: int, final: bool) -> None:
        self.sim.feed(data.draw(st.sampled_from(sorted(self.sim.live))), rows, final=final)

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sim.live)))
        self.sim.abort(key)
        self.aborted.add(key)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.sim.step()

    @invariant()
    def tables_agree(self) -> None:
        if hasattr(self, "sim"):
            self.sim.scheduler.check()
            assert set(self.sim.scheduler.keys()) == set(self.sim.live)

    def teardown(self) -> None:
        """With every stream ended, everything ends, and every block comes back."""
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        for key in sorted(sim.live):
            sim.feed(key, 0, final=True)
        sim.drain()
        assert not sim.live
        assert set(sim.finished) | self.aborted == {f"s{n + 1}" for n in range(self.added)}
        assert not set(sim.finished) & self.aborted
        sim.pool.check([])
        assert sim.pool.free_blocks == sim.pool.num_blocks


SchedulerMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=30, deadline=None, suppress_health_check=SLOW_MACHINE
)
TestSchedulerMachine = SchedulerMachine.TestCase
