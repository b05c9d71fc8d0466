"""One-shot modules as stages: every piece of input gives one chunk. No torch: a module may run on anything."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from omnistage.engines.codec.scheduler import AGE_LIMIT
from omnistage.errors import InvalidRequestError, OmniError, StageError
from omnistage.pipeline.loop import stage_failure
from omnistage.pipeline.stage import Stage, StageStats
from omnistage.types import (
    AudioChunk,
    ChatInput,
    CodecParams,
    FinishReason,
    ModuleInput,
    ModuleOutput,
    RequestInfo,
    StageChunk,
    StageFeed,
    StageInput,
)

logger = logging.getLogger(__name__)

ModulePayload = ModuleInput | ChatInput


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
    def run(self, jobs: Sequence[Job]) -> list[AudioChunk | ModuleOutput]:
        """What each job gives, in order. The jobs have one `group` and belong to different requests.

        Where it raises, each job is run again alone, and only those that fail alone end their requests.
        """

    def close(self) -> None:  # noqa: B027  (most modules hold nothing that the garbage collector cannot free)
        """Release what the module holds."""


class ModuleLimits(Protocol):
    """The part of a codec stage's budget that a module reads."""

    @property
    def max_batch(self) -> int: ...


# ------------------------------------------------------------------------------------------------ scheduling


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A job to run now. `last` says that it ends its request."""

    job: Job
    last: bool

    @property
    def request_id(self) -> str:
        return self.job.info.request_id


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One step's work. `ended` names requests whose end came without a piece."""

    turns: tuple[Turn, ...] = ()
    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(slots=True)
class _Request:
    info: RequestInfo
    params: CodecParams
    turn: int
    """When it last ran, or arrived: the smallest has waited longest."""
    jobs: deque[tuple[Job, Hashable]] = field(default_factory=deque)
    """What has not run yet, each with its group."""
    pieces: int = 0
    """All that came so far."""
    final: bool = False
    started: bool = False
    age: int = 0

    @property
    def is_over(self) -> bool:
        return self.final and not self.jobs

    @property
    def rank(self) -> tuple[int, int, int]:
        """Smaller runs first: the long passed over, then by priority (lower is earlier), then the longest wait."""
        if self.age >= AGE_LIMIT:
            return -self.age, 0, self.turn
        return 0, self.info.priority, self.turn


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

    def next_job(self, request_id: str, payload: ModulePayload) -> Job:
        """The payload as the request's next piece; `extend` puts it in line."""
        request = self._requests[request_id]
        return Job(request.info, request.params, payload, request.pieces)

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
        """The next batch. Requests of which nothing is left to run are forgotten here."""
        over = [request for request in self._requests.values() if request.is_over]
        ready = sorted((r for r in self._requests.values() if r.jobs), key=lambda r: r.rank)
        picked = [r for r in ready if r.jobs[0][1] == ready[0].jobs[0][1]][: self._max_batch]
        started = tuple(r.info.request_id for r in (*over, *picked) if not r.started)
        for request in ready:
            request.age += 1
        turns = []
        for request in picked:
            request.started, request.age, request.turn = True, 0, next(self._turns)
            job, _ = request.jobs.popleft()
            turns.append(Turn(job, last=request.is_over))
        ended = tuple(request.info.request_id for request in over)
        for request_id in (*ended, *(turn.request_id for turn in turns if turn.last)):
            self.remove(request_id)
        return ModulePlan(tuple(turns), started, ended)


# ----------------------------------------------------------------------------------------------------- stage


class ModuleStage(Stage):
    """Runs one `ModuleComponent`, batched across requests.

    Each request gives a started marker when it first runs, then one chunk a piece, in order. The chunk of the last
    piece carries its finish; where the end comes alone, so does the finish. A piece that fails ends its own request.
    """

    params_type = CodecParams

    def __init__(self, name: str, component: ModuleComponent, budget: ModuleLimits) -> None:
        self.name = name
        self.component = component
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
        self._scheduler.add(info, params)
        try:
            self._extend(info.request_id, payload)
        except Exception:  # whatever a component raises: the stage must be as it was
            self._scheduler.remove(info.request_id)
            raise

    def feed(self, request_id: str, feed: StageFeed) -> None:
        """Errors raise, and whoever drives the stage ends the request: a piece is wrong or not of the right type."""
        request = self._scheduler.request(request_id)
        if request is None:
            return
        if self.component.input_type is not ModuleInput or not isinstance(feed, ModuleInput):
            raise InvalidRequestError(f"stage {self.name!r} is not fed {type(feed).__name__}")
        if not _is_empty(feed):
            self.component.check(*request, feed)
        self._extend(request_id, feed)

    def abort(self, request_id: str) -> None:
        self._scheduler.remove(request_id)

    def step(self) -> list[StageChunk]:
        plan = self._scheduler.schedule()
        chunks = [StageChunk(request_id, self.name) for request_id in plan.started]
        chunks += [StageChunk(request_id, self.name, finish=FinishReason.STOP) for request_id in plan.ended]
        self._steps += 1
        return chunks + self._run(plan.turns)

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

    def _extend(self, request_id: str, payload: ModulePayload) -> None:
        final = payload.final if isinstance(payload, ModuleInput) else True
        if _is_empty(payload):
            self._scheduler.extend(request_id, None, None, final)
            return
        job = self._scheduler.next_job(request_id, payload)
        self._scheduler.extend(request_id, job, self.component.group(job), final)

    def _run(self, turns: Sequence[Turn]) -> list[StageChunk]:
        """All together; where that fails each alone, so that only the culprit fails."""
        if not turns:
            return []
        try:
            return self._try(turns)
        except Exception as error:  # the step's boundary: whatever a component raises ends at most this batch
            if len(turns) == 1:
                return [self._failed(turns[0], error)]
            logger.warning("a batch of %d failed (%s); running each alone", len(turns), type(error).__name__)
        chunks: list[StageChunk] = []
        for turn in turns:
            try:
                chunks += self._try([turn])
            except Exception as error:  # the same boundary
                chunks.append(self._failed(turn, error))
        return chunks

    def _try(self, turns: Sequence[Turn]) -> list[StageChunk]:
        results = self.component.run([turn.job for turn in turns])
        if len(results) != len(turns):
            raise StageError(f"the module gave {len(results)} results for {len(turns)} pieces")
        for result in results:
            _check_result(result)
        self._pieces += len(turns)
        self._audio_seconds += sum(len(r.samples) / r.sample_rate for r in results if isinstance(r, AudioChunk))
        return [
            StageChunk(turn.request_id, self.name, result, finish=FinishReason.STOP if turn.last else None)
            for turn, result in zip(turns, results, strict=True)
        ]

    def _failed(self, turn: Turn, error: Exception) -> StageChunk:
        self._scheduler.remove(turn.request_id)
        own: OmniError = stage_failure(error, f"stage {self.name!r}")
        return StageChunk(turn.request_id, self.name, finish=FinishReason.ERROR, error=own)


def _is_empty(payload: ModulePayload) -> bool:
    """Whether there is nothing to run: it only says whether more follows."""
    return isinstance(payload, ModuleInput) and not payload.arrays and not payload.text


def _check_result(result: AudioChunk | ModuleOutput) -> None:
    if isinstance(result, AudioChunk):
        if not np.isfinite(result.samples).all():
            raise StageError("the module gave samples that are not numbers")
    elif not isinstance(result, ModuleOutput):
        raise StageError(f"the module gave a {type(result).__name__}; it must give AudioChunk or ModuleOutput")
