"""A group of stages that runs in processes of its own: which process has which request, and what comes of it when one
of them is lost.

Locks, in the only order in which they may nest: a binding's, then the group's. Nothing is encoded or sent under the
group's.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from omnistage.core.errors import OmniError, ShutdownError, StageUnavailableError
from omnistage.core.failures import log_defect
from omnistage.core.params import StageParams
from omnistage.core.stage import GROWING, StageState, StageStats, StepSeconds
from omnistage.core.types import (
    FinishReason,
    LinkedInput,
    RequestInfo,
    StageChunk,
    StageFeed,
    StageInput,
    StagePayloadIn,
)
from omnistage.placement.messages import (
    WINDOW,
    Abort,
    Beat,
    Check,
    Checked,
    Chunks,
    Failed,
    Feed,
    Loading,
    Message,
    Ready,
    Submit,
    Taken,
)
from omnistage.placement.prefixes import Prefixes
from omnistage.placement.proxy import ProxyStage
from omnistage.placement.replicas import Replicas, ReplicaStats
from omnistage.placement.worker_process import Worker

_log = logging.getLogger(__name__)
_CHECK_TRIES = 2
Report = Callable[[str, float], None]


@dataclass(slots=True, eq=False)
class Binding:
    """A request in a group, and the process that it is bound to from its first stage there to its last."""

    info: RequestInfo
    worker: Worker
    key: int
    """Stands for the request in that process."""
    stages: set[str] = field(default_factory=set)
    """Those of the group that have it."""
    replay: list[Submit | Feed] | None = field(default_factory=list)
    """Until the first output, what another process would need to start it again; None: it cannot be."""
    error: OmniError | None = None
    """It has lost its process."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while something is sent for it, so that all of that comes in order, to one process."""


@dataclass(slots=True, eq=False)
class _Call:
    """A check that waits for its answer."""

    worker: Worker
    answered: threading.Event = field(default_factory=threading.Event)
    error: OmniError | None = None
    lost: bool = False


class StageGroup:
    """The stages of one group, as proxies, over one or more processes that each run all of them."""

    def __init__(
        self, name: str, stages: Mapping[str, type[StageParams]], replicas: Replicas, *, restart_requests: bool = True
    ) -> None:
        self.name = name
        self._replicas = replicas
        self._restart_requests = restart_requests
        self._reporting = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._bindings: dict[int, Binding] = {}
        self._by_request: dict[int, Binding] = {}
        """By the identity of their `info`, of which a request has one."""
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._prefixes = Prefixes()
        self._lost_stats: dict[str, StageStats] = {}
        """What processes that are gone had counted, which goes on being counted."""
        self._lost_steps: dict[str, StepSeconds] = {}
        self._open = set(stages)
        self._progress: Report | None = None
        self.stages = {stage: ProxyStage(stage, params, self) for stage, params in stages.items()}
        replicas.watch(self._receive, self._on_lost, self.report, self._has_work)

    def start(self, progress: Report | None = None) -> None:
        """Build the stages in processes that were spawned; returns once all take requests. Raises why one cannot."""
        self._progress = progress
        self._replicas.start()
        self._progress = None

    def report(self) -> None:
        """Tell the stages whether they can take requests."""
        with self._reporting:  # or an older state could be told last
            state = self._replicas.state()
            for stage in self.stages.values():
                stage.note(state)

    def replicas(self) -> list[ReplicaStats]:
        return self._replicas.stats()

    def _unavailable(self) -> StageUnavailableError:
        if self._replicas.state() is StageState.FAILED:
            return StageUnavailableError(
                f"the processes of {self._words()} have failed too often; look at the log and restart the service"
            )
        return StageUnavailableError(f"the process of {self._words()} is being restarted; try again later")

    def _words(self) -> str:
        return f"stage {next(iter(self.stages))!r}" if len(self.stages) == 1 else f"stages {', '.join(self.stages)}"

    # ------------------------------------------------------------------------------- requests, from proxies

    def submit(self, stage: str, stage_input: StageInput) -> Binding:
        """Send a request to its process; one that is new here gets the one with the fewest, or with its prefix."""
        binding = self._bind(stage_input.info, stage_input.payload)
        stages = (stage, *(linked.name for linked in stage_input.linked))
        try:
            with binding.lock:
                if binding.error is not None:
                    raise binding.error
                with self._lock:
                    binding.stages.update(stages)
                if not isinstance(stage_input.payload, LinkedInput):  # it goes with the stage that it is linked to
                    self._send(binding, Submit(stage, binding.key, stage_input))
        except BaseException:
            for name in stages:
                self.release(binding, name)
            raise
        return binding

    def feed(self, binding: Binding, stage: str, feed: StageFeed) -> None:
        with binding.lock:
            if binding.error is None:
                self._send(binding, Feed(stage, binding.key, binding.info.request_id, feed))

    def abort(self, binding: Binding, stage: str) -> None:
        with binding.lock:
            binding.replay = None
            if binding.error is None:
                binding.worker.send(Abort(stage, binding.key, binding.info.request_id))
        self.release(binding, stage)

    def release(self, binding: Binding, stage: str) -> None:
        """A stage has ended with the request; after the last one its process has one less."""
        with self._lock:
            binding.stages.discard(stage)
            if not binding.stages and self._bindings.pop(binding.key, None) is not None:
                del self._by_request[id(binding.info)]
                binding.worker.load -= 1

    def _bind(self, info: RequestInfo, payload: StagePayloadIn) -> Binding:
        with self._lock:
            if (binding := self._by_request.get(id(info))) is not None:
                return binding
            if (worker := self._replicas.least_loaded()) is None:
                raise self._unavailable()
            worker = self._prefixes.choose(payload, worker)
            self._note_work(worker)
            binding = Binding(info, worker, next(self._numbers))
            self._bindings[binding.key] = self._by_request[id(info)] = binding
            self._replicas.count(worker)
            return binding

    def _send(self, binding: Binding, message: Submit | Feed) -> None:
        if (queue := binding.replay) is not None:  # the first output ends it, in another thread
            queue.append(message)
        binding.worker.send(message)

    # ------------------------------------------------------------------------------- checks, from any thread

    def check(self, stage: str, *, stage_input: StageInput | None = None, params: StageParams | None = None) -> None:
        """Ask a process. Raises what its stage does."""
        for _ in range(_CHECK_TRIES):
            with self._lock:
                if not self._open:
                    raise ShutdownError("the service is stopping; send the request again")
                if (worker := self._replicas.least_loaded()) is None:
                    raise self._unavailable()
                self._note_work(worker)
                number = next(self._numbers)
                call = self._calls[number] = _Call(worker)
            try:
                worker.send(Check(number, stage, stage_input, params))
                call.answered.wait()
            finally:
                with self._lock:
                    self._calls.pop(number, None)
            if call.error is not None:
                raise call.error
            if not call.lost:
                return
        raise self._unavailable()

    def _has_work(self, worker: Worker) -> bool:
        with self._lock:
            return self._is_busy(worker)

    def _is_busy(self, worker: Worker) -> bool:
        return worker.load > 0 or any(call.worker is worker for call in self._calls.values())

    def _note_work(self, worker: Worker) -> None:
        """It gets something to do: its silence counts from now, if it had nothing."""
        if not self._is_busy(worker):
            worker.heard = time.monotonic()

    # -------------------------------------------------------------------------------------- from processes

    def _receive(self, worker: Worker, message: Message) -> None:
        if isinstance(message, Chunks):
            self._deliver(worker, message)
        elif isinstance(message, Checked):
            with self._lock:
                call = self._calls.get(message.number)
            if call is not None:
                call.error = message.error
                call.answered.set()
        elif isinstance(message, Beat):
            with self._lock:
                if not worker.lost:
                    worker.stats, worker.steps = message.stats, message.steps
            if message.overdue is not None:
                self._replicas.give_up(worker, f"stage {message.overdue!r} has been in one step for too long")
        elif isinstance(message, Ready):
            worker.modules = message.modules
            worker.started(devices=message.devices)
        elif isinstance(message, Failed):
            worker.started(message.error)
        elif isinstance(message, Loading) and self._progress is not None:
            self._progress(message.doing, message.fraction)

    def _deliver(self, worker: Worker, message: Chunks) -> None:
        batch = []
        with self._lock:
            if worker.lost:
                return
            for key, chunk in zip(message.keys, message.chunks, strict=True):
                if (binding := self._bindings.get(key)) is not None:
                    if chunk.payload is not None or chunk.finish is not None:
                        binding.replay = None
                    batch.append((binding, chunk))
        self.stages[message.stage].put(worker, batch)

    def note_taken(self, worker: Worker, stage: str) -> None:
        """A batch has been taken; the process is told of several together."""
        count = worker.num_taken.get(stage, 0) + 1  # called by the stage's loop alone
        if count >= WINDOW // 4:
            worker.send(Taken(stage, count))
            count = 0
        worker.num_taken[stage] = count

    # ---------------------------------------------------------------------------------------------- losses

    def _on_lost(self, worker: Worker, why: str) -> None:
        """A process is gone, and nothing of it is delivered any more: end its requests, or start them elsewhere."""
        with self._lock:
            self._prefixes.forget(worker)
            bindings = [binding for binding in self._bindings.values() if binding.worker is worker]
            calls = [call for call in self._calls.values() if call.worker is worker]
            for stage, stats in worker.stats.items():
                past = _counters_of(stats)
                self._lost_stats[stage] = _sum([self._lost_stats.get(stage, StageStats()), past], held=True)
            for stage, steps in worker.steps.items():
                self._lost_steps[stage] = _sum_steps([steps, self._lost_steps.get(stage)])
            worker.stats, worker.steps = {}, {}  # counted above from now on
        for call in calls:
            call.lost = True
            call.answered.set()
        rest = [binding for binding in bindings if not self._moved(binding)]
        for binding in rest:
            self._end(binding, why)
        if bindings:
            num_moved = len(bindings) - len(rest)
            _log.warning(
                "group %s: %d requests ended with their process, %d were moved", self.name, len(rest), num_moved
            )

    def _moved(self, binding: Binding) -> bool:
        try:
            return self._move(binding)
        except Exception as error:  # the boundary of one request: those behind it end, too, or are moved
            log_defect(f"starting a request of group {self.name} again", error)
            for stage in sorted(binding.stages):  # what has been sent of it would wait for the rest
                binding.worker.send(Abort(stage, binding.key, binding.info.request_id))
            return False

    def _move(self, binding: Binding) -> bool:
        """Start a request again in another process, where it has given nothing yet."""
        with binding.lock:
            messages, binding_lost = binding.replay, binding.worker
            if messages is None or not self._restart_requests:
                return False
            with self._lock:
                worker = self._replicas.least_loaded()
                if worker is None or self._bindings.pop(binding.key, None) is None:
                    return False
                binding.worker, binding.key = worker, next(self._numbers)
                self._bindings[binding.key] = binding
                self._note_work(worker)
                binding_lost.load -= 1
                self._replicas.count(worker)
            binding.replay = None  # once: it may be what its process died of
            for message in messages:
                worker.send(_with_key(message, binding.key))
            return True

    def _end(self, binding: Binding, why: str) -> None:
        with binding.lock:
            binding.error = StageUnavailableError(
                f"the process of {self._words()} ended while it had this request ({why}); send the request again"
            )
            with self._lock:
                stages = sorted(binding.stages)
        for stage in stages:
            chunk = StageChunk(binding.info.request_id, stage, finish=FinishReason.ERROR, error=binding.error)
            self.stages[stage].put(None, [(binding, chunk)])

    # ------------------------------------------------------------------------------------- counting, closing

    def stats(self, stage: str, *, holding: bool) -> StageStats:
        """The sum over the processes, as they last said. Without requests nothing can be in the stage."""
        with self._lock:
            workers = self._replicas.counted_workers()
            each = [self._lost_stats.get(stage), *(worker.stats.get(stage) for worker in workers)]
        return _sum([stats for stats in each if stats is not None], held=holding)

    def step_seconds(self, stage: str) -> StepSeconds:
        with self._lock:
            workers = self._replicas.counted_workers()
            each = [self._lost_steps.get(stage), *(worker.steps.get(stage) for worker in workers)]
        return _sum_steps(each)

    def close(self, stage: str) -> None:
        """Close one stage; the processes end with the last."""
        with self._lock:
            self._open.discard(stage)
            if self._open:
                return
        self._replicas.close()
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.error = ShutdownError("the service is stopping; send the request again")
            call.answered.set()


def _with_key(message: Submit | Feed, key: int) -> Submit | Feed:
    if isinstance(message, Submit):
        return Submit(message.stage, key, message.stage_input)
    return Feed(message.stage, key, message.request_id, message.feed)


def _sum(each: Sequence[StageStats], *, held: bool) -> StageStats:
    counts: Counter[str] = Counter()
    extra: dict[str, float] = {}
    for stats in each:
        counts.update({name: getattr(stats, name) for name in _COUNTS if held or name not in _GAUGES})
        for name, value in stats.extra.items():
            extra[name] = extra.get(name, 0) + value
    return StageStats(**counts, extra=extra)


def _counters_of(stats: StageStats) -> StageStats:
    """What a stage had counted, without what it had at the moment."""
    counts = {name: getattr(stats, name) for name in _COUNTS if name in GROWING}
    return StageStats(**counts, extra={name: value for name, value in stats.extra.items() if name in GROWING})


def _sum_steps(each: Sequence[StepSeconds | None]) -> StepSeconds:
    parts = [steps for steps in each if steps is not None]
    counts = zip(*(steps.counts for steps in parts), strict=True)
    return StepSeconds(tuple(map(sum, counts)), sum(steps.total for steps in parts)) if parts else StepSeconds()


_GAUGES = frozenset({"waiting", "running", "starved"})
_COUNTS = tuple(each.name for each in fields(StageStats) if each.name != "extra")
