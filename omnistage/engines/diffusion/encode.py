"""The encoding stage: prompts in, conditions out. Texts are encoded together, and never twice while they are kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import OmniError
from omnistage.core.failures import isolate, stage_failure
from omnistage.core.params import DiffusionParams
from omnistage.core.stage import StageStats
from omnistage.core.types import DiffusionInput, RequestInfo, StageChunk, StageInput
from omnistage.engines.byte_cache import ByteCache
from omnistage.engines.diffusion.component import EncodeJob, PromptEncoder, Tensors
from omnistage.engines.diffusion.request_queue import RequestQueue
from omnistage.engines.stage import BatchedStage
from omnistage.media.hashing import content_key

_FAILED = "encoding the prompt"


class PromptCache(ByteCache[Tensors]):
    """Encoded texts by content."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, _size)

    def put(self, key: bytes, value: Tensors) -> None:
        # Cloned: a row of a batch would keep the whole batch alive, and the bound would mean nothing.
        super().put(key, {name: tensor.clone() for name, tensor in value.items()})


def job_key(job: EncodeJob) -> bytes:
    """A digest of all that the result of a job depends on."""
    images = (content_key("image", image) for image in job.images)
    return content_key("text", job.text.encode(), repr(job.options), *images)


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


class EncodeStage(BatchedStage[DiffusionInput, DiffusionParams]):
    """Runs one `PromptEncoder`. A request gives a started marker and one `Condition`, which ends it here."""

    params_type = DiffusionParams
    payload_type = DiffusionInput

    def __init__(self, name: str, encoder: PromptEncoder, budget: DiffusionBudget) -> None:
        super().__init__(name)
        self.encoder = encoder
        self.cache = PromptCache(budget.prompt_cache)
        self._queue: RequestQueue[_Item] = RequestQueue(budget.ageing_steps)
        self._max_batch = budget.max_batch
        self._encoded = 0

    def _check(self, info: RequestInfo, params: DiffusionParams, payload: DiffusionInput) -> None:
        self.encoder.check(payload, params)

    def _add(self, stage_input: StageInput, params: DiffusionParams, payload: DiffusionInput) -> None:
        info, jobs = stage_input.info, self.encoder.jobs(payload, params)
        order = tuple(job_key(job) for job in jobs)
        item = _Item(payload, params, dict(zip(order, jobs, strict=True)), order)
        self._queue.put(info.request_id, item, info.priority)

    def _remove(self, request_id: str) -> None:
        self._queue.remove(request_id)

    def step(self) -> list[StageChunk]:
        batch = self._queue.take(self._max_batch, lambda item: item.options)
        chunks = self._mark_started(request_id for request_id, _ in batch)
        with torch.inference_mode():
            encoded = self._encode({key: job for _, item in batch for key, job in item.jobs.items()})
            chunks += [self._emit(request_id, item, encoded) for request_id, item in batch]
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # the next stage reads on a stream of its own
        self._steps += 1
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

    def _encode(self, jobs: dict[bytes, EncodeJob]) -> dict[bytes, Tensors | OmniError]:
        """Every job's tensors, from the cache or computed, or why it failed."""
        encoded: dict[bytes, Tensors | OmniError] = {}
        missing: dict[Hashable, list[tuple[bytes, EncodeJob]]] = {}
        for key, job in jobs.items():
            tensors = self.cache.get(key)
            if tensors is not None:
                encoded[key] = tensors
            else:
                missing.setdefault(job.options, []).append((key, job))
        for group in missing.values():
            for (key, _), result in isolate(group, self._run, _FAILED):
                encoded[key] = result
                if not isinstance(result, OmniError):
                    self._encoded += 1
                    self.cache.put(key, result)
        return encoded

    def _run(self, jobs: Sequence[tuple[bytes, EncodeJob]]) -> list[Tensors]:
        return self.encoder.encode([job for _, job in jobs])

    def _emit(self, request_id: str, item: _Item, encoded: dict[bytes, Tensors | OmniError]) -> StageChunk:
        parts: list[Tensors] = []
        for key in item.order:
            tensors = encoded[key]
            if isinstance(tensors, OmniError):
                return self._fail(request_id, tensors)
            parts.append(tensors)
        try:
            condition = self.encoder.condition(item.payload, item.params, parts)
        except BaseException as error:  # the boundary of one request's pictures
            return self._fail(request_id, stage_failure(error, _FAILED))
        return self._finish(request_id, condition)


def _size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
