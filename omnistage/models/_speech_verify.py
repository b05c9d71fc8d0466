"""What the comparisons of families that speak share: words to say, the codes behind the sound, and the sound itself."""

from __future__ import annotations

import numpy as np

from omnistage.core.family import Bridge, BridgeResult
from omnistage.core.types import Code, CodecFrames, CodecInput, RequestInfo, StageChunk
from omnistage.core.verification import VerifyRow

WAVE_TOLERANCE = 1e-3
SILENCE = np.zeros(0, dtype=np.float32)
_WORDS = ("please", "tell", "me", "what", "you", "hear", "and", "see", "in", "this", "one", "😀", "第三", "Straße")


def random_words(rng: np.random.Generator) -> str:
    """One to eight words."""
    return " ".join(rng.choice(_WORDS, size=int(rng.integers(1, 9))))


def recording(bridge: Bridge, codes: dict[str, list[Code]]) -> Bridge:
    """The bridge into a codec stage; the codes that it passes on are added to `codes`, by request."""

    def record(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        state, inputs = bridge(request, state, chunk)
        for value in inputs:
            if isinstance(value, CodecInput | CodecFrames):
                codes.setdefault(request.request_id, []).extend(value.codes)
        return state, inputs

    return record


def wave_row(case: str, ours: np.ndarray, theirs: np.ndarray) -> VerifyRow:
    """The largest difference of samples; infinite where there are more of one."""
    difference = float(np.abs(ours - theirs).max(initial=0.0)) if len(ours) == len(theirs) else float("inf")
    return VerifyRow.judge(case, "waveform", difference, WAVE_TOLERANCE)
