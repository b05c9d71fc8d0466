"""From stage chunks to what the caller sees: stream items, the final output, and the buffer in between."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from omnistage.core.errors import OmniError, StageError
from omnistage.core.transcripts import Transcript
from omnistage.core.types import (
    AudioChunk,
    FinishReason,
    ImageChunk,
    Modality,
    ModuleOutput,
    Progress,
    StageChunk,
    TokenChunk,
    VideoChunk,
)
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk, Trace, Usage

if TYPE_CHECKING:
    import numpy as np

Sink = Callable[[OutputChunk], None]
"""Takes a request's stream items, one call at a time and in order; the last carries `final`.

It is called from stage threads, so it must return at once and never wait for the consumer.
"""


_PAYLOADS: dict[Modality, tuple[type, ...]] = {
    Modality.TEXT: (TokenChunk, Transcript),
    Modality.AUDIO: (AudioChunk,),
    Modality.IMAGE: (ImageChunk, VideoChunk),
    Modality.VIDEO: (VideoChunk, ImageChunk),
    Modality.EMBEDDING: (ModuleOutput,),
    Modality.SCORES: (ModuleOutput,),
}
"""What a stage emits for each modality: a picture may be a video's only frame."""


class OutputAssembler:
    """Collects one request's chunks. Not thread-safe: the request's emit lock guards it.

    `modalities` maps each stage whose output was asked for to its modality; chunks of other stages are ignored.
    """

    def __init__(
        self,
        request_id: str,
        modalities: Mapping[str, Modality],
        answers: int,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self.metadata = metadata or {}
        self._request_id = request_id
        self._modalities = modalities
        has_text = Modality.TEXT in modalities.values()
        self._main_modality = Modality.TEXT if has_text else next(iter(modalities.values()), Modality.TEXT)
        self._answers = [CompletionOutput(index) for index in range(answers if has_text else 0)]
        self._text: list[list[str]] = [[] for _ in self._answers]
        self._audio: list[AudioChunk] = []
        self._pictures: dict[int, ImageChunk] = {}
        self._videos: dict[int, VideoChunk] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._transcript: Transcript | None = None
        self.closed = False

    def add(self, chunk: StageChunk) -> OutputChunk | None:
        """The stream item for this chunk; None where it holds nothing for the caller."""
        if self.closed:
            return None
        modality, payload = self._modalities.get(chunk.stage), chunk.payload
        if modality is Modality.TEXT and isinstance(payload, TokenChunk):  # first: nearly every chunk is of this kind
            answer, finish = self._answers[chunk.index], chunk.finish
            if finish is not None:
                answer.finish_reason, answer.stop_reason = finish, payload.stop_reason
            if (ids := payload.token_ids) or payload.text:
                answer.token_ids += ids
                text, logprobs = payload.text, payload.logprobs
                if logprobs:
                    answer.logprobs += logprobs
                self._text[chunk.index].append(text)
                return OutputChunk(
                    self._request_id, modality, chunk.index, text, ids, logprobs, None, None, None, None, finish
                )
        elif isinstance(payload, Progress):
            # Of any stage: the one that denoises is rarely the one that outputs the picture.
            return OutputChunk(self._request_id, self._main_modality, progress=payload)
        if modality is None:
            return None
        if payload is not None and not isinstance(payload, _PAYLOADS[modality]):
            raise StageError(f"stage {chunk.stage!r} outputs {modality} and emitted a {type(payload).__name__}")
        if modality is Modality.TEXT and chunk.finish is not None:
            self._answers[chunk.index].finish_reason = chunk.finish
        item = partial(OutputChunk, self._request_id, modality, finish_reason=chunk.finish)
        if isinstance(payload, Transcript):
            self._transcript = payload
            self._answers[0].token_ids += payload.token_ids
            self._text[0].append(payload.text)
            return item(0, text=payload.text, token_ids=payload.token_ids)
        if modality is Modality.AUDIO and isinstance(payload, AudioChunk) and len(payload.samples):
            if self._audio and self._audio[0].sample_rate != payload.sample_rate:
                raise StageError(f"stage {chunk.stage!r} changed its sample rate within a request")
            self._audio.append(payload)
            return item(chunk.index, audio=payload)
        elif isinstance(payload, ImageChunk):
            if not payload.preview:
                self._pictures[payload.index] = payload
            return item(payload.index, image=payload)
        elif isinstance(payload, VideoChunk):
            if not payload.preview:
                self._videos[payload.index] = payload
            return item(payload.index, video=payload)
        elif isinstance(payload, ModuleOutput):
            self._arrays |= payload.arrays
        return item(chunk.index) if chunk.finish is not None else None

    def final(self, reason: FinishReason, error: OmniError | None, usage: Usage, trace: Trace) -> OutputChunk:
        """Close the stream; answers that had not ended get the request's own reason."""
        self.closed = True
        for answer, pieces in zip(self._answers, self._text, strict=True):
            answer.text = "".join(pieces)
            answer.finish_reason = answer.finish_reason or reason
        if reason is FinishReason.LENGTH and len(self._answers) == 1:  # also where its speech was cut, and not its text
            self._answers[0].finish_reason = reason
        audio = None
        if self._audio:
            from omnistage.media.audio_output import AudioOutput

            whole = _join_audio(self._audio)
            audio = AudioOutput(whole.samples, whole.sample_rate)
        usage.audio_seconds = audio.seconds if audio is not None else 0.0
        output = OmniRequestOutput(self._request_id, self._answers, audio, reason, error, usage, trace)
        output.arrays, output.transcript = self._arrays, self._transcript
        if self._pictures or self._videos:
            self._add_pictures(output)
        return OutputChunk(self._request_id, self._main_modality, final=output)

    def _add_pictures(self, output: OmniRequestOutput) -> None:
        from omnistage.media.audio_output import AudioOutput
        from omnistage.media.image_output import ImageOutput
        from omnistage.media.video_output import VideoOutput

        def metadata(seed: int | None) -> dict[str, object]:
            return {"seed": seed, **self.metadata} if seed is not None else dict(self.metadata)

        for _, picture in sorted(self._pictures.items()):
            output.images.append(ImageOutput(picture.pixels, metadata(picture.seed)))
        for _, video in sorted(self._videos.items()):
            track = None
            if video.audio is not None:
                track = AudioOutput(video.audio.samples, video.audio.sample_rate)
            output.videos.append(VideoOutput(video.frames, video.fps, track, metadata(video.seed)))
        output.usage.images = len(output.images)
        output.usage.video_seconds = sum(video.seconds for video in output.videos)


class OutputBuffer:
    """A sink that holds items for a consumer of its own pace, at most about `limit` of them.

    A full buffer never blocks the stage and drops nothing: everything that waits is joined into one item per stream
    (a modality of an answer), so a slow consumer gets fewer, larger items. `wake` is called, without the lock, when
    an item arrives in an empty buffer, and for the last item `wake_last`.
    """

    def __init__(
        self,
        limit: int,
        wake: Callable[[], object] | None = None,
        wake_last: Callable[[], object] | None = None,
    ) -> None:
        self._limit = max(1, limit)
        self._wake = wake
        self._wake_last = wake_last
        self._items: deque[OutputChunk] = deque()
        self._lock = threading.Lock()  # itself, and not through the condition, which takes several calls
        self._has_items = threading.Condition(self._lock)
        self._waiting = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: OutputChunk) -> None:
        with self._lock:
            was_empty = not self._items
            if len(self._items) >= self._limit and item.final is None:
                self._items = deque(_joined([*self._items, item]))
            else:
                self._items.append(item)
            if self._waiting:
                self._has_items.notify()
        if item.final is not None and self._wake_last is not None:
            self._wake_last()
        elif was_empty and self._wake is not None:
            self._wake()

    def pop_all(self) -> list[OutputChunk]:
        """All items that are there now."""
        with self._lock:
            items = list(self._items)
            self._items.clear()
            return items

    def get(self, timeout: float | None = None) -> OutputChunk | None:
        """Wait for the next item; None once `timeout` seconds have passed."""
        with self._lock:
            self._waiting = True
            self._has_items.wait_for(lambda: bool(self._items), timeout)
            self._waiting = False
            return self._items.popleft() if self._items else None


def _joined(items: list[OutputChunk]) -> list[OutputChunk]:
    """One item per stream, each stream in its own order, streams in the order of their first items.

    Text comes first: a reader must not hear a sentence before it can be read.
    """
    streams: dict[tuple[Modality, int], list[OutputChunk]] = {}
    for item in items:
        streams.setdefault((item.modality, item.index), []).append(item)
    texts_first = sorted(streams, key=lambda stream: stream[0] is not Modality.TEXT)
    return [_join_stream(streams[stream]) for stream in texts_first]


def _join_stream(items: list[OutputChunk]) -> OutputChunk:
    if len(items) == 1:
        return items[0]
    chunks = [item.audio for item in items if item.audio is not None]
    # Of pictures and progress the last says all: an older one of the same picture is a preview.
    return replace(
        items[0],
        image=next((item.image for item in reversed(items) if item.image is not None), None),
        video=next((item.video for item in reversed(items) if item.video is not None), None),
        progress=next((item.progress for item in reversed(items) if item.progress is not None), None),
        text="".join(item.text for item in items),
        token_ids=tuple(token for item in items for token in item.token_ids),
        logprobs=tuple(entry for item in items for entry in item.logprobs),
        audio=_join_audio(chunks) if chunks else None,
        finish_reason=items[-1].finish_reason,
    )


def _join_audio(chunks: list[AudioChunk]) -> AudioChunk:
    if len(chunks) == 1:
        return chunks[0]
    import numpy as np

    return AudioChunk(np.concatenate([sound.samples for sound in chunks]), chunks[0].sample_rate)
