"""Takes scheduled denoising steps: tensors, no policy.

Every step collects the rows of all lanes of the batch (two for a guided lane), runs rows of one group in one forward,
and lets each lane's own scheduler move it on.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import OmniError, StageError
from omnistage.core.failures import isolate, stage_failure
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, Latents
from omnistage.engines.adapters.layers import AdapterLayers
from omnistage.engines.adapters.library import NOTHING, Selection
from omnistage.engines.compiling import distinct_sizes
from omnistage.engines.diffusion.adapters import activate, within_slots
from omnistage.engines.diffusion.caching import StepCache
from omnistage.engines.diffusion.component import Denoiser, Lane, Row
from omnistage.engines.diffusion.convergence import Convergence, expected_picture, remember_expected
from omnistage.engines.diffusion.graphs import StepGraphs, captured_rows
from omnistage.engines.diffusion.scheduler import LaneKey
from omnistage.engines.streams import DeviceStream


@dataclass(slots=True)
class RunnerOutput:
    """What a step gave, by lane; a failed lane is in `failed` only."""

    advances: list[LaneKey] = field(default_factory=list)
    """Took a step."""
    finished: list[LaneKey] = field(default_factory=list)
    """Of those, the ones that are done."""
    failed: dict[LaneKey, OmniError] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Job:
    condition: Condition
    params: DiffusionParams
    seed: int
    adapters: Selection


@dataclass(slots=True, eq=False)
class _Running:
    lane: Lane
    seed: int
    convergence: Convergence | None


class DiffusionRunner:
    """Owns the lanes of one stage."""

    def __init__(
        self,
        denoiser: Denoiser,
        budget: DiffusionBudget,
        stream: DeviceStream,
        cache: StepCache | None = None,
        adapters: AdapterLayers | None = None,
    ) -> None:
        self.denoiser = denoiser
        self._max_tokens, self._max_rows = budget.max_batch_tokens, budget.max_batch
        self._cache = cache
        self._adapters = adapters
        self._graphs = StepGraphs(denoiser, enabled=budget.cuda_graphs and stream.cuda is not None and cache is None)
        self._jobs: dict[str, _Job] = {}
        self._lanes: dict[LaneKey, _Running] = {}
        self._stream = stream
        self._event: torch.cuda.Event | None = None
        """Behind the last step on the device."""
        self.forwards = 0
        self.rows = 0

    def warm_up(self, width: int, height: int, num_frames: int) -> None:
        """Run what requests of this size will, so that blocks are compiled for it, and capture the graphs."""
        condition = self.denoiser.planned_condition(width, height, num_frames)
        if condition is None:
            return
        with self._stream.use(), fast_attention(self._stream.cuda is not None), distinct_sizes():
            rows = [
                Row(self.denoiser.open(each, DiffusionParams(), torch.Generator()), "positive")
                for each in (condition, _shortened(condition, 0.99), _shortened(condition, 0.5))
            ]
            row = rows[0]
            most = max(1, min(self._max_rows, self._max_tokens // max(row.lane.tokens, 1)))
            # Compiled for one row and for several; again with texts of other lengths, where they share a forward.
            for other in rows:
                if self.denoiser.group(other) == self.denoiser.group(row):
                    for batch in ([other], [row, other])[: min(most, 2)]:
                        self.denoiser.forward(batch)
            for count in range(captured_rows(row.lane.tokens, most), 0, -1):  # the largest first: others fit into it
                self._graphs.capture([row] * count)

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.close()

    def add(
        self, request_id: str, condition: Condition, params: DiffusionParams, adapters: Selection = NOTHING
    ) -> None:
        seed = secrets.randbits(31) if params.seed is None else params.seed
        # They are of the encoding stage's stream, which must not give their memory away while this one reads it.
        for tensors in (condition.positive, condition.negative or {}, condition.shared):
            for tensor in tensors.values():
                self._stream.share(tensor)
        if (cuda := self._stream.cuda) is not None:  # an encoder in another process may have sent them by the host
            with self._stream.use():
                condition = _to_device(condition, cuda.device)
        self._jobs[request_id] = _Job(condition, params, seed, adapters)

    def remove(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)
        for key in [key for key in self._lanes if key.request_id == request_id]:
            self._close(key)

    def open(self, key: LaneKey) -> tuple[tuple[Hashable, ...], int]:
        """Sample a lane's noise and set its schedule; the groups of its first rows, and what one row costs."""
        job = self._jobs[key.request_id]
        seed = (job.seed + key.index) % 2**63
        with self._stream.use():
            lane = self.denoiser.open(job.condition, job.params, torch.Generator().manual_seed(seed))
        lane.adapters = job.adapters
        limit = job.params.early_stop
        self._lanes[key] = _Running(lane, seed, Convergence(limit) if limit is not None else None)
        return self.groups(key), lane.tokens

    def groups(self, key: LaneKey) -> tuple[Hashable, ...]:
        """Groups of the rows of a lane's next step."""
        lane = self._lanes[key].lane
        return tuple(self.denoiser.group(row) for row in self.denoiser.rows(lane))

    def tokens(self, key: LaneKey) -> int:
        """What one of the lane's rows costs."""
        return self._lanes[key].lane.tokens

    def progress(self, key: LaneKey) -> tuple[int, int]:
        """Steps done, of those that there are."""
        running = self._lanes[key]
        return running.lane.step, running.lane.steps

    def execute(self, batch: Sequence[LaneKey]) -> RunnerOutput:
        """One step of every lane in the batch. On CUDA the device may still be at it: the next call waits for it.

        One step ahead, so that the device does not wait for the host between steps, and no further, so that an
        aborted request's work ends within a step.
        """
        output = RunnerOutput()
        with self._stream.use():
            rows_of = {key: self.denoiser.rows(self._lanes[key].lane) for key in batch}
            predictions, failed = self._predict([row for rows in rows_of.values() for row in rows])
            for key, rows in rows_of.items():
                running = self._lanes[key]
                error = failed.get(id(running.lane))
                if error is None:
                    error = self._advance(running, [predictions[id(row.lane), row.branch] for row in rows])
                if error is not None:
                    output.failed[key] = error
                    continue
                output.advances.append(key)
                if running.lane.done:
                    output.finished.append(key)
            self._wait_for_last_step()
        return output

    def result(self, key: LaneKey, *, preview: bool, final: bool) -> Latents:
        """A lane's latents for the decoder; a finished lane is closed. Raises if they are not numbers."""
        running = self._lanes[key]
        condition = running.lane.condition
        with self._stream.use():
            if preview:
                latents, running.lane.latents = running.lane.latents, expected_picture(running.lane)
                picture = self.denoiser.result(running.lane).clone()
                running.lane.latents = latents
            else:
                picture = self.denoiser.result(running.lane)
            finite = bool(torch.isfinite(picture).all())
        if not preview:
            self._close(key)
        if not finite:
            raise StageError("the denoiser returned values that are not finite; try other parameters or another dtype")
        size = (condition.width, condition.height, condition.num_frames)
        return Latents(picture, *size, index=key.index, seed=running.seed, preview=preview, final=final)

    # --------------------------------------------------------------------------------------------- pieces

    def _wait_for_last_step(self) -> None:
        if self._stream.cuda is None:
            return
        last, self._event = self._event, self._stream.cuda.record_event()
        if last is not None:
            last.synchronize()

    def _predict(self, rows: Sequence[Row]) -> tuple[dict[tuple[int, str], Tensor], dict[int, OmniError]]:
        """Predictions by lane and branch, and lanes with a row that failed by itself."""
        predictions: dict[tuple[int, str], Tensor] = {}
        failed: dict[int, OmniError] = {}
        for part in self._forwards(rows):
            for row, prediction in isolate(part, self._forward, "denoising"):
                if isinstance(prediction, OmniError):
                    failed[id(row.lane)] = prediction
                else:
                    predictions[id(row.lane), row.branch] = prediction
        return predictions, failed

    def _forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        self.forwards += 1
        self.rows += len(rows)
        if self._adapters is not None:
            activate(self._adapters, rows)
        with fast_attention(self._stream.cuda is not None):
            if self._cache is not None:
                return self._cache.forward(self.denoiser, rows)
            return self._graphs.forward(rows)

    def _forwards(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Rows by group, split where they exceed the budget; a cache runs each lane and branch by itself."""
        groups: dict[Hashable, list[Row]] = {}
        for row in rows:
            state = (id(row.lane), row.branch) if self._cache is not None else None
            groups.setdefault((self.denoiser.group(row), state), []).append(row)
        for group in groups.values():
            size = max(1, min(self._max_rows, self._max_tokens // max(group[0].lane.tokens, 1)))
            for first in range(0, len(group), size):
                part = group[first : first + size]
                yield from [part] if self._adapters is None else within_slots(self._adapters, part)

    def _advance(self, running: _Running, predictions: Sequence[Tensor]) -> OmniError | None:
        lane = running.lane
        before = lane.latents
        try:
            self.denoiser.advance(lane, predictions)
            if running.convergence is not None or lane.params.preview_every:
                remember_expected(lane, before)
            if running.convergence is not None and running.convergence.reached(lane):
                lane.latents = expected_picture(lane)
                lane.timesteps = lane.timesteps[: lane.step]
        except BaseException as error:  # the boundary of one lane's schedule
            return stage_failure(error, "denoising")
        return None

    def _close(self, key: LaneKey) -> None:
        running = self._lanes.pop(key, None)
        if running is not None and self._cache is not None:
            self._cache.forget(running.lane)


def _shortened(condition: Condition, share: float) -> Condition:
    """The same with a share of its text's tokens."""
    texts = condition.positive.items()
    return replace(condition, positive={name: t[: int(len(t) * share)] if t.ndim > 1 else t for name, t in texts})


def _to_device(condition: Condition, device: torch.device) -> Condition:
    """The condition with all of its tensors on a device."""

    def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    negative = None if condition.negative is None else move(condition.negative)
    return replace(condition, positive=move(condition.positive), negative=negative, shared=move(condition.shared))


@contextmanager
def fast_attention(cuda: bool) -> Iterator[None]:
    """Prefer cuDNN's attention on CUDA: for the long sequences of pictures it is the fastest of torch's on Hopper."""
    if not cuda:
        yield
        return
    backend = torch.nn.attention.SDPBackend
    order = [backend.CUDNN_ATTENTION, backend.FLASH_ATTENTION, backend.EFFICIENT_ATTENTION, backend.MATH]
    with torch.nn.attention.sdpa_kernel(order, set_priority=True):
        yield
