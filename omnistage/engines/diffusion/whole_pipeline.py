"""The stage for pipelines that run whole: their own loop, in a thread that stops after every denoising step.

Nothing is batched across requests. What the engine keeps is its contract: one request and one step at a time,
progress, an abort within a step, an error that ends only its own request.
"""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import ConfigError, OmniError, StageError
from omnistage.core.failures import stage_failure
from omnistage.core.params import DiffusionParams
from omnistage.core.stage import StageStats
from omnistage.core.types import (
    AudioChunk,
    DiffusionInput,
    ImageChunk,
    Progress,
    RequestInfo,
    StageChunk,
    StageInput,
    VideoChunk,
)
from omnistage.engines.adapters.library import select
from omnistage.engines.diffusion.request_queue import RequestQueue
from omnistage.engines.stage import BatchedStage

OnStep = Callable[[int, int], None]
"""Called after every denoising step with how many are done, of how many. What it raises must not be caught."""


@dataclass(frozen=True, slots=True, eq=False)
class VideoWithAudio:
    """A video `uint8 [frames, h, w, 3]` and its sound."""

    frames: np.ndarray
    audio: AudioChunk


Generated = np.ndarray | AudioChunk | VideoWithAudio
"""A picture `uint8 [h, w, 3]`, a video `uint8 [frames, h, w, 3]`, a sound, or a video with sound."""


class WholePipeline(ABC):
    """A pipeline that goes from prompt to pixels or samples in one call."""

    fps: float = 16.0
    """Of videos, where the request does not say."""

    @abstractmethod
    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        """Raise an `OmniError` naming the parameter if this can never run. Thread-safe and cheap."""

    @abstractmethod
    def draw(self, payload: DiffusionInput, params: DiffusionParams, seed: int, on_step: OnStep) -> Generated:
        """Generate one picture, video or sound, whatever `params.n` is.

        Called from a thread that is not the stage's, one call at a time.
        """

    def close(self) -> None:  # noqa: B027  (most hold nothing that the garbage collector cannot free)
        """Release what the garbage collector cannot."""


class _Abandoned(BaseException):
    """Unwinds a pipeline whose request is gone. No `Exception`, so that no pipeline takes it for one of its own."""


class _Run:
    """One call of a pipeline in a thread of its own. Either the thread runs or the stage does, never both."""

    def __init__(self, draw: Callable[[OnStep], Generated], name: str) -> None:
        self.at = (0, 0)
        """Steps done, of those that there are; none where the pipeline does not say."""
        self.ended = False
        self.result: Generated | None = None
        self.failure: OmniError | None = None
        self._draw = draw
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._abandoned = False
        self._started = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def advance(self) -> None:
        """Run to the end of the next denoising step, or to the end."""
        if self._started:
            self._go.release()
        else:
            self._thread.start()
            self._started = True
        self._stopped.acquire()
        if self.ended:
            self._thread.join()

    def abandon(self) -> None:
        """End it where it stands; no further step is taken."""
        self._abandoned = True
        if self._started and not self.ended:
            self._go.release()
            self._thread.join()

    # ------------------------------------------------------------------------------------- in the thread

    def _main(self) -> None:
        try:
            self.result = self._draw(self._on_step)
        except BaseException as error:  # the boundary of one request's pipeline; else the stage would never be woken
            if not self._abandoned:
                self.failure = stage_failure(error, "the pipeline")
        finally:
            self.ended = True
            self._stopped.release()

    def _on_step(self, step: int, steps: int) -> None:
        if not self._abandoned:  # else the pipeline took another step on its way out
            self.at = (step, max(step, steps))
            self._stopped.release()
            self._go.acquire()
        if self._abandoned:
            raise _Abandoned


@dataclass(slots=True, eq=False)
class _Request:
    payload: DiffusionInput
    params: DiffusionParams
    seed: int
    index: int = 0
    """Of the picture in progress."""
    before: int = 0
    """Steps that the pictures before it took."""


class WholeStage(BatchedStage[DiffusionInput, DiffusionParams]):
    """Runs one `WholePipeline`, one picture at a time; a request that has begun is finished before the next.

    Each request gives a started marker, a `Progress` a step, and an `ImageChunk`, `VideoChunk` or `AudioChunk` for
    each of its n pictures, the last of which carries the finish reason. The last step of a picture is followed by one
    that decodes it.
    """

    params_type = DiffusionParams
    payload_type = DiffusionInput
    uses_torch = False  # not in its own thread: a pipeline runs in one for each picture

    def __init__(self, name: str, component: WholePipeline, budget: DiffusionBudget) -> None:
        for field, set_ in (("cache", budget.cache is not None), ("compile", budget.compile is True)):
            if set_:
                raise ConfigError(
                    f"stage {name!r} runs a pipeline whole, which takes no {field}", param=f"{name}.{field}"
                )
        super().__init__(name)
        self.component = component
        self._queue: RequestQueue[_Request] = RequestQueue(budget.ageing_steps)
        self._current: tuple[str, _Request] | None = None
        self._run: _Run | None = None
        self._lane_steps = 0

    def _check(self, info: RequestInfo, params: DiffusionParams, payload: DiffusionInput) -> None:
        self.component.check(payload, params)

    def _check_params(self, params: DiffusionParams) -> None:
        select(None, self.name, params.lora)

    def _add(self, stage_input: StageInput, params: DiffusionParams, payload: DiffusionInput) -> None:
        info = stage_input.info
        seed = secrets.randbits(31) if params.seed is None else params.seed
        self._queue.put(info.request_id, _Request(payload, params, seed), info.priority)

    def _remove(self, request_id: str) -> None:
        self._queue.remove(request_id)
        if self._current is not None and self._current[0] == request_id:
            self._drop_current()

    def step(self) -> list[StageChunk]:
        if self._current is None:
            self._current = next(iter(self._queue.take(1, lambda request: None)), None)
        if self._current is None:
            return []
        request_id, request = self._current
        chunks = self._mark_started([request_id])
        run = self._run = self._run or self._begin(request)
        run.advance()
        self._steps += 1
        if run.ended:
            self._run = None
            return chunks + self._emit(request_id, request, run)
        self._lane_steps += 1
        return [*chunks, self._progress(request_id, request, run.at)]

    def has_work(self) -> bool:
        return self._current is not None or len(self._queue) > 0

    def stats(self) -> StageStats:
        running = int(self._current is not None)
        return StageStats(
            waiting=len(self._queue), running=running, steps=self._steps, tokens=self._lane_steps, capacity=1
        )

    def close(self) -> None:
        self._drop_current()
        self.component.close()

    def _begin(self, request: _Request) -> _Run:
        seed = (request.seed + request.index) % 2**63

        def draw(on_step: OnStep) -> Generated:
            return self.component.draw(request.payload, request.params, seed, on_step)

        return _Run(draw, f"omnistage-{self.name}-pipeline")

    def _progress(self, request_id: str, request: _Request, at: tuple[int, int]) -> StageChunk:
        """Steps of all pictures; those that wait will have as many as this one."""
        step, steps = at
        total = request.before + steps * (request.params.n - request.index)
        return StageChunk(request_id, self.name, Progress(request.before + step, total))

    def _emit(self, request_id: str, request: _Request, run: _Run) -> list[StageChunk]:
        """A picture is done, or failed."""
        try:
            payload = self._chunk(request, run)
        except OmniError as error:
            return [self._fail(request_id, error)]
        chunks: list[StageChunk] = []
        if run.at == (0, 0):  # a pipeline that does not say: all of it is one step
            self._lane_steps += 1
            run.at = (1, 1)
            chunks.append(self._progress(request_id, request, run.at))
        request.before += run.at[0]
        request.index += 1
        if request.index == request.params.n:
            return [*chunks, self._finish(request_id, payload)]
        return [*chunks, StageChunk(request_id, self.name, payload)]

    def _chunk(self, request: _Request, run: _Run) -> ImageChunk | VideoChunk | AudioChunk:
        """What a run gave, checked."""
        if run.failure is not None:
            raise run.failure
        result, seed = run.result, (request.seed + request.index) % 2**63
        audio = result.audio if isinstance(result, VideoWithAudio) else None
        if isinstance(result, AudioChunk):
            return _checked_audio(result)
        pixels = result.frames if isinstance(result, VideoWithAudio) else result
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[-1:] != (3,):
            raise StageError("the pipeline returned no picture")
        if pixels.ndim == 3 and audio is None:
            return ImageChunk(pixels, request.index, seed=seed)
        if pixels.ndim == 4:
            sound = None if audio is None else _checked_audio(audio)
            return VideoChunk(pixels, request.params.fps or self.component.fps, request.index, seed=seed, audio=sound)
        raise StageError(f"the pipeline returned an array of shape {pixels.shape}, which is not a picture")

    def _drop_current(self) -> None:
        """End the picture in progress."""
        run, self._run, self._current = self._run, None, None
        if run is not None:
            run.abandon()


def _checked_audio(audio: AudioChunk) -> AudioChunk:
    samples = audio.samples
    if samples.ndim not in (1, 2) or not len(samples):
        raise StageError(f"the pipeline returned samples of shape {samples.shape}, which are not a sound")
    if not np.isfinite(samples).all():
        raise StageError("the pipeline returned samples that are NaN or infinite")
    return audio
