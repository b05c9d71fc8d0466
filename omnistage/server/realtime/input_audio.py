"""The sound that a client has sent and not yet made a message of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import LimitExceededError
from omnistage.server.realtime.audio import RATES, FormatName, RateChanger
from omnistage.server.realtime.config import ServerVad
from omnistage.server.realtime.vad import FRAME, RATE, Silero, TurnDetector

_BYTES = 2
"""Of a sample."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Somebody began to speak at one position, padding included, or stopped at the other."""

    kind: Literal["started", "stopped"]
    start: int
    end: int


class InputAudio:
    """A bounded buffer that hears turns. Positions count all samples that ever came in.

    While it listens for turns and nobody speaks, it keeps only the padding that goes before one; a turn that would
    be longer than the bound ends there, and whoever goes on begins another. `append` computes, so it belongs in a
    worker thread; nothing else here does.
    """

    def __init__(self, format: FormatName, detection: ServerVad | None, max_seconds: float, begun_ms: int = 0) -> None:
        self.format = format
        self.rate = RATES[format]
        self._most = int(max_seconds * self.rate)
        self._begun_ms = begun_ms
        self._kept = bytearray()
        self._start = 0
        """The position of the first sample that is kept."""
        self._turn: int | None = None
        """Where the turn that is being spoken began."""
        self._free = 0
        """Where the last turn ended: the next one's padding does not reach into it."""
        self._vad: Silero | None = None
        self.detection: ServerVad | None = None
        self.listen(detection)

    def listen(self, detection: ServerVad | None) -> None:
        """Listen for turns in this way from here on, or no more. What is kept stays."""
        if detection is None:
            self._vad = self._turn = None
        elif self._vad is None:
            self._vad = Silero()
            self._to_vad = RateChanger(self.rate, RATE, "MQ")
            self._vad_start, self._frames = self.end, 0
        if detection is not None:
            self._turns = TurnDetector(detection.threshold, detection.silence_duration_ms, self._turn is not None)
        self.detection = detection

    def __len__(self) -> int:
        return len(self._kept) // _BYTES

    @property
    def nbytes(self) -> int:
        return len(self._kept)

    @property
    def end(self) -> int:
        return self._start + len(self)

    def ms(self, position: int) -> int:
        """A position as milliseconds since the session began."""
        return self._begun_ms + position * 1000 // self.rate

    @property
    def seconds(self) -> float:
        return len(self) / self.rate

    def append(self, samples: NDArray[np.int16]) -> list[Turn]:
        """Keep more sound; the turns that it begins and ends, in order."""
        listens = self._vad is not None and self.detection is not None
        if not listens and len(self) + len(samples) > self._most:
            raise LimitExceededError(
                f"the buffer would hold more than {self._most // self.rate} s; commit or clear it first", param="audio"
            )
        self._kept += samples.astype("<i2").tobytes()
        return self._hear(samples) if listens else []

    def _hear(self, samples: NDArray[np.int16]) -> list[Turn]:
        if self._vad is None or self.detection is None:
            return []
        padding = min(self.detection.prefix_padding_ms * self.rate // 1000, self._most // 2)
        turns: list[Turn] = []
        for probability in self._vad.push(self._to_vad.push(samples.astype(np.float32) / 32768.0)):
            kind = self._turns.push(probability)
            if kind == "started":
                self._turn = max(self._free, self._start, self._heard - padding)
                turns.append(Turn(kind, self._turn, self._turn))
            self._frames += 1
            if self._turn is not None and (kind == "stopped" or self._heard - self._turn >= self._most):
                self._free = min(self._heard, self.end, self._turn + self._most)
                turns.append(Turn("stopped", self._turn, self._free))
                self._turn, self._turns.speaking = None, False
        if all(turn.kind == "started" for turn in turns):  # what has stopped is still to be taken
            self._drop(self._heard - padding if self._turn is None else self._turn)
        return turns

    @property
    def _heard(self) -> int:
        """The position up to which the network has listened."""
        return self._vad_start + self._frames * FRAME * self.rate // RATE

    def take(self, start: int, end: int) -> NDArray[np.int16]:
        """What is kept between two positions; all that is before the second is dropped."""
        begin, stop = max(start - self._start, 0), max(end - self._start, 0)
        taken = np.frombuffer(bytes(self._kept[begin * _BYTES : stop * _BYTES]), dtype="<i2").astype(np.int16)
        self._drop(end)
        return taken

    def take_all(self) -> NDArray[np.int16]:
        """Everything that is kept, as far as the bound. Whoever still speaks begins another turn."""
        self._turn = None
        self.listen(self.detection)
        # A turn may be a frame over the bound before that is heard.
        return self.take(self.end - self._most, self.end)

    def clear(self) -> None:
        """Drop everything, and listen as if nothing had been heard: what follows is another sound."""
        detection = self.detection
        self.listen(None)
        self._drop(self.end)
        self.listen(detection)

    def _drop(self, before: int) -> None:
        count = min(max(before - self._start, 0), len(self))
        del self._kept[: count * _BYTES]
        self._start += count
