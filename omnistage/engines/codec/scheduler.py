"""Which requests decode which codes next, by the listener's clock. Pure Python: it knows counters, not tensors.

A request is a growing list of codes and a counter of those that are done. Where an utterance is cut is a function of
the place in it and of nothing else: a window's size changes its samples a little (what lies further ahead than its
look-ahead is not seen), and no audio may depend on who else is served. So the clock chooses the order of the windows,
what shares a forward, and when the first sound goes out; never what a window holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from omnistage.config.schema import CodecBudget
from omnistage.core.types import Code
from omnistage.engines.ageing import Turns
from omnistage.engines.codec.component import CodecLayout
from omnistage.engines.codec.costs import CostModel, Pace
from omnistage.engines.codec.requests import INF, CodecRequest, SchedulerOutput, Shape, WindowPlan

FIRST_SOUND_SECONDS = 0.5
"""After its first code a request is due for its first sound."""
MAX_BATCH_SECONDS = 0.35
"""Batches are no longer than that, where there is a choice: who comes next waits for them."""
_TOO_SLOW = 1.3
"""Where codes or batches take so many times as long as their sound, holding the first sound back would not help."""
_RESERVE_SECONDS = 0.5
"""Windows that could wait begin as long before a player runs dry: another batch may run when they are due."""
_GATHER_SECONDS = 0.06
"""Listeners who come almost together share their first batches: each batch takes time of its own."""
_MIN_SLOWDOWN = 2.0
"""Codes come so many times slower beside a batch where the codec shares its device with the models upstream."""
_SAME_TIME = 5e-4
"""Codes wait while a batch runs and then come at once; no model makes two of them within so many seconds."""
_SAFETY = 0.85
"""Share of the sound at hand in which more must be expected for the first to go out."""


class CodecScheduler:
    """Picks one batch of windows at a time: what is due first, and with it what delays nobody.

    Each chunk is as long as all before it: the first is small for early sound, later ones spread the cost of look-ahead
    over more of it. A player is due when it runs dry, a new listener soon after its first code. Lower priorities go
    first, and waiting makes up for priority.
    """

    def __init__(
        self, layout: CodecLayout, limits: CodecBudget, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self._clock = clock
        self._limits = limits
        self.lookahead = min(limits.lookahead_blocks, layout.max_lookahead_blocks) * layout.block_codes
        self._requests: dict[str, CodecRequest] = {}
        self._turns = Turns()
        self._scheduled_at = 0.0
        self._batches = 0
        self.costs = CostModel()
        self.pace = Pace()
        """Of whole utterances: once their text is there, codes come faster."""

    # ------------------------------------------------------------------------------------------- requests

    def add(self, request_id: str, group: Hashable, *, priority: int = 0, streaming: bool = True) -> None:
        self._requests[request_id] = CodecRequest(request_id, group, self._turns.new(priority), streaming)

    def extend(self, request_id: str, codes: Sequence[Code], final: bool) -> None:
        """More codes; ignored once the utterance is complete or the request has ended."""
        request = self._requests.get(request_id)
        if request is None or request.final:
            return
        now = self._clock()
        if not request.codes:
            request.first_code = now
        else:
            if now - request.last_code > _SAME_TIME:  # else they came with the last ones
                request.beside_batch = request.batches_seen != self._batches
            request.pace.observe(len(codes), now - request.last_code, beside_batch=request.beside_batch)
        request.last_code, request.batches_seen = now, self._batches
        request.codes.extend(codes)
        request.final = final
        self._note_ready(request, now)
        if final:
            self.pace.learn(request.pace)

    def _note_ready(self, request: CodecRequest, now: float) -> None:
        if request.ready_at == INF and self._next(request) is not None:
            request.ready_at = now

    def length(self, request_id: str) -> int | None:
        """Codes known so far; None where more would be ignored: the utterance is complete, or the request has ended."""
        request = self._requests.get(request_id)
        return None if request is None or request.final else len(request.codes)

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether a window should run now, or sound that was held back must go out."""
        limit = self.wait_limit()
        return limit is not None and limit <= 0

    @property
    def running(self) -> int:
        return sum(r.started for r in list(self._requests.values()))

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    @property
    def starved(self) -> int:
        """Requests that have run all they can and wait for their upstream."""
        return sum(r.started and self._next(r) is None for r in list(self._requests.values()))

    # ------------------------------------------------------------------------------------------- batches

    def schedule(self) -> SchedulerOutput:
        """The next batch. The caller runs it and then calls `update`."""
        now = self._scheduled_at = self._clock()
        empty = tuple(r.request_id for r in self._requests.values() if r.empty)
        ready = [(r, s) for r in self._requests.values() if (s := self._next(r)) is not None]
        ready.sort(key=lambda pair: self._rank(pair[0]))
        free = self._limits.max_running - self.running
        batch = _Batch(self, now, self._latest_starts())
        started = list(empty)
        for request, shape in ready:
            if (request.started or free > 0) and batch.take(request, shape):
                if not request.started:
                    request.started = True
                    free -= 1
                    started.append(request.request_id)
                self._turns.take(request.turn)
            else:
                request.turn.age += 1
        self._batches += bool(batch.windows)
        return SchedulerOutput(tuple(batch.windows), tuple(started), empty)

    def update(self, output: SchedulerOutput, failed: Collection[str], seconds: Mapping[str, float]) -> None:
        """Count what ran and forget what ended: complete, empty and failed requests. `seconds` of sound came out."""
        now = self._clock()
        if output.windows:
            seconds_taken = now - self._scheduled_at
            self.costs.observe(sum(self.blocks(len(w.codes)) for w in output.windows), seconds_taken)
            mine = {window.request_id for window in output.windows}
            for request in self._requests.values():
                if request.request_id in mine:
                    request.batch_windows = len(mine)
                elif request.codes:
                    request.others += min(seconds_taken, now - request.first_code)
                    request.others_count += 1
        for window in output.windows:
            if window.last or window.request_id in failed:
                self.remove(window.request_id)
                continue
            request = self._requests[window.request_id]
            request.num_decoded += window.emit
            request.windows += 1
            if request.dry_at is None:
                request.unsent_seconds += seconds.get(window.request_id, 0.0)
            else:  # a player that ran dry goes on when the sound comes
                request.dry_at = max(request.dry_at, now) + seconds.get(window.request_id, 0.0)
            request.ready_at = INF
            self._note_ready(request, now)
        for request_id in output.empty:
            self.remove(request_id)

    def release(self) -> list[str]:
        """Requests whose sound goes out from now on: their players are not expected to run dry."""
        now = self._clock()
        playing = [
            r
            for r in self._requests.values()
            if r.unsent_seconds and (self._hold_limit(r) <= 0 or self._stays_in_time(r, now))
        ]
        for request in playing:
            request.dry_at = now + request.unsent_seconds
            request.unsent_seconds = 0.0
        return [request.request_id for request in playing]

    def playing(self, request_id: str) -> bool:
        """Whether the request's first sound has gone out."""
        return self._requests[request_id].dry_at is not None

    def wait_limit(self) -> float | None:
        """Seconds until windows should run or sound that is held back must go out; None: there is nothing of either."""
        if any(r.empty for r in self._requests.values()):
            return 0.0
        limits = [self._hold_limit(r) for r in self._requests.values() if r.unsent_seconds]
        free = self.running < self._limits.max_running
        ready = [(r, s) for r in self._requests.values() if (r.started or free) and (s := self._next(r)) is not None]
        if ready:
            limits.append(self._slack(ready))
        return max(min(limits), 0.0) if limits else None

    def _slack(self, ready: Sequence[tuple[CodecRequest, Shape]]) -> float:
        """Seconds for which these windows may wait for others to share a batch with.

        That pays where the models that make the codes have the device for themselves meanwhile.
        """
        if len(self._requests) == 1 or self.pace.slowdown < _MIN_SLOWDOWN:
            return 0.0
        if all(r.final for r in self._requests.values()):
            return 0.0
        blocks = sum(self.blocks(shape.length) for _, shape in ready)
        seconds = self.costs.seconds(blocks)
        if not 0 < seconds < MAX_BATCH_SECONDS:
            return 0.0
        soon = [r for r in self._requests.values() if self._comes_soon(r)]
        together = self.costs.seconds(blocks + sum(self.blocks(self._codes_for_next(r)) for r in soon))
        limits = []
        for request, _ in ready:
            limit = request.ready_at + _GATHER_SECONDS if soon else 0.0
            if request.dry_at is not None:
                limit = min(limit, request.dry_at - together / _SAFETY)
                limit = max(limit, request.dry_at - seconds - _RESERVE_SECONDS)
            elif not request.streaming:
                limit = self.due(request) - seconds - _RESERVE_SECONDS
            limits.append(limit)
        return min(limits) - self._clock()

    def _comes_soon(self, request: CodecRequest) -> bool:
        """Whether the request's next window will be ready so soon that others should wait for it."""
        if not request.streaming or request.final or not request.codes:
            return False
        missing = request.num_decoded + self._codes_for_next(request) - len(request.codes)
        return 0 < missing <= _GATHER_SECONDS / max(self.pace.free, 1e-3)

    # -------------------------------------------------------------------------------------------- windows

    def blocks(self, codes: int) -> int:
        """What a window of so many codes counts in a batch."""
        return -(-codes // self._layout.block_codes)

    def key(self, request: CodecRequest, shape: Shape) -> Hashable:
        """What windows must have in common to share a forward."""
        return request.group if self._layout.mixed_windows else (request.group, shape)

    def chunk_blocks(self, index: int) -> int:
        """Blocks of an utterance's window of this number, unless it is the last."""
        first = max(self._limits.first_chunk_blocks, self._layout.first_blocks)
        return first if index == 0 else min(first << min(index - 1, 32), self._limits.max_chunk_blocks)

    def chunk_sizes(self) -> list[int]:
        """Blocks of the windows of an utterance until they grow no more."""
        sizes = [self.chunk_blocks(0)]
        while len(sizes) < 2 or sizes[-1] < self._limits.max_chunk_blocks:
            sizes.append(self.chunk_blocks(len(sizes)))
        return sizes

    def _codes_for_next(self, request: CodecRequest) -> int:
        """Codes beyond those done from which the next window is not the last."""
        return self.chunk_blocks(request.windows) * self._layout.block_codes + self.lookahead

    def _next(self, request: CodecRequest) -> Shape | None:
        """The window that could run now, or None while codes are missing.

        Whether it is the last depends on the length of the utterance, not on when its end was known.
        """
        if request.empty:
            return None
        if not request.streaming:
            count = len(request.codes)
            return Shape(0, count, count, True) if request.final else None
        history = min(request.num_decoded, self._layout.history_blocks * self._layout.block_codes)
        available, needed_codes = len(request.codes) - request.num_decoded, self._codes_for_next(request)
        if available >= needed_codes:
            return Shape(history, history + needed_codes, needed_codes - self.lookahead, False)
        return Shape(history, history + available, available, True) if request.final else None

    # ---------------------------------------------------------------------------------------------- clock

    def due(self, request: CodecRequest) -> float:
        """When the request's next sound should be there."""
        if request.dry_at is not None:
            return request.dry_at
        patience = 0.0 if request.streaming else len(request.codes) * self._layout.code_seconds
        return request.first_code + FIRST_SOUND_SECONDS + patience

    def _rank(self, request: CodecRequest) -> tuple[int, float, int]:
        level, number = self._turns.rank(request.turn)
        return level, self.due(request), number

    def _latest_starts(self) -> dict[str, float]:
        """When each player's next window must begin, on a device of its own."""
        return {
            r.request_id: r.dry_at - self.costs.seconds(self.blocks(self._codes_for_next(r)))
            for r in self._requests.values()
            if r.dry_at is not None
        }

    def _hold_limit(self, request: CodecRequest) -> float:
        """Seconds for which the request's sound may still be held back; infinite where none is."""
        return request.first_code + self._limits.max_hold_seconds - self._clock() if request.unsent_seconds else INF

    def _stays_in_time(self, request: CodecRequest, now: float) -> bool:
        """Whether the next three windows of a player that starts now are expected before it runs dry.

        Codes are taken to come as this request's came, those after the next window half way to those of whole
        utterances (nobody knows when its text ends), and batches to hold what they held. Where codes or the device are
        far slower than sound, it will run dry whatever is held back: then nothing is.
        """
        layout, longest = self._layout, self._limits.max_chunk_blocks
        listeners = sum(r.streaming and bool(r.codes) for r in self._requests.values())
        pace = request.pace
        if not pace.known:  # all at once, or only beside batches
            pace = Pace(len(request.codes), now - request.first_code)
        usual = self.pace if self.pace.known else pace
        later = pace.between(usual)
        code_seconds = layout.code_seconds or request.unsent_seconds / request.num_decoded
        block_seconds = layout.block_codes * code_seconds
        work = self._seconds_of(listeners, longest)
        codes_behind = longest * layout.block_codes - work * usual.beside
        if max(work, 0.0 if request.final else work + codes_behind * usual.free) > _TOO_SLOW * longest * block_seconds:
            return True
        others = min(request.others / max(now - request.first_code, 1e-9), 0.9)
        ready = others * request.others / max(request.others_count, 1)  # another batch may run when a window is ready
        played, num_done, num_codes = request.unsent_seconds, request.num_decoded, float(len(request.codes))
        beginners = sum(r.streaming and bool(r.codes) and r.dry_at is None for r in self._requests.values())
        windows = min(max(request.batch_windows, beginners), listeners)
        for index in range(request.windows, request.windows + 3):
            if request.final and num_done >= len(request.codes):
                break
            size = self.chunk_blocks(index)
            num_done += size * layout.block_codes
            missing = 0.0 if request.final else max(0.0, num_done + self.lookahead - num_codes)
            seconds = self._seconds_of(windows, size)
            ready += pace.wait(missing, others) + seconds
            num_codes += missing + seconds * pace.beside
            if ready > _SAFETY * played:
                return False
            played += size * block_seconds
            pace = later
        return True

    def _seconds_of(self, listeners: int, size: int) -> float:
        """What windows that emit so many blocks, one of each listener, take together."""
        seconds = self.costs.seconds(listeners * (size + self.blocks(self.lookahead)))
        return seconds + self.costs.seconds(0) * (seconds // MAX_BATCH_SECONDS)


class _Batch:
    """A batch while it is put together, most urgent request first."""

    def __init__(self, scheduler: CodecScheduler, now: float, latest: Mapping[str, float]) -> None:
        self._scheduler = scheduler
        self._now = now
        self._latest = dict(latest)
        """When the device must be free for each of the players that are not in the batch."""
        self._key: Hashable = None
        self._blocks = 0
        self._due = INF
        self._behind = False
        """A player in it runs dry whatever happens: then large batches help all the most."""
        self.windows: list[WindowPlan] = []

    def take(self, request: CodecRequest, shape: Shape) -> bool:
        """Add the request's window, unless there is no room or it would make other players run dry."""
        scheduler, limits = self._scheduler, self._scheduler._limits
        key, blocks = scheduler.key(request, shape), self._blocks + scheduler.blocks(shape.length)
        seconds = scheduler.costs.seconds(blocks)
        if self.windows and (
            key != self._key
            or len(self.windows) >= limits.max_batch
            or blocks > limits.max_batch_blocks
            or seconds > MAX_BATCH_SECONDS
            or (self._now + seconds > min(self._due, self._others(request)) and not self._behind)
        ):
            return False
        self._latest.pop(request.request_id, None)
        self._key, self._blocks = key, blocks
        if request.dry_at is not None:
            if request.dry_at >= self._now + seconds:
                self._due = min(self._due, request.dry_at)
            else:
                self._behind = True
        start = request.num_decoded - shape.history
        codes = tuple(request.codes[start : start + shape.length])
        self.windows.append(WindowPlan(request.request_id, codes, shape.history, shape.emit, shape.last))
        return True

    def _others(self, request: CodecRequest) -> float:
        """When the device must be free for the first one that is not in the batch; late ones do not count."""
        late = self._now + self._scheduler.costs.seconds(self._blocks)
        return min((at for name, at in self._latest.items() if name != request.request_id and at >= late), default=INF)
