"""The processes of a group: started, watched, restarted with growing delays, counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnistage.core.errors import OmniError, StageUnavailableError
from omnistage.core.failures import log_defect
from omnistage.core.stage import StageState
from omnistage.core.threads import DaemonThreads
from omnistage.placement.fork_server import ForkServer
from omnistage.placement.messages import Message, Start, Stop
from omnistage.placement.silence import LOOK_SECONDS
from omnistage.placement.worker_process import Host, LocalProcess, Worker

_log = logging.getLogger(__name__)

RESTART_PAUSES = (0.1, 1.0, 2.0, 5.0, 10.0)
"""Seconds before a restart: the first for a process that has run for a while, then for those that end soon again."""
STEADY_SECONDS = 10.0
"""A process that has run for so long has run for a while."""
RESTART_MEMORY = 600.0
"""A process that has run for so many seconds has all its restarts again."""
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One process of a group, for metrics and people."""

    group: str
    number: int
    state: StageState
    pid: int | None
    running: int
    """Requests that it has."""
    requests: int
    """Those that it has had."""
    failures: int
    restarts: int


@dataclass(slots=True, eq=False)
class _Replica:
    number: int
    start: Start
    worker: Worker | None = None
    """None while it is down."""
    due: float | None = None
    """When it is to be restarted."""
    up_since: float = 0.0
    tries: int = 0
    """Restarts since it last ran for long."""
    short_lives: int = 0
    """Of its last processes, how many ended soon."""
    requests: int = 0
    failures: int = 0
    restarts: int = 0
    given_up: bool = False

    @property
    def state(self) -> StageState:
        if self.worker is not None:
            return StageState.UP
        return StageState.FAILED if self.given_up else StageState.REBUILDING


class Replicas:
    """All methods may be called from any thread. `least_loaded` and `count` are called under the group's lock."""

    def __init__(
        self,
        name: str,
        starts: Sequence[Start],
        *,
        hang_seconds: float,
        max_restarts: int,
        host: Callable[[], Host] = LocalProcess,
        release: Callable[[], None] = lambda: None,
        fork_server: Callable[[Sequence[str], Start], ForkServer] | None = None,
    ) -> None:
        """`starts` has for each process what it is to do; those that are lost are forked from a `fork_server`.

        `release` is called when all of them have been ended for good.
        """
        self._name = name
        self._replicas = [_Replica(number, start) for number, start in enumerate(starts)]
        self._hang_seconds = hang_seconds
        self._max_restarts = max_restarts
        self._make_fork_server = fork_server
        self._host, self._release = host, release
        self._changed = threading.Condition()  # guards the replicas
        self._leaving: list[Worker] = []
        self._closing = False
        self._hosts: list[Host] = []
        """Processes that wait for what they are to do."""
        self._fork_server: ForkServer | None = None
        self._modules: dict[str, None] = {}
        """Those that the processes have imported, in order."""
        self._starting: Worker | None = None
        """One that builds its stages."""
        self._starter = DaemonThreads(1, f"omnistage-{name}-start")  # one at a time: they share the memory

    def watch(
        self,
        receive: Callable[[Worker, Message], None],
        lost: Callable[[Worker, str], None],
        changed: Callable[[], None],
        has_work: Callable[[Worker], bool],
    ) -> None:
        """What is called with a process's messages, for one that is lost, when `state` may have changed."""
        self._receive, self._on_lost, self._on_changed, self._has_work = receive, lost, changed, has_work

    def spawn(self) -> None:
        """Start the processes; they import what they need until `start`, which may come later."""
        for _ in self._replicas:
            self._hosts.append(self._host())

    def start(self) -> None:
        """Have them build their stages, one after the other; raises why one of them cannot."""
        for replica in self._replicas:
            self._run(replica, self._next_host())
        self._starter.submit(self._keep_fork_server)
        threading.Thread(target=self._watch, name=f"omnistage-{self._name}-watch", daemon=True).start()

    def _keep_fork_server(self) -> None:
        """Start one where there is none."""
        server = self._fork_server
        if self._make_fork_server is None or (server is not None and not server.ended()):
            return
        try:
            server = self._make_fork_server(tuple(self._modules), self._replicas[0].start)
        except Exception as error:  # the boundary of an optional process: restarts take longer without it
            log_defect(f"starting the fork server of group {self._name}", error)
            return
        with self._changed:
            self._fork_server, closing = server, self._closing
        if closing:
            server.close()

    def _next_host(self) -> Host:
        """A process that has nothing to do yet."""
        while True:
            with self._changed:
                host, server = self._hosts.pop() if self._hosts else None, self._fork_server
            if host is None:
                return (server.fork() if server is not None else None) or self._host()
            if host.wait(0) is None:
                return host
            _discard(host)

    def _run(self, replica: _Replica, host: Host) -> None:
        worker = Worker(f"{self._name}-{replica.number}", host, self._receive, self._closed)
        with self._changed:
            self._starting = worker
            if self._closing:
                worker.kill()
        try:
            worker.start(replica.start)
        except BaseException:
            worker.kill()
            host.wait(_CLOSE_SECONDS)
            raise
        finally:
            with self._changed:
                self._starting = None
        self._modules |= dict.fromkeys(worker.modules)
        with self._changed:
            if not worker.lost and not self._closing:
                replica.worker, replica.up_since = worker, time.monotonic()
                return
        worker.stop()
        if not self._closing:
            raise StageUnavailableError("its process ended as soon as it had started")

    # -------------------------------------------------------------------------------------------- choosing

    def least_loaded(self) -> Worker | None:
        """The process with the fewest requests, of several the one that has had the fewest; None: none is up."""
        with self._changed:
            up = [(each.worker.load, each.requests, each.number, each.worker) for each in self._replicas if each.worker]
        return min(up, key=lambda item: item[:3])[3] if up else None

    def count(self, worker: Worker) -> None:
        """A request has been bound to a process."""
        with self._changed:
            worker.load += 1
            for replica in self._replicas:
                replica.requests += replica.worker is worker

    def workers(self) -> list[Worker]:
        with self._changed:
            return [replica.worker for replica in self._replicas if replica.worker is not None]

    def counted_workers(self) -> list[Worker]:
        """Those and the ones that are lost, until the group has taken over what they had counted."""
        with self._changed:
            return [*self.workers(), *self._leaving]

    def state(self) -> StageState:
        """Of the group as a whole, which is up while one process is."""
        with self._changed:
            states = {replica.state for replica in self._replicas}
        return next(state for state in (StageState.UP, StageState.REBUILDING, StageState.FAILED) if state in states)

    def stats(self) -> list[ReplicaStats]:
        with self._changed:
            return [
                ReplicaStats(
                    self._name,
                    each.number,
                    each.state,
                    None if each.worker is None else each.worker.host.pid,
                    0 if each.worker is None else each.worker.load,
                    each.requests,
                    each.failures,
                    each.restarts,
                )
                for each in self._replicas
            ]

    # ------------------------------------------------------------------------------------------------ losses

    def give_up(self, worker: Worker, why: str) -> None:
        """End a process that does not work any more, and all that is in it."""
        with self._changed:
            replica = next((each for each in self._replicas if each.worker is worker), None)
            lost_before, worker.lost = worker.lost, True
            if lost_before or replica is None:  # or it was being started: whoever does that finds it lost
                return
            replica.worker = None
            self._leaving.append(worker)
            closing = self._closing
            if not closing:
                replica.failures += 1
                self._schedule(replica)
        worker.kill()
        if closing:
            return
        _log.error("process %d of group %s is lost: %s", replica.number, self._name, why)
        self._on_changed()  # first: what ends now is not to be sent here again
        self._on_lost(worker, why)
        with self._changed:
            self._leaving.remove(worker)

    def _schedule(self, replica: _Replica) -> None:
        """With `_changed` held: when to start it again, if at all."""
        lived = time.monotonic() - replica.up_since
        if lived > RESTART_MEMORY:
            replica.tries = 0
        replica.short_lives = replica.short_lives + 1 if lived < STEADY_SECONDS else 0
        if replica.tries >= self._max_restarts:
            replica.given_up = True
            _log.critical(
                "process %d of group %s has failed %d times; it is not started again",
                replica.number,
                self._name,
                replica.tries + 1,
            )
            return
        replica.due = time.monotonic() + RESTART_PAUSES[min(replica.short_lives, len(RESTART_PAUSES) - 1)]
        replica.tries += 1
        self._changed.notify_all()

    def _closed(self, worker: Worker) -> None:
        self.give_up(worker, worker.ending())

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, LOOK_SECONDS):
                    return
                now = time.monotonic()
                due = [each for each in self._replicas if each.due is not None and each.due <= now]
                for replica in due:
                    replica.due = None
                workers = [each.worker for each in self._replicas if each.worker is not None]
            for replica in due:
                self._starter.submit(self._restart, replica)
            for worker in workers:
                if self._has_work(worker) and worker.hangs(self._hang_seconds):
                    self.give_up(worker, f"it has not responded for {self._hang_seconds:g} s")

    def _restart(self, replica: _Replica) -> None:
        try:
            self._run(replica, self._next_host())
        except Exception as error:  # the boundary of a process that is being started: another attempt may succeed
            if self._closing:
                return
            if isinstance(error, OmniError):
                _log.error("process %d of group %s cannot be started: %s", replica.number, self._name, error)
            else:
                log_defect(f"starting a process of group {self._name}", error)
            with self._changed:
                replica.failures += 1
                replica.up_since = time.monotonic()
                self._schedule(replica)
        else:
            with self._changed:
                replica.restarts += 1
            _log.warning("process %d of group %s has been restarted", replica.number, self._name)
        self._on_changed()
        self._keep_fork_server()

    def close(self) -> None:
        """End all processes. Safe to call again."""
        with self._changed:
            self._closing = True
            workers = [replica.worker for replica in self._replicas if replica.worker is not None]
            if self._starting is not None:
                self._starting.kill()
            hosts, self._hosts, server = self._hosts, [], self._fork_server
            self._changed.notify_all()
        self._starter.shutdown(cancel_futures=True)
        for host in hosts:
            _discard(host)
        if server is not None:
            server.close()
        for worker in workers:
            worker.send(Stop())
        for worker in workers:
            worker.stop()
        self._release()


def _discard(host: Host) -> None:
    """End a process that was given nothing to do."""
    host.kill()
    host.socket.close()
    host.wait(_CLOSE_SECONDS)
