"""Audio files: whole, or piece by piece while the audio is generated."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from omnistage.media import audio_output
from omnistage.media.audio_output import AudioOutput

if TYPE_CHECKING:
    from av.audio.stream import AudioStream

CONTENT_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
_UNKNOWN = 0xFFFFFFFF
"""The length in a WAV header that is written before it is known."""
_COMMON_RATE = 48_000
"""Hz, for encoders that do not support the model's."""


@dataclass(frozen=True, slots=True)
class _Codec:
    name: str
    container: str
    sample_format: str
    bit_rate: int | None = None
    page_microseconds: int | None = None


_CODECS = {
    "flac": _Codec("flac", "flac", "s16"),
    "mp3": _Codec("libmp3lame", "mp3", "fltp", bit_rate=128_000),
    # Ogg would collect a second of audio in each of its pages.
    "opus": _Codec("libopus", "ogg", "flt", page_microseconds=100_000),
    "aac": _Codec("aac", "adts", "fltp"),
}


def pcm16(samples: NDArray[np.float32]) -> bytes:
    """Signed 16-bit little-endian, mono: bare samples have no place to say that there are more channels."""
    return _integers(samples if samples.ndim == 1 else samples.mean(axis=1)).tobytes()


def _integers(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return (np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2")


def encode_audio(audio: AudioOutput, format: str) -> bytes:
    """Whole audio in one of `CONTENT_TYPES`."""
    if format in ("wav", "flac", "mp3"):  # whose headers can say how long whole audio is
        return audio_output.encode_audio(audio.samples, audio.sample_rate, f".{format}")
    writer = audio_writer(format, audio.sample_rate, audio.channels)
    return writer.write(audio.samples) + writer.finish()


# --------------------------------------------------------------------------------------------- piece by piece


class AudioWriter(Protocol):
    """A file that grows with its audio. Not thread-safe."""

    def write(self, samples: NDArray[np.float32]) -> bytes:
        """Add samples `[n]`, or `[n, channels]` where the writer has several.

        Returns the bytes that the file has gained, which may be none yet.
        """

    def finish(self) -> bytes:
        """The rest of the file."""


def audio_writer(format: str, sample_rate: int, channels: int = 1) -> AudioWriter:
    """A writer for one of `CONTENT_TYPES`. Its file does not say how long it is."""
    if format in ("pcm", "pcm16"):
        return _PcmWriter(b"", pcm16)
    if format == "wav":
        return _PcmWriter(_wav_head(sample_rate, channels), lambda samples: _integers(samples).tobytes())
    return _CodecWriter(_CODECS[format], sample_rate, channels)


def _wav_head(rate: int, channels: int) -> bytes:
    frame = 2 * channels
    shape = struct.pack("<IHHIIHH", 16, 1, channels, rate, frame * rate, frame, 16)  # plain samples, 16 bits
    return b"RIFF" + struct.pack("<I", _UNKNOWN) + b"WAVEfmt " + shape + b"data" + struct.pack("<I", _UNKNOWN)


class _PcmWriter:
    def __init__(self, head: bytes, encode: Callable[[NDArray[np.float32]], bytes]) -> None:
        self._head = head
        self._encode = encode

    def write(self, samples: NDArray[np.float32]) -> bytes:
        head, self._head = self._head, b""
        return head + self._encode(samples)

    def finish(self) -> bytes:
        return b""


class _Unsent:
    """A file for PyAV that cannot seek: what was taken out of it has been sent."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> int:
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._bytes)
        self._bytes.clear()
        return data


class _CodecWriter:
    """One encoder for the whole audio, and a container that passes on every packet at once."""

    def __init__(self, codec: _Codec, sample_rate: int, channels: int) -> None:
        import av

        self._rate = sample_rate
        self._layout = "stereo" if channels == 2 else "mono"
        self._kind = "s16" if codec.sample_format == "s16" else "flt"
        self._file = _Unsent()
        options = {"flush_packets": "1"}
        if codec.page_microseconds is not None:
            options["page_duration"] = str(codec.page_microseconds)
        self._container = av.open(self._file, "w", format=codec.container, options=options)
        rates = av.Codec(codec.name, "w").audio_rates
        rate = sample_rate if rates is None or sample_rate in rates else _COMMON_RATE
        stream = cast("AudioStream", self._container.add_stream(codec.name, rate=rate))
        stream.layout = self._layout
        stream.format = codec.sample_format
        if codec.bit_rate is not None:
            stream.bit_rate = codec.bit_rate
        self._stream = stream

    def write(self, samples: NDArray[np.float32]) -> bytes:
        import av

        if not len(samples):
            return b""
        # Integers by our own rounding, so that lossless formats hold the same samples as the plain ones.
        values = _integers(samples) if self._kind == "s16" else np.clip(samples, -1.0, 1.0)
        packed: NDArray[Any] = np.ascontiguousarray(values).reshape(1, -1)  # channels side by side
        frame = av.AudioFrame.from_ndarray(packed, format=self._kind, layout=self._layout)
        frame.sample_rate = self._rate
        self._container.mux(self._stream.encode(frame))
        return self._file.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.take()
