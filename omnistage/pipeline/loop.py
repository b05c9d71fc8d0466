"""What drives a pipeline: one loop per stage, and one timer for all deadlines.

A `StageLoop` is the only caller of its stage (`check` aside), so a stage needs no locks. Both classes also run
without a thread, one turn at a time, so that every interleaving can be tested without sleeping.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from omnistage.errors import OmniError, ShutdownError, StageError
from omnistage.pipeline.stage import Stage, StageStats
from omnistage.pipeline.timing import StepSeconds, StepTimer
from omnistage.types import FinishReason, SamplingParams, StageChunk, StageFeed, StageInput, StageParams

_log = logging.getLogger(__name__)
Owner = TypeVar("Owner")


_RETRY_SECONDS = 0.05


def log_defect(where: str, error: BaseException) -> None:
    """Log an unexpected error by its type and frames. Its message may quote user content, so it is left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%s failed with %s\n%s", where, type(error).__name__, frames)


def stage_failure(error: BaseException, failed: str, *, doing: str | None = None) -> OmniError:
    """What a request that failed in a stage is told: our own errors as they are, any other by its kind alone.

    `failed` is what did not work, for the user; `doing` the same for the log.
    """
    if isinstance(error, OmniError):
        return error
    log_defect(doing or failed, error)
    failure = StageError(f"{failed} failed: {type(error).__name__}")
    failure.__cause__ = error
    return failure


def answers(params: StageParams) -> int:
    """How many answers a stage gives under these parameters."""
    return params.n if isinstance(params, SamplingParams) else 1


@dataclass(frozen=True, slots=True)
class _Submit(Generic[Owner]):
    owner: Owner
    stage_input: StageInput


@dataclass(frozen=True, slots=True)
class _Feed(Generic[Owner]):
    owner: Owner
    request_id: str
    feed: StageFeed


@dataclass(frozen=True, slots=True)
class _Abort(Generic[Owner]):
    owner: Owner
    request_id: str


@dataclass(slots=True)
class _Live(Generic[Owner]):
    """A request that the stage holds: whose it is and which of its answers have not ended."""

    owner: Owner
    open: set[int]


class StageLoop(Generic[Owner]):
    """Runs one stage: commands are drained before every step, chunks are handed to `emit` in order.

    `submit`, `feed`, `abort` and `stop` may be called from any thread and return at once; `emit(owner, chunk)` is
    called from the loop's thread. `owner` identifies a request beyond its id: chunks, feeds and aborts of a request
    that has ended never reach a later one with the same id. Every submitted request gets a chunk with `finish` for
    each answer or one with an error, unless it is aborted through `abort`.
    """

    def __init__(
        self,
        stage: Stage,
        emit: Callable[[Owner, StageChunk], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage = stage
        self._emit = emit
        self._clock = clock
        self._changed = threading.Condition()
        self._inbox: deque[_Submit[Owner] | _Feed[Owner] | _Abort[Owner]] = deque()
        self._stopping = False
        self._drain = True
        self._resting = False
        self._stats = StageStats()
        self._step_timer = StepTimer()
        self._live: dict[str, _Live[Owner]] = {}  # touched by the loop only
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------- from any thread

    def submit(self, stage_input: StageInput, owner: Owner) -> None:
        """Queue a request. Raises `ShutdownError` once the loop is stopping."""
        with self._changed:
            if self._stopping:
                raise ShutdownError(f"stage {self.stage.name!r} is stopping and takes no more requests")
            self._put(_Submit(owner, stage_input))

    def feed(self, request_id: str, feed: StageFeed, owner: Owner) -> None:
        with self._changed:
            self._put(_Feed(owner, request_id, feed))

    def abort(self, request_id: str, owner: Owner) -> None:
        """Forget the request before the next step; nothing more is emitted for it after that."""
        with self._changed:
            self._put(_Abort(owner, request_id))

    def _put(self, command: _Submit[Owner] | _Feed[Owner] | _Abort[Owner]) -> None:
        self._inbox.append(command)
        self._changed.notify_all()

    def start(self) -> None:
        """Run in a daemon thread from now on."""
        self._thread = threading.Thread(target=self._run, name=f"omnistage-{self.stage.name}", daemon=True)
        self._thread.start()

    def stop(self, drain: bool = True) -> None:
        """End the loop: with `drain` once nothing is runnable, else after the step that is running now.

        Requests that are left then (starved ones, or all without `drain`) end with `FinishReason.ABORT`.
        """
        with self._changed:
            self._stopping = True
            self._drain = self._drain and drain
            self._changed.notify_all()
        if self._thread is None:
            while self._drain and self.run_pending():
                pass
            self._close_out()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for a stopped loop's thread; whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait_resting(self, timeout: float | None = None) -> bool:
        """Wait until every command has been applied and nothing is runnable; whether that came about in time."""
        with self._changed:
            if self._thread is None or self._stopping:
                return not self._inbox
            return self._changed.wait_for(lambda: self._resting and not self._inbox, timeout)

    def stats(self) -> StageStats:
        """The stage's counters as of its last turn; exact while the loop rests."""
        return self._stats

    def step_seconds(self) -> StepSeconds:
        return self._step_timer.read()

    def leftovers(self) -> list[str]:
        """What the loop and its stage still hold, in words; only meaningful while the loop rests."""
        stats = self._stats
        held = stats.waiting + stats.running + stats.starved
        name = self.stage.name
        found = [f"{len(self._inbox)} commands for {name}"] if self._inbox else []
        found += [f"request {request_id} in the loop of {name}" for request_id in list(self._live)]
        return found + ([f"{held} requests in stage {name}"] if held else [])

    # --------------------------------------------------------------------------------------- in the loop

    def run_pending(self) -> bool:
        """One turn: apply every queued command, then make at most one step. Whether anything was done."""
        applied = False
        while (command := self._take()) is not None:
            self._apply(command)
            applied = True
        return self._turn() or applied

    def _run(self) -> None:
        while True:
            busy = self.run_pending()
            with self._changed:
                if not busy:
                    self._rest()
                if self._stopping and (not self._drain or not (busy or self._inbox)):
                    break
        self._close_out()

    def _rest(self) -> None:
        """Wait for a command, a stop, or the time that the stage itself names."""
        try:
            limit = self.stage.wait_limit()
        except Exception as error:  # the boundary of a stage, as in `_turn`; it is asked again at the next rest
            log_defect(f"wait_limit of stage {self.stage.name!r}", error)
            limit = _RETRY_SECONDS
        self._resting = True
        self._changed.notify_all()
        while not self._inbox and not self._stopping and self._changed.wait(limit):
            pass
        self._resting = False

    def _take(self) -> _Submit[Owner] | _Feed[Owner] | _Abort[Owner] | None:
        with self._changed:
            return self._inbox.popleft() if self._inbox else None

    def _turn(self) -> bool:
        held = bool(self._live)
        try:
            self._stats = self.stage.stats()
            busy = self.stage.has_work()
            chunks = self._step() if busy else ()
        except Exception as error:
            # The boundary of a stage: its defect ends the requests in it, not the loop.
            log_defect(f"a step of stage {self.stage.name!r}", error)
            self._fail_all(error)
            return held
        for chunk in chunks:
            self._deliver(chunk)
        return busy

    def _step(self) -> Sequence[StageChunk]:
        begun = time.perf_counter()
        chunks = self.stage.step()
        self._step_timer.add(time.perf_counter() - begun)
        return chunks

    def _apply(self, command: _Submit[Owner] | _Feed[Owner] | _Abort[Owner]) -> None:
        if isinstance(command, _Submit):
            request_id = command.stage_input.info.request_id
            self._live[request_id] = _Live(command.owner, set(range(answers(command.stage_input.params))))
            self._guard(command.owner, request_id, "submit", lambda: self.stage.submit(command.stage_input))
            return
        live = self._live.get(command.request_id)
        if live is None or live.owner is not command.owner:
            return  # it has ended here; whoever sent this could not know yet
        if isinstance(command, _Feed):
            self._guard(
                command.owner, command.request_id, "feed", lambda: self.stage.feed(command.request_id, command.feed)
            )
        else:
            self._forget(command.request_id)

    def _guard(self, owner: Owner, request_id: str, what: str, call: Callable[[], None]) -> None:
        """Make a call on behalf of one request; if it raises, only that request ends."""
        try:
            call()
        except OmniError as error:
            self._fail(owner, request_id, error)
        except Exception as error:
            log_defect(f"{what} to stage {self.stage.name!r}", error)
            self._fail(owner, request_id, self._stage_error(what, error))

    def _deliver(self, chunk: StageChunk) -> None:
        live = self._live.get(chunk.request_id)
        if live is None or chunk.index not in live.open:
            _log.warning("stage %s emitted a chunk for an answer that it does not hold", self.stage.name)
            return
        if chunk.error is not None or chunk.finish is FinishReason.ERROR:
            self._forget(chunk.request_id)  # other answers of the request may still be in the stage
        elif chunk.finish is not None:
            live.open.discard(chunk.index)
            if not live.open:
                del self._live[chunk.request_id]
        self._hand_over(live.owner, chunk)

    def _fail_all(self, error: BaseException) -> None:
        for request_id, live in list(self._live.items()):
            self._fail(live.owner, request_id, self._stage_error("a step", error))

    def _fail(self, owner: Owner, request_id: str, error: OmniError) -> None:
        self._forget(request_id)
        self._hand_over(owner, self._ending(request_id, FinishReason.ERROR, error))

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        try:
            self.stage.abort(request_id)
        except Exception as error:
            log_defect(f"abort in stage {self.stage.name!r}", error)

    def _hand_over(self, owner: Owner, chunk: StageChunk) -> None:
        try:
            self._emit(owner, chunk)
        except Exception as error:
            # The receiver ends its requests itself; whatever escapes must not end this thread for all others.
            log_defect(f"handing on a chunk of stage {self.stage.name!r}", error)

    def _close_out(self) -> None:
        while (command := self._take()) is not None:
            if isinstance(command, _Submit):
                request_id = command.stage_input.info.request_id
                self._hand_over(command.owner, self._ending(request_id, FinishReason.ABORT))
        for request_id, live in list(self._live.items()):
            self._forget(request_id)
            self._hand_over(live.owner, self._ending(request_id, FinishReason.ABORT))
        try:
            self._stats = self.stage.stats()
        except Exception as error:
            log_defect(f"stats of stage {self.stage.name!r}", error)

    def _ending(self, request_id: str, finish: FinishReason, error: OmniError | None = None) -> StageChunk:
        return StageChunk(request_id, self.stage.name, finish=finish, error=error, time=self._clock())

    def _stage_error(self, what: str, error: BaseException) -> StageError:
        failure = StageError(f"{what} of stage {self.stage.name!r} failed with {type(error).__name__}")
        failure.__cause__ = error
        return failure


class DeadlineTimer(Generic[Owner]):
    """Calls `expire(owner)` once a deadline has passed: one heap, at most one thread, however many requests.

    `add` returns a token for `discard`. Without `start` nothing happens until `tick` is called.
    """

    def __init__(self, expire: Callable[[Owner], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._expire = expire
        self._clock = clock
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        # By token, and only here: what has been discarded keeps nobody's media in memory until its time.
        self._owners: dict[int, Owner] = {}
        self._next_token = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, deadline: float, owner: Owner) -> int:
        with self._changed:
            token = self._next_token
            self._next_token += 1
            self._owners[token] = owner
            heapq.heappush(self._heap, (deadline, token))
            if self._heap[0][1] == token:
                self._changed.notify_all()
            return token

    def discard(self, token: int) -> None:
        with self._changed:
            self._owners.pop(token, None)
            # Entries stay in the heap until their time, so it is swept once most of it is stale.
            if len(self._heap) > 2 * len(self._owners) + 16:
                self._heap = [entry for entry in self._heap if entry[1] in self._owners]
                heapq.heapify(self._heap)

    def tick(self) -> bool:
        """Expire everything whose time has come; whether there was any."""
        due = self._pop_due()
        for owner in due:
            self._expire(owner)
        return bool(due)

    def _pop_due(self) -> list[Owner]:
        due: list[Owner] = []
        now = self._clock()
        with self._changed:
            while self._heap and (self._heap[0][0] <= now or self._heap[0][1] not in self._owners):
                _, token = heapq.heappop(self._heap)
                if token in self._owners:
                    due.append(self._owners.pop(token))
        return due

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="omnistage-deadlines", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            self.tick()
            with self._changed:
                if self._stopping:
                    return
                wait = self._heap[0][0] - self._clock() if self._heap else None
                if wait is None or wait > 0:
                    # A wait longer than a lock can express is cut short; the next turn waits on.
                    self._changed.wait(None if wait is None else min(wait, threading.TIMEOUT_MAX))
