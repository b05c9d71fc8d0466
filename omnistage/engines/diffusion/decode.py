"""The decoding stage: latents in, pictures or videos out, beside the denoiser and never in its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import OmniError
from omnistage.core.failures import isolate
from omnistage.core.params import DiffusionParams
from omnistage.core.stage import StageStats
from omnistage.core.types import ImageChunk, Latents, Modality, StageChunk, StageFeed, StageInput, VideoChunk
from omnistage.engines.diffusion.component import LatentDecoder
from omnistage.engines.diffusion.request_queue import RequestQueue
from omnistage.engines.stage import BatchedStage


@dataclass(slots=True)
class _Request:
    params: DiffusionParams
    priority: int
    pending: int = 0
    """Latents that wait."""
    complete: bool = False
    """No more will come."""


class DecodeStage(BatchedStage[Latents, DiffusionParams]):
    """Runs one `LatentDecoder`. A request gives an `ImageChunk` or `VideoChunk` for each of its latents.

    Previews that a newer one of the same picture has overtaken are dropped undecoded.
    """

    params_type = DiffusionParams
    payload_type = Latents

    def __init__(self, name: str, decoder: LatentDecoder, budget: DiffusionBudget) -> None:
        super().__init__(name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.decoder = decoder
        self._max_batch = budget.max_batch
        self._queue: RequestQueue[Latents] = RequestQueue(budget.ageing_steps)
        self._requests: dict[str, _Request] = {}
        self._decoded = 0

    def _add(self, stage_input: StageInput, params: DiffusionParams, payload: Latents) -> None:
        info = stage_input.info
        self._requests[info.request_id] = _Request(params, info.priority)
        self._put(info.request_id, payload)

    def _remove(self, request_id: str) -> None:
        del self._requests[request_id]
        self._queue.remove(request_id)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if request_id not in self._requests:
            return
        if not isinstance(feed, Latents):
            raise self._wrong_feed(feed)
        self._put(request_id, feed)

    def _put(self, request_id: str, latents: Latents) -> None:
        request = self._requests[request_id]
        overtaken = self._queue.drop(request_id, lambda old: old.preview and old.index == latents.index)
        request.pending += 1 - overtaken
        request.complete = request.complete or latents.final
        # Pictures that are done go before previews of others.
        self._queue.put(request_id, latents, request.priority + (1 if latents.preview else 0))

    def step(self) -> list[StageChunk]:
        batch = self._queue.take(self._max_batch, self._group)
        chunks = self._mark_started(request_id for request_id, _ in batch)
        for (request_id, latents), result in isolate(batch, self._run, "decoding"):
            if request_id in self._requests:  # else an earlier picture of it failed just now
                chunks.append(self._emit(request_id, latents, result))
        self._steps += 1
        return chunks

    def _group(self, latents: Latents) -> object:
        size = (latents.width, latents.height, latents.num_frames)
        return self.decoder.group(latents.picture), size

    def _run(self, batch: Sequence[tuple[str, Latents]]) -> list[np.ndarray]:
        """On a CUDA stream beside the denoiser's where there is one. Pixels end on the host."""
        first = batch[0][1]
        pictures = [latents.picture for _, latents in batch]
        with self.stream.use():
            return self.decoder.decode(pictures, width=first.width, height=first.height, num_frames=first.num_frames)

    def _emit(self, request_id: str, latents: Latents, result: np.ndarray | OmniError) -> StageChunk:
        request = self._requests[request_id]
        request.pending -= 1
        if isinstance(result, OmniError):
            if latents.preview:  # the picture itself may still come out right
                return StageChunk(request_id, self.name)
            return self._fail(request_id, result)
        self._decoded += 1
        payload: ImageChunk | VideoChunk
        if self.decoder.modality is Modality.VIDEO:
            fps = request.params.fps or self.decoder.fps
            payload = VideoChunk(result, fps, latents.index, latents.preview, latents.seed)
        else:
            payload = ImageChunk(result, latents.index, latents.preview, latents.seed)
        if request.complete and not request.pending:
            return self._finish(request_id, payload)
        return StageChunk(request_id, self.name, payload)

    def has_work(self) -> bool:
        return len(self._queue) > 0

    def stats(self) -> StageStats:
        running = sum(self._started.values())
        return StageStats(
            waiting=len(self._started) - running,
            running=running,
            starved=sum(not request.pending for request in list(self._requests.values())),
            steps=self._steps,
            tokens=self._decoded,
        )

    def close(self) -> None:
        self.decoder.close()
