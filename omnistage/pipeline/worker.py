"""A process that runs a group of stages for a service: `python -m omnistage.pipeline.worker SOCKET`.

It is started by `placement.worker_process`. It builds its stages as a service without groups would, runs them in the
same loops, and ends when the other end of its socket does, however that comes about.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from omnistage.config import OmniEngineArgs
from omnistage.core.errors import InternalError, OmniError
from omnistage.core.failures import isolate, log_defect
from omnistage.core.stage import Stage
from omnistage.core.threads import DaemonThreads
from omnistage.core.types import FinishReason, StageChunk
from omnistage.pipeline.group_build import GroupParts, build_group, prepare_group
from omnistage.pipeline.links import Links
from omnistage.pipeline.loop import StageLoop
from omnistage.pipeline.loop_threads import loop_threads, sharing
from omnistage.pipeline.supervision import step_limit
from omnistage.placement.channel import Channel
from omnistage.placement.clock import clock_offset, shifted
from omnistage.placement.device_memory import used_devices
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
    Start,
    Stop,
    Submit,
    Taken,
)

_log = logging.getLogger(__name__)
_CHECK_THREADS = 4
_FAILED_CODE = 3
"""The exit code of a process one of whose stages has failed for good."""


class WorkerLoop(StageLoop[int]):
    """A loop that sends what a turn gave in one batch, and waits where too many are on their way."""

    def __init__(self, stage: Stage, worker: Worker, changed: threading.Condition | None) -> None:
        super().__init__(stage, self._pass_on, changed=changed)
        self._worker = worker
        self._batch: list[tuple[int, StageChunk]] = []
        self.window = threading.Semaphore(WINDOW)

    def _pass_on(self, key: int, chunk: StageChunk) -> None:
        self._batch.append((key, self._worker.links.pass_on(key, chunk)))

    def run_pending(self) -> bool:
        busy = super().run_pending()
        self._send_batch()
        return busy

    def _send_batch(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self.turn_started = None  # waiting for the service is not a step that takes too long
            self.window.acquire()
            self._worker.send_chunks(self.health.name, batch)

    def give_up(self, error: BaseException, *, permanent: bool = False) -> None:
        """End the process, which is of no use without one of its stages: the service starts another."""
        _log.error("stage %s has failed with %s; its process ends", self.health.name, type(error).__name__)
        self._send_batch()
        logging.shutdown()
        os._exit(_FAILED_CODE)


class Worker:
    """The stages of one process, driven by the messages of its channel."""

    def __init__(self, sock: socket.socket) -> None:
        self._start = threading.Event()
        self._message: Start | None = None
        self._ready = threading.Event()
        self._stopped = threading.Event()
        self._offset = 0.0
        """Of our clock to that of the service, which may be on another machine."""
        self._loops: Mapping[str, WorkerLoop] = {}
        self._checks = DaemonThreads(_CHECK_THREADS, "omnistage-check")
        self._channel = Channel(sock, self._receive, self._end, name="service")
        self.links: Links

    def run(self) -> int:
        """Until the service says stop, or a stage has failed; the exit code."""
        self._channel.start()
        threading.Thread(target=self._beat_until_ready, name="omnistage-beat", daemon=True).start()
        import torch  # noqa: F401  (meanwhile: most of a start is importing)

        self._start.wait()
        message = self._message
        if message is None:
            return 0
        logging.basicConfig(level=message.log_level, format="%(levelname)s %(process)d %(name)s: %(message)s")
        try:
            parts = self._build(message)
        except OmniError as error:
            self._channel.send(Failed(error))
            self._stopped.wait()
            return 1
        self._run_loops(parts)
        self._channel.share_devices(message.devices)
        self._ready.set()
        self._channel.send(self._beat(None))  # so that its stages are known when the service goes on
        self._channel.send(Ready(used_devices(), imported_modules()))
        while not self._stopped.wait(message.beat_seconds):
            self._channel.send(self._beat(parts.max_step_seconds))
        for loop in self._loops.values():
            loop.stop(drain=False)
        return 0

    def _build(self, message: Start) -> GroupParts:
        args = OmniEngineArgs.model_validate_json(message.arguments)
        try:
            return build_group(args, message, lambda doing, done: self._channel.send(Loading(doing, done)))
        except OmniError:
            raise
        except BaseException as error:  # the boundary of the process: the service is to know why it ends
            log_defect("building the stages", error)
            raise InternalError(f"the stages cannot be built: {type(error).__name__}") from error

    def _run_loops(self, parts: GroupParts) -> None:
        shared, changed = sharing(parts.stages.values()), threading.Condition()
        self._loops = {
            name: WorkerLoop(stage, self, changed if name in shared else None) for name, stage in parts.stages.items()
        }
        self.links = Links(parts.graph, self._loops, parts.bridges, self._emit)
        for thread in loop_threads(list(self._loops.values()), shared):
            thread.start()

    def _beat_until_ready(self) -> None:
        """Say that this process lives while it builds its stages."""
        self._start.wait()
        while self._message is not None and not self._ready.wait(self._message.beat_seconds):
            self._channel.send(Beat())

    def _beat(self, max_step_seconds: float | None) -> Beat:
        now, overdue = time.perf_counter(), None
        steps = {name: loop.step_seconds() for name, loop in self._loops.items()}
        for name, loop in self._loops.items():
            started = loop.turn_started
            if started is not None and now - started > step_limit(max_step_seconds, sum(steps[name].counts)):
                overdue = name
        return Beat({name: loop.stats() for name, loop in self._loops.items()}, steps, overdue)

    # -------------------------------------------------------------------------------------------- receiving

    def _receive(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Feed):
                self._loops[message.stage].feed(message.request_id, message.feed, message.key)
            elif isinstance(message, Abort):
                self.links.close(message.key, message.request_id, message.stage)
                self._loops[message.stage].abort(message.request_id, message.key)
            elif isinstance(message, Taken):
                self._loops[message.stage].window.release(message.batches)
            elif isinstance(message, Check):
                self._checks.submit(self._check, message)
            elif isinstance(message, Start):
                self._message = message
                self._offset = clock_offset(message.boot, message.now)
                self._start.set()
            elif isinstance(message, Stop):
                self._stopped.set()

    def _submit(self, message: Submit) -> None:
        if self._offset:
            stage_input = replace(message.stage_input, info=shifted(message.stage_input.info, self._offset))
            message = replace(message, stage_input=stage_input)
        self.links.open(message.key, message.stage_input)
        try:
            self._loops[message.stage].submit(message.stage_input, message.key)
        except OmniError as error:
            request_id = message.stage_input.info.request_id
            chunk = StageChunk(request_id, message.stage, finish=FinishReason.ERROR, error=error)
            self._emit(message.key, self.links.pass_on(message.key, chunk))

    def _check(self, message: Check) -> None:
        stage, error = self._loops[message.stage].stage, None
        try:
            if message.stage_input is not None:
                stage.check(message.stage_input)
            if message.params is not None:
                stage.check_params(message.params)
        except OmniError as failure:
            error = failure
        except BaseException as failure:  # the boundary to a stage's code
            log_defect("checking a request", failure)
            error = InternalError(f"checking the request failed with {type(failure).__name__}")
        self._channel.send(Checked(message.number, error))

    # ---------------------------------------------------------------------------------------------- sending

    def send_chunks(self, stage: str, batch: list[tuple[int, StageChunk]]) -> None:
        """Send a batch; a chunk of it that cannot be encoded ends its request."""
        for key_and_chunk, error in isolate(batch, partial(self._send_batch, stage), "sending the output"):
            if isinstance(error, OmniError):
                key, chunk = key_and_chunk
                failed = StageChunk(chunk.request_id, stage, finish=FinishReason.ERROR, error=error)
                self._send_batch(stage, [(key, failed)])

    def _send_batch(self, stage: str, batch: Sequence[tuple[int, StageChunk]]) -> list[None]:
        if self._offset:
            batch = [(key, replace(chunk, time=chunk.time - self._offset)) for key, chunk in batch]
        self._channel.send(Chunks(stage, tuple(key for key, _ in batch), tuple(chunk for _, chunk in batch)))
        return [None] * len(batch)

    def _emit(self, key: int, chunk: StageChunk) -> None:
        self._loops[chunk.stage].window.acquire(blocking=False)  # the service counts this batch, too
        self.send_chunks(chunk.stage, [(key, chunk)])

    # ----------------------------------------------------------------------------------------------- ending

    def _end(self) -> None:
        """Nobody is left to work for; a stage may be in the middle of a step."""
        os._exit(0)


def imported_modules() -> tuple[str, ...]:
    """The modules that can be imported by their names, in the order in which they were."""
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if (spec := getattr(module, "__spec__", None)) is not None and spec.name == name and spec.origin
    )


def prepare(arguments: str, stages: Sequence[str]) -> None:
    """Do in a process what its forks, which then run `main`, need not do."""
    prepare_group(arguments, stages)


def main(arguments: list[str]) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to whole groups: the service decides
        signal.signal(name, signal.SIG_IGN)
    code = Worker(socket.socket(fileno=int(arguments[0]))).run()
    logging.shutdown()
    os._exit(code)  # what a step still computes is of no use to anyone


if __name__ == "__main__":
    main(sys.argv[1:])
