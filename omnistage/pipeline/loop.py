"""What drives a stage: its loop.

A `StageLoop` is the only caller of its stage (`check` aside), so a stage needs no locks. It also runs without a thread,
one turn at a time, so that every interleaving can be tested without sleeping.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

from omnistage.core.errors import OmniError, ShutdownError, StageError, StageLostError
from omnistage.core.failures import kind_of, log_defect, loses_device
from omnistage.core.params import answers
from omnistage.core.stage import Stage, StageState, StageStats, StepSeconds
from omnistage.core.types import FinishReason, StageChunk, StageFeed, StageInput
from omnistage.pipeline.commands import Abort, Command, Feed, Owner, Replace, Submit
from omnistage.pipeline.health import (
    PAYLOADS,
    FailedStage,
    StageHealth,
    chunk_defect,
    close_stage,
)
from omnistage.pipeline.supervision import Supervisor
from omnistage.pipeline.timing import StepTimer

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
MAX_FAILED_STEPS = 5
"""Steps in a row that may raise before the stage is given up: one request at fault ends its step, not the stage."""
_turn = threading.local()
"""`fed` of a thread whose loop delivers what a step gave: the loops that it feeds, told when all is delivered."""
_RECENT_REQUESTS = 1024
"""Ids kept to tell a late chunk of a request that has ended from one of an unknown request."""


@dataclass(slots=True)
class _Live(Generic[Owner]):
    """A request that the stage holds: whose it is and which of its answers have not ended."""

    owner: Owner
    open: set[int]


class StageLoop(Generic[Owner]):
    """Runs one stage: commands are drained before every step, chunks are handed to `emit` in order.

    `submit`, `feed`, `abort` and `stop` may be called from any thread and return at once; `emit(owner, chunk)` is
    called from the `LoopThread` that the loop is given to. `owner` identifies a request beyond its id: chunks, feeds
    and aborts of a request that has ended never reach a later one with the same id. Every submitted request gets a
    chunk with `finish` for each answer or one with an error, unless it is aborted through `abort`.
    """

    def __init__(
        self,
        stage: Stage,
        emit: Callable[[Owner, StageChunk], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`changed` is given where several loops are to share a thread: the same one to all of them."""
        self.stage = stage
        self.health = StageHealth(stage.name)
        self.turn_started: float | None = None
        """When the turn that is running began, by `time.perf_counter`."""
        self.changed = changed or threading.Condition()
        self._supervisor = supervisor
        self._emit = emit
        self._clock = clock
        self._inbox: deque[Command[Owner]] = deque()
        self._feeds: deque[Feed[Owner]] = deque()
        """In the order in which they came; they go into the inbox together."""
        self.stopping = False
        """Whether it was told to stop."""
        self._drain = True
        self._woken = False
        """The stage has said that there may be something to do."""
        self.resting = False
        """Nothing is runnable, and the loop waits; set with `changed` held."""
        self._stats = StageStats()
        self._last_stats: StageStats | None = None
        """Once the loop has ended."""
        self._counting = threading.Lock()
        self._step_timer = StepTimer()
        self._failed_steps = 0
        self._recent: deque[str] = deque(maxlen=_RECENT_REQUESTS)
        self._live: dict[str, _Live[Owner]] = {}  # touched by the loop only
        self._busy = False
        self.thread: threading.Thread | None = None
        """The `LoopThread` that makes the turns."""
        self._ended = threading.Event()
        stage.wake = self._wake

    # ------------------------------------------------------------------------------------- from any thread

    def submit(self, stage_input: StageInput, owner: Owner) -> None:
        """Queue a request. Raises `ShutdownError` once the loop is stopping, `StageUnavailableError` if it failed."""
        with self.changed:
            if self.health.state is not StageState.UP:
                raise self.health.error()
            if self.stopping:
                raise ShutdownError(f"stage {self.stage.name!r} is stopping and accepts no more requests")
            self._inbox.append(Submit(owner, stage_input))
            self.changed.notify_all()

    def feed(self, request_id: str, feed: StageFeed, owner: Owner) -> None:
        """What one turn of another loop feeds comes together, at its end: its receivers run in one batch."""
        # One queue for all sources: what several stages feed a request stays in the order of these calls.
        self._feeds.append(Feed(owner, request_id, feed))
        if (fed := getattr(_turn, "fed", None)) is not None:
            fed[self] = None
        else:
            self._take_feeds()

    def _take_feeds(self) -> None:
        with self.changed:
            while self._feeds:
                self._inbox.append(self._feeds.popleft())
            self.changed.notify_all()

    def abort(self, request_id: str, owner: Owner) -> None:
        """Forget the request before the next step; nothing more is emitted for it after that."""
        with self.changed:
            self._inbox.append(Abort(owner, request_id))
            self.changed.notify_all()

    def _wake(self) -> None:
        with self.changed:
            self._woken = True
            self.changed.notify_all()

    def replace(self, stage: Stage) -> bool:
        """Run another stage in place of the failed one; False if the loop is stopping, or over, and will not."""
        with self.changed:
            if self.stopping or self._ended.is_set():
                return False
            self._inbox.append(Replace(stage))
            self.changed.notify_all()
            return True

    def stop(self, drain: bool = True) -> None:
        """End the loop: with `drain` once nothing is runnable, else after the step that is running now.

        Requests that are left then (starved ones, or all without `drain`) end with `FinishReason.ABORT`.
        """
        with self.changed:
            self.stopping = True
            self._drain = self._drain and drain
            self.changed.notify_all()
        if self.thread is None:
            while self._drain and self.run_pending():
                pass
            self.close_out()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for a stopped loop to end; whether it has. Its own thread cannot wait for it."""
        if self.thread is threading.current_thread():
            return self._ended.is_set()
        return self.thread is None or self._ended.wait(timeout)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait_resting(self, timeout: float | None = None) -> bool:
        """Wait until every command has been applied and nothing is runnable; whether that came about in time."""
        with self.changed:
            if self.thread is None or self.stopping or self._ended.is_set():
                return not self._inbox
            return self.changed.wait_for(lambda: self.resting and not self.has_command, timeout)

    def stats(self) -> StageStats:
        """The stage's counters, read now; exact while the loop rests, and the last ones once it has ended."""
        # One that hangs holds up one reader: the others get the counters that were read last.
        if self._last_stats is None and self._counting.acquire(blocking=False):
            try:
                self._stats = self._read_stats()
            finally:
                self._counting.release()
        return self._last_stats or self._stats

    def _read_stats(self) -> StageStats:
        try:
            stats = self.stage.stats()
            if isinstance(stats, StageStats):
                return stats
            raise StageError(f"stats returned a {type(stats).__name__}")
        except BaseException as error:  # the boundary of a stage: nothing fails because it cannot be counted
            log_defect(f"stats of stage {self.stage.name!r}", error)
        return self._stats

    def condition(self) -> StageHealth:
        """A copy of the stage's health."""
        return replace(self.health, state=StageState.FAILED if self.stage.beyond_repair else self.health.state)

    def step_seconds(self) -> StepSeconds:
        return self.stage.step_seconds() or self._step_timer.read()

    def leftovers(self) -> list[str]:
        """What the loop and its stage still hold, in words; only meaningful while the loop rests."""
        stats = self.stats()
        num_requests = stats.waiting + stats.running + stats.starved
        name = self.stage.name
        leftovers = [f"{len(self._inbox)} commands for {name}"] if self._inbox else []
        leftovers += [f"request {request_id} in the loop of {name}" for request_id in list(self._live)]
        return leftovers + ([f"{num_requests} requests in stage {name}"] if num_requests else [])

    # --------------------------------------------------------------------------------------- in the loop

    def run_pending(self) -> bool:
        """One turn: apply every queued command, then make at most one step. Whether anything was done."""
        busy = bool(self._inbox)
        self._woken = False  # before the stage is looked at: what comes later wakes it again
        try:
            while self._inbox:  # only this thread takes from it
                self._apply(self._inbox.popleft())
            self.health.unavailable = self.stage.unavailable
            if self.stage.has_work():
                start = time.perf_counter()
                chunks = self.stage.step()
                if not self.stage.only_waited:
                    self._step_timer.add(time.perf_counter() - start)
                fed: dict[StageLoop[Owner], None] = {}
                _turn.fed = fed
                try:
                    for chunk in chunks:
                        self._deliver(chunk)
                finally:
                    _turn.fed = None
                    for loop in fed:
                        loop._take_feeds()
                self._failed_steps = 0
                busy = True
        except BaseException as error:
            # The boundary of a stage: its defect ends the requests in it, not the loop. Without any the loop rests, or
            # a stage that is broken for good would keep it busy, and from stopping.
            busy = busy or bool(self._live)
            self._step_failed(error)
        self._busy = busy
        return busy

    def enter_thread(self) -> None:
        if self.stage.enter_thread is None:
            return
        try:
            self.stage.enter_thread()
        except BaseException as error:  # the boundary of a stage, as in `run_pending`
            log_defect(f"enter_thread of stage {self.stage.name!r}", error)

    @property
    def has_command(self) -> bool:
        """Whether a command or a stop waits, or the stage has woken the loop; asked with `changed` held."""
        return bool(self._inbox) or self.stopping or self._woken

    @property
    def over(self) -> bool:
        """Whether it was stopped and has no more turns to make; asked with `changed` held."""
        return self.stopping and (not self._drain or not (self._busy or self._inbox))

    def wait_limit(self) -> float | None:
        """How long the loop may wait where nothing is runnable; called without `changed`, which others wait for."""
        try:
            limit = self.stage.wait_limit()
            if limit is None:
                return None
            if limit != limit:
                raise ValueError("not a number")
            return max(0.0, min(float(limit), threading.TIMEOUT_MAX))
        except BaseException as error:  # the boundary of a stage, as in `run_pending`; the next rest asks again
            log_defect(f"wait_limit of stage {self.stage.name!r}", error)
            return _RETRY_SECONDS

    def _apply(self, command: Command[Owner]) -> None:
        """Make a call on behalf of one request; if it raises, only that request ends."""
        if isinstance(command, Submit):
            request_id = command.stage_input.info.request_id
            self._live[request_id] = _Live(command.owner, set(range(answers(command.stage_input.params))))
            self._recent.append(request_id)
        elif isinstance(command, Replace):
            self._install(command.stage)
            return
        else:
            request_id = command.request_id
            live = self._live.get(request_id)
            if live is None or live.owner != command.owner:
                return  # it has ended here; the sender could not know yet
        try:
            if isinstance(command, Submit):
                self.stage.submit(command.stage_input)
            elif isinstance(command, Feed):
                self.stage.feed(request_id, command.feed)
            else:
                self._forget(request_id)
        except OmniError as error:
            self._fail(command.owner, request_id, error)
        except BaseException as error:
            call = "submit" if isinstance(command, Submit) else "feed"
            log_defect(f"{call} to stage {self.stage.name!r}", error)
            self._fail(command.owner, request_id, self._stage_error(call, error))
            if loses_device(error):
                self.give_up(error)

    def _deliver(self, chunk: StageChunk) -> None:
        """Hand a chunk over. Raises if the stage is at fault and it cannot be known which request is concerned."""
        if not isinstance(chunk, StageChunk):
            raise StageError(f"stage {self.stage.name!r} emitted a {type(chunk).__name__}, which is not a chunk")
        live = self._live.get(chunk.request_id)
        if (
            live is None
            or chunk.index not in live.open
            or chunk.stage != self.stage.name
            or not isinstance(chunk.payload, PAYLOADS)
        ):
            self._reject(chunk, live)
            return
        lost = False
        if chunk.error is not None or chunk.finish is not None:
            if chunk_defect(chunk, self.stage.name) is not None:
                self._reject(chunk, live)
                return
            if chunk.error is not None or chunk.finish is FinishReason.ERROR:
                self._forget(chunk.request_id)  # other answers of the request may still be in the stage
                lost = chunk.error is not None and loses_device(chunk.error)
            else:
                live.open.discard(chunk.index)
                if not live.open:
                    del self._live[chunk.request_id]
        try:
            self._emit(live.owner, chunk)
        except BaseException as error:
            # The receiver ends its requests itself; whatever escapes must not end this thread for all others.
            log_defect(f"routing a chunk of stage {self.stage.name!r}", error)
        if lost and chunk.error is not None:
            raise chunk.error

    def _reject(self, chunk: StageChunk, live: _Live[Owner] | None) -> None:
        """A chunk that the stage must not emit ends its request; one of an unknown request ends all of them."""
        name = self.stage.name
        if live is not None:
            defect = chunk_defect(chunk, name) or StageError(f"stage {name!r} emitted a chunk for a closed answer")
            _log.error("%s", defect)
            self._fail(live.owner, chunk.request_id, defect)
        elif chunk.request_id in self._recent:
            _log.warning("stage %s emitted a chunk for a request that it does not hold", name)
        else:
            raise StageError(f"stage {name!r} emitted a chunk for an unknown request")

    def _step_failed(self, error: BaseException) -> None:
        log_defect(f"a step of stage {self.stage.name!r}", error)
        for request_id, live in list(self._live.items()):
            self._fail(live.owner, request_id, self._stage_error("a step", error))
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS or isinstance(error, StageLostError) or loses_device(error):
            self.give_up(error)

    def _fail(self, owner: Owner, request_id: str, error: OmniError) -> None:
        self._forget(request_id)
        self._emit_end(owner, request_id, FinishReason.ERROR, error)

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        try:
            self.stage.abort(request_id)
        except BaseException as error:
            log_defect(f"abort in stage {self.stage.name!r}", error)

    def _emit_end(self, owner: Owner, request_id: str, finish: FinishReason, error: OmniError | None = None) -> None:
        chunk = StageChunk(request_id, self.stage.name, finish=finish, error=error, time=self._clock())
        try:
            self._emit(owner, chunk)
        except BaseException as failure:  # the same boundary as in `_deliver`
            log_defect(f"routing the end of a request in stage {self.stage.name!r}", failure)

    # ------------------------------------------------------------------------------------ failing, replacing

    def give_up(self, error: BaseException, *, permanent: bool = False) -> None:
        """The stage cannot go on: end its requests, refuse new ones, release it.

        Permanent where no other stage of this process could run in its place.
        """
        if self.health.state is not StageState.UP:
            if permanent:
                self.health.state = StageState.FAILED  # and not one that is being rebuilt
            return
        stage, health = self.stage, self.health
        permanent = permanent or loses_device(error)
        health.failures += 1
        health.state = StageState.FAILED
        _log.error("stage %s has failed with %s", stage.name, type(error).__name__)
        self._tell(lambda supervisor: supervisor.stage_failed(health.name, permanent=permanent))
        with self.changed:
            commands, self._inbox = self._inbox, deque()
            self.stage = FailedStage(health, stage.params_type)
        abandoned = [
            (command.owner, command.stage_input.info.request_id) for command in commands if isinstance(command, Submit)
        ]
        abandoned += [(live.owner, request_id) for request_id, live in self._live.items()]
        self._live.clear()
        for owner, request_id in abandoned:
            self._emit_end(owner, request_id, FinishReason.ERROR, health.error())
        close_stage(stage)
        del stage  # or its memory would still be taken when the next one is built
        self._tell(lambda supervisor: supervisor.stage_released(health.name))

    def _install(self, stage: Stage) -> None:
        self.stage, self._failed_steps = stage, 0
        stage.wake = self._wake
        self.enter_thread()
        self._tell(lambda supervisor: supervisor.stage_replaced(stage.name, stage))
        self.health.state = StageState.UP

    def _tell(self, call: Callable[[Supervisor], None]) -> None:
        if self._supervisor is None:
            return
        try:
            call(self._supervisor)
        except BaseException as error:  # the requests of this stage end whatever else fails
            log_defect(f"the supervisor of stage {self.health.name!r}", error)

    def close_out(self) -> None:
        """End every request that is left, and the loop."""
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, Submit):
                self._emit_end(command.owner, command.stage_input.info.request_id, FinishReason.ABORT)
            elif isinstance(command, Replace):
                close_stage(command.stage)
        for request_id, live in list(self._live.items()):
            self._forget(request_id)
            self._emit_end(live.owner, request_id, FinishReason.ABORT)
        # The stage may be closed from now on; a reader that began earlier must not win.
        self._last_stats = self._read_stats()
        self._ended.set()

    def _stage_error(self, what: str, error: BaseException) -> StageError:
        if isinstance(error, StageError):
            return error
        failure = StageError(f"{what} of stage {self.stage.name!r} failed with {kind_of(error)}")
        failure.__cause__ = error
        return failure
