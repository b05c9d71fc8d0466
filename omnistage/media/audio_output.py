"""Encoding generated audio."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from omnistage.core.errors import InvalidRequestError, MediaError

_FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}
# libsndfile's Vorbis encoder keeps a write's samples on the stack and overflows it with long ones.
_BLOCK_FRAMES = 16_384
_MAX_CHANNELS = 2


@dataclass(frozen=True, slots=True, eq=False)
class AudioOutput:
    """Generated audio: `samples` is float32 in -1..1, mono `[n]` or several channels `[n, channels]`."""

    samples: NDArray[np.float32]
    sample_rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate

    @property
    def channels(self) -> int:
        return channels_of(self.samples)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path` in the format of its extension (wav, flac, ogg, mp3) and return the path."""
        target = Path(path)
        if target.suffix.lower() not in _FORMATS:
            raise InvalidRequestError(f"cannot save audio as {target.name!r}; end the name in {', '.join(_FORMATS)}")
        target.write_bytes(encode_audio(self.samples, self.sample_rate, target.suffix.lower()))
        return target

    def to_wav_bytes(self) -> bytes:
        return encode_wav(self.samples, self.sample_rate)

    def __repr__(self) -> str:
        return f"AudioOutput({self.seconds:.2f} s at {self.sample_rate} Hz)"


def channels_of(samples: NDArray[np.generic]) -> int:
    """The channels of samples `[n]` or `[n, channels]`."""
    return 1 if samples.ndim == 1 else int(samples.shape[1])


def encode_wav(samples: NDArray[np.generic], rate: int) -> bytes:
    """Return samples `[n]` or `[n, channels]` as a 16-bit WAV file; values beyond -1..1 are clipped, NaN refused."""
    return encode_audio(samples, rate, ".wav")


def encode_audio(samples: NDArray[np.generic], rate: int, extension: str) -> bytes:
    """The same for any extension that `AudioOutput.save` takes."""
    if samples.ndim not in (1, 2) or not 1 <= channels_of(samples) <= _MAX_CHANNELS or samples.dtype.kind != "f":
        raise MediaError(f"audio to encode must be floats [n] or [n, 2], got {samples.dtype} {samples.shape}")
    if not np.isfinite(samples).all():
        raise MediaError("audio to encode has NaN or infinite samples")
    kind, subtype = _FORMATS[extension]
    clipped, encoded = np.clip(samples, -1.0, 1.0).astype(np.float32), io.BytesIO()
    try:
        channels = channels_of(samples)
        with soundfile.SoundFile(encoded, "w", rate, channels, subtype=subtype, format=kind) as writer:
            for start in range(0, len(clipped), _BLOCK_FRAMES):
                writer.write(clipped[start : start + _BLOCK_FRAMES])
    except soundfile.SoundFileError as error:
        raise MediaError(f"cannot encode {extension[1:]} at {rate} Hz ({error}); use wav, or another rate") from error
    return encoded.getvalue()
