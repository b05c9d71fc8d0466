"""One-shot modules as stages: every piece of input gives one chunk. No torch: a module may run on anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from omnistage.config.schema import CodecBudget
from omnistage.core.errors import InvalidRequestError, OmniError, StageError
from omnistage.core.failures import isolate, log_defect
from omnistage.core.params import CodecParams
from omnistage.core.stage import StageStats
from omnistage.core.transcripts import Transcript
from omnistage.core.types import (
    AudioChunk,
    ChatInput,
    ModuleInput,
    ModuleOutput,
    RequestInfo,
    SpeechInput,
    StageChunk,
    StageFeed,
    StageInput,
)
from omnistage.engines.ageing import Turn, Turns
from omnistage.engines.stage import BatchedStage

ModulePayload = ModuleInput | ChatInput | SpeechInput


class Unfinished(Enum):
    """The type of `UNFINISHED`."""

    UNFINISHED = "unfinished"


UNFINISHED: Final = Unfinished.UNFINISHED
"""What `run` gives for a job that is not done yet: others have their turn, then it is run again."""
ModuleChunk = AudioChunk | ModuleOutput | Transcript


@dataclass(frozen=True, slots=True)
class Partial:
    """What `run` gives for a job that is not done yet, and of which something is to be emitted already."""

    chunk: ModuleChunk


JobResult = ModuleChunk | Partial | Unfinished | OmniError
"""An error ends the job's request alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One piece of one request."""

    info: RequestInfo
    params: CodecParams
    payload: ModulePayload
    number: int
    """0 for a request's first piece."""


class ModuleComponent(ABC):
    """A one-shot module behind a codec stage: every piece of input gives one chunk."""

    input_type: type[ModuleInput] | type[ChatInput] | type[SpeechInput] = ModuleInput
    max_batch: int = 1
    """Most jobs that one `run` takes."""
    uses_torch: bool = False
    """Whether torch does most of the work. On the CPU such a stage takes turns with others that do; any other runs
    beside them, and what little it computes with torch has one thread."""

    @property
    def voices(self) -> tuple[str, ...]:
        """Names that a request's voice may take; empty where the module has no use for one. Thread-safe."""
        return ()

    def check(  # noqa: B027  (most modules take whatever has the right type)
        self, info: RequestInfo, params: CodecParams, payload: ModulePayload
    ) -> None:
        """Raise an `OmniError` for a piece that can never run. Thread-safe, before any work."""

    def group(self, job: Job) -> Hashable:
        """Jobs share a `run` only where this is equal."""
        return None

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """What each job gives, in order. The jobs have one `group` and belong to different requests.

        Where it raises, each job is run again by itself, and only those that fail then end their requests.

        A run cannot be interrupted, and all other requests wait for it. One that takes long does a part of its job,
        keeps what it has under the request's id and gives `UNFINISHED`; the same job then comes again, unless its
        request has ended meanwhile. `forget` says when it has.
        """

    def forget(self, request_id: str) -> None:  # noqa: B027  (most modules keep nothing of a request)
        """A request has ended, in whatever way: drop what was kept for it."""

    def close(self) -> None:  # noqa: B027  (most modules hold nothing that the garbage collector cannot free)
        """Release what the module holds."""


# ------------------------------------------------------------------------------------------------ scheduling


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One step's work. `ended` names requests whose end came without a piece."""

    jobs: tuple[Job, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(slots=True)
class _Request:
    info: RequestInfo
    params: CodecParams
    turn: Turn
    jobs: deque[tuple[Job, Hashable]] = field(default_factory=deque)
    """What is not done yet, each with its group."""
    pieces: int = 0
    """All that came so far."""
    final: bool = False
    resumed: bool = False
    """Its next job has run already, and is not done."""

    @property
    def is_over(self) -> bool:
        return self.final and not self.jobs


class ModuleScheduler:
    """Which pieces run next: one of a request at a time, in order, with those of others that agree in `group`."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._requests: dict[str, _Request] = {}
        self._turns = Turns()

    def add(self, info: RequestInfo, params: CodecParams) -> None:
        self._requests[info.request_id] = _Request(info, params, self._turns.new(info.priority))

    def extend(self, request_id: str, job: Job | None, group: Hashable, final: bool) -> None:
        """Queue a piece, or None where there is nothing to say but whether it was the last."""
        request = self._requests[request_id]
        if job is not None:
            request.jobs.append((job, group))
            request.pieces += 1
        request.final = final

    def request(self, request_id: str) -> tuple[RequestInfo, CodecParams, int] | None:
        """What a request was submitted with and how many pieces came so far, while it takes more."""
        request = self._requests.get(request_id)
        return None if request is None or request.final else (request.info, request.params, request.pieces)

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        return any(request.jobs or request.final for request in self._requests.values())

    @property
    def starved(self) -> int:
        """Requests that have run all their pieces and wait for their upstream."""
        return sum(request.pieces > 0 and not request.jobs for request in list(self._requests.values()))

    def schedule(self) -> ModulePlan:
        """The next batch: its jobs stay at the head of their requests until they are `done`, or go on with `resume`.

        Requests of which nothing is left to run are removed here.
        """
        over = [request for request in self._requests.values() if request.is_over]
        ready = sorted((r for r in self._requests.values() if r.jobs), key=self._rank)
        jobs = [r for r in ready if r.jobs[0][1] == ready[0].jobs[0][1]][: self._max_batch]
        for request in ready:
            request.turn.age += 1
        for request in jobs:
            self._turns.take(request.turn)
        ended = tuple(request.info.request_id for request in over)
        for request_id in ended:
            self.remove(request_id)
        return ModulePlan(tuple(request.jobs[0][0] for request in jobs), ended)

    def _rank(self, request: _Request) -> tuple[int, bool, int]:
        """As `Turns` has it, but that among equals new jobs go before the rest of long ones.

        However many of those there are, a short job waits for one part of one of them.
        """
        level, number = self._turns.rank(request.turn)
        return level, request.resumed, number

    def resume(self, request_id: str) -> None:
        """The job that ran is not done: it stays the request's next."""
        self._requests[request_id].resumed = True

    def done(self, request_id: str) -> bool:
        """The job that ran is done; whether it was the request's last, which then is removed."""
        request = self._requests[request_id]
        request.jobs.popleft()
        request.resumed = False
        if request.is_over:
            self.remove(request_id)
        return request.is_over


# ----------------------------------------------------------------------------------------------------- stage


class ModuleStage(BatchedStage[ModulePayload, CodecParams]):
    """Runs one `ModuleComponent`, batched across requests.

    Each request gives a started marker when it first runs, then one chunk a piece, in order. The chunk of the last
    piece carries its finish; where the end comes alone, so does the finish. A piece that fails ends its own request.
    A piece may take several steps, between which other requests have theirs.
    """

    params_type = CodecParams

    def __init__(self, name: str, component: ModuleComponent, budget: CodecBudget) -> None:
        super().__init__(name)
        self.component = component
        self.payload_type = component.input_type
        self.uses_torch = component.uses_torch
        self._scheduler = ModuleScheduler(min(component.max_batch, budget.max_batch))
        self._pieces = 0
        self._audio_seconds = 0.0

    def _check(self, info: RequestInfo, params: CodecParams, payload: ModulePayload) -> None:
        voices = self.component.voices
        if voices and info.voice is not None and info.voice not in voices:
            raise InvalidRequestError(
                f"unknown voice {info.voice!r}; its voices: {', '.join(sorted(voices))}", param="voice"
            )
        if not _is_empty(payload):
            self.component.check(info, params, payload)

    def _add(self, stage_input: StageInput, params: CodecParams, payload: ModulePayload) -> None:
        info = stage_input.info
        job, group = self._job(info, params, payload, 0)  # before the request is taken: a component may refuse it
        self._scheduler.add(info, params)
        self._scheduler.extend(info.request_id, job, group, payload.final if isinstance(payload, ModuleInput) else True)

    def _remove(self, request_id: str) -> None:
        self._scheduler.remove(request_id)
        try:
            self.component.forget(request_id)
        except BaseException as error:  # the boundary of a component: the request is over, and others must not suffer
            log_defect(f"forgetting a request in stage {self.name!r}", error)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        """Raises for a piece that is wrong or not of the right type."""
        request = self._scheduler.request(request_id)
        if request is None:
            return
        if self.component.input_type is not ModuleInput or not isinstance(feed, ModuleInput):
            raise self._wrong_feed(feed)
        info, params, pieces = request
        if not _is_empty(feed):
            self.component.check(info, params, feed)
        job, group = self._job(info, params, feed, pieces)
        self._scheduler.extend(request_id, job, group, feed.final)

    def _job(
        self, info: RequestInfo, params: CodecParams, payload: ModulePayload, number: int
    ) -> tuple[Job | None, Hashable]:
        """A payload as a piece of work and its group; None where there is nothing to run."""
        if _is_empty(payload):
            return None, None
        job = Job(info, params, payload, number)
        return job, self.component.group(job)

    def step(self) -> list[StageChunk]:
        plan = self._scheduler.schedule()
        chunks = self._mark_started((*plan.ended, *(job.info.request_id for job in plan.jobs)))
        chunks += [self._finish(request_id) for request_id in plan.ended]
        for job, result in isolate(plan.jobs, self._run, f"stage {self.name!r}"):
            chunks += self._emit(job.info.request_id, result)
        self._steps += 1
        return chunks

    def _run(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        results = self.component.run(jobs)
        for result in results:
            _check_result(result)
        return results

    def _emit(self, request_id: str, result: JobResult) -> list[StageChunk]:
        if isinstance(result, OmniError):
            return [self._fail(request_id, result)]
        if isinstance(result, Unfinished | Partial):
            self._scheduler.resume(request_id)
            return [StageChunk(request_id, self.name, result.chunk)] if isinstance(result, Partial) else []
        self._pieces += 1
        if isinstance(result, AudioChunk):
            self._audio_seconds += len(result.samples) / result.sample_rate
        last = self._scheduler.done(request_id)
        return [self._finish(request_id, result) if last else StageChunk(request_id, self.name, result)]

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def stats(self) -> StageStats:
        running = sum(self._started.values())
        return StageStats(
            waiting=len(self._started) - running,
            running=running,
            starved=self._scheduler.starved,
            steps=self._steps,
            tokens=self._pieces,
            extra={"audio_seconds": self._audio_seconds},
        )

    def close(self) -> None:
        self.component.close()


def _is_empty(payload: ModulePayload) -> bool:
    """Whether there is nothing to run: it only says whether more follows."""
    return isinstance(payload, ModuleInput) and not payload.arrays and not payload.text


def _check_result(result: JobResult) -> None:
    if isinstance(result, AudioChunk):
        if result.sample_rate < 1:
            raise StageError(f"the module returned samples at {result.sample_rate} Hz")
        if not np.isfinite(result.samples).all():
            raise StageError("the module returned samples that are not finite")
    elif isinstance(result, Partial):
        _check_result(result.chunk)
    elif not isinstance(result, ModuleOutput | Transcript | Unfinished | OmniError):
        raise StageError(f"the module returned a {type(result).__name__}; it must return AudioChunk or ModuleOutput")
