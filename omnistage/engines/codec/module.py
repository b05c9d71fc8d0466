"""One-shot modules as stages: every piece of input gives one chunk. No torch: a module may run on anything."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

import numpy as np

from omnistage.core.errors import InvalidRequestError, OmniError, StageError
from omnistage.core.failures import log_defect, stage_failure
from omnistage.core.params import CodecParams
from omnistage.core.stage import Stage, StageStats
from omnistage.core.types import (
    AudioChunk,
    ChatInput,
    FinishReason,
    ModuleInput,
    ModuleOutput,
    RequestInfo,
    StageChunk,
    StageFeed,
    StageInput,
)
from omnistage.engines.codec.scheduler import AGE_LIMIT

logger = logging.getLogger(__name__)

ModulePayload = ModuleInput | ChatInput


class Unfinished(Enum):
    """The type of `UNFINISHED`."""

    UNFINISHED = "unfinished"


UNFINISHED: Final = Unfinished.UNFINISHED
"""What `run` gives for a job that is not done yet: others have their turn, then it is run again."""
JobResult = AudioChunk | ModuleOutput | Unfinished


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

    input_type: type[ModuleInput] | type[ChatInput] = ModuleInput
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

        Where it raises, each job is run again alone, and only those that fail alone end their requests.

        A run cannot be interrupted, and all other requests wait for it. One that takes long does a part of its job,
        keeps what it has under the request's id and gives `UNFINISHED`; the same job then comes again, unless its
        request has ended meanwhile. `forget` says when it has.
        """

    def forget(self, request_id: str) -> None:  # noqa: B027  (most modules keep nothing of a request)
        """A request has ended, in whatever way: drop what was kept for it."""

    def close(self) -> None:  # noqa: B027  (most modules hold nothing that the garbage collector cannot free)
        """Release what the module holds."""


class ModuleLimits(Protocol):
    """The part of a codec stage's budget that a module reads."""

    @property
    def max_batch(self) -> int: ...


# ------------------------------------------------------------------------------------------------ scheduling


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One step's work. `ended` names requests whose end came without a piece."""

    jobs: tuple[Job, ...] = ()
    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(slots=True)
class _Request:
    info: RequestInfo
    params: CodecParams
    turn: int
    """When it last ran, or arrived: the smallest has waited longest."""
    jobs: deque[tuple[Job, Hashable]] = field(default_factory=deque)
    """What is not done yet, each with its group."""
    pieces: int = 0
    """All that came so far."""
    final: bool = False
    started: bool = False
    halfway: bool = False
    """Its next job has run already, and is not done."""
    age: int = 0

    @property
    def is_over(self) -> bool:
        return self.final and not self.jobs

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Smaller runs first: the long passed over, then by priority (lower is earlier), then the longest wait.

        Among equals, new jobs go before the rest of long ones: however many of those there are, a short job waits for
        one part of one of them.
        """
        if self.age >= AGE_LIMIT:
            return -self.age, 0, False, self.turn
        return 0, self.info.priority, self.halfway, self.turn


class ModuleScheduler:
    """Which pieces run next: one of a request at a time, in order, with those of others that agree in `group`."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._requests: dict[str, _Request] = {}
        self._turns = itertools.count()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, info: RequestInfo, params: CodecParams) -> None:
        self._requests[info.request_id] = _Request(info, params, next(self._turns))

    def pieces(self, request_id: str) -> int:
        """How many came so far."""
        return self._requests[request_id].pieces

    def extend(self, request_id: str, job: Job | None, group: Hashable, final: bool) -> None:
        """Put a piece in line, or None where there is nothing to say but whether it was the last."""
        request = self._requests[request_id]
        if job is not None:
            request.jobs.append((job, group))
            request.pieces += 1
        request.final = final

    def request(self, request_id: str) -> tuple[RequestInfo, CodecParams] | None:
        """What a request was submitted with, while it takes more pieces."""
        request = self._requests.get(request_id)
        return None if request is None or request.final else (request.info, request.params)

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        return any(request.jobs or request.final for request in self._requests.values())

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    @property
    def running(self) -> int:
        return sum(request.started for request in self._requests.values())

    @property
    def starved(self) -> int:
        """Requests that have run all their pieces and wait for their upstream."""
        return sum(request.started and not request.jobs for request in self._requests.values())

    def schedule(self) -> ModulePlan:
        """The next batch: its jobs stay at the head of their requests until they are `done`, or go on with `resume`.

        Requests of which nothing is left to run are removed here.
        """
        over = [request for request in self._requests.values() if request.is_over]
        ready = sorted((r for r in self._requests.values() if r.jobs), key=lambda r: r.rank)
        picked = [r for r in ready if r.jobs[0][1] == ready[0].jobs[0][1]][: self._max_batch]
        started = tuple(r.info.request_id for r in (*over, *picked) if not r.started)
        for request in ready:
            request.age += 1
        for request in picked:
            request.started, request.age, request.turn = True, 0, next(self._turns)
        ended = tuple(request.info.request_id for request in over)
        for request_id in ended:
            self.remove(request_id)
        return ModulePlan(tuple(request.jobs[0][0] for request in picked), started, ended)

    def resume(self, request_id: str) -> None:
        """The job that ran is not done: it stays the request's next."""
        self._requests[request_id].halfway = True

    def done(self, request_id: str) -> bool:
        """The job that ran is done; whether it was the request's last, which then is removed."""
        request = self._requests[request_id]
        request.jobs.popleft()
        request.halfway = False
        if request.is_over:
            self.remove(request_id)
        return request.is_over


# ----------------------------------------------------------------------------------------------------- stage


class ModuleStage(Stage):
    """Runs one `ModuleComponent`, batched across requests.

    Each request gives a started marker when it first runs, then one chunk a piece, in order. The chunk of the last
    piece carries its finish; where the end comes alone, so does the finish. A piece that fails ends its own request.
    A piece may take several steps, between which other requests have theirs.
    """

    params_type = CodecParams

    def __init__(self, name: str, component: ModuleComponent, budget: ModuleLimits) -> None:
        self.name = name
        self.component = component
        self.uses_torch = component.uses_torch
        self._scheduler = ModuleScheduler(min(component.max_batch, budget.max_batch))
        self._steps = 0
        self._pieces = 0
        self._audio_seconds = 0.0

    def check(self, stage_input: StageInput) -> None:
        self._checked(stage_input)

    def submit(self, stage_input: StageInput) -> None:
        params, payload = self._checked(stage_input)
        info = stage_input.info
        if info.request_id in self._scheduler:
            raise InvalidRequestError(f"request {info.request_id!r} is in stage {self.name!r} already")
        job, group = self._job(info, params, payload, 0)  # before the request is taken: a component may refuse it
        self._scheduler.add(info, params)
        self._scheduler.extend(info.request_id, job, group, _is_final(payload))

    def feed(self, request_id: str, feed: StageFeed) -> None:
        """Errors raise, and whoever drives the stage ends the request: a piece is wrong or not of the right type."""
        request = self._scheduler.request(request_id)
        if request is None:
            return
        if self.component.input_type is not ModuleInput or not isinstance(feed, ModuleInput):
            raise InvalidRequestError(f"stage {self.name!r} is not fed {type(feed).__name__}")
        if not _is_empty(feed):
            self.component.check(*request, feed)
        job, group = self._job(*request, feed, self._scheduler.pieces(request_id))
        self._scheduler.extend(request_id, job, group, feed.final)

    def abort(self, request_id: str) -> None:
        if request_id in self._scheduler:
            self._scheduler.remove(request_id)
            self._forget(request_id)

    def step(self) -> list[StageChunk]:
        plan = self._scheduler.schedule()
        chunks = [StageChunk(request_id, self.name) for request_id in plan.started]
        for request_id in plan.ended:
            self._forget(request_id)
            chunks.append(StageChunk(request_id, self.name, finish=FinishReason.STOP))
        self._steps += 1
        return chunks + self._run(plan.jobs)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def stats(self) -> StageStats:
        scheduler = self._scheduler
        return StageStats(
            waiting=scheduler.waiting,
            running=scheduler.running,
            starved=scheduler.starved,
            steps=self._steps,
            tokens=self._pieces,
            extra={"audio_seconds": self._audio_seconds},
        )

    def close(self) -> None:
        self.component.close()

    # --------------------------------------------------------------------------------------------- pieces

    def _checked(self, stage_input: StageInput) -> tuple[CodecParams, ModulePayload]:
        info, params, payload = stage_input.info, stage_input.params, stage_input.payload
        wanted = self.component.input_type
        if not isinstance(params, CodecParams) or not isinstance(payload, wanted):
            raise InvalidRequestError(
                f"stage {self.name!r} takes a {wanted.__name__} with CodecParams, "
                f"not {type(payload).__name__} with {type(params).__name__}"
            )
        voices = self.component.voices
        if voices and info.voice is not None and info.voice not in voices:
            raise InvalidRequestError(
                f"unknown voice {info.voice!r}; this model speaks with {', '.join(sorted(voices))}", param="voice"
            )
        if not _is_empty(payload):
            self.component.check(info, params, payload)
        return params, payload

    def _job(
        self, info: RequestInfo, params: CodecParams, payload: ModulePayload, number: int
    ) -> tuple[Job | None, Hashable]:
        """A payload as a piece of work and its group; None where there is nothing to run."""
        if _is_empty(payload):
            return None, None
        job = Job(info, params, payload, number)
        return job, self.component.group(job)

    def _run(self, jobs: Sequence[Job]) -> list[StageChunk]:
        """All together; where that fails each alone, so that only the culprit fails."""
        if not jobs:
            return []
        try:
            return self._try(jobs)
        except Exception as error:  # the step's boundary: whatever a component raises ends at most this batch
            if len(jobs) == 1:
                return [self._failed(jobs[0], error)]
            logger.warning("a batch of %d failed (%s); running each alone", len(jobs), type(error).__name__)
        chunks: list[StageChunk] = []
        for job in jobs:
            try:
                chunks += self._try([job])
            except Exception as error:  # the same boundary
                chunks.append(self._failed(job, error))
        return chunks

    def _try(self, jobs: Sequence[Job]) -> list[StageChunk]:
        results = self.component.run(jobs)
        if len(results) != len(jobs):
            raise StageError(f"the module gave {len(results)} results for {len(jobs)} pieces")
        for result in results:
            _check_result(result)
        seconds = sum(len(r.samples) / r.sample_rate for r in results if isinstance(r, AudioChunk))
        # Nothing raises from here on: what is done is not run again.
        self._audio_seconds += seconds
        chunks = []
        for job, result in zip(jobs, results, strict=True):
            request_id = job.info.request_id
            if isinstance(result, Unfinished):
                self._scheduler.resume(request_id)
                continue
            self._pieces += 1
            last = self._scheduler.done(request_id)
            if last:
                self._forget(request_id)
            chunks.append(StageChunk(request_id, self.name, result, finish=FinishReason.STOP if last else None))
        return chunks

    def _forget(self, request_id: str) -> None:
        try:
            self.component.forget(request_id)
        except Exception as error:  # the boundary of a component: the request is over, and others must not suffer
            log_defect(f"forgetting a request in stage {self.name!r}", error)

    def _failed(self, job: Job, error: Exception) -> StageChunk:
        request_id = job.info.request_id
        self.abort(request_id)
        own: OmniError = stage_failure(error, f"stage {self.name!r}")
        return StageChunk(request_id, self.name, finish=FinishReason.ERROR, error=own)


def _is_final(payload: ModulePayload) -> bool:
    return payload.final if isinstance(payload, ModuleInput) else True


def _is_empty(payload: ModulePayload) -> bool:
    """Whether there is nothing to run: it only says whether more follows."""
    return isinstance(payload, ModuleInput) and not payload.arrays and not payload.text


def _check_result(result: JobResult) -> None:
    if isinstance(result, AudioChunk):
        if not np.isfinite(result.samples).all():
            raise StageError("the module gave samples that are not numbers")
    elif not isinstance(result, ModuleOutput | Unfinished):
        raise StageError(f"the module gave a {type(result).__name__}; it must give AudioChunk or ModuleOutput")
