"""The sound stage: a code is a pitch, and a tone goes on without a click from one code to the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from omnistage.core.params import CodecParams
from omnistage.engines.codec import CodecComponent, CodecLayout, Window

CODES = 64
LOWEST_HZ = {"low": 110.0, "high": 440.0}
SAMPLES_PER_CODE = 800


@dataclass
class Tone:
    """A request's state: where its wave stands."""

    lowest: float
    phase: float = 0.0


class Beeper(CodecComponent):
    """Causal, so it needs neither context nor look-ahead."""

    sample_rate = 16_000
    layout = CodecLayout(block_codes=4, codebook_size=CODES, max_codes=4096)

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(LOWEST_HZ)

    def group(self, params: CodecParams) -> Hashable:
        return None

    def open(self, request_id: str, params: CodecParams, voice: str | None) -> Tone:
        return Tone(LOWEST_HZ[voice or "low"])

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        sounds, ends = [], []
        for window in windows:
            new = np.array(window.codes[window.history : window.history + window.emit], dtype=np.float64)
            hertz = window.state.lowest * 2 ** (new / 24)
            steps = np.repeat(2 * np.pi * hertz / self.sample_rate, SAMPLES_PER_CODE)
            phases = window.state.phase + np.cumsum(steps)
            sounds.append((0.3 * np.sin(phases)).astype(np.float32))
            ends.append(float(phases[-1]) if len(phases) else window.state.phase)
        # Last, and only if all went well: a batch that fails is run again, one by one.
        for window, phase in zip(windows, ends, strict=True):
            window.state.phase = phase
        return sounds
