"""The denoising stage: conditions in, latents out, many pictures at different steps in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import CapacityError, InvalidRequestError, OmniError, StageError
from omnistage.core.failures import stage_failure
from omnistage.core.params import DiffusionParams
from omnistage.core.stage import Stage, StageStats
from omnistage.core.types import Condition, FinishReason, Progress, StageChunk, StageFeed, StageInput
from omnistage.engines.diffusion.caching import StepCache
from omnistage.engines.diffusion.component import Denoiser
from omnistage.engines.diffusion.runner import DiffusionRunner, RunnerOutput
from omnistage.engines.diffusion.scheduler import DiffusionScheduler, LaneKey


@dataclass(slots=True)
class _Request:
    params: DiffusionParams
    open_lanes: int
    started: bool = False
    done_steps: int = 0
    """Of all its pictures."""
    steps_of: dict[int, int] | None = None
    """Steps of each picture, once it is open."""

    @property
    def total(self) -> int:
        """Steps of all pictures, as far as they are known: those that wait will have as many as the others."""
        known = self.steps_of or {}
        return sum(known.values()) + (self.params.n - len(known)) * max(known.values(), default=1)


class DenoiseStage(Stage):
    """Runs one `Denoiser`, batched across requests step by step.

    Each request gives a started marker, a `Progress` a step, previews where it asks for them, and `Latents` for each
    of its n pictures; the last of them carries the finish reason.
    """

    params_type = DiffusionParams

    def __init__(self, name: str, denoiser: Denoiser, budget: DiffusionBudget) -> None:
        self.name = name
        self.denoiser = denoiser
        self._budget = budget
        if budget.compile:
            for transformer in denoiser.transformers:
                _compile(transformer)
        self._cache = StepCache.open(budget.cache, denoiser) if budget.cache is not None else None
        self._scheduler = DiffusionScheduler(budget)
        self._runner = DiffusionRunner(
            denoiser, max_batch_tokens=budget.max_batch_tokens, max_batch=budget.max_batch, cache=self._cache
        )
        self._requests: dict[str, _Request] = {}
        self._steps = 0
        self._moved = 0

    # ------------------------------------------------------------------------------------------- requests

    def check(self, stage_input: StageInput) -> None:
        params, condition = self._typed(stage_input)
        self.check_params(params)
        self._check_size(condition.width, condition.height, condition.num_frames)

    def check_params(self, params: object) -> None:
        if not isinstance(params, DiffusionParams):
            raise InvalidRequestError(f"stage {self.name!r} takes DiffusionParams, not {type(params).__name__}")
        self.denoiser.check(params)
        if params.width is not None and params.height is not None:
            self._check_size(params.width, params.height, params.num_frames or 1)

    def submit(self, stage_input: StageInput) -> None:
        self.check(stage_input)
        params, condition = self._typed(stage_input)
        info = stage_input.info
        if info.request_id in self._requests:
            raise InvalidRequestError(f"request {info.request_id!r} is in stage {self.name!r} already")
        self._runner.add(info.request_id, condition, params)
        self._scheduler.add(info.request_id, params.n, priority=info.priority)
        self._requests[info.request_id] = _Request(params, params.n)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if request_id in self._requests:
            raise InvalidRequestError(f"stage {self.name!r} takes no more input once it has started")

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._scheduler.remove(request_id)
        self._runner.remove(request_id)

    # ------------------------------------------------------------------------------------------- stepping

    def step(self) -> list[StageChunk]:
        chunks = self._open(self._scheduler.admit())
        batch = self._scheduler.schedule()
        result = self._runner.execute(batch)
        self._steps += 1
        self._moved += len(result.moved)
        return chunks + self._started(batch) + self._emit(result)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def stats(self) -> StageStats:
        forwards = max(self._runner.forwards, 1)
        return StageStats(
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            steps=self._steps,
            tokens=self._moved,
            extra={"forwards": self._runner.forwards, "rows_per_forward": self._runner.rows / forwards},
        )

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self.denoiser.close()

    # --------------------------------------------------------------------------------------------- pieces

    def _open(self, keys: Sequence[LaneKey]) -> list[StageChunk]:
        chunks: list[StageChunk] = []
        for key in keys:
            if key.request_id not in self._requests:
                continue  # another of its pictures failed to open
            try:
                groups, tokens = self._runner.open(key)
            except Exception as error:  # the boundary of one request's preparation
                chunks.append(self._failed(key.request_id, stage_failure(error, "preparing a picture")))
                continue
            self._scheduler.opened(key, groups, tokens)
            request = self._requests[key.request_id]
            request.steps_of = {**(request.steps_of or {}), key.index: self._runner.progress(key)[1]}
        return chunks

    def _started(self, batch: Sequence[LaneKey]) -> list[StageChunk]:
        chunks = []
        for key in batch:
            request = self._requests.get(key.request_id)
            if request is not None and not request.started:
                request.started = True
                chunks.append(StageChunk(key.request_id, self.name))
        return chunks

    def _emit(self, result: RunnerOutput) -> list[StageChunk]:
        chunks: list[StageChunk] = []
        for key, error in result.failed.items():
            if key.request_id in self._requests:
                chunks.append(self._failed(key.request_id, error))
        moved = [key for key in result.moved if key.request_id in self._requests]
        for key in moved:
            self._count(key)
        for request_id in dict.fromkeys(key.request_id for key in moved):
            request = self._requests[request_id]
            progress = Progress(request.done_steps, request.total)
            chunks.append(StageChunk(request_id, self.name, progress))
        finished = set(result.finished)
        for key in moved:
            if key.request_id not in self._requests:
                continue  # failed just now, with an earlier picture
            if key in finished:
                chunks.append(self._finish(key))
                continue
            try:
                self._scheduler.opened(key, self._runner.groups(key), self._runner.tokens(key))
            except Exception as error:  # the boundary of one request's next step
                chunks.append(self._failed(key.request_id, stage_failure(error, "preparing a step")))
                continue
            every = self._requests[key.request_id].params.preview_every
            if every and self._runner.progress(key)[0] % every == 0:
                chunks.append(self._latents(key, preview=True, final=False))
        return chunks

    def _count(self, key: LaneKey) -> None:
        """Note a step of a lane, and how many it has: fewer than planned once it has converged."""
        request = self._requests[key.request_id]
        request.done_steps += 1
        request.steps_of = {**(request.steps_of or {}), key.index: self._runner.progress(key)[1]}

    def _finish(self, key: LaneKey) -> StageChunk:
        request = self._requests[key.request_id]
        request.open_lanes -= 1
        final = request.open_lanes == 0
        chunk = self._latents(key, preview=False, final=final)
        self._scheduler.finish([key])
        if final:
            self.abort(key.request_id)  # forget it: this was its last picture
        return chunk

    def _latents(self, key: LaneKey, *, preview: bool, final: bool) -> StageChunk:
        try:
            latents = self._runner.result(key, preview=preview, final=final)
        except Exception as error:  # the boundary of one picture
            return self._failed(key.request_id, stage_failure(error, "finishing a picture"))
        return StageChunk(key.request_id, self.name, latents, finish=FinishReason.STOP if final else None)

    def _failed(self, request_id: str, error: OmniError) -> StageChunk:
        self.abort(request_id)
        return StageChunk(request_id, self.name, finish=FinishReason.ERROR, error=error)

    def _typed(self, stage_input: StageInput) -> tuple[DiffusionParams, Condition]:
        params, payload = stage_input.params, stage_input.payload
        if not isinstance(params, DiffusionParams) or not isinstance(payload, Condition):
            raise InvalidRequestError(
                f"stage {self.name!r} takes a Condition with DiffusionParams, "
                f"not {type(payload).__name__} with {type(params).__name__}"
            )
        return params, payload

    def _check_size(self, width: int, height: int, num_frames: int) -> None:
        tokens, most = self.denoiser.tokens(width, height, num_frames), self._budget.max_batch_tokens
        if tokens <= most:
            return
        fits = self._fitting(width, height, num_frames)
        frames = f" with {num_frames} frames" if num_frames > 1 else ""
        advice = f"about {fits} would fit, or raise" if fits else "ask for less, or raise"
        raise CapacityError(
            f"{width}x{height}{frames} is {tokens} latent patches, over the budget of {most}; {advice} "
            f"{self.name}.max_batch_tokens",
            param="width",
        )

    def _fitting(self, width: int, height: int, num_frames: int) -> str | None:
        """A size of about this shape that the budget holds; None where there is none to name."""
        most, count = self._budget.max_batch_tokens, self.denoiser.tokens
        share = math.sqrt(most / count(width, height, num_frames))
        for grid in (64, 32, 16):
            cells = [int(side * share) // grid for side in (width, height)]
            if min(cells) < 1 and grid > 16:
                continue  # too coarse a grid for the shorter side
            across, down = (max(n, 1) * grid for n in cells)
            over = count(across, down, num_frames) / most
            if over > 1:  # the shorter side could not shrink any more, so the longer one does
                long = int(max(across, down) / over) // grid * grid
                across, down = (long, down) if across > down else (across, long)
            if 0 < count(across, down, num_frames) <= most:
                return f"{across}x{down}"
        return None


def _compile(transformer: object) -> None:
    """Compile the blocks that repeat, as diffusers recommends: minutes less than compiling the whole."""
    compile_blocks = getattr(transformer, "compile_repeated_blocks", None)
    if compile_blocks is None:
        raise StageError(f"{type(transformer).__name__} cannot be compiled; set compile: false")
    compile_blocks(fullgraph=False)
