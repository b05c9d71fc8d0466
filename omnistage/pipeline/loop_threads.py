"""The threads that loops run in, and which of them share one."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Generic

from omnistage.core.failures import log_defect
from omnistage.core.stage import Stage
from omnistage.core.threads import usable_cores
from omnistage.pipeline.commands import Owner
from omnistage.pipeline.loop import StageLoop


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
            loop.thread = self._thread
        self._thread.start()
        self._entered.wait()

    def _run(self) -> None:
        open_loops = list(range(len(self._loops)))
        try:
            for loop in self._loops:
                loop.enter_thread()
            self._entered.set()
            self._drive(open_loops)
        except BaseException as error:
            # Nothing that a stage does comes this far. Without its thread a stage can only be given up.
            log_defect(f"the thread {self.name}", error)
            for number in open_loops:
                self._loops[number].give_up(error, permanent=True)
                self._loops[number].close_out()
            self._entered.set()

    def _drive(self, open_loops: list[int]) -> None:
        """Turns, with a rest where there is nothing to do, until all loops have been stopped and have ended."""
        while open_loops:
            if not self._turn(open_loops):
                self._rest([self._loops[number] for number in open_loops])
            ended = []
            with self._changed:
                for number in open_loops:
                    if self._loops[number].stopping and self._loops[number].over:
                        ended.append(number)
            for number in ended:
                open_loops.remove(number)
                self._loops[number].close_out()

    def _turn(self, open_loops: Sequence[int]) -> bool:
        """A turn of the first loop that has something to do; whether there was one."""
        for number in sorted(open_loops, key=self._seconds.__getitem__):
            # Idle time is not saved up: a loop that comes back has no claim on more than the others had meanwhile.
            had = max(self._seconds[number], self._floor)
            loop = self._loops[number]
            start = loop.turn_started = time.perf_counter()
            busy = loop.run_pending()
            loop.turn_started = None
            self._seconds[number] = had
            if busy:
                self._floor = had
                self._seconds[number] += time.perf_counter() - start
                return True
        return False

    def _rest(self, loops: Sequence[StageLoop[Owner]]) -> None:
        """Wait for a command, a stop, or the time that a stage itself names."""
        limits = []
        for loop in loops:
            loop.turn_started = time.perf_counter()
            limits.append(loop.wait_limit())
            loop.turn_started = None
        limit = min((limit for limit in limits if limit is not None), default=None)
        with self._changed:
            for loop in loops:
                loop.resting = True
            self._changed.notify_all()
            while not any(loop.has_command for loop in loops) and self._changed.wait(limit):
                pass
            for loop in loops:
                loop.resting = False


def sharing(stages: Iterable[Stage]) -> frozenset[str]:
    """Names of the stages that are to share a thread: those that torch computes on the CPU, unless there are cores
    enough for all of their threads."""
    threads = {stage.name: stage.cpu_threads for stage in stages if stage.cpu_threads}
    crowded = max(threads.values(), default=0) > 1 and sum(threads.values()) > usable_cores()
    return frozenset(threads) if crowded else frozenset()


def loop_threads(loops: Sequence[StageLoop[Owner]], shared: Collection[str]) -> list[LoopThread[Owner]]:
    """One for the stages in `shared` together, and one for every other stage."""
    threads = [LoopThread(f"omnistage-{loop.stage.name}", [loop]) for loop in loops if loop.stage.name not in shared]
    together = [loop for loop in loops if loop.stage.name in shared]
    return [*threads, LoopThread("omnistage-cpu", together)] if together else threads


def join_threads(loops: Iterable[StageLoop[Owner]], give_up: float) -> None:
    """Wait until the threads whose loops have all ended are gone, no longer than to `give_up` (`time.monotonic`).

    A thread that still lets go of a stage's tensors when the interpreter ends would abort the process.
    """
    loops = list(loops)
    stuck = {loop.thread for loop in loops if not loop.ended}
    for thread in {loop.thread for loop in loops}.difference(stuck, (None, threading.current_thread())):
        if thread is not None:
            thread.join(max(give_up - time.monotonic(), 0.0))
