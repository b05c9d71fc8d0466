"""Whether a stage can take requests, and what stands in for one that has failed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omnistage.core.errors import OmniError, StageError, StageUnavailableError
from omnistage.core.failures import log_defect
from omnistage.core.params import StageParams
from omnistage.core.stage import Stage, StageState, StageStats, StepSeconds
from omnistage.core.transcripts import Transcript
from omnistage.core.types import (
    AudioChunk,
    Condition,
    FinishReason,
    ImageChunk,
    Latents,
    ModuleOutput,
    Progress,
    StageChunk,
    StageFeed,
    StageInput,
    TokenChunk,
    VideoChunk,
)
from omnistage.placement.replicas import ReplicaStats


@dataclass(slots=True)
class StageHealth:
    """One stage's condition. Written by its loop and its supervisor, read by anyone."""

    name: str
    state: StageState = StageState.UP
    overdue: float | None = None
    """How long its present step has taken, where that is longer than it should."""
    hung: bool = False
    """It has taken so long that it is not expected to end."""
    unavailable: str | None = None
    """Why it takes no requests for now, in its own words: the process or server that does its work is away."""
    failures: int = 0
    rebuilds: int = 0

    @property
    def available(self) -> bool:
        """Whether it takes requests: not where it has failed, nor while it is stuck in a step or says so itself."""
        return self.state is StageState.UP and self.overdue is None and self.unavailable is None

    @property
    def needs_restart(self) -> bool:
        return self.state is StageState.FAILED or self.hung

    def error(self) -> StageUnavailableError:
        if self.state is StageState.FAILED:
            return StageUnavailableError(f"stage {self.name!r} has failed and cannot be rebuilt; restart the service")
        if self.state is StageState.REBUILDING:
            return StageUnavailableError(f"stage {self.name!r} has failed and is being rebuilt; try again later")
        if self.hung:
            return StageUnavailableError(f"stage {self.name!r} hangs; restart the service")
        if self.overdue is None and self.unavailable is not None:
            return StageUnavailableError(f"stage {self.name!r} {self.unavailable}; try again later")
        return StageUnavailableError(
            f"stage {self.name!r} has been in one step for {self.overdue or 0.0:.0f} s; try again later"
        )


@dataclass(frozen=True, slots=True)
class OrchestratorStats:
    inflight: int
    max_inflight: int
    admitted: int
    rejected: int
    """Refused because the service was full."""
    finished: Mapping[FinishReason, int]
    stages: Mapping[str, StageStats]
    step_seconds: Mapping[str, StepSeconds]
    health: Mapping[str, StageHealth]
    replicas: tuple[ReplicaStats, ...] = ()
    """The processes that stages run in, other than this one."""

    @property
    def waiting(self) -> int:
        """Requests in the queues of all stages."""
        return sum(stage.waiting for stage in self.stages.values())

    @property
    def utilization(self) -> float:
        """That of the stage that has the most to do."""
        return max((stage.utilization for stage in self.stages.values()), default=0.0)


class FailedStage(Stage):
    """Stands in for a stage that has failed, so that nothing keeps that one's memory. It takes no requests."""

    uses_torch = False

    def __init__(self, health: StageHealth, params_type: type[StageParams]) -> None:
        self.name = health.name
        self.params_type = params_type
        self._health = health

    def check(self, stage_input: StageInput) -> None:
        raise self._health.error()

    def check_params(self, params: StageParams) -> None:
        raise self._health.error()

    def submit(self, stage_input: StageInput) -> None:
        raise self._health.error()

    def feed(self, request_id: str, feed: StageFeed) -> None:
        pass

    def abort(self, request_id: str) -> None:
        pass

    def step(self) -> list[StageChunk]:
        return []

    def has_work(self) -> bool:
        return False

    def stats(self) -> StageStats:
        return StageStats()


PAYLOADS = (
    type(None),
    TokenChunk,
    AudioChunk,
    Condition,
    Latents,
    Progress,
    ImageChunk,
    VideoChunk,
    ModuleOutput,
    Transcript,
)
"""What a chunk may carry; a tuple, which `isinstance` goes through faster than a union."""


def chunk_defect(chunk: StageChunk, stage: str) -> StageError | None:
    """What is wrong with a chunk of a request that the stage holds; None if it is whole. Nothing of it is quoted."""
    payload: object = chunk.payload
    finish: object = chunk.finish
    error: object = chunk.error
    if chunk.stage != stage:
        problem = "is marked as another stage's"
    elif not isinstance(payload, PAYLOADS):
        problem = f"carries a {type(payload).__name__}"
    elif not isinstance(finish, FinishReason | None):
        problem = f"has a {type(finish).__name__} as its finish reason"
    elif not isinstance(error, OmniError | None):
        problem = f"has a {type(error).__name__} as its error"
    else:
        return None
    return StageError(f"stage {stage!r} emitted a chunk that {problem}")


def close_stage(stage: Stage) -> None:
    try:
        stage.close()
    except BaseException as error:  # the boundary of a stage: it is not used any more
        log_defect(f"close of stage {stage.name!r}", error)


def close_stages(stages: Sequence[Stage], timeout: float) -> None:
    """Close stages, and wait for that no longer than `timeout` seconds."""

    def close() -> None:
        for stage in stages:
            close_stage(stage)

    closing = threading.Thread(target=close, name="omnistage-close", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # the interpreter is exiting and starts no more threads
        close()
    else:
        closing.join(timeout)
