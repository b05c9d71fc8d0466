"""The decoding stage: latents in, pictures or videos out, beside the denoiser and never in its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from omnistage.config.schema import DiffusionBudget
from omnistage.core.errors import InvalidRequestError, OmniError, StageError
from omnistage.core.failures import stage_failure
from omnistage.core.params import DiffusionParams
from omnistage.core.stage import Stage, StageStats
from omnistage.core.types import (
    FinishReason,
    ImageChunk,
    Latents,
    Modality,
    StageChunk,
    StageFeed,
    StageInput,
    VideoChunk,
)
from omnistage.engines.diffusion.component import LatentDecoder
from omnistage.engines.diffusion.request_queue import RequestQueue


@dataclass(slots=True)
class _Request:
    params: DiffusionParams
    priority: int
    left: int = 0
    """Latents that wait."""
    complete: bool = False
    """No more will come."""
    started: bool = False


class DecodeStage(Stage):
    """Runs one `LatentDecoder`. A request gives an `ImageChunk` or `VideoChunk` for each of its latents.

    Previews that a newer one of the same picture has overtaken are dropped undecoded.
    """

    params_type = DiffusionParams

    def __init__(self, name: str, decoder: LatentDecoder, budget: DiffusionBudget) -> None:
        self.name = name
        self.decoder = decoder
        self._max_batch = budget.max_batch
        self._queue: RequestQueue[Latents] = RequestQueue(budget.ageing_steps)
        self._requests: dict[str, _Request] = {}
        self._steps = 0
        self._decoded = 0
        cuda = torch.cuda.is_available()
        self._stream = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]

    def check(self, stage_input: StageInput) -> None:
        self._typed(stage_input)

    def submit(self, stage_input: StageInput) -> None:
        params, latents = self._typed(stage_input)
        info = stage_input.info
        if info.request_id in self._requests:
            raise InvalidRequestError(f"request {info.request_id!r} is in stage {self.name!r} already")
        self._requests[info.request_id] = _Request(params, info.priority)
        self._put(info.request_id, latents)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if request_id not in self._requests:
            return
        if not isinstance(feed, Latents):
            raise InvalidRequestError(f"stage {self.name!r} is fed Latents, not {type(feed).__name__}")
        self._put(request_id, feed)

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._queue.remove(request_id)

    def step(self) -> list[StageChunk]:
        taken = self._queue.take(self._max_batch, self._group)
        self._steps += 1
        chunks: list[StageChunk] = []
        for request_id, _ in taken:
            request = self._requests[request_id]
            if not request.started:
                request.started = True
                chunks.append(StageChunk(request_id, self.name))
        for (request_id, latents), result in zip(taken, self._decode([item for _, item in taken]), strict=True):
            if request_id in self._requests:  # else an earlier picture of it failed just now
                chunks.append(self._emit(request_id, latents, result))
        return chunks

    def has_work(self) -> bool:
        return len(self._queue) > 0

    def stats(self) -> StageStats:
        running = sum(request.started for request in self._requests.values())
        return StageStats(
            waiting=len(self._requests) - running,
            running=running,
            starved=sum(not request.left for request in self._requests.values()),
            steps=self._steps,
            tokens=self._decoded,
        )

    def close(self) -> None:
        self.decoder.close()

    # --------------------------------------------------------------------------------------------- pieces

    def _put(self, request_id: str, latents: Latents) -> None:
        request = self._requests[request_id]
        overtaken = self._queue.drop(request_id, lambda old: old.preview and old.index == latents.index)
        request.left += 1 - overtaken
        request.complete = request.complete or latents.final
        # Pictures that are done go before previews of others.
        self._queue.put(request_id, latents, request.priority + (1 if latents.preview else 0))

    def _group(self, latents: Latents) -> object:
        size = (latents.width, latents.height, latents.num_frames)
        return self.decoder.group(latents.picture), size

    def _decode(self, items: Sequence[Latents]) -> list[np.ndarray | OmniError]:
        """Pixels of each; where all together fail, each gets one try alone."""
        try:
            return list(self._run(items))
        except Exception as error:  # the step's boundary: whatever a decoder raises ends at most this batch
            if len(items) == 1:
                return [_own(error)]
        results: list[np.ndarray | OmniError] = []
        for item in items:
            try:
                results += self._run([item])
            except Exception as error:  # the same boundary
                results.append(_own(error))
        return results

    def _run(self, items: Sequence[Latents]) -> list[np.ndarray]:
        first = items[0]
        with self._on_stream():
            pixels = self.decoder.decode(
                [item.picture for item in items],
                width=first.width,
                height=first.height,
                num_frames=first.num_frames,
            )
        if len(pixels) != len(items):
            raise StageError(f"the decoder gave {len(pixels)} results for {len(items)} latents")
        self._decoded += len(items)
        return pixels

    def _emit(self, request_id: str, latents: Latents, result: np.ndarray | OmniError) -> StageChunk:
        request = self._requests[request_id]
        request.left -= 1
        if isinstance(result, OmniError):
            if latents.preview:  # the picture itself may still come out right
                return StageChunk(request_id, self.name)
            self.abort(request_id)
            return StageChunk(request_id, self.name, finish=FinishReason.ERROR, error=result)
        ended = request.complete and not request.left
        if ended:
            self.abort(request_id)
        payload: ImageChunk | VideoChunk
        if self.decoder.modality is Modality.VIDEO:
            fps = request.params.fps or self.decoder.fps
            payload = VideoChunk(result, fps, latents.index, latents.preview, latents.seed)
        else:
            payload = ImageChunk(result, latents.index, latents.preview, latents.seed)
        return StageChunk(request_id, self.name, payload, finish=FinishReason.STOP if ended else None)

    def _typed(self, stage_input: StageInput) -> tuple[DiffusionParams, Latents]:
        params, payload = stage_input.params, stage_input.payload
        if not isinstance(params, DiffusionParams) or not isinstance(payload, Latents):
            raise InvalidRequestError(
                f"stage {self.name!r} takes Latents with DiffusionParams, "
                f"not {type(payload).__name__} with {type(params).__name__}"
            )
        return params, payload

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Inference mode, on a CUDA stream beside the denoiser's where there is one. Pixels end on the host."""
        with torch.inference_mode():
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield


def _own(error: Exception) -> OmniError:
    return stage_failure(error, "decoding", doing="decoding a picture")
