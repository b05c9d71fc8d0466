"""The codec stage: codes in, samples out, while both stream."""

from __future__ import annotations

import numpy as np

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError
from omnistage.core.params import CodecParams
from omnistage.core.stage import Stage, StageStats
from omnistage.core.types import AudioChunk, CodecFrames, CodecInput, FinishReason, StageChunk, StageFeed, StageInput
from omnistage.engines.codec.component import CodecComponent
from omnistage.engines.codec.runner import CodecRunner, RunnerOutput
from omnistage.engines.codec.scheduler import CodecLimits, CodecScheduler, SchedulerOutput


class CodecStage(Stage):
    """Runs one `CodecComponent`, batched across requests.

    Each request gives a started marker when it first runs, then `AudioChunk`s in order, the last with its finish
    reason; an utterance without codes gives one chunk of no samples. Codes that arrive wrong (outside the codebook,
    past the longest utterance) end their own request with an error.
    """

    params_type = CodecParams

    def __init__(self, name: str, component: CodecComponent, budget: CodecLimits) -> None:
        self.name = name
        self.component = component
        self._scheduler = CodecScheduler(component.layout, budget)
        self._runner = CodecRunner(component)
        self._refused: dict[str, OmniError] = {}  # by request id: ended by what was fed to them
        self._steps = 0
        self._codes = 0
        self._windows = 0
        self._samples = 0

    def check(self, stage_input: StageInput) -> None:
        _, payload = self._typed(stage_input)
        voice, voices = stage_input.info.voice, self.component.voices
        if voice is not None and voice not in voices:
            known = f"this model speaks with {', '.join(sorted(voices))}" if voices else "this model has a single voice"
            raise InvalidRequestError(f"unknown voice {voice!r}; {known}", param="voice")
        self._check_codes(payload.codes, known=0)

    def submit(self, stage_input: StageInput) -> None:
        self.check(stage_input)
        params, payload = self._typed(stage_input)
        info = stage_input.info
        if info.request_id in self._scheduler or info.request_id in self._refused:
            raise InvalidRequestError(f"request {info.request_id!r} is in stage {self.name!r} already")
        group = self.component.group(params)
        self._scheduler.add(info.request_id, group, priority=info.priority, streaming=params.streaming)
        self._scheduler.extend(info.request_id, payload.codes, payload.final)
        self._runner.add(info.request_id, params, info.voice)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        if self._scheduler.is_complete(request_id):
            return
        try:
            if not isinstance(feed, CodecFrames):
                raise InvalidRequestError(f"stage {self.name!r} is fed CodecFrames, not {type(feed).__name__}")
            self._check_codes(feed.codes, known=self._scheduler.length(request_id))
        except OmniError as error:
            self._forget(request_id)
            self._refused[request_id] = error
        else:
            self._scheduler.extend(request_id, feed.codes, feed.final)

    def abort(self, request_id: str) -> None:
        self._forget(request_id)
        self._refused.pop(request_id, None)

    def step(self) -> list[StageChunk]:
        scheduled = self._scheduler.schedule()
        started = [StageChunk(request_id, self.name) for request_id in scheduled.started]
        result = self._runner.run(scheduled.windows)
        self._scheduler.update(scheduled, result.failed)
        self._count(scheduled, result)
        return started + self._emit(scheduled, result)

    def has_work(self) -> bool:
        return bool(self._refused) or self._scheduler.has_work()

    def wait_limit(self) -> float | None:
        return self._scheduler.wait_limit()

    def stats(self) -> StageStats:
        return StageStats(
            waiting=self._scheduler.waiting,
            running=self._scheduler.running,
            starved=self._scheduler.starved,
            steps=self._steps,
            tokens=self._codes,
            extra={"windows": self._windows, "audio_seconds": self._samples / self.component.sample_rate},
        )

    def close(self) -> None:
        self.component.close()

    def _typed(self, stage_input: StageInput) -> tuple[CodecParams, CodecInput]:
        params, payload = stage_input.params, stage_input.payload
        if not isinstance(params, CodecParams) or not isinstance(payload, CodecInput):
            raise InvalidRequestError(
                f"stage {self.name!r} takes CodecInput with CodecParams, "
                f"not {type(payload).__name__} with {type(params).__name__}"
            )
        return params, payload

    def _check_codes(self, codes: tuple[int, ...], known: int) -> None:
        layout = self.component.layout
        if known + len(codes) > layout.max_codes:
            raise LimitExceededError(
                f"the utterance has {known + len(codes)} codes and may have {layout.max_codes}; speak less at once"
            )
        if codes and not (min(codes) >= 0 and max(codes) < layout.codebook_size):
            wrong = next(code for code in codes if not 0 <= code < layout.codebook_size)
            size = layout.codebook_size
            raise InvalidRequestError(f"code {wrong} is outside the codebook [0, {size})", param="codes")

    def _forget(self, request_id: str) -> None:
        self._scheduler.remove(request_id)
        self._runner.remove(request_id)

    def _emit(self, scheduled: SchedulerOutput, result: RunnerOutput) -> list[StageChunk]:
        nothing = np.zeros(0, dtype=np.float32)
        chunks = [self._audio(request_id, nothing, FinishReason.STOP) for request_id in scheduled.empty]
        for window in scheduled.windows:
            samples = result.samples.get(window.request_id)
            if samples is not None and (window.last or samples.size):
                chunks.append(self._audio(window.request_id, samples, FinishReason.STOP if window.last else None))
        failed = {**self._refused, **result.failed}
        chunks += [StageChunk(i, self.name, finish=FinishReason.ERROR, error=error) for i, error in failed.items()]
        self._refused.clear()
        for chunk in chunks:
            if chunk.finish is not None:
                self._runner.remove(chunk.request_id)
        return chunks

    def _audio(self, request_id: str, samples: np.ndarray, finish: FinishReason | None) -> StageChunk:
        return StageChunk(request_id, self.name, AudioChunk(samples, self.component.sample_rate), finish=finish)

    def _count(self, scheduled: SchedulerOutput, result: RunnerOutput) -> None:
        self._steps += 1
        self._windows += len(scheduled.windows)
        self._codes += sum(w.emit for w in scheduled.windows if w.request_id in result.samples)
        self._samples += sum(part.size for part in result.samples.values())
