"""The denoising stage: conditions in, latents out, many pictures at different steps in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import CapacityError, StageError
from omnistage.core.failures import stage_failure
from omnistage.core.params import DiffusionParams
from omnistage.core.stage import StageStats
from omnistage.core.types import Condition, Progress, RequestInfo, StageChunk, StageInput
from omnistage.engines.adapters.library import AdapterLibrary, select
from omnistage.engines.compiling import compile_layers, worth_compiling
from omnistage.engines.diffusion.adapters import open_adapters
from omnistage.engines.diffusion.caching import StepCache
from omnistage.engines.diffusion.component import Denoiser
from omnistage.engines.diffusion.graphs import warm_sizes
from omnistage.engines.diffusion.runner import DiffusionRunner, RunnerOutput
from omnistage.engines.diffusion.scheduler import DiffusionScheduler, LaneKey
from omnistage.engines.stage import BatchedStage


@dataclass(slots=True)
class _Request:
    params: DiffusionParams
    open_lanes: int
    done_steps: int = 0
    """Of all its pictures."""
    steps_of: dict[int, int] = field(default_factory=dict)
    """Steps of each picture, once it is open."""

    @property
    def total(self) -> int:
        """Steps of all pictures, as far as they are known: those that wait will have as many as the others."""
        steps_known = self.steps_of
        return sum(steps_known.values()) + (self.params.n - len(steps_known)) * max(steps_known.values(), default=1)


class DenoiseStage(BatchedStage[Condition, DiffusionParams]):
    """Runs one `Denoiser`, batched across requests step by step.

    Each request gives a started marker, a `Progress` a step, previews where it asks for them, and `Latents` for each
    of its n pictures; the last of them carries the finish reason.
    """

    params_type = DiffusionParams
    payload_type = Condition

    def __init__(
        self,
        name: str,
        denoiser: Denoiser,
        budget: DiffusionBudget,
        params: DiffusionParams | None = None,
        adapters: AdapterLibrary | None = None,
    ) -> None:
        """`params` are those of requests that name none; a start prepares for their size."""
        super().__init__(name, next(denoiser.transformer.parameters()).device)
        self.denoiser = denoiser
        self._budget = budget
        self._default_params = params or DiffusionParams()
        self.adapters, layers = adapters, open_adapters(adapters, denoiser, name, budget)
        # Hooks of a cache change what a block does from step to step, and it would be compiled for each.
        worth = budget.cache is None and worth_compiling(denoiser.transformers)
        if worth if budget.compile == "auto" else budget.compile:
            compile_layers(_blocks(denoiser, required=budget.compile is True))
        self._cache = StepCache.open(budget.cache, denoiser) if budget.cache is not None else None
        self._scheduler = DiffusionScheduler(budget)
        self._runner = DiffusionRunner(denoiser, budget, self.stream, self._cache, layers)
        self._requests: dict[str, _Request] = {}
        self._lane_steps = 0

    def warm_up(self) -> None:
        if self._cache is not None:
            return  # its hooks belong to a request
        for size in warm_sizes(self.denoiser, self._budget, self._default_params):
            self._runner.warm_up(*size)

    # ------------------------------------------------------------------------------------------- requests

    def _check(self, info: RequestInfo, params: DiffusionParams, payload: Condition) -> None:
        self._check_params(params)
        self._check_size(payload.width, payload.height, payload.num_frames)

    def _check_params(self, params: DiffusionParams) -> None:
        self.denoiser.check(params)
        select(self.adapters, self.name, params.lora)
        if params.width is not None and params.height is not None:
            self._check_size(params.width, params.height, params.num_frames or 1)

    def _add(self, stage_input: StageInput, params: DiffusionParams, payload: Condition) -> None:
        info = stage_input.info
        adapters = select(self.adapters, self.name, params.lora)
        self._runner.add(info.request_id, payload, params, adapters)
        self._scheduler.add(info.request_id, params.n, priority=info.priority)
        self._requests[info.request_id] = _Request(params, params.n)

    def _remove(self, request_id: str) -> None:
        del self._requests[request_id]
        self._scheduler.remove(request_id)
        self._runner.remove(request_id)

    # ------------------------------------------------------------------------------------------- stepping

    def step(self) -> list[StageChunk]:
        chunks = self._open(self._scheduler.admit())
        batch = self._scheduler.schedule()
        result = self._runner.execute(batch)
        self._steps += 1
        self._lane_steps += len(result.advances)
        return chunks + self._mark_started(key.request_id for key in batch) + self._emit(result)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def stats(self) -> StageStats:
        return StageStats(
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            steps=self._steps,
            tokens=self._lane_steps,
            capacity=self._budget.max_running,
            extra={"forwards": self._runner.forwards, "rows": self._runner.rows},
        )

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._runner.close()
        self.denoiser.close()

    # --------------------------------------------------------------------------------------------- pieces

    def _open(self, keys: Sequence[LaneKey]) -> list[StageChunk]:
        chunks: list[StageChunk] = []
        for key in keys:
            if key.request_id not in self._requests:
                continue  # another of its pictures failed to open
            try:
                groups, tokens = self._runner.open(key)
            except BaseException as error:  # the boundary of one request's preparation
                chunks.append(self._fail(key.request_id, stage_failure(error, "preparing a picture")))
                continue
            self._scheduler.set_next(key, groups, tokens)
            self._requests[key.request_id].steps_of[key.index] = self._runner.progress(key)[1]
        return chunks

    def _emit(self, result: RunnerOutput) -> list[StageChunk]:
        chunks: list[StageChunk] = []
        for key, error in result.failed.items():
            if key.request_id in self._requests:
                chunks.append(self._fail(key.request_id, error))
        moved_keys = [key for key in result.advances if key.request_id in self._requests]
        chunks += self._progress(moved_keys)
        finished = set(result.finished)
        for key in moved_keys:
            if key.request_id in self._requests:  # else it failed just now, with an earlier picture
                chunks += [self._last_of(key)] if key in finished else self._next_of(key)
        return chunks

    def _progress(self, keys: Sequence[LaneKey]) -> list[StageChunk]:
        """Count a step of each lane, and how many it has: fewer than planned once it has converged."""
        for key in keys:
            request = self._requests[key.request_id]
            request.done_steps += 1
            request.steps_of[key.index] = self._runner.progress(key)[1]
        requests = {key.request_id: self._requests[key.request_id] for key in keys}
        return [
            StageChunk(request_id, self.name, Progress(request.done_steps, request.total))
            for request_id, request in requests.items()
        ]

    def _next_of(self, key: LaneKey) -> list[StageChunk]:
        """Set a lane's next step; its preview, where one is due."""
        try:
            self._scheduler.set_next(key, self._runner.groups(key), self._runner.tokens(key))
        except BaseException as error:  # the boundary of one request's next step
            return [self._fail(key.request_id, stage_failure(error, "preparing a step"))]
        every = self._requests[key.request_id].params.preview_every
        if every and self._runner.progress(key)[0] % every == 0:
            return [self._latents(key, preview=True, final=False)]
        return []

    def _last_of(self, key: LaneKey) -> StageChunk:
        """The chunk of a lane that is done."""
        request = self._requests[key.request_id]
        request.open_lanes -= 1
        self._scheduler.finish([key])
        return self._latents(key, preview=False, final=request.open_lanes == 0)

    def _latents(self, key: LaneKey, *, preview: bool, final: bool) -> StageChunk:
        try:
            latents = self._runner.result(key, preview=preview, final=final)
        except BaseException as error:  # the boundary of one picture
            return self._fail(key.request_id, stage_failure(error, "finishing a picture"))
        if final:
            return self._finish(key.request_id, latents)
        return StageChunk(key.request_id, self.name, latents)

    def _check_size(self, width: int, height: int, num_frames: int) -> None:
        tokens, limit = self.denoiser.tokens(width, height, num_frames), self._budget.max_batch_tokens
        if tokens <= limit:
            return
        fits = self._fitting(width, height, num_frames)
        frames = f" with {num_frames} frames" if num_frames > 1 else ""
        hint = f"about {fits} would fit, or raise" if fits else "request less, or raise"
        raise CapacityError(
            f"{width}x{height}{frames} is {tokens} latent patches, over the budget of {limit}; {hint} "
            f"{self.name}.max_batch_tokens",
            param="width",
        )

    def _fitting(self, width: int, height: int, num_frames: int) -> str | None:
        """A size of about this shape that the budget holds; None where there is none to name."""
        limit, count = self._budget.max_batch_tokens, self.denoiser.tokens
        share = math.sqrt(limit / count(width, height, num_frames))
        for grid in (64, 32, 16):
            cells = [int(side * share) // grid for side in (width, height)]
            if min(cells) < 1 and grid > 16:
                continue  # too coarse a grid for the shorter side
            across, down = (max(n, 1) * grid for n in cells)
            over = count(across, down, num_frames) / limit
            if over > 1:  # the shorter side could not shrink any more, so the longer one does
                long = int(max(across, down) / over) // grid * grid
                across, down = (long, down) if across > down else (across, long)
            if 0 < count(across, down, num_frames) <= limit:
                return f"{across}x{down}"
        return None


def _blocks(denoiser: Denoiser, *, required: bool) -> list[nn.Module]:
    """What the transformers repeat. Compiling these takes minutes less than compiling the whole."""
    blocks: list[nn.Module] = []
    for transformer in denoiser.transformers:
        if denoiser.block_class is not None:
            blocks += [part for part in transformer.modules() if type(part).__name__ == denoiser.block_class]
            continue
        lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
        if not lists and required:
            raise StageError(f"{type(transformer).__name__} cannot be compiled; set compile: false")
        blocks += [block for repeated in lists for block in repeated]
    return blocks
