"""Voice activity detection: silero's network on an audio stream, and turns from its probabilities.

The network is the ONNX file of the package `silero-vad`; none of its Python code is imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import MissingDependencyError

RATE = 16_000
FRAME = 512
"""Samples of one inference."""
FRAME_MS = FRAME * 1000 // RATE
_CONTEXT = 64
_HYSTERESIS = 0.15
"""Ongoing speech stays speech until its probability is this far below the threshold."""
_MISSING = "detecting speech needs more packages: pip install 'omnistage[realtime]'"


class _Network(Protocol):
    """`onnxruntime.InferenceSession`, as far as it is used."""

    def run(self, names: None, inputs: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.float32]]: ...


def _model_path() -> Path | None:
    """silero's network; None where it, or onnxruntime, is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    try:
        package = importlib.metadata.distribution("silero-vad")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file("silero_vad/data/silero_vad.onnx")))
    return path if path.is_file() else None


def vad_available() -> bool:
    return _model_path() is not None


def require_vad() -> Path:
    path = _model_path()
    if path is None:
        raise MissingDependencyError(_MISSING)
    return path


@functools.cache
def _network() -> _Network:
    """The network, shared by all streams: its state is an input and an output. `run` is thread-safe."""
    path = require_vad()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    network: _Network = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return network


class Silero:
    """The speech probability of each frame of one stream."""

    def __init__(self) -> None:
        self._network = _network()
        self.reset()

    def reset(self) -> None:
        """Start a new stream."""
        self._state = np.zeros((2, 1, 128), np.float32)
        self._context = np.zeros(_CONTEXT, np.float32)
        self._rest = np.zeros(0, np.float32)

    def push(self, samples: NDArray[np.float32]) -> list[float]:
        """A probability for each frame that these samples (at 16 kHz) complete."""
        pending = np.concatenate([self._rest, samples])
        whole = len(pending) // FRAME * FRAME
        self._rest = pending[whole:]
        return [self._frame(pending[start : start + FRAME]) for start in range(0, whole, FRAME)]

    def _frame(self, frame: NDArray[np.float32]) -> float:
        window = np.concatenate([self._context, frame])
        inputs = {"input": window[None], "state": self._state, "sr": np.array(RATE, np.int64)}
        probability, self._state = self._network.run(None, inputs)
        self._context = window[-_CONTEXT:]
        return float(probability[0, 0])


def speech_spans(samples: NDArray[np.float32], threshold: float = 0.5) -> list[tuple[int, int]]:
    """Where speech is in a clip at 16 kHz: the first sample of each stretch, and the one after its last."""
    spans: list[tuple[int, int]] = []
    speaking = False
    for number, probability in enumerate(Silero().push(samples)):
        continues, speaking = speaking, probability >= threshold - (_HYSTERESIS if speaking else 0.0)
        if speaking:
            start = spans.pop()[0] if continues else number * FRAME
            spans.append((start, (number + 1) * FRAME))
    return spans


@dataclass(slots=True)
class TurnDetector:
    """Turns from probabilities, frame by frame."""

    threshold: float = 0.5
    silence_ms: int = 500
    speaking: bool = False
    _silent_frames: int = 0

    def push(self, probability: float) -> Literal["started", "stopped"] | None:
        """What this frame is: the first of a turn, the last of the silence that ends one, or neither."""
        if not self.speaking:
            self.speaking = probability >= self.threshold
            self._silent_frames = 0
            return "started" if self.speaking else None
        if probability >= self.threshold - _HYSTERESIS:
            self._silent_frames = 0
            return None
        self._silent_frames += 1
        if self._silent_frames * FRAME_MS < self.silence_ms:
            return None
        self.speaking = False
        return "stopped"
