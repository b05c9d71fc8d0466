"""Decoded audio and video, as prompts carry them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """Decoded audio: `samples` is mono float32 `[n]`, n > 0, all finite."""

    samples: NDArray[np.float32]
    sample_rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate

    def __repr__(self) -> str:
        return f"AudioClip({self.seconds:.2f} s at {self.sample_rate} Hz)"


@dataclass(frozen=True, slots=True, eq=False)
class VideoClip:
    """Sampled video: `frames` is RGB uint8 `[n, h, w, 3]`, `fps` the rate of those frames, `seconds` the length."""

    frames: NDArray[np.uint8]
    fps: float
    seconds: float
    audio: AudioClip | None = None

    def __repr__(self) -> str:
        count, height, width, _ = self.frames.shape
        audio = "with" if self.audio is not None else "without"
        return (
            f"VideoClip({count} frames of {width}x{height} at {self.fps:.2f} fps, {self.seconds:.2f} s, {audio} audio)"
        )
