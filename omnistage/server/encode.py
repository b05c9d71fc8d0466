"""Sound and pictures as clients ask for them, in bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.media.audio_output import AudioOutput, encode_wav

CONTENT_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}


def pcm16(samples: NDArray[np.float32]) -> bytes:
    """Signed 16-bit little-endian."""
    return (np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2").tobytes()


def encode_audio(audio: AudioOutput, format: str) -> bytes:
    """A whole sound in one of `CONTENT_TYPES`."""
    if format in ("pcm", "pcm16"):
        return pcm16(audio.samples)
    if format == "wav":
        return encode_wav(audio.samples, audio.sample_rate)
    if format in ("opus", "aac"):
        return _encode_av(audio, format)
    import soundfile

    kind, subtype = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III")}[format]
    encoded = io.BytesIO()
    with soundfile.SoundFile(encoded, "w", audio.sample_rate, 1, subtype=subtype, format=kind) as writer:
        for start in range(0, len(audio.samples), 16_384):
            writer.write(audio.samples[start : start + 16_384])
    return encoded.getvalue()


def _encode_av(audio: AudioOutput, format: str) -> bytes:
    import av

    codec, container_format = {"opus": ("libopus", "ogg"), "aac": ("aac", "adts")}[format]
    encoded = io.BytesIO()
    with av.open(encoded, "w", format=container_format) as container:
        rate = 48_000
        stream: Any = container.add_stream(codec, rate=rate)
        stream.layout = "mono"
        resampler = av.AudioResampler(format="fltp" if format == "aac" else "flt", layout="mono", rate=rate)
        samples = np.ascontiguousarray(audio.samples, dtype=np.float32)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="flt", layout="mono")
        frame.sample_rate = audio.sample_rate
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return encoded.getvalue()
