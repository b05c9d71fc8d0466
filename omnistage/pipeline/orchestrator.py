"""The orchestrator: owns each request's life over the graph.

Admission, routing, fan-in and fan-out, streaming out, abort, deadlines, traces. It never branches on a stage's kind.

Locks, in the only order in which they may nest: a request's `emit_lock`, a target's `fold_lock`, the request's `lock`,
then one of a loop's, the timer's or this object's own. Bridges run under a `fold_lock` and sinks under an `emit_lock`
only, both of which belong to one request: nothing that one request does can hold up another.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from omnistage.core.errors import (
    BridgeError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    QueueFullError,
    ShutdownError,
    StageError,
)
from omnistage.core.failures import internal_error
from omnistage.core.family import Bridge
from omnistage.core.graph import PipelineGraph
from omnistage.core.params import StageParams
from omnistage.core.stage import Stage
from omnistage.core.types import (
    FinishReason,
    LinkedInput,
    LinkedStage,
    StageChunk,
    StageFeed,
    StageInput,
    StagePayloadIn,
)
from omnistage.pipeline.deadlines import DeadlineTimer
from omnistage.pipeline.health import FailedStage, OrchestratorStats, StageHealth, close_stages
from omnistage.pipeline.loop import StageLoop
from omnistage.pipeline.loop_threads import join_threads, loop_threads, sharing
from omnistage.pipeline.output_assembler import Sink
from omnistage.pipeline.outputs import Trace
from omnistage.pipeline.planning import RequestPlanner, check_parts
from omnistage.pipeline.request import OmniRequest, Phase, RequestPlan, RequestRun
from omnistage.pipeline.routing import call_bridge, check_length, no_inputs
from omnistage.pipeline.supervision import Rebuild, Supervisor
from omnistage.pipeline.timing import mean_pause

_RECENT_FINISHES = 64
_CLOSE_SECONDS = 2.0  # for stages to release what they hold, all together


class Orchestrator:
    """Runs requests over a graph of stages. Every method may be called from any thread.

    `bridges` holds one bridge per stage that has sources. With `threads=False` nothing runs until `run_once` or
    `run_until_idle` is called, all in the caller's thread.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        stages: Mapping[str, Stage],
        bridges: Mapping[str, Bridge],
        defaults: Mapping[str, StageParams],
        *,
        max_inflight: int = 256,
        trace_history: int = 1000,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
        threads: bool = True,
        rebuilds: Mapping[str, Rebuild] | None = None,
        max_step_seconds: float | None = None,
        max_rebuilds: int = 3,
        links: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`rebuilds` builds stages anew after they failed; a stage that is not in it stays failed.

        `links` has the stages that run in one process with a stage and get their input from it there.
        """
        check_parts(graph, stages, bridges)
        self._links = links or {}
        self.graph = graph
        self.stages = dict(stages)
        self.max_inflight = max_inflight
        self.model = model
        linked = {target for targets in self._links.values() for target in targets}
        self._bridges = {name: no_inputs if name in linked else bridge for name, bridge in bridges.items()}
        self._planner = RequestPlanner(graph, self.stages, defaults)
        self.default_params = self._planner.defaults
        """By stage, what it uses where a request says nothing."""
        self._clock = clock
        self._threads = threads
        self._room = threading.Condition()  # its lock guards everything from here to the loops
        self._runs: dict[str, RequestRun] = {}
        self._inflight = 0
        """Answers of all runs: a request for several counts as so many."""
        self._history: OrderedDict[str, Trace] = OrderedDict()
        self._trace_history = trace_history
        self._finish_times: deque[float] = deque(maxlen=_RECENT_FINISHES)
        self._finished = dict.fromkeys(FinishReason, 0)
        self._admitted = 0
        self._rejected = 0
        self._closing = False
        self._closed_stages = False
        self._timer: DeadlineTimer[RequestRun] = DeadlineTimer(self._expire, clock=clock)
        self._supervisor = Supervisor(
            self._end_needing,
            self._stage_failed,
            self.stages.__setitem__,
            rebuilds or {},
            max_step_seconds=max_step_seconds,
            max_rebuilds=max_rebuilds,
            clock=clock,
        )
        shared, changed = sharing(stages.values()), threading.Condition()
        self._loops: dict[str, StageLoop[RequestRun]] = {
            name: StageLoop(
                stages[name],
                self._on_chunk,
                clock=clock,
                changed=changed if name in shared else None,
                supervisor=self._supervisor,
            )
            for name in graph.order
        }
        self._supervisor.watch(self._loops)
        if threads:
            self._timer.start()
            self._supervisor.start()
            for thread in loop_threads(list(self._loops.values()), shared):
                thread.start()

    # ------------------------------------------------------------------------------------------- admission

    def submit(self, request: OmniRequest, sink: Sink) -> None:
        """Check and admit a request; `sink` then gets its items, the last of them with `final`, exactly once.

        Raises, with nothing queued and the sink never called, if the request cannot run or there is no room.
        """
        self.start(self.plan(request), sink)

    def plan(self, request: OmniRequest) -> RequestPlan:
        """Everything that can be said about a request without taking it; raises what is wrong with it."""
        plan = self._planner.plan(request)
        if plan.places > self.max_inflight:
            raise LimitExceededError(f"{plan.places} answers are over the limit of {self.max_inflight}", param="n")
        self._check_stages(plan)
        self._planner.check(plan)
        return plan

    def check_params(self, overrides: Mapping[str, StageParams]) -> None:
        """Raise what stages find wrong with their parameters. Constraints are compiled, which may take a while."""
        self._planner.check_params(overrides)

    def start(self, plan: RequestPlan, sink: Sink) -> RequestRun:
        """Admit a planned request and set it going. The result may be given to `cancel`."""
        info, now = plan.request.info, self._clock()
        if info.deadline is not None and now >= info.deadline:
            raise DeadlineExceededError(
                "the deadline passed before the request could be admitted; allow more time", param="timeout"
            )
        run = RequestRun(plan, sink, self.model)
        self._check_stages(plan)
        with self._room:
            self.check_room(info.request_id, plan.places)
            self._runs[info.request_id] = run
            self._inflight += plan.places
            self._admitted += 1
            run.trace.admitted = now - info.arrival
        with run.lock:
            if info.deadline is not None and not run.over:
                run.timer = self._timer.add(info.deadline, run)
        try:
            self._launch(run, self.graph.entry, plan.request.payload)
        except OmniError as error:  # the stage failed, or was stopped, just now
            self._end(run, FinishReason.ERROR, error)
        return run

    def _check_stages(self, plan: RequestPlan) -> None:
        for name in plan.route.stages:
            if not (health := self._loops[name].health).available:
                raise health.error()

    def check_room(self, request_id: str, answers: int = 1) -> None:
        """Raise what `start` would raise now for want of room: worth a look before costly preparation."""
        with self._room:
            if self._closing:
                raise ShutdownError("the engine is shutting down and accepts no more requests")
            if request_id in self._runs:
                raise InvalidRequestError("a request with this id is running; use another id", param="request_id")
            if self._inflight + answers > self.max_inflight:
                self._rejected += 1
                wait = mean_pause(self._finish_times, self._clock())
                raise QueueFullError(
                    f"{self._inflight} requests of {self.max_inflight} are in flight; try again in {wait:.1f} s",
                    retry_after=wait,
                )

    def wait_for_room(self, timeout: float | None = None, answers: int = 1) -> bool:
        """Wait until a request would be admitted, or refused for good because of a shutdown."""
        with self._room:
            return self._room.wait_for(lambda: self._inflight + answers <= self.max_inflight or self._closing, timeout)

    # --------------------------------------------------------------------------------------------- routing

    def _launch(self, run: RequestRun, name: str, payload: StagePayloadIn) -> None:
        stage, plan = run.stages[name], run.plan
        stage_input = StageInput(run.info, plan.params[name], payload, emit_hidden=name in plan.route.emits_hidden)
        with run.lock:
            # Under the lock, so that the thread that ends the request finds either a running stage or none to come.
            if run.over:
                return
            if name == run.lead:
                run.note_prompt(payload)
            stage.begin(payload, self._clock() - run.info.arrival)
            if name in self._links:
                stage_input = replace(stage_input, linked=self._begin_linked(run, name))
            self._loops[name].submit(stage_input, run)

    def _begin_linked(self, run: RequestRun, name: str) -> tuple[LinkedStage, ...]:
        """Announce a request to the stages that will get their input without coming by here again."""
        linked, plan = [], run.plan
        for target in self._links[name]:
            if (stage := run.stages.get(target)) is not None:
                linked.append(LinkedStage(target, plan.params[target], target in plan.route.emits_hidden))
                stage.phase = Phase.RUNNING
                # Before the first stage: whatever comes of this one finds it in its loop.
                self._loops[target].submit(StageInput(run.info, linked[-1].params, LinkedInput()), run)
        return tuple(linked)

    def _on_chunk(self, run: RequestRun, chunk: StageChunk) -> None:
        """Take a chunk, in the emitting stage's thread. The boundary of routing: what fails ends this request."""
        try:
            if not run.record(chunk):
                return
            stage, finish = run.stages[chunk.stage], chunk.finish
            with run.emit_lock:
                item = run.output.add(chunk)
                if item is not None:
                    run.sink(item)
            if chunk.error is not None or finish is FinishReason.ERROR:
                error = chunk.error or StageError(f"stage {chunk.stage!r} ended with an error that it did not give")
                self._end(run, FinishReason.ERROR, error)
            elif finish in (FinishReason.ABORT, FinishReason.DEADLINE):
                self._end(run, finish)
            else:
                if stage.targets and (chunk.payload is not None or finish is not None):
                    for target in stage.targets:
                        self._fold(run, target, chunk)
                if not stage.open_answers:
                    self._stage_ended(run, chunk.stage)
        except OmniError as failure:
            self._end(run, FinishReason.ERROR, failure)
        except BaseException as failure:
            self._end(run, FinishReason.ERROR, internal_error(f"routing a chunk of stage {chunk.stage!r}", failure))
        finally:
            if run.final_due:  # it ended while this thread was in its sink
                run.emit_final()

    def _stage_ended(self, run: RequestRun, name: str) -> None:
        skipped, reason = run.stage_ended(name)
        if reason is not None:
            self._end(run, reason)
        for target in skipped:
            end = StageChunk(run.info.request_id, target, finish=FinishReason.STOP, time=self._clock())
            self._on_chunk(run, end)  # as any chunk

    def _fold(self, run: RequestRun, target: str, chunk: StageChunk) -> None:
        """Run the bridge into `target` over a chunk and queue what it gives."""
        stage = run.stages[target]
        with stage.fold_lock:
            if run.over or stage.phase is Phase.ENDED:
                return
            stage.state, inputs = call_bridge(self._bridges[target], run.info, stage.state, chunk, target)
            for value in inputs:
                if stage.phase is Phase.WAITING:
                    if not isinstance(value, StagePayloadIn):
                        raise BridgeError(f"the bridge into {target!r} must start it before it gives it more input")
                    if target == run.lead:
                        check_length(value, run.plan.request.max_prompt_tokens)
                    self._launch(run, target, value)
                elif isinstance(value, StageFeed):
                    self._feed(run, target, value)
                else:
                    raise BridgeError(f"the bridge into {target!r} started it a second time")

    def _feed(self, run: RequestRun, target: str, feed: StageFeed) -> None:
        stage = run.stages[target]
        with run.lock:
            if run.over or stage.phase is Phase.ENDED:
                return
            stage.accept(feed)
            self._loops[target].feed(run.info.request_id, feed, run)

    # ---------------------------------------------------------------------------------------------- ending

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request for a reason; every stage forgets it before its next step.

        Whether the request was running.
        """
        with self._room:
            run = self._runs.get(request_id)
        return run is not None and self._end(run, reason)

    def cancel(self, run: RequestRun) -> bool:
        """Like `abort`, for exactly this request even if its id is in use again."""
        return self._end(run, FinishReason.ABORT)

    def _expire(self, run: RequestRun) -> None:
        self._end(run, FinishReason.DEADLINE)

    def _stage_failed(self, name: str) -> None:
        self.stages[name] = FailedStage(self._loops[name].health, self.stages[name].params_type)
        self._end_needing(name)

    def _end_needing(self, name: str) -> None:
        """End every request that is in a stage or still has to reach it."""
        with self._room:
            runs = [run for run in self._runs.values() if name in run.stages]
        for run in runs:
            if run.stages[name].phase is not Phase.ENDED:
                self._end(run, FinishReason.ERROR, self._loops[name].health.error())

    def _end(self, run: RequestRun, reason: FinishReason, error: OmniError | None = None) -> bool:
        """End a request unless it is over. The only way a request ends."""
        now = self._clock()
        running = run.end(reason, error, now)
        if running is None:
            return False
        request_id = run.info.request_id
        try:
            # Queued before the id is free: a new request with this id must find each stage rid of the old one.
            for name in running:
                self._loops[name].abort(request_id, run)
            if run.timer is not None:
                self._timer.discard(run.timer)
            with self._room:
                del self._runs[request_id]
                self._inflight -= run.plan.places
                self._finished[reason] += 1
                self._finish_times.append(now)
                self._history.pop(request_id, None)
                self._history[request_id] = run.trace
                while len(self._history) > self._trace_history:
                    self._history.popitem(last=False)
                self._room.notify_all()
        finally:
            run.emit_final()
        return True

    # ------------------------------------------------------------------------------------------ inspection

    def trace(self, request_id: str) -> Trace | None:
        """The trace of a running or recent request; None if it is unknown or long gone."""
        with self._room:
            run = self._runs.get(request_id)
            if run is None:
                return self._history.get(request_id)
        return run.trace_now()

    def health(self) -> dict[str, StageHealth]:
        """A copy of every stage's condition."""
        return {name: loop.condition() for name, loop in self._loops.items()}

    def stats(self) -> OrchestratorStats:
        stages = {name: loop.stats() for name, loop in self._loops.items()}  # without the lock: it is the stages' code
        with self._room:
            return OrchestratorStats(
                len(self._runs),
                self.max_inflight,
                self._admitted,
                self._rejected,
                dict(self._finished),
                stages,
                {name: loop.step_seconds() for name, loop in self._loops.items()},
                self.health(),
            )

    def check_idle(self, timeout: float = 10.0) -> None:
        """Raise `InternalError` unless nothing is left anywhere: no request, deadline, command or stage state."""
        restless = [name for name, loop in self._loops.items() if not loop.wait_resting(timeout)]
        leftovers = [f"loop of {name} not at rest" for name in restless]
        with self._room:
            leftovers += [f"request {request_id}" for request_id in self._runs]
        leftovers += [f"{len(self._timer)} deadlines"] if len(self._timer) else []
        for loop in self._loops.values():
            leftovers += loop.leftovers()
        if leftovers:
            raise InternalError(f"not idle: {'; '.join(leftovers)}")

    # ------------------------------------------------------------------------------------ driving, stopping

    def run_once(self) -> bool:
        """Without threads: expire deadlines, then one turn of every stage in graph order. Whether anything ran."""
        busy = self._timer.tick()
        busy = self._supervisor.tick() or busy
        for loop in self._loops.values():
            busy = loop.run_pending() or busy
        return busy

    def run_until_idle(self) -> None:
        """Without threads: run until nothing is runnable. Requests that wait for time or input may remain."""
        while self.run_once():
            pass

    def shutdown(self, drain: bool = True, timeout: float = 30.0) -> None:
        """Take no more requests, let those in flight finish for up to `timeout` seconds, abort the rest, stop.

        Without `drain` they are aborted at once. Safe to call again. Not to be called from a sink.
        """
        give_up = time.monotonic() + timeout
        with self._room:
            if self._closed_stages:  # also where a stage is stuck in a step: it is waited for once
                return
            self._closing = True
            self._room.notify_all()
            if drain and self._threads:
                self._room.wait_for(lambda: not self._runs, timeout)
        if drain and not self._threads:
            self.run_until_idle()
        with self._room:
            runs = list(self._runs.values())
        for run in runs:
            self.cancel(run)
        for loop in self._loops.values():
            loop.stop(drain=False)
        # Stages in the middle of a step get a moment even where draining has used up the time.
        give_up = max(give_up, time.monotonic() + 1.0)
        stopped = [name for name, loop in self._loops.items() if loop.join(max(give_up - time.monotonic(), 0.0))]
        join_threads(self._loops.values(), give_up)
        self._timer.stop(1.0)
        self._supervisor.stop(1.0)
        self._close_stages(stopped)

    def _close_stages(self, stopped: Sequence[str]) -> None:
        """Close those that have stopped, once: a stage that is stuck in a step cannot be closed safely."""
        with self._room:
            if self._closed_stages:
                return
            self._closed_stages = True
        close_stages([self.stages[name] for name in stopped], _CLOSE_SECONDS)
