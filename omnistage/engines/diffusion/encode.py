"""The encoding stage: prompts in, conditions out. Texts are encoded together, and never twice while they are kept."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from omnistage.config.schema import DiffusionBudget
from omnistage.engines.diffusion.component import EncodeJob, PromptEncoder, Tensors
from omnistage.engines.diffusion.line import Line
from omnistage.errors import InvalidRequestError, OmniError, StageError
from omnistage.pipeline.loop import log_defect
from omnistage.pipeline.stage import Stage, StageStats
from omnistage.types import Condition, DiffusionInput, DiffusionParams, FinishReason, StageChunk, StageFeed, StageInput


class PromptCache:
    """Encoded texts by content, least recently used first out, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Tensors] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, key: bytes) -> Tensors | None:
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return found

    def put(self, key: bytes, tensors: Tensors) -> None:
        size = _size(tensors)
        if size > self._max_bytes or key in self._entries:
            return
        # Cloned: a row of a batch would keep the whole batch alive, and the bound would mean nothing.
        self._entries[key] = {name: tensor.clone() for name, tensor in tensors.items()}
        self.bytes += size
        while self.bytes > self._max_bytes:
            _key, old = self._entries.popitem(last=False)
            self.bytes -= _size(old)


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
    jobs: tuple[EncodeJob, ...]


class EncodeStage(Stage):
    """Runs one `PromptEncoder`. A request gives a started marker and one `Condition`, which ends it here."""

    params_type = DiffusionParams

    def __init__(self, name: str, encoder: PromptEncoder, budget: DiffusionBudget) -> None:
        self.name = name
        self.encoder = encoder
        self.cache = PromptCache(budget.prompt_cache)
        self._line: Line[_Item] = Line(budget.ageing_steps)
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
        if info.request_id in self._line:
            raise InvalidRequestError(f"request {info.request_id!r} is in stage {self.name!r} already")
        jobs = tuple(self.encoder.jobs(payload, params))
        self._line.put(info.request_id, _Item(payload, params, jobs), info.priority)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if request_id in self._line:
            raise InvalidRequestError(f"stage {self.name!r} takes no more input once it has started")

    def abort(self, request_id: str) -> None:
        self._line.remove(request_id)

    def step(self) -> list[StageChunk]:
        taken = self._line.take(self._max_batch, lambda item: item.jobs[0].options if item.jobs else ())
        self._steps += 1
        chunks = [StageChunk(request_id, self.name) for request_id, _ in taken]
        with torch.inference_mode():
            encoded, failed = self._encode([job for _, item in taken for job in item.jobs])
            for request_id, item in taken:
                chunks.append(self._condition(request_id, item, encoded, failed))
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # the next stage reads on a stream of its own
        return chunks

    def has_work(self) -> bool:
        return len(self._line) > 0

    def stats(self) -> StageStats:
        cache = self.cache
        return StageStats(
            waiting=len(self._line),
            steps=self._steps,
            tokens=self._encoded,
            extra={"cache_hits": cache.hits, "cache_misses": cache.misses, "cache_bytes": cache.bytes},
        )

    def close(self) -> None:
        self.encoder.close()

    # --------------------------------------------------------------------------------------------- pieces

    def _encode(self, jobs: Sequence[EncodeJob]) -> tuple[dict[bytes, Tensors], dict[bytes, OmniError]]:
        """Every job's tensors, from the cache or fresh, and the jobs that failed even alone."""
        found: dict[bytes, Tensors] = {}
        failed: dict[bytes, OmniError] = {}
        missing: dict[Hashable, dict[bytes, EncodeJob]] = {}
        for job in jobs:
            key = job_key(job)
            if key in found:
                continue
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
        keys = [job_key(job) for job in item.jobs]
        error = next((failed[key] for key in keys if key in failed), None)
        condition: Condition | None = None
        if error is None:
            try:
                condition = self.encoder.condition(item.payload, item.params, [encoded[key] for key in keys])
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
    if isinstance(error, OmniError):
        return error
    log_defect("encoding a prompt", error)
    failure = StageError(f"encoding the prompt failed: {type(error).__name__}")
    failure.__cause__ = error
    return failure


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
