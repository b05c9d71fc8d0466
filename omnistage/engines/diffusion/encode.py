"""The encoding stage: prompts in, conditions out. Texts are encoded together, and never twice while they are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import InvalidRequestError, OmniError, StageError
from omnistage.core.failures import stage_failure
from omnistage.core.params import DiffusionParams
from omnistage.core.stage import Stage, StageStats
from omnistage.core.types import Condition, DiffusionInput, FinishReason, StageChunk, StageFeed, StageInput
from omnistage.engines.byte_cache import ByteCache
from omnistage.engines.diffusion.component import EncodeJob, PromptEncoder, Tensors
from omnistage.engines.diffusion.request_queue import RequestQueue


class PromptCache(ByteCache[Tensors]):
    """Encoded texts by content."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, _size)

    def put(self, key: bytes, value: Tensors) -> None:
        # Cloned: a row of a batch would keep the whole batch alive, and the bound would mean nothing.
        super().put(key, {name: tensor.clone() for name, tensor in value.items()})


def job_key(job: EncodeJob) -> bytes:
    """A digest of all that the result of a job depends on."""
    digest = hashlib.sha256()
    digest.update(repr(job.options).encode())
    digest.update(f"|{len(job.text)}|".encode())
    digest.update(job.text.encode())
    for image in job.images:
        digest.update(f"|{image.shape}|".encode())
        digest.update(image.tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    payload: DiffusionInput
    params: DiffusionParams
    jobs: dict[bytes, EncodeJob]
    """By their digests, which are made once: they read whole pictures. Two equal texts are one job."""
    order: tuple[bytes, ...]
    """The digests as the encoder asked for them."""

    @property
    def options(self) -> Hashable:
        return next((job.options for job in self.jobs.values()), ())


class EncodeStage(Stage):
    """Runs one `PromptEncoder`. A request gives a started marker and one `Condition`, which ends it here."""

    params_type = DiffusionParams

    def __init__(self, name: str, encoder: PromptEncoder, budget: DiffusionBudget) -> None:
        self.name = name
        self.encoder = encoder
        self.cache = PromptCache(budget.prompt_cache)
        self._queue: RequestQueue[_Item] = RequestQueue(budget.ageing_steps)
        self._max_batch = budget.max_batch
        self._steps = 0
        self._encoded = 0

    def check(self, stage_input: StageInput) -> None:
        params, payload = self._typed(stage_input)
        self.encoder.check(payload, params)

    def submit(self, stage_input: StageInput) -> None:
        self.check(stage_input)
        params, payload = self._typed(stage_input)
        info = stage_input.info
        if info.request_id in self._queue:
            raise InvalidRequestError(f"request {info.request_id!r} is in stage {self.name!r} already")
        jobs = self.encoder.jobs(payload, params)
        order = tuple(job_key(job) for job in jobs)
        self._queue.put(
            info.request_id, _Item(payload, params, dict(zip(order, jobs, strict=True)), order), info.priority
        )

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if request_id in self._queue:
            raise InvalidRequestError(f"stage {self.name!r} takes no more input once it has started")

    def abort(self, request_id: str) -> None:
        self._queue.remove(request_id)

    def step(self) -> list[StageChunk]:
        taken = self._queue.take(self._max_batch, lambda item: item.options)
        self._steps += 1
        chunks = [StageChunk(request_id, self.name) for request_id, _ in taken]
        with torch.inference_mode():
            encoded, failed = self._encode({key: job for _, item in taken for key, job in item.jobs.items()})
            for request_id, item in taken:
                chunks.append(self._condition(request_id, item, encoded, failed))
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # the next stage reads on a stream of its own
        return chunks

    def has_work(self) -> bool:
        return len(self._queue) > 0

    def stats(self) -> StageStats:
        cache = self.cache
        return StageStats(
            waiting=len(self._queue),
            steps=self._steps,
            tokens=self._encoded,
            extra={"cache_hits": cache.hits, "cache_misses": cache.misses, "cache_bytes": cache.bytes},
        )

    def close(self) -> None:
        self.encoder.close()

    # --------------------------------------------------------------------------------------------- pieces

    def _encode(self, jobs: dict[bytes, EncodeJob]) -> tuple[dict[bytes, Tensors], dict[bytes, OmniError]]:
        """Every job's tensors, from the cache or fresh, and the jobs that failed even alone."""
        found: dict[bytes, Tensors] = {}
        failed: dict[bytes, OmniError] = {}
        missing: dict[Hashable, dict[bytes, EncodeJob]] = {}
        for key, job in jobs.items():
            kept = self.cache.get(key)
            if kept is not None:
                found[key] = kept
            else:
                missing.setdefault(job.options, {})[key] = job
        for group in missing.values():
            fresh = _all_or_each(group, self._run, failed)
            found.update(fresh)
            for key, tensors in fresh.items():
                self.cache.put(key, tensors)
        return found, failed

    def _run(self, jobs: dict[bytes, EncodeJob]) -> dict[bytes, Tensors]:
        results = self.encoder.encode(list(jobs.values()))
        if len(results) != len(jobs):
            raise StageError(f"the encoder gave {len(results)} results for {len(jobs)} texts")
        self._encoded += len(jobs)
        return dict(zip(jobs, results, strict=True))

    def _condition(
        self, request_id: str, item: _Item, encoded: dict[bytes, Tensors], failed: dict[bytes, OmniError]
    ) -> StageChunk:
        error = next((failed[key] for key in item.order if key in failed), None)
        condition: Condition | None = None
        if error is None:
            try:
                condition = self.encoder.condition(item.payload, item.params, [encoded[key] for key in item.order])
            except Exception as failure:  # the boundary of one request's pictures
                error = _own(failure)
        if condition is None:
            return StageChunk(request_id, self.name, finish=FinishReason.ERROR, error=error)
        return StageChunk(request_id, self.name, condition, finish=FinishReason.STOP)

    def _typed(self, stage_input: StageInput) -> tuple[DiffusionParams, DiffusionInput]:
        params, payload = stage_input.params, stage_input.payload
        if not isinstance(params, DiffusionParams) or not isinstance(payload, DiffusionInput):
            raise InvalidRequestError(
                f"stage {self.name!r} takes a DiffusionInput with DiffusionParams, "
                f"not {type(payload).__name__} with {type(params).__name__}"
            )
        return params, payload


def _all_or_each(
    jobs: dict[bytes, EncodeJob],
    run: Callable[[dict[bytes, EncodeJob]], dict[bytes, Tensors]],
    failed: dict[bytes, OmniError],
) -> dict[bytes, Tensors]:
    """All together; where that fails each alone, so that only the culprit fails."""
    try:
        return run(jobs)
    except Exception as error:  # the step's boundary
        if len(jobs) == 1:
            failed[next(iter(jobs))] = _own(error)
            return {}
    results: dict[bytes, Tensors] = {}
    for key, job in jobs.items():
        try:
            results.update(run({key: job}))
        except Exception as error:  # the same boundary
            failed[key] = _own(error)
    return results


def _own(error: Exception) -> OmniError:
    return stage_failure(error, "encoding the prompt", doing="encoding a prompt")


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
