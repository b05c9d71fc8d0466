"""Which requests decode which codes next. Pure Python: it knows counters, not tensors.

A request is a growing list of codes and a counter of those that are done. Its next window is ready when there are
enough codes for a chunk and for the look-ahead beyond it, or when the utterance is complete. Ready windows of one
shape share a forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from omnistage.config.schema import CodecBudget
from omnistage.engines.ageing import Turn, Turns
from omnistage.engines.codec.component import CodecLayout

GROWTH_PACE = 0.4
"""Chunks double while codes come in less than this share of their playing time. Then the next chunk, twice as
long, is there before the last one has been played."""
DECODE_SHARE = 0.4
"""Chunks double for good when decoding one takes more than this share of its playing time: small chunks spend
most of their work on context and look-ahead, and a stage that cannot keep up with them would fall further behind."""
_WAIT_MARGIN = 0.001


class Shape(NamedTuple):
    """What windows must have in common to share a forward."""

    group: Hashable
    history: int
    length: int
    emit: int
    last: bool


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """A window of one request: `codes` is `history` old codes, `emit` new ones, then look-ahead."""

    request_id: str
    codes: tuple[int, ...]
    history: int
    emit: int
    last: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. `empty` names utterances without a single code, which end without running."""

    windows: tuple[WindowPlan, ...] = ()
    started: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


@dataclass(slots=True)
class _Request:
    request_id: str
    group: Hashable
    turn: Turn
    streaming: bool
    first_code: float = 0.0
    """When the first codes came."""
    codes: list[int] = field(default_factory=list)
    final: bool = False
    done: int = 0
    last_blocks: int = 0
    """Blocks of the last chunk."""
    min_blocks: int = 1
    """Smaller chunks take too long to decode."""
    started: bool = False

    @property
    def empty(self) -> bool:
        """An utterance without a single code."""
        return self.final and not self.codes


class CodecScheduler:
    """Picks one batch of equally shaped windows at a time.

    Chunks are powers of two of blocks, as many as the codes at hand allow when the window is scheduled: the first one
    small for early audio, later ones larger under load, which spreads the cost of context and look-ahead. Powers of
    two, so that requests meet in few shapes. Among equals the one that has waited longest since its last window goes
    first, so that a request with many codes at hand does not keep a new one from its first audio.
    """

    def __init__(
        self, layout: CodecLayout, limits: CodecBudget, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self._clock = clock
        self._limits = limits
        self._lookahead = min(limits.lookahead_blocks, layout.max_lookahead_blocks) * layout.block_codes
        self._requests: dict[str, _Request] = {}
        self._turns = Turns()
        self._scheduled_at = 0.0

    @property
    def first_length(self) -> int:
        """Codes in the first window of an utterance, look-ahead included."""
        blocks = max(self._limits.first_chunk_blocks, self._layout.first_blocks)
        return min(blocks * self._layout.block_codes + self._lookahead, self._layout.max_codes)

    def add(self, request_id: str, group: Hashable, *, priority: int = 0, streaming: bool = True) -> None:
        self._requests[request_id] = _Request(request_id, group, self._turns.new(priority), streaming)

    def extend(self, request_id: str, codes: Sequence[int], final: bool) -> None:
        """More codes; ignored once the utterance is complete or the request has ended."""
        request = self._requests.get(request_id)
        if request is None or request.final:
            return
        if not request.codes:
            request.first_code = self._clock()
        request.codes.extend(codes)
        request.final = final

    def length(self, request_id: str) -> int | None:
        """Codes known so far; None where more would be ignored: the utterance is complete, or the request has ended."""
        request = self._requests.get(request_id)
        return None if request is None or request.final else len(request.codes)

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        free = self.running < self._limits.max_running
        return any(
            r.empty or ((r.started or free) and self._next_shape(r) is not None) for r in self._requests.values()
        )

    @property
    def running(self) -> int:
        return sum(r.started for r in list(self._requests.values()))

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    @property
    def starved(self) -> int:
        """Requests that have run all they can and wait for their upstream."""
        return sum(r.started and self._next_shape(r) is None for r in list(self._requests.values()))

    def schedule(self) -> SchedulerOutput:
        """The next batch. The caller runs it and then calls `update`."""
        empty = tuple(r.request_id for r in self._requests.values() if r.empty)
        ready = [(r, s) for r in self._requests.values() if (s := self._next_shape(r)) is not None]
        ready.sort(key=lambda pair: self._turns.rank(pair[0].turn))
        free = self._limits.max_running - self.running
        picked: list[_Request] = []
        shape: Shape | None = None
        for request, candidate in ready:
            admissible = request.started or free > 0
            if admissible and len(picked) < self._limits.max_batch and shape in (None, candidate):
                shape = candidate
                free -= not request.started
                picked.append(request)
            else:
                request.turn.age += 1
        started = (*empty, *(r.request_id for r in picked if not r.started))
        for request in picked:
            request.started = True
            self._turns.take(request.turn)
        windows = tuple(_plan(request, shape) for request in picked) if shape else ()
        self._scheduled_at = self._clock()
        return SchedulerOutput(windows, started, empty)

    def update(self, output: SchedulerOutput, failed: Collection[str]) -> None:
        """Count what ran and forget what ended: complete, empty and failed requests."""
        passed = self._clock() - self._scheduled_at
        for window in output.windows:
            if window.last or window.request_id in failed:
                self.remove(window.request_id)
            else:
                request = self._requests[window.request_id]
                request.done += window.emit
                request.last_blocks = window.emit // self._layout.block_codes
                if 0 < DECODE_SHARE * self._layout.code_seconds * window.emit < passed:
                    request.min_blocks = min(2 * request.last_blocks, self._limits.max_chunk_blocks)
        for request_id in output.empty:
            self.remove(request_id)

    def _next_shape(self, request: _Request) -> Shape | None:
        """The window that could run now, or None while codes are missing."""
        if request.empty:
            return None
        if not request.streaming:
            count = len(request.codes)
            return Shape(request.group, 0, count, count, True) if request.final else None
        block = self._layout.block_codes
        first = request.done == 0
        available = len(request.codes) - request.done
        complete = (available - self._lookahead) // block
        chunk = self._chunk_blocks(request, complete)
        history = min(request.done, self._layout.history_blocks * block)
        reach = (chunk if first else self._limits.max_chunk_blocks) * block + self._lookahead
        if request.final and available <= reach:
            # The window reaches the end of the utterance, so what would be look-ahead is exact: emit it all.
            return Shape(request.group, history, history + available, available, True)
        if complete < chunk:
            return None
        emit = chunk * block
        return Shape(request.group, history, history + emit + self._lookahead, emit, False)

    def _chunk_blocks(self, request: _Request, complete: int) -> int:
        """Blocks of the next chunk where `complete` of them have their look-ahead."""
        if request.done == 0:
            return max(self._limits.first_chunk_blocks, self._layout.first_blocks)
        if complete >= self._limits.max_chunk_blocks:
            return self._limits.max_chunk_blocks
        blocks = max(1 << (max(complete, 1).bit_length() - 1), request.min_blocks)
        if self._lead(request) > 0:  # waiting for a longer chunk makes no gap
            blocks = max(blocks, min(2 * request.last_blocks, self._limits.max_chunk_blocks))
        return blocks

    def _lead(self, request: _Request) -> float:
        """Seconds for which codes stay ahead of their audio, at the pace for growing, if no more come."""
        passed = self._clock() - request.first_code
        return GROWTH_PACE * self._layout.code_seconds * len(request.codes) - passed

    def wait_limit(self) -> float | None:
        """Seconds until a request that waits for a longer chunk takes the shorter one; None: none does."""
        block = self._layout.block_codes
        leads = [
            self._lead(r)
            for r in self._requests.values()
            if r.done and r.streaming and len(r.codes) - r.done - self._lookahead >= block * r.min_blocks
        ]
        return max(min(leads), 0.0) + _WAIT_MARGIN if leads else None


def _plan(request: _Request, shape: Shape) -> WindowPlan:
    start = request.done - shape.history
    codes = tuple(request.codes[start : start + shape.length])
    return WindowPlan(request.request_id, codes, shape.history, shape.emit, shape.last)
