"""Who is speaking, and when do they stop: silero's network on a stream of sound, and what its numbers mean for turns.

The network is the ONNX file of the package `silero-vad`; of its Python code nothing is imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import MissingDependencyError

RATE = 16_000
FRAME = 512
"""Samples that the network hears at once."""
FRAME_MS = FRAME * 1000 // RATE
_CONTEXT = 64
_HYSTERESIS = 0.15
"""Speech that goes on may be this much less certain than speech that begins."""
_MISSING = "hearing when somebody speaks needs more packages on the server: pip install 'omnistage[realtime]'"


def _file() -> Path | None:
    """Where silero's network lies; None where what runs it is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    try:
        found = importlib.metadata.distribution("silero-vad")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(found.locate_file("silero_vad/data/silero_vad.onnx")))
    return path if path.is_file() else None


def available() -> bool:
    """Whether turns can be heard here."""
    return _file() is not None


def check_available() -> None:
    if not available():
        raise MissingDependencyError(_MISSING)


@functools.cache
def _network() -> Any:
    """The network, shared by all: what it remembers is handed in and out. Its `run` may be called from any thread."""
    path = _file()
    if path is None:
        raise MissingDependencyError(_MISSING)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Silero:
    """How likely each frame of one stream is speech."""

    def __init__(self) -> None:
        self._run = _network().run
        self.reset()

    def reset(self) -> None:
        """Forget all that was heard."""
        self._state = np.zeros((2, 1, 128), np.float32)
        self._context = np.zeros(_CONTEXT, np.float32)
        self._rest = np.zeros(0, np.float32)

    def push(self, samples: NDArray[np.float32]) -> list[float]:
        """A probability for each frame that these samples (at 16 kHz) complete."""
        heard = np.concatenate([self._rest, samples])
        whole = len(heard) // FRAME * FRAME
        self._rest = heard[whole:]
        return [self._frame(heard[start : start + FRAME]) for start in range(0, whole, FRAME)]

    def _frame(self, frame: NDArray[np.float32]) -> float:
        sound = np.concatenate([self._context, frame])
        inputs = {"input": sound[None], "state": self._state, "sr": np.array(RATE, np.int64)}
        probability, self._state = self._run(None, inputs)
        self._context = sound[-_CONTEXT:]
        return float(probability[0, 0])


@dataclass(slots=True)
class TurnDetector:
    """Turns out of probabilities, a frame at a time."""

    threshold: float = 0.5
    silence_ms: int = 500
    speaking: bool = False
    _silent: int = 0
    """Frames since somebody was last heard in this turn."""

    def push(self, probability: float) -> Literal["started", "stopped"] | None:
        """What this frame means: the first of a turn, the last of the silence that ends one, or neither."""
        if not self.speaking:
            self.speaking = probability >= self.threshold
            self._silent = 0
            return "started" if self.speaking else None
        if probability >= self.threshold - _HYSTERESIS:
            self._silent = 0
            return None
        self._silent += 1
        if self._silent * FRAME_MS < self.silence_ms:
            return None
        self.speaking = False
        return "stopped"
