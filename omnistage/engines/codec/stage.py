"""The codec stage: codes in, samples out, while both stream."""

from __future__ import annotations

import numpy as np

from omnistage.config.schema import CodecBudget
from omnistage.core.errors import InvalidRequestError, LimitExceededError
from omnistage.core.params import CodecParams
from omnistage.core.stage import StageStats
from omnistage.core.types import (
    AudioChunk,
    Code,
    CodecFrames,
    CodecInput,
    RequestInfo,
    StageChunk,
    StageFeed,
    StageInput,
)
from omnistage.engines.codec.component import CodecComponent
from omnistage.engines.codec.requests import SchedulerOutput
from omnistage.engines.codec.runner import CodecRunner, RunnerOutput
from omnistage.engines.codec.scheduler import CodecScheduler
from omnistage.engines.stage import BatchedStage

_SILENCE = np.zeros(0, dtype=np.float32)


class CodecStage(BatchedStage[CodecInput, CodecParams]):
    """Runs one `CodecComponent`, batched across requests.

    Each request gives a started marker when it first runs, then `AudioChunk`s in order, the last with its finish
    reason; an utterance without codes gives one chunk of no samples.
    """

    params_type = CodecParams
    payload_type = CodecInput

    def __init__(self, name: str, component: CodecComponent, budget: CodecBudget) -> None:
        super().__init__(name)
        self.component = component
        self._budget = budget
        self._scheduler = CodecScheduler(component.layout, budget)
        self._runner = CodecRunner(component)
        self._pending_samples: dict[str, list[np.ndarray]] = {}
        """Sound that has not gone out yet, as the scheduler says."""
        self._codes = 0
        self._windows = 0
        self._samples = 0

    def warm_up(self) -> None:
        """Decode windows of each size that requests will have."""
        self.component.warm_up(self._scheduler.chunk_sizes(), self._scheduler.lookahead, self._budget.max_batch_blocks)

    def _check(self, info: RequestInfo, params: CodecParams, payload: CodecInput) -> None:
        voice, voices = info.voice, self.component.voices
        if voice is not None and voice not in voices:
            hint = f"its voices: {', '.join(sorted(voices))}" if voices else "this model has a single voice"
            raise InvalidRequestError(f"unknown voice {voice!r}; {hint}", param="voice")
        self._check_codes(payload.codes, earlier=0)

    def _add(self, stage_input: StageInput, params: CodecParams, payload: CodecInput) -> None:
        info, group = stage_input.info, self.component.group(params)
        self._scheduler.add(info.request_id, group, priority=info.priority, streaming=params.streaming)
        self._scheduler.extend(info.request_id, payload.codes, payload.final)
        self._runner.add(info.request_id, params, info.voice)

    def _remove(self, request_id: str) -> None:
        self._pending_samples.pop(request_id, None)
        self._scheduler.remove(request_id)
        self._runner.remove(request_id)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        """Raises for codes outside the codebook or past the longest utterance."""
        length = self._scheduler.length(request_id)
        if length is None:
            return
        if not isinstance(feed, CodecFrames):
            raise self._wrong_feed(feed)
        self._check_codes(feed.codes, length)
        self._scheduler.extend(request_id, feed.codes, feed.final)

    def _check_codes(self, codes: tuple[Code, ...], earlier: int) -> None:
        layout = self.component.layout
        if earlier + len(codes) > layout.max_codes:
            raise LimitExceededError(
                f"the utterance has {earlier + len(codes)} codes and may have {layout.max_codes}; split the text"
            )
        size, count = layout.codebook_size, layout.num_codebooks
        for frame in codes:
            values = (frame,) if isinstance(frame, int) else frame
            if len(values) != count or isinstance(frame, int) != (count == 1):
                raise InvalidRequestError(f"a frame has {count} codes, not {frame}", param="codes")
            for code in values:
                if not 0 <= code < size:
                    raise InvalidRequestError(f"code {code} is outside the codebook [0, {size})", param="codes")

    def step(self) -> list[StageChunk]:
        scheduled = self._scheduler.schedule()
        chunks = self._mark_started(scheduled.started)
        result = self._runner.run(scheduled.windows)
        rate = self.component.sample_rate
        seconds = {request_id: samples.size / rate for request_id, samples in result.samples.items()}
        self._scheduler.update(scheduled, result.failed, seconds)
        self._steps += 1
        return chunks + self._collect(scheduled, result) + self._emit()

    def _collect(self, scheduled: SchedulerOutput, result: RunnerOutput) -> list[StageChunk]:
        """Take the sound of a batch; the last chunks of the requests that ended with it."""
        rate = self.component.sample_rate
        chunks = [self._finish(request_id, AudioChunk(_SILENCE, rate)) for request_id in scheduled.empty]
        for window in scheduled.windows:
            self._windows += 1
            samples = result.samples.get(window.request_id)
            if samples is None:
                chunks.append(self._fail(window.request_id, result.failed[window.request_id]))
                continue
            self._codes += window.emit
            self._samples += samples.size
            self._pending_samples.setdefault(window.request_id, []).append(samples)
            if window.last:
                sound = self._take(window.request_id)
                chunks.append(self._finish(window.request_id, AudioChunk(sound, rate)))
        return chunks

    def _emit(self) -> list[StageChunk]:
        """The sound that may go out now."""
        playing = [request_id for request_id in self._pending_samples if self._scheduler.playing(request_id)]
        chunks = []
        for request_id in (*playing, *self._scheduler.release()):
            if (sound := self._take(request_id)).size:
                chunks.append(StageChunk(request_id, self.name, AudioChunk(sound, self.component.sample_rate)))
        return chunks

    def _take(self, request_id: str) -> np.ndarray:
        parts = self._pending_samples.pop(request_id)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def wait_limit(self) -> float | None:
        return self._scheduler.wait_limit()

    def stats(self) -> StageStats:
        return StageStats(
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            starved=self._scheduler.starved,
            steps=self._steps,
            tokens=self._codes,
            capacity=self._budget.max_running,
            extra={"windows": self._windows, "audio_seconds": self._samples / self.component.sample_rate},
        )

    def close(self) -> None:
        self.component.close()
