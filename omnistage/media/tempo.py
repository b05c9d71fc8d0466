"""Speech faster or slower at its own pitch, while it streams: FFmpeg's filter `atempo`."""

from __future__ import annotations

from fractions import Fraction

import av
import av.filter
import numpy as np
from numpy.typing import NDArray

MIN_SPEED, MAX_SPEED = 0.25, 4.0
"""As with OpenAI."""
_MAX_STEP = 2.0
"""Of one filter: beyond it samples are skipped rather than blended; below its inverse there is no filter."""


class TempoStretcher:
    """Stretches a stream in time chunk by chunk; the output lags by some tens of milliseconds."""

    def __init__(self, sample_rate: int, speed: float) -> None:
        self._rate = sample_rate
        self._position = 0
        self._graph = graph = av.filter.Graph()
        options = {"sample_rate": str(sample_rate), "sample_fmt": "flt", "channel_layout": "mono"}
        nodes = [graph.add("abuffer", **options, time_base=f"1/{sample_rate}")]
        while speed != 1.0:
            step = min(max(speed, 1 / _MAX_STEP), _MAX_STEP)
            nodes.append(graph.add("atempo", repr(step)))
            speed /= step
        nodes.append(graph.add("abuffersink"))
        graph.link_nodes(*nodes).configure()

    def push(self, samples: NDArray[np.float32], *, last: bool = False) -> NDArray[np.float32]:
        """What these samples complete; with `last` also the remainder, after which nothing may follow."""
        if len(samples):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples, np.float32)[None], "flt", "mono")
            frame.sample_rate, frame.pts = self._rate, self._position
            frame.time_base = Fraction(1, self._rate)
            self._position += len(samples)
            self._graph.push(frame)
        if last:
            self._graph.push(None)
        pieces = [np.zeros(0, np.float32)]
        while True:
            try:
                pieces.append(self._graph.pull().to_ndarray()[0])
            except (av.BlockingIOError, av.EOFError):
                return np.concatenate(pieces)
