"""Watches over the loops of a model: failed stages are rebuilt, steps that take too long are reported."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.core.errors import InternalError, OmniError, StageError
from omnistage.core.failures import log_defect
from omnistage.core.stage import Stage, StageState
from omnistage.core.threads import DaemonThreads
from omnistage.pipeline.health import close_stage

if TYPE_CHECKING:
    from omnistage.pipeline.loop import StageLoop

_log = logging.getLogger(__name__)

REBUILD_PAUSES = (1.0, 10.0, 60.0)
"""Seconds before the first, the second and every further attempt to rebuild a stage."""
REBUILD_MEMORY = 600.0
"""A stage that has run for so many seconds since it was rebuilt has all its attempts again."""
WARM_UP_STEPS, WARM_UP_FACTOR = 32, 10
"""A stage's first steps may take that many times longer: they compile and capture graphs."""
HUNG_FACTOR = 10
"""A step that takes that many times longer than it may is not expected to end."""
_CHECKS_PER_LIMIT = 10
_CHECK_SECONDS = (0.02, 5.0)

Rebuild = Callable[[int], Stage]
"""Builds a stage anew; called with how many attempts were made since it last ran for long."""


@dataclass(slots=True)
class _Attempts:
    count: int = 0
    """Since the stage last ran for long."""
    running_since: float = field(default=float("-inf"))
    due: float | None = None
    steps: int = 0
    """Of the stages that ran before, so that a new one may warm up."""


class Supervisor:
    """One for all stages of a model. Without `start` nothing happens until `tick` is called.

    `end_requests(name)` is to end those that need a stage; `on_failed(name)`, which is to do so too, and
    `on_replaced(name, stage)` are called from the stage's loop. A step that hangs cannot be ended, nor its stage
    rebuilt: Python cannot stop a thread.
    """

    def __init__(
        self,
        end_requests: Callable[[str], None],
        on_failed: Callable[[str], None],
        on_replaced: Callable[[str, Stage], None],
        rebuilds: Mapping[str, Rebuild],
        *,
        max_step_seconds: float | None,
        max_rebuilds: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end_requests = end_requests
        self._on_failed = on_failed
        self._on_replaced = on_replaced
        self._rebuilds = rebuilds
        self._max_step_seconds = max_step_seconds
        self._max_rebuilds = max_rebuilds
        self._clock = clock
        self._loops: Mapping[str, StageLoop[Any]] = {}
        self._attempts: dict[str, _Attempts] = {}
        self._reported: dict[str, float] = {}
        """By stage: when the step began that was reported."""
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._builder: DaemonThreads | None = None

    def watch(self, loops: Mapping[str, StageLoop[Any]]) -> None:
        self._loops = loops
        self._attempts = {name: _Attempts() for name in loops}

    def start(self) -> None:
        self._builder = DaemonThreads(1, "omnistage-rebuild")  # one at a time: they share the memory
        self._thread = threading.Thread(target=self._run, name="omnistage-watchdog", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._builder is not None:
            self._builder.shutdown(cancel_futures=True)
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        low, high = _CHECK_SECONDS
        limit = self._max_step_seconds
        pause = high if limit is None else min(max(limit / _CHECKS_PER_LIMIT, low), high)
        while True:
            try:
                self.tick()
            except BaseException as error:  # the boundary of this thread: without it no stage is rebuilt
                log_defect("the watchdog", error)
            with self._changed:
                due = [each.due for each in self._attempts.values() if each.due is not None]
                wait = max(low, min([pause, *(at - self._clock() for at in due)]))
                if self._stopping or (self._changed.wait(wait) and self._stopping):
                    return

    def tick(self) -> bool:
        """Look at every loop; start the rebuilds that are due. Whether any was."""
        stuck: dict[threading.Thread | None, float] = {}
        for name, loop in self._loops.items():
            self._check_thread(loop)
            if (seconds := self._overdue(name, loop)) is not None:
                stuck[loop.thread] = seconds
        for loop in self._loops.values():  # those that share a thread are stuck together
            self._note(loop, stuck.get(loop.thread))
        now = self._clock()
        with self._changed:
            due = [name for name, each in self._attempts.items() if each.due is not None and each.due <= now]
            for name in due:
                self._attempts[name].due = None
        for name in due:
            if self._builder is None:
                self._rebuild(name)
            else:
                self._builder.submit(self._rebuild, name)
        return bool(due)

    # ------------------------------------------------------------------------------------------ rebuilding

    def stage_failed(self, name: str, *, permanent: bool) -> None:
        """From its loop: decide what becomes of a stage, then end the requests that need it."""
        attempts, health = self._attempts[name], self._loops[name].health
        with self._changed:
            if self._clock() - attempts.running_since > REBUILD_MEMORY:
                attempts.count = 0
            possible = not permanent and name in self._rebuilds and attempts.count < self._max_rebuilds
            health.state = StageState.REBUILDING if possible else StageState.FAILED
        if not possible:
            _log.critical("stage %s cannot be rebuilt; restart the service", name)
        self._on_failed(name)

    def stage_released(self, name: str) -> None:
        """From its loop: the failed stage is closed and forgotten, and another may be built."""
        with self._changed:
            if self._loops[name].health.state is StageState.REBUILDING:
                self._schedule(name)

    def _schedule(self, name: str) -> None:
        attempts = self._attempts[name]
        attempts.due = self._clock() + REBUILD_PAUSES[min(attempts.count, len(REBUILD_PAUSES) - 1)]
        self._changed.notify_all()

    def stage_replaced(self, name: str, stage: Stage) -> None:
        """From its loop: another stage runs from now on."""
        attempts, health = self._attempts[name], self._loops[name].health
        with self._changed:
            attempts.count += 1  # until it has run for long
            attempts.running_since = self._clock()
            attempts.steps = sum(self._loops[name].step_seconds().counts)
            health.rebuilds += 1
        self._on_replaced(name, stage)
        _log.warning("stage %s has been rebuilt", name)

    def _rebuild(self, name: str) -> None:
        attempts, loop = self._attempts[name], self._loops[name]
        try:
            with _freed_memory():
                stage = self._rebuilds[name](attempts.count)
            if not isinstance(stage, Stage):
                raise InternalError(f"the factory of stage {name!r} returned a {type(stage).__name__}")
        except BaseException as error:  # the boundary of a checkpoint and a device: another attempt may succeed
            if isinstance(error, OmniError):
                _log.error("stage %s cannot be rebuilt now: %s", name, error)
            else:
                log_defect(f"rebuilding stage {name!r}", error)
            self._rebuild_failed(name)
            return
        if not loop.replace(stage):
            close_stage(stage)

    def _rebuild_failed(self, name: str) -> None:
        attempts, health = self._attempts[name], self._loops[name].health
        with self._changed:
            attempts.count += 1
            if attempts.count < self._max_rebuilds:
                self._schedule(name)
                return
            health.state = StageState.FAILED
        _log.critical("stage %s could not be rebuilt in %d attempts; restart the service", name, attempts.count)

    # -------------------------------------------------------------------------------------------- watching

    def _check_thread(self, loop: StageLoop[Any]) -> None:
        """Give up a stage whose thread is gone: its requests end, and not only at their deadlines."""
        if loop.thread is not None and loop.thread.ident is not None and not loop.thread.is_alive() and not loop.ended:
            loop.give_up(StageError("its thread has ended"), permanent=True)
            loop.close_out()

    def _limit(self, loop: StageLoop[Any]) -> float:
        steps = sum(loop.step_seconds().counts) - self._attempts[loop.health.name].steps
        return step_limit(self._max_step_seconds, steps)

    def _note(self, loop: StageLoop[Any], overdue: float | None) -> None:
        health = loop.health
        hung = overdue is not None and overdue > HUNG_FACTOR * self._limit(loop)
        hangs_now = hung and not health.hung
        health.overdue, health.hung = overdue, hung
        if hangs_now:
            _log.critical("stage %s hangs; restart the service", health.name)
        if hung:  # each time: a request may have been checked just before
            self._end_requests(health.name)

    def _overdue(self, name: str, loop: StageLoop[Any]) -> float | None:
        """How long a loop's step has taken, where that is too long. Reports it once, and its end."""
        started = loop.turn_started
        seconds = 0.0 if started is None else time.perf_counter() - started
        if started is None or seconds < self._limit(loop):
            if self._reported.pop(name, None) is not None:
                _log.warning("the step of stage %s that was overdue has ended", name)
            return None
        if self._reported.get(name) != started:
            self._reported[name] = started
            _log.error("stage %s has been in one step for %.0f s\n%s", name, seconds, _stacks(name, loop.thread))
        return seconds


def step_limit(max_step_seconds: float | None, steps: int) -> float:
    """How long the next step of a stage may take that has made so many."""
    if max_step_seconds is None:
        return float("inf")
    return max_step_seconds * (1 if steps >= WARM_UP_STEPS else WARM_UP_FACTOR)


@contextmanager
def _freed_memory() -> Iterator[None]:
    """Build a stage with the old one's memory free: that may be in cycles, and a server freezes what it has loaded."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    gc.collect()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _stacks(stage: str, thread: threading.Thread | None) -> str:
    """Where the threads of a stage are: its loop's, and those that the stage itself has started. Frames only."""
    frames = sys._current_frames()
    threads = [each for each in threading.enumerate() if each is thread or each.name.startswith(f"omnistage-{stage}-")]
    texts = [
        f"thread {each.name}:\n{''.join(traceback.format_stack(frames[each.ident]))}"
        for each in threads
        if each.ident in frames
    ]
    return "".join(texts)
