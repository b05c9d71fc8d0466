"""The stage contract: what the orchestrator may ask of any stage, whatever its engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from omnistage.core.params import StageParams
from omnistage.core.types import StageChunk, StageFeed, StageInput


@dataclass(frozen=True, slots=True)
class StageStats:
    """Counters of one stage, for metrics and tests. `extra` holds what only some engines have."""

    waiting: int = 0
    running: int = 0
    starved: int = 0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    capacity: int = 0
    """Requests that it can run at once; 0: it does not say."""
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def utilization(self) -> float:
        """The share of its places that are taken, requests that wait included: above 1 it is behind.

        Where some wait, the places are those that run, whatever the capacity: memory may allow no more.
        """
        occupied = self.running + self.starved
        places = max(occupied, 1) if self.waiting else self.capacity
        return (occupied + self.waiting) / places if places else 0.0


STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds: from a small decode step on a GPU to a large picture's decoding on a CPU."""


GROWING = frozenset(
    {
        *("steps", "tokens", "preemptions", "forwards", "rows", "windows", "audio_seconds", "prefix_lookups"),
        *("prefix_hits", "encoder_cache_hits", "encoder_cache_misses", "cache_hits", "cache_misses", "masks_late"),
        *("remote_errors", "server_restarts"),
    }
)
"""What of `StageStats` and its `extra` only grows; the rest says how it is now."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Steps by how long they took: one count for each of `STEP_BUCKETS`, the last for all that were longer."""

    counts: tuple[int, ...] = (0,) * (len(STEP_BUCKETS) + 1)
    total: float = 0.0


class StageState(StrEnum):
    UP = "up"
    REBUILDING = "rebuilding"
    """It failed; a new one is being built."""
    FAILED = "failed"
    """It failed, and only a restart of the process brings it back."""


class Stage(ABC):
    """One node of a pipeline.

    All methods but `check`, `check_params` and `stats` are called from the stage's own loop, one at a time. A
    request's life in a stage: `submit` once, `feed` while its input streams, then `step` emits its chunks until one
    carries `finish` for every answer; after that the stage has forgotten it. A stage ends the requests of a failed step
    itself, with a chunk that carries the error, and keeps running the others; `step` raising is a defect that ends all
    of them.
    """

    name: str
    params_type: type[StageParams]
    uses_torch: bool = True
    """Whether torch does its work, in the thread that the stage is run in."""
    cpu_threads: int = 0
    """How many threads torch has for its steps on the CPU; none where it does not compute them there."""
    only_waited: bool = False
    """Whether the last `step` ran nothing and only waited for work elsewhere; it is not counted as a step."""
    wake: Callable[[], None] | None = None
    """Set by the loop that runs the stage. Where work is done elsewhere (another thread, process or machine), the stage
    calls it from any thread once `has_work` or `unavailable` may have changed."""
    unavailable: str | None = None
    """Why the stage takes no requests for now, as words that follow its name; None: it takes them."""
    beyond_repair: bool = False
    """Whether it is `unavailable` until the service is restarted."""
    enter_thread: Callable[[], None] | None = None
    """Called once in the thread that the stage will be run in, where there is one."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together that a stage which samples text can hold, where it is known."""
        return None

    def warm_up(self) -> None:  # noqa: B027  (most have nothing to prepare)
        """Run a large step once on a GPU, before there are requests: none of them waits for kernels to be compiled."""

    @abstractmethod
    def check(self, stage_input: StageInput) -> None:
        """Raise an `OmniError` if this input can never run (too long, wrong shape). Thread-safe, changes nothing."""

    def check_params(self, params: StageParams) -> None:  # noqa: B027  (most parameters check themselves)
        """Raise an `OmniError` for parameters that this stage can never run with. Thread-safe, changes nothing.

        Asked of every stage that a request will reach, before the first one starts.
        """

    @abstractmethod
    def submit(self, stage_input: StageInput) -> None:
        """Take a request. Errors found here raise and leave the stage unchanged."""

    @abstractmethod
    def feed(self, request_id: str, feed: StageFeed) -> None:
        """Add streaming input. A request that has ended already is ignored: its upstream cannot know yet."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forget the request at once and emit nothing more for it. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> list[StageChunk]:
        """Run one batch and return what it produced."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` would run something now. Starved requests are not work."""

    def wait_limit(self) -> float | None:
        """Seconds after which `has_work` may turn true by itself; None: only a call from outside can make it so."""
        return None

    @abstractmethod
    def stats(self) -> StageStats:
        """Counters as they are now. Called from any thread at any time; it waits for nothing and changes nothing.

        What a step may change meanwhile is copied before it is counted (`list(...)`).
        """

    def step_seconds(self) -> StepSeconds | None:
        """How long its steps took, where they run elsewhere; None: the caller of `step` measures it. As `stats`."""
        return None

    def drain(self) -> list[StageChunk]:
        """Step until nothing is runnable; the chunks of all those steps."""
        chunks: list[StageChunk] = []
        while self.has_work():
            chunks.extend(self.step())
        return chunks

    def close(self) -> None:  # noqa: B027  (most stages hold nothing that the garbage collector cannot free)
        """Release device memory and threads."""
