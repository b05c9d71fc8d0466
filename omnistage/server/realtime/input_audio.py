"""The input audio buffer: audio that is not yet part of a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import LimitExceededError
from omnistage.media.audio import StreamResampler
from omnistage.media.vad import FRAME, RATE, Silero, TurnDetector
from omnistage.server.realtime.audio import RATES, FormatName
from omnistage.server.realtime.config import TurnDetection

SAMPLE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """Speech started at position `start`, padding included, or stopped at `end`."""

    kind: Literal["started", "stopped"]
    start: int
    end: int


class InputAudio:
    """A bounded buffer with turn detection. Positions count all samples since the buffer was made.

    With turn detection it keeps only the padding before a turn until one starts; a turn that would exceed the bound
    ends there and another starts. `append` computes and belongs in a worker thread; the other methods are cheap.
    """

    def __init__(
        self, format: FormatName, detection: TurnDetection | None, max_seconds: float, start_ms: int = 0
    ) -> None:
        self.format = format
        self.rate = RATES[format]
        self._max_samples = int(max_seconds * self.rate)
        self._start_ms = start_ms
        self._buffer = bytearray()
        self._start = 0
        """The position of the first sample in the buffer."""
        self._turn_start: int | None = None
        """The start of the current turn."""
        self._last_turn_end = 0
        """The next turn's padding does not reach before it."""
        self._vad: Silero | None = None
        self.detection: TurnDetection | None = None
        self.set_detection(detection)

    def set_detection(self, detection: TurnDetection | None) -> None:
        """Detect turns in this way from here on, or no longer. The buffer's content stays."""
        if detection is None:
            self._vad = self._turn_start = None
        elif self._vad is None:
            self._vad = Silero()
            self._to_vad = StreamResampler(self.rate, RATE, "MQ")
            self._vad_start, self._frames = self.end, 0
        if detection is not None:
            speaking = self._turn_start is not None
            self._detector = TurnDetector(detection.threshold, detection.silence_duration_ms, speaking)
        self.detection = detection

    def __len__(self) -> int:
        return len(self._buffer) // SAMPLE_BYTES

    @property
    def nbytes(self) -> int:
        return len(self._buffer)

    @property
    def end(self) -> int:
        return self._start + len(self)

    def ms(self, position: int) -> int:
        """A position as milliseconds since the session started."""
        return self._start_ms + position * 1000 // self.rate

    @property
    def seconds(self) -> float:
        return len(self) / self.rate

    def append(self, samples: NDArray[np.int16]) -> list[Turn]:
        """Add audio; return the turns that it starts and ends, in order."""
        if self.detection is None and len(self) + len(samples) > self._max_samples:
            raise LimitExceededError(
                f"the buffer would hold more than {self._max_samples // self.rate} s; commit or clear it first",
                param="audio",
            )
        self._buffer += samples.astype("<i2").tobytes()
        return self._detect(samples)

    def _detect(self, samples: NDArray[np.int16]) -> list[Turn]:
        if self._vad is None or self.detection is None:
            return []
        padding = min(self.detection.prefix_padding_ms * self.rate // 1000, self._max_samples // 2)
        turns: list[Turn] = []
        for probability in self._vad.push(self._to_vad.push(samples.astype(np.float32) / 32768.0)):
            kind = self._detector.push(probability)
            if kind == "started":
                self._turn_start = max(self._last_turn_end, self._start, self._vad_position - padding)
                turns.append(Turn(kind, self._turn_start, self._turn_start))
            self._frames += 1
            start, position = self._turn_start, self._vad_position
            if start is not None and (kind == "stopped" or position - start >= self._max_samples):
                self._last_turn_end = min(position, self.end, start + self._max_samples)
                turns.append(Turn("stopped", start, self._last_turn_end))
                self._turn_start, self._detector.speaking = None, False
        if all(turn.kind == "started" for turn in turns):  # a stopped turn is still to be taken
            self._drop(self._vad_position - padding if self._turn_start is None else self._turn_start)
        return turns

    @property
    def _vad_position(self) -> int:
        """The position up to which the network has run."""
        return self._vad_start + self._frames * FRAME * self.rate // RATE

    def take(self, start: int, end: int) -> NDArray[np.int16]:
        """The audio between two positions; everything before `end` is dropped."""
        first, last = (max(position - self._start, 0) * SAMPLE_BYTES for position in (start, end))
        samples = np.frombuffer(bytes(self._buffer[first:last]), dtype="<i2").astype(np.int16)
        self._drop(end)
        return samples

    def take_all(self) -> NDArray[np.int16]:
        """The whole buffer, up to the bound. Speech that goes on starts another turn."""
        self._turn_start = None
        self.set_detection(self.detection)
        # A turn may exceed the bound by a frame before that is noticed.
        return self.take(self.end - self._max_samples, self.end)

    def clear(self) -> None:
        """Drop everything and restart turn detection."""
        detection = self.detection
        self.set_detection(None)
        self._drop(self.end)
        self.set_detection(detection)

    def _drop(self, before: int) -> None:
        count = min(max(before - self._start, 0), len(self))
        del self._buffer[: count * SAMPLE_BYTES]
        self._start += count
