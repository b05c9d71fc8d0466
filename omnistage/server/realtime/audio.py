"""Audio on the wire: the formats of the realtime protocol."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Literal

import numpy as np
import soundfile
from numpy.typing import NDArray

from omnistage.core.errors import InvalidRequestError
from omnistage.server.openai.audio.encode import pcm16

FormatName = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
RATES: dict[str, int] = {"audio/pcm": 24_000, "audio/pcmu": 8_000, "audio/pcma": 8_000}
_SAMPLE_BYTES = {"audio/pcm": 2, "audio/pcmu": 1, "audio/pcma": 1}
_SUBTYPES = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}


def from_base64(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError("is not valid base64; encode the bytes again", param=param) from None


def base64_seconds(text: str, format: FormatName) -> float:
    """The duration of base64 audio, without decoding it."""
    return (len(text.rstrip("=")) * 3 // 4) / (_SAMPLE_BYTES[format] * RATES[format])


def decode(data: bytes, format: FormatName, param: str) -> NDArray[np.int16]:
    """The samples of headerless audio, `int16 [n]` at the format's rate."""
    if format == "audio/pcm":
        if len(data) % 2:
            raise InvalidRequestError(
                f"has an odd number of bytes ({len(data)}); send whole 16-bit samples", param=param
            )
        return np.frombuffer(data, dtype="<i2").astype(np.int16)
    if not data:
        return np.zeros(0, np.int16)
    raw = {"samplerate": RATES[format], "channels": 1, "format": "RAW", "subtype": _SUBTYPES[format]}
    samples, _ = soundfile.read(io.BytesIO(data), dtype="int16", **raw)
    return np.asarray(samples, dtype=np.int16)


def encode(samples: NDArray[np.float32], format: FormatName) -> bytes:
    """Samples at the format's rate as headerless bytes."""
    if format == "audio/pcm":
        return pcm16(samples)
    encoded = io.BytesIO()
    clipped = np.clip(samples, -1.0, 1.0)
    soundfile.write(encoded, clipped, RATES[format], format="RAW", subtype=_SUBTYPES[format])
    return encoded.getvalue()
