"""Which tokens of which requests run in the next step. Pure Python: knows counters and blocks, no tensors.

There is no prefill or decode phase: a request has `computed` tokens catching up with `known` tokens, under a token
budget. All requests stand in one strict order, their rank: priority plus the time of arrival, so that waiting makes
up for priority and nothing starves. When blocks run out, the worst-ranked running request gives its blocks back and
is recomputed later. Since ranks never change, two requests cannot evict each other in turn, and the best-ranked
running request always moves. A waiting one may evict worse-ranked ones that have no place in the step yet.

`schedule` counts a batch as computed at once, so that the next one can be scheduled before its tokens are read: a
sequence that runs `ahead` goes on from a token that only the device knows yet.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from omnistage.core.errors import InternalError
from omnistage.core.record import record
from omnistage.engines.ageing import arrival_rank
from omnistage.engines.ar.block_pool import BlockPool, block_hash

MIN_UNCUT_TOKENS = 3
"""Tokens of a step with which a prompt can always go on without a single one being cut off."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence as the scheduler sees it."""

    key: str
    rank: float
    token_ids: list[int]
    prompt_length: int
    side_rows: float | None = None
    """None: not streaming. Else how many generated tokens have their side row (inf once the stream is final)."""
    media_keys: Callable[[int, int], Sequence[bytes]] | None = None
    """Digests of the media overlapping tokens [start, end), with their offset; None: no media."""
    salt: bytes = b""
    """What its keys and values depend on beside its tokens: the adapters that compute them."""
    adapters: frozenset[bytes] = frozenset()
    """Those that have to be on the device while it runs."""
    cacheable: bool = True
    """False when the content is not determined by token ids and media (prompt embeddings, side rows)."""
    cacheable_length: float = float("inf")
    """Tokens, from the first on, of which it is determined by them."""
    both_ways: Sequence[tuple[int, ...]] = ()
    """Pairs of the start and the end of what is computed in one step, in order."""
    max_length: float = float("inf")
    """It ends with this many tokens, if not before."""
    ahead: bool = True
    """Whether its next token may be computed before the last one is read."""
    unread: int = 0
    """Tokens that were sampled, or are being sampled, and have not been read."""
    computed: int = 0
    """Tokens that have been scheduled, and so will be there for the next step."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    running: bool = False
    started: bool = False
    preemptions: int = 0
    cached: int = 0
    """Tokens that were found computed when it was first admitted."""
    held: bool = False
    """Its last token, from which the next is sampled, must not be computed yet."""

    @property
    def pending(self) -> int:
        """How many tokens could be computed now; 0: it waits for its upstream, for a token to be read, or is held."""
        num_tokens = len(self.token_ids) - self.held
        if self.unread:
            num_tokens += self.unread
            if not self.ahead or not self.running or num_tokens >= self.max_length:
                return 0
        if self.side_rows is not None:
            num_tokens = int(min(num_tokens, self.prompt_length + self.side_rows))
        return max(num_tokens - self.computed, 0)

    def extend_hashes(self, block_size: int, upto: int) -> None:
        """Hash the full blocks within the first `upto` tokens."""
        while self.cacheable and (len(self.hashes) + 1) * block_size <= min(upto, self.cacheable_length):
            start = len(self.hashes) * block_size
            end = start + block_size
            extra = self.media_keys(start, end) if self.media_keys is not None else ()
            parent = self.hashes[-1] if self.hashes else self.salt
            self.hashes.append(block_hash(parent, self.token_ids[start:end], extra))


@record
class ScheduledSequence:
    """Compute tokens [start, start + count) of a sequence; `sample` when that reaches its last known token."""

    key: str
    start: int
    count: int
    sample: bool
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's batch, in order."""

    batch: tuple[ScheduledSequence, ...]
    started: tuple[str, ...] = ()
    """Sequences that run for the first time."""
    preempted: tuple[str, ...] = ()


class Scheduler:
    """Owns the order, the budget and the block pool of one stage."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_running: int,
        ageing_steps: int = 64,
        prefill_chunk: int | None = None,
        cut_pairs: bool = True,
        adapter_slots: int = 0,
    ) -> None:
        """`cut_pairs`: a prompt may be cut so that one token of it is computed by itself, after others."""
        self.pool = pool
        self._adapter_slots = adapter_slots
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._ageing_steps = ageing_steps
        self._prefill_chunk = prefill_chunk or max_batch_tokens
        self._cut_pairs = cut_pairs
        self._sequences: dict[str, SequenceState] = {}
        self._running: list[SequenceState] = []
        self._waiting: list[SequenceState] = []
        self._arrivals = 0
        self._stalled = False
        self.steps = 0
        self.tokens = 0
        self.preemptions = 0

    # ------------------------------------------------------------------------------------------- requests

    def add(self, state: SequenceState, priority: int = 0) -> None:
        """Queue a sequence. Lower `priority` runs earlier; `ageing_steps` steps of waiting are worth one level."""
        if state.key in self._sequences:
            raise InternalError(f"sequence {state.key!r} is scheduled already")
        self._arrivals += 1
        state.rank = arrival_rank(priority, self.steps, self._arrivals, self._ageing_steps)
        self._sequences[state.key] = state
        insort(self._waiting, state, key=attrgetter("rank"))
        self._stalled = False

    def remove(self, key: str) -> None:
        """Forget a sequence (finished, aborted or failed) and free its blocks. Unknown keys are ignored."""
        state = self._sequences.pop(key, None)
        if state is None:
            return
        (self._running if state.running else self._waiting).remove(state)
        self._free(state)
        self._stalled = False

    def feed(self, key: str, rows: int, *, final: bool) -> None:
        """`rows` more side rows arrived; `final`: the last one serves all further tokens."""
        state = self._sequences.get(key)
        if state is None or state.side_rows is None:
            return
        state.side_rows = float("inf") if final else state.side_rows + rows
        self._stalled = False

    def hold(self, key: str) -> None:
        """Compute no token from which one would be sampled, until `release`."""
        self._sequences[key].held = True

    def release(self, key: str) -> None:
        self._sequences[key].held = False
        self._stalled = False

    def append(self, key: str, token_id: int) -> None:
        """A sampled token was read."""
        state = self._sequences[key]
        state.token_ids.append(token_id)
        state.unread -= 1

    def cached(self, key: str) -> int:
        """Tokens of a sequence that were found computed when it was first admitted."""
        return self._sequences[key].cached

    # ------------------------------------------------------------------------------------------- stepping

    def has_work(self) -> bool:
        """Whether `schedule` might give a batch: something is not starved and the last try gave a batch."""
        return not self._stalled and any(s.pending for s in (*self._running, *self._waiting))

    def schedule(self) -> SchedulerOutput:
        """The next batch, blocks allocated. Call `commit` once it has run, batches in order."""
        self.steps += 1
        batch: list[ScheduledSequence] = []
        started: list[str] = []
        preempted: list[str] = []
        budget, block_size = self._max_batch_tokens, self.pool.block_size
        for state in list(self._running):
            if budget == 0:
                break
            count = self._chunk(state, budget)
            if not count or not state.running:  # evicted a moment ago
                continue
            end = state.computed + count
            if end > len(state.blocks) * block_size and not self._grow(state, end, preempted):
                continue
            batch.append(self._advance(state, count))
            budget -= count
        if self._waiting:
            self._admit(batch, started, preempted, budget)
        self._stalled = not batch
        return SchedulerOutput(tuple(batch), tuple(started), tuple(preempted))

    def commit(self, output: SchedulerOutput, unsampled: Collection[str] = ()) -> None:
        """The batch was computed: publish blocks that became full.

        The last token of those that could not be sampled counts as not computed: it will run again.
        """
        size = self.pool.block_size
        if output.batch:
            self._stalled = False
        for item in output.batch:
            self.tokens += item.count
            state = self._sequences.get(item.key)
            if state is None:
                continue
            end = item.start + item.count
            if item.key in unsampled:
                state.unread -= 1
                end -= 1
            if not state.running:  # preempted since it was scheduled
                continue
            if item.key in unsampled:
                state.computed = end
            if state.cacheable and end // size > item.start // size:
                state.extend_hashes(size, end)
                for index in range(item.start // size, min(end // size, len(state.hashes))):
                    self.pool.publish(state.blocks[index], state.hashes[index])

    # ------------------------------------------------------------------------------------------- helpers

    def _admit(self, batch: list[ScheduledSequence], started: list[str], preempted: list[str], budget: int) -> None:
        block_size, full = self.pool.block_size, False
        # What was evicted a moment ago must not come back in the same step.
        for state in [s for s in self._waiting if s.key not in preempted]:
            if budget == 0:
                return
            if not state.pending:
                continue
            # Behind one that waits for a slot none takes or keeps one: it would wait for as long as others come.
            if state.adapters and (full := full or not self._has_slots(state)):
                continue
            if len(self._running) >= self._max_running and not self._evict_for(state, preempted, batch):
                return
            cached = self._reuse_prefix(state)
            count = self._chunk(state, budget)
            if not count:
                self.pool.release(cached)
                state.blocks, state.computed = [], 0
                if state.both_ways:  # else others take what it needs of a step, for as long as they come
                    return
                continue
            end = state.computed + count
            while not self._try_grow(state, end):
                if not self._evict_for(state, preempted, batch):
                    self.pool.release(cached)
                    state.blocks, state.computed = [], 0
                    return
            # Counted on admission, not on each try: a sequence that waits for room is looked up again every step.
            if state.cacheable and self.pool.prefix_caching:
                self.pool.lookups += min((len(state.token_ids) - 1) // block_size, len(state.hashes))
                self.pool.hits += len(cached)
            self._waiting.remove(state)
            insort(self._running, state, key=attrgetter("rank"))
            state.running = True
            if not state.started:
                state.started = True
                state.cached = state.computed
                started.append(state.key)
            batch.append(self._advance(state, count))
            budget -= count

    def _has_slots(self, state: SequenceState) -> bool:
        """Whether its adapters fit on the device beside those of the running sequences."""
        return len(state.adapters.union(*(other.adapters for other in self._running))) <= self._adapter_slots

    def _chunk(self, state: SequenceState, budget: int) -> int:
        """How many tokens of a sequence come next."""
        count = min(state.pending, budget, self._prefill_chunk)
        for start, end in state.both_ways:
            if start < state.computed + count < end:
                whole = end - state.computed
                # A range that is longer than a chunk takes what it needs of the step, or waits for the next one.
                count = start - state.computed or (whole if whole <= budget else 0)
        return count if self._cut_pairs else self._uncut(state, count)

    @staticmethod
    def _uncut(state: SequenceState, count: int) -> int:
        """So many tokens or fewer, that a prompt is not cut before its last one, nor after a single one."""
        rest = state.prompt_length - state.computed
        if count >= rest:
            return count
        count -= rest - count == 1
        return 0 if count == 1 and state.computed else count

    @staticmethod
    def _advance(state: SequenceState, count: int) -> ScheduledSequence:
        """Count `count` more tokens of a sequence as computed."""
        start = state.computed
        state.computed += count
        sample = state.computed == len(state.token_ids) + state.unread
        state.unread += sample
        return ScheduledSequence(state.key, start, count, sample, state.blocks)

    def _reuse_prefix(self, state: SequenceState) -> list[int]:
        """Start from blocks that hold the sequence's prefix already. The last token is always computed."""
        if not state.cacheable or not self.pool.prefix_caching:
            return []
        size = self.pool.block_size
        state.extend_hashes(size, len(state.token_ids))
        usable = (len(state.token_ids) - 1) // size
        cached = self.pool.match(state.hashes[:usable])
        for start, end in reversed(state.both_ways):
            if start < len(cached) * size < end:
                cached = cached[: start // size]
        self.pool.acquire(cached)
        state.blocks = list(cached)
        state.computed = len(cached) * size
        return cached

    def _grow(self, state: SequenceState, tokens: int, preempted: list[str]) -> bool:
        """Give a running sequence room for `tokens`, evicting worse-ranked ones, at the last itself."""
        while not self._try_grow(state, tokens):
            victim = self._running[-1]
            self._preempt(victim, preempted)
            if victim is state:
                return False
        return True

    def _try_grow(self, state: SequenceState, tokens: int) -> bool:
        last = state.blocks[-1] if state.blocks else None
        blocks = self.pool.allocate(self.pool.blocks_for(tokens) - len(state.blocks), after=last)
        if blocks is None:
            return False
        state.blocks.extend(blocks)
        return True

    def _evict_for(self, state: SequenceState, preempted: list[str], batch: Sequence[ScheduledSequence]) -> bool:
        """Evict the worst running sequence if `state` outranks it and it is not in this step's batch."""
        if not self._running:
            return False
        victim = self._running[-1]
        if victim.rank <= state.rank or any(item.key == victim.key for item in batch):
            return False
        self._preempt(victim, preempted)
        return True

    def _preempt(self, victim: SequenceState, preempted: list[str]) -> None:
        self._running.remove(victim)
        self._free(victim)
        victim.running = False
        victim.preemptions += 1
        self.preemptions += 1
        insort(self._waiting, victim, key=attrgetter("rank"))
        preempted.append(victim.key)

    def _free(self, state: SequenceState) -> None:
        self.pool.release(state.blocks)
        state.blocks = []
        state.computed = 0

    # ------------------------------------------------------------------------------------------- insight

    def counts(self) -> tuple[int, int, int]:
        """(waiting, running, starved)."""
        starved = sum(1 for s in list(self._running) if not s.pending and not s.unread)
        return len(self._waiting), len(self._running), starved

    def keys(self) -> list[str]:
        return list(self._sequences)

    def check(self) -> None:
        """Integrity of the pool against all sequences."""
        self.pool.check([s.blocks for s in self._sequences.values()])
