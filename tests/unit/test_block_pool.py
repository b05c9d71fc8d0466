"""The block pool: references, reuse by content, eviction order, and the check that finds its own defects."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omnistage.core.errors import InternalError
from omnistage.engines.ar.block_pool import BlockPool, block_hash

SLOW_MACHINE = [HealthCheck.too_slow]


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def chain(*blocks: Sequence[int], extra: Sequence[bytes] = ()) -> list[bytes]:
    hashes: list[bytes] = []
    for tokens in blocks:
        hashes.append(block_hash(hashes[-1] if hashes else b"", tokens, extra))
    return hashes


# ---------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_room_for_a_token_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(InternalError, match="at least one token"):
        BlockPool(blocks, size)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tokens_need_whole_blocks(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 4).blocks_for(tokens) == blocks


def test_an_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    held = taken(pool, 2)
    assert pool.allocate(2) is None
    assert pool.free_blocks == 1
    pool.check([held])


def test_a_released_block_can_be_taken_again() -> None:
    pool = BlockPool(1, 4)
    first = taken(pool, 1)
    pool.release(first)
    assert taken(pool, 1) == first


def test_a_sequence_gets_adjacent_blocks_again_after_several_took_turns() -> None:
    pool = BlockPool(8, 4)
    tables = [taken(pool, 1), taken(pool, 1)]
    for _ in range(3):
        for table in tables:
            blocks = pool.allocate(1, after=table[-1])
            assert blocks is not None
            table.extend(blocks)
    for table in tables:
        pool.release(table)
    table = taken(pool, 3)
    more = pool.allocate(1, after=table[-1])
    assert more is not None
    assert [*table, *more] == list(range(table[0], table[0] + 4))


def test_adjacent_content_that_may_be_used_again_stays() -> None:
    pool = BlockPool(4, 4)
    first, second = taken(pool, 1), taken(pool, 1)
    pool.publish(second[0], b"hash")
    pool.release(second)
    assert pool.allocate(1, after=first[0]) == [2]
    assert pool.match([b"hash"]) == second


def test_releasing_more_often_than_taking_raises() -> None:
    pool = BlockPool(2, 4)
    blocks = taken(pool, 1)
    pool.release(blocks)
    with pytest.raises(InternalError, match="more often"):
        pool.release(blocks)


def test_published_content_is_found_by_its_hash_even_after_release() -> None:
    pool = BlockPool(4, 2)
    hashes = chain((1, 2), (3, 4))
    blocks = taken(pool, 2)
    for block, value in zip(blocks, hashes, strict=True):
        pool.publish(block, value)
    pool.release(blocks)
    assert pool.match(hashes) == blocks
    pool.acquire(blocks)
    assert pool.free_blocks == 2
    pool.check([blocks])


def test_a_match_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(4, 2)
    hashes = chain((1, 2), (3, 4), (5, 6))
    blocks = taken(pool, 3)
    pool.publish(blocks[0], hashes[0])
    pool.publish(blocks[2], hashes[2])
    assert pool.match(hashes) == blocks[:1]


def test_nothing_is_matched_with_prefix_caching_off() -> None:
    pool = BlockPool(4, 2, prefix_caching=False)
    blocks, hashes = taken(pool, 1), chain((1, 2))
    pool.publish(blocks[0], hashes[0])
    assert pool.match(hashes) == []


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2, 2)
    blocks = taken(pool, 1)
    pool.publish(blocks[0], chain((1, 2))[0])
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.free_blocks == 1
    pool.check([blocks])
    pool.release(blocks)
    assert pool.free_blocks == 2


def test_the_first_publisher_of_a_hash_wins() -> None:
    pool = BlockPool(2, 2)
    first, second = taken(pool, 1), taken(pool, 1)
    value = chain((1, 2))[0]
    pool.publish(first[0], value)
    pool.publish(second[0], value)
    assert pool.match([value]) == first
    pool.check([first, second])


def test_blocks_without_content_are_reused_before_those_with_it() -> None:
    pool = BlockPool(2, 2)
    kept, plain = taken(pool, 1), taken(pool, 1)
    value = chain((1, 2))[0]
    pool.publish(kept[0], value)
    pool.release(kept)
    pool.release(plain)
    assert taken(pool, 1) == plain
    assert pool.match([value]) == kept


def test_the_least_recently_released_content_is_evicted_first() -> None:
    pool = BlockPool(3, 2)
    values = [chain((i, i))[0] for i in range(3)]
    blocks = taken(pool, 3)
    for block, value in zip(blocks, values, strict=True):
        pool.publish(block, value)
    for index in (1, 0, 2):
        pool.release([blocks[index]])
    taken(pool, 2)
    assert [pool.match([value]) for value in values] == [[], [], [blocks[2]]]


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, 2)
    hashes = chain((1, 2), (3, 4), (5, 6))
    blocks = taken(pool, 3)
    for block, value in zip(blocks, hashes, strict=True):
        pool.publish(block, value)
    pool.release(blocks)
    taken(pool, 1)
    assert pool.match(hashes) == blocks[:2]


def test_an_evicted_block_is_no_longer_matched() -> None:
    pool = BlockPool(1, 2)
    value = chain((1, 2))[0]
    blocks = taken(pool, 1)
    pool.publish(blocks[0], value)
    pool.release(blocks)
    again = taken(pool, 1)
    assert pool.match([value]) == []
    pool.check([again])


def test_forgotten_prefixes_are_not_matched_and_owners_keep_their_blocks() -> None:
    pool = BlockPool(2, 2)
    value = chain((1, 2))[0]
    blocks = taken(pool, 1)
    pool.publish(blocks[0], value)
    pool.forget_prefixes()
    assert pool.match([value]) == []
    pool.check([blocks])


@pytest.mark.parametrize("owners", [[[0], [0]], [], [[0, 1]], [[1]]])
def test_the_check_finds_leaked_and_double_owned_blocks(owners: list[list[int]]) -> None:
    pool = BlockPool(3, 2)
    assert taken(pool, 1) == [0]
    with pytest.raises(InternalError, match="leaked or double-owned") as caught:
        pool.check(owners)
    counted = [sum(block in table for table in owners) for block in range(3)]
    assert str([block for block in range(3) if counted[block] != [1, 0, 0][block]]) in str(caught.value)


def test_the_check_finds_a_free_list_that_lost_a_block() -> None:
    pool = BlockPool(3, 2)
    del pool._free[1]
    with pytest.raises(InternalError, match="free list"):
        pool.check([])


def test_the_check_finds_hashes_that_lead_to_another_block() -> None:
    pool = BlockPool(3, 2)
    blocks = taken(pool, 2)
    pool.publish(blocks[0], chain((1, 2))[0])
    pool._hash_of[blocks[1]] = pool._hash_of.pop(blocks[0])
    with pytest.raises(InternalError, match="hash tables"):
        pool.check([blocks])


def test_a_new_pool_has_looked_nothing_up() -> None:
    pool = BlockPool(3, 2)
    assert (pool.hits, pool.lookups) == (0, 0)


def test_the_check_finds_a_block_that_stands_twice_in_a_table() -> None:
    pool = BlockPool(3, 2)
    block = taken(pool, 1)[0]
    pool.acquire([block])
    with pytest.raises(InternalError, match="twice"):
        pool.check([[block, block]])


# ------------------------------------------------------------------------------------------------ hashes


def test_hashes_are_short_and_tell_media_of_one_length_apart() -> None:
    one, other = block_hash(b"", (1, 2), [b"cat"]), block_hash(b"", (1, 2), [b"dog"])
    assert one != other
    assert len(one) == len(other) == 16


_TOKENS = st.lists(st.integers(0, 3), min_size=2, max_size=2).map(tuple)
_EXTRA = st.lists(st.binary(max_size=3), max_size=3).map(tuple)
_CONTENT = st.lists(st.tuples(_TOKENS, _EXTRA), min_size=1, max_size=3)


@settings(deadline=None, suppress_health_check=SLOW_MACHINE)
@given(_CONTENT, _CONTENT)
def test_hash_chains_are_equal_exactly_when_tokens_and_media_are(
    one: list[tuple[tuple[int, ...], tuple[bytes, ...]]], other: list[tuple[tuple[int, ...], tuple[bytes, ...]]]
) -> None:
    def last(content: list[tuple[tuple[int, ...], tuple[bytes, ...]]]) -> bytes:
        value = b""
        for tokens, extra in content:
            value = block_hash(value, tokens, extra)
        return value

    assert (last(one) == last(other)) == (one == other)


# ---------------------------------------------------------------------------------------- state machine


class PoolMachine(RuleBasedStateMachine):
    """Random use by several owners, against a model that keeps every block's content in plain sight."""

    @initialize(blocks=st.integers(1, 8), caching=st.booleans())
    def start(self, blocks: int, caching: bool) -> None:
        self.pool = BlockPool(blocks, 1, prefix_caching=caching)
        self.owners: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """What was last written into each block."""

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def open(self, path: list[int]) -> None:
        """Take the known prefix of a chain, allocate the rest, write and publish it."""
        hashes = chain(*[(step,) for step in path])
        found = self.pool.match(hashes)
        for block, value in zip(found, hashes, strict=False):
            assert self.content[block] == value, "a match gave a block with other content"
        self.pool.acquire(found)
        free = self.pool.free_blocks
        fresh = self.pool.allocate(len(hashes) - len(found))
        assert (fresh is None) == (free < len(hashes) - len(found))
        if fresh is None:
            self.pool.release(found)
            return
        for block, value in zip(fresh, hashes[len(found) :], strict=True):
            assert all(block not in owner for owner in self.owners), "an owned block was handed out"
            self.content[block] = value
            self.pool.publish(block, value)
        self.owners.append([*found, *fresh])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(self.owners.pop(index))

    @rule()
    def forget(self) -> None:
        self.pool.forget_prefixes()

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.owners)
            held = {block for owner in self.owners for block in owner}
            assert self.pool.free_blocks == self.pool.num_blocks - len(held)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for owner in self.owners:
                self.pool.release(owner)
            self.pool.check([])
            assert self.pool.free_blocks == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=SLOW_MACHINE
)
TestPoolMachine = PoolMachine.TestCase
