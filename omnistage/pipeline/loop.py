"""What drives a stage: its loop, and the threads that loops run in.

A `StageLoop` is the only caller of its stage (`check` aside), so a stage needs no locks. It also runs without a thread,
one turn at a time, so that every interleaving can be tested without sleeping.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from omnistage.core.errors import OmniError, ShutdownError, StageError
from omnistage.core.failures import log_defect
from omnistage.core.params import SamplingParams, StageParams
from omnistage.core.stage import Stage, StageStats
from omnistage.core.types import FinishReason, StageChunk, StageFeed, StageInput
from omnistage.pipeline.timing import StepSeconds, StepTimer

_log = logging.getLogger(__name__)
Owner = TypeVar("Owner")


_RETRY_SECONDS = 0.05


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
    ) -> None:
        """`changed` is given where several loops are to share a thread: the same one to all of them."""
        self.stage = stage
        self.changed = changed or threading.Condition()
        self._emit = emit
        self._clock = clock
        self._inbox: deque[_Submit[Owner] | _Feed[Owner] | _Abort[Owner]] = deque()
        self.stopping = False
        """Whether it was told to stop."""
        self._drain = True
        self._resting = False
        self._stats = StageStats()
        self._last_stats: StageStats | None = None
        """Once the loop has ended."""
        self._step_timer = StepTimer()
        self._live: dict[str, _Live[Owner]] = {}  # touched by the loop only
        self._busy = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    # ------------------------------------------------------------------------------------- from any thread

    def submit(self, stage_input: StageInput, owner: Owner) -> None:
        """Queue a request. Raises `ShutdownError` once the loop is stopping."""
        with self.changed:
            if self.stopping:
                raise ShutdownError(f"stage {self.stage.name!r} is stopping and takes no more requests")
            self._inbox.append(_Submit(owner, stage_input))
            self.changed.notify_all()

    def feed(self, request_id: str, feed: StageFeed, owner: Owner) -> None:
        with self.changed:
            self._inbox.append(_Feed(owner, request_id, feed))
            self.changed.notify_all()

    def abort(self, request_id: str, owner: Owner) -> None:
        """Forget the request before the next step; nothing more is emitted for it after that."""
        with self.changed:
            self._inbox.append(_Abort(owner, request_id))
            self.changed.notify_all()

    def stop(self, drain: bool = True) -> None:
        """End the loop: with `drain` once nothing is runnable, else after the step that is running now.

        Requests that are left then (starved ones, or all without `drain`) end with `FinishReason.ABORT`.
        """
        with self.changed:
            self.stopping = True
            self._drain = self._drain and drain
            self.changed.notify_all()
        if self._thread is None:
            while self._drain and self.run_pending():
                pass
            self.close_out()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for a stopped loop to end; whether it has. Its own thread cannot wait for it."""
        if self._thread is threading.current_thread():
            return self._ended.is_set()
        return self._thread is None or self._ended.wait(timeout)

    def wait_resting(self, timeout: float | None = None) -> bool:
        """Wait until every command has been applied and nothing is runnable; whether that came about in time."""
        with self.changed:
            if self._thread is None or self.stopping:
                return not self._inbox
            return self.changed.wait_for(lambda: self._resting and not self._inbox, timeout)

    def stats(self) -> StageStats:
        """The stage's counters, read now; exact while the loop rests, and the last ones once it has ended."""
        if self._last_stats is not None:
            return self._last_stats
        try:
            self._stats = self.stage.stats()
        except Exception as error:  # the boundary of a stage: nothing fails because it cannot be counted
            log_defect(f"stats of stage {self.stage.name!r}", error)
        return self._stats

    def step_seconds(self) -> StepSeconds:
        return self._step_timer.read()

    def leftovers(self) -> list[str]:
        """What the loop and its stage still hold, in words; only meaningful while the loop rests."""
        stats = self.stats()
        held = stats.waiting + stats.running + stats.starved
        name = self.stage.name
        left = [f"{len(self._inbox)} commands for {name}"] if self._inbox else []
        left += [f"request {request_id} in the loop of {name}" for request_id in list(self._live)]
        return left + ([f"{held} requests in stage {name}"] if held else [])

    # --------------------------------------------------------------------------------------- in the loop

    def run_pending(self) -> bool:
        """One turn: apply every queued command, then make at most one step. Whether anything was done."""
        busy = bool(self._inbox)
        while self._inbox:  # only this thread takes from it
            self._apply(self._inbox.popleft())
        chunks: Sequence[StageChunk] = ()
        try:
            if self.stage.has_work():
                start = time.perf_counter()
                chunks = self.stage.step()
                self._step_timer.add(time.perf_counter() - start)
                busy = True
        except Exception as error:
            # The boundary of a stage: its defect ends the requests in it, not the loop. Without any the loop rests, or
            # a stage that is broken for good would keep it busy for ever, and from stopping.
            busy = busy or bool(self._live)
            log_defect(f"a step of stage {self.stage.name!r}", error)
            self._fail_all(error)
        for chunk in chunks:
            self._deliver(chunk)
        self._busy = busy
        return busy

    def give_to(self, thread: threading.Thread) -> None:
        """From now on a `LoopThread` makes the turns."""
        self._thread = thread

    def enter_thread(self) -> None:
        if self.stage.enter_thread is None:
            return
        try:
            self.stage.enter_thread()
        except Exception as error:  # the boundary of a stage, as in `_turn`
            log_defect(f"enter_thread of stage {self.stage.name!r}", error)

    @property
    def has_command(self) -> bool:
        """Whether a command or a stop waits; asked with `changed` held."""
        return bool(self._inbox) or self.stopping

    @property
    def over(self) -> bool:
        """Whether it was stopped and has no more turns to make; asked with `changed` held."""
        return self.stopping and (not self._drain or not (self._busy or self._inbox))

    def rest(self) -> float | None:
        """Nothing is runnable, and the loop will wait, at most so many seconds; called with `changed` held."""
        self._resting = True
        try:
            return self.stage.wait_limit()
        except Exception as error:  # the boundary of a stage, as in `run_pending`; it is asked again at the next rest
            log_defect(f"wait_limit of stage {self.stage.name!r}", error)
            return _RETRY_SECONDS

    def wake(self) -> None:
        self._resting = False

    def _apply(self, command: _Submit[Owner] | _Feed[Owner] | _Abort[Owner]) -> None:
        """Make a call on behalf of one request; if it raises, only that request ends."""
        if isinstance(command, _Submit):
            request_id = command.stage_input.info.request_id
            self._live[request_id] = _Live(command.owner, set(range(answers(command.stage_input.params))))
        else:
            request_id = command.request_id
            live = self._live.get(request_id)
            if live is None or live.owner is not command.owner:
                return  # it has ended here; the sender could not know yet
        try:
            if isinstance(command, _Submit):
                self.stage.submit(command.stage_input)
            elif isinstance(command, _Feed):
                self.stage.feed(request_id, command.feed)
            else:
                self._forget(request_id)
        except OmniError as error:
            self._fail(command.owner, request_id, error)
        except Exception as error:
            call = "submit" if isinstance(command, _Submit) else "feed"
            log_defect(f"{call} to stage {self.stage.name!r}", error)
            self._fail(command.owner, request_id, self._stage_error(call, error))

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
        try:
            self._emit(live.owner, chunk)
        except Exception as error:
            # The receiver ends its requests itself; whatever escapes must not end this thread for all others.
            log_defect(f"routing a chunk of stage {self.stage.name!r}", error)

    def _fail_all(self, error: BaseException) -> None:
        for request_id, live in list(self._live.items()):
            self._fail(live.owner, request_id, self._stage_error("a step", error))

    def _fail(self, owner: Owner, request_id: str, error: OmniError) -> None:
        self._forget(request_id)
        self._emit_end(owner, request_id, FinishReason.ERROR, error)

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        try:
            self.stage.abort(request_id)
        except Exception as error:
            log_defect(f"abort in stage {self.stage.name!r}", error)

    def _emit_end(self, owner: Owner, request_id: str, finish: FinishReason, error: OmniError | None = None) -> None:
        chunk = StageChunk(request_id, self.stage.name, finish=finish, error=error, time=self._clock())
        try:
            self._emit(owner, chunk)
        except Exception as failure:  # the same boundary as in `_deliver`
            log_defect(f"routing the end of a request in stage {self.stage.name!r}", failure)

    def close_out(self) -> None:
        """End every request that is left, and the loop."""
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, _Submit):
                self._emit_end(command.owner, command.stage_input.info.request_id, FinishReason.ABORT)
        for request_id, live in list(self._live.items()):
            self._forget(request_id)
            self._emit_end(live.owner, request_id, FinishReason.ABORT)
        self._last_stats = self.stats()  # the stage may be closed from now on; a reader that began earlier must not win
        self._ended.set()

    def _stage_error(self, what: str, error: BaseException) -> StageError:
        failure = StageError(f"{what} of stage {self.stage.name!r} failed with {type(error).__name__}")
        failure.__cause__ = error
        return failure


class LoopThread(Generic[Owner]):
    """Runs loops in one daemon thread; where several have work, the one that has had the least time is next.

    Stages that torch computes on the CPU share one. OpenMP keeps a team of as many threads as there are cores for every
    thread that computes, and once the teams together have more threads than there are cores, those of GNU's library
    sleep and wake at every operator instead of waiting awake: a step takes half as long again, or twice as long, even
    while only one stage has work (`benchmarks/openmp_teams.py`).
    """

    def __init__(self, name: str, loops: Sequence[StageLoop[Owner]]) -> None:
        self._changed = loops[0].changed
        if any(loop.changed is not self._changed for loop in loops):
            raise ValueError("loops that share a thread must share their condition")
        self.name = name
        self._loops = list(loops)
        self._seconds = [0.0] * len(loops)
        self._floor = 0.0
        self._entered = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Returns once every stage has entered the thread."""
        for loop in self._loops:
            loop.give_to(self._thread)
        self._thread.start()
        self._entered.wait()

    def _run(self) -> None:
        for loop in self._loops:
            loop.enter_thread()
        self._entered.set()
        open_loops = list(range(len(self._loops)))
        while open_loops:
            busy = self._turn(open_loops)
            with self._changed:
                if not busy:
                    self._rest(open_loops)
                ended = [number for number in open_loops if self._loops[number].stopping and self._loops[number].over]
            for number in ended:
                open_loops.remove(number)
                self._loops[number].close_out()

    def _turn(self, open_loops: Sequence[int]) -> bool:
        """A turn of the first loop that has something to do; whether there was one."""
        for number in sorted(open_loops, key=self._seconds.__getitem__):
            # Idle time is not saved up: a loop that comes back has no claim on more than the others had meanwhile.
            had = max(self._seconds[number], self._floor)
            start = time.perf_counter()
            busy = self._loops[number].run_pending()
            self._seconds[number] = had
            if busy:
                self._floor = had
                self._seconds[number] += time.perf_counter() - start
                return True
        return False

    def _rest(self, open_loops: Sequence[int]) -> None:
        """Wait for a command, a stop, or the time that a stage itself names."""
        loops = [self._loops[number] for number in open_loops]
        limits = [limit for loop in loops if (limit := loop.rest()) is not None]
        limit = min(limits, default=None)
        self._changed.notify_all()
        while not any(loop.has_command for loop in loops) and self._changed.wait(limit):
            pass
        for loop in loops:
            loop.wake()


def sharing(stages: Iterable[Stage]) -> frozenset[str]:
    """Names of the stages that are to share a thread: those that torch computes on the CPU, unless there are cores
    enough for all of their threads."""
    threads = {stage.name: stage.cpu_threads for stage in stages if stage.cpu_threads}
    crowded = max(threads.values(), default=0) > 1 and sum(threads.values()) > _cores()
    return frozenset(threads) if crowded else frozenset()


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loop_threads(loops: Sequence[StageLoop[Owner]], shared: Collection[str]) -> list[LoopThread[Owner]]:
    """One for the stages in `shared` together, and one for every other stage."""
    threads = [LoopThread(f"omnistage-{loop.stage.name}", [loop]) for loop in loops if loop.stage.name not in shared]
    together = [loop for loop in loops if loop.stage.name in shared]
    return [*threads, LoopThread("omnistage-cpu", together)] if together else threads
