"""Decoding audio: everything becomes mono float32, with limits checked from the header and again while decoding."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable, Iterator

import av
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from omnistage.core.cancellation import current_cancellation
from omnistage.core.clips import AudioClip
from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media.budget import current_hold
from omnistage.media.container import check_decoder, open_container
from omnistage.media.decode_pool import active_decode_pool
from omnistage.media.limits import MediaLimits, Need, no_need
from omnistage.media.source import BytesSource, load_bytes

PCM16_RATE = 24_000
MIN_RATE, MAX_RATE = 1_000, 384_000
_MAX_CHANNELS = 32
_BLOCK_FRAMES = 65_536
_MAX_SAMPLE = 2.0**31
"""As 32-bit integers have them that nobody scaled; spectra of far larger ones are infinite."""
_MARGIN_SECONDS = 1.0
"""That a clip may be longer than its header says: encoders pad."""
# Placeholders in the headers of WAV files that were written as a stream.
_UNKNOWN_WAV_SIZES = (0, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFFFFF, 0xFFFFF000)
AudioSource = BytesSource | AudioClip | tuple[NDArray[np.generic], int]


def decode_audio(
    source: AudioSource,
    limits: MediaLimits,
    target_rate: int | None = None,
    *,
    format: str | None = None,
    bare_base64: bool = False,
) -> AudioClip:
    """Return `source` as mono float32, resampled to `target_rate` where one is given.

    `source` is what `load_bytes` takes, a clip, or `(samples, rate)` with samples `[n]` or `[n, channels]`, float
    or int16/int32. Channels are averaged. `format="pcm16"` means headerless 16-bit little-endian mono at 24 kHz; any
    other container is recognised by its content. Audio longer than `limits.max_audio_seconds` is refused from its
    header, or as soon as decoding passes the limit. Encoded audio is decoded in another process where
    `use_decode_pool` has set that up.
    """
    if target_rate is not None:
        _check_rate(target_rate, InvalidRequestError)
    if isinstance(source, AudioClip):
        source = (source.samples, source.sample_rate)
    array = _checked_array(source) if isinstance(source, tuple) else None
    if not isinstance(source, tuple):
        data = load_bytes(source, limits, bare_base64=bare_base64)
        if format == "pcm16":
            if len(data) % 2:
                raise MediaError(f"pcm16 audio has an odd number of bytes ({len(data)}); send whole 16-bit samples")
            array = np.frombuffer(data, dtype="<i2"), PCM16_RATE
    with current_hold().decoding() as item:
        if array is not None:
            clip = _from_array(*array, target_rate, limits.max_audio_seconds, item.need)
        elif (pool := active_decode_pool()) is not None:
            clip = pool.decode_audio(data, limits, target_rate, item)
        else:
            clip = decode_audio_bytes(data, limits, target_rate, item.need)
        item.keep(clip.samples.nbytes)
        return clip


def decode_audio_bytes(data: bytes, limits: MediaLimits, target_rate: int | None, need: Need = no_need) -> AudioClip:
    """Decode an audio file in this process."""
    seconds = limits.max_audio_seconds
    _check_seconds(_wav_header_seconds(data), seconds)
    file = _open_soundfile(data)
    if file is not None:
        with file:
            return _decode_soundfile(file, target_rate, seconds, need)
    clip = decode_audio_track(data, target_rate, max_seconds=seconds, kind="audio", need=need)
    if clip is None:
        raise MediaError("the file has no audio track; send an audio file, or a video with audio")
    return clip


def decode_audio_track(
    data: bytes, target_rate: int | None, *, max_seconds: float, kind: str, need: Need = no_need
) -> AudioClip | None:
    """Return the first audio track of any container that FFmpeg reads, or None where there is no such track."""
    # A cover image inside a music file needs a frame too, but never a large one.
    with open_container(data, kind, max_frame_pixels=4096 * 4096) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        check_decoder(stream, kind)
        seconds = None
        if stream.duration is not None and stream.time_base is not None:
            seconds = float(stream.duration * stream.time_base)
        elif container.duration is not None:
            seconds = container.duration / av.time_base
        rate = stream.codec_context.sample_rate
        _check_rate(rate, MediaError)
        length = _Length(seconds, max_seconds, rate if target_rate is None else target_rate, need)
        return _collect(_decoded_blocks(container.decode(stream), rate), rate, target_rate, length)


def _open_soundfile(data: bytes) -> soundfile.SoundFile | None:
    """The file if soundfile can read it. It fails to seek in streamed FLAC, which has no length."""
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError:
        return None
    if file.format == "FLAC" and file.frames == np.iinfo(np.int64).max:
        file.close()
        return None
    return file


def _decode_soundfile(file: soundfile.SoundFile, target_rate: int | None, max_seconds: float, need: Need) -> AudioClip:
    rate = int(file.samplerate)
    _check_rate(rate, MediaError)
    _check_channels(file.channels)
    # Some formats have no length in their header and report the largest integer.
    seconds = file.frames / rate if file.frames < np.iinfo(np.int64).max else None
    length = _Length(seconds, max_seconds, rate if target_rate is None else target_rate, need)
    try:
        return _collect(_file_blocks(file), rate, target_rate, length)
    except soundfile.SoundFileError as error:
        raise MediaError(f"audio does not decode ({error}); the file may be truncated or damaged") from error


def _file_blocks(file: soundfile.SoundFile) -> Iterator[NDArray[np.generic]]:
    # Not SoundFile.blocks: it yields empty blocks for as long as the header promises samples.
    while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
        yield block


def _decoded_blocks(frames: Iterable[av.AudioFrame], rate: int) -> Iterator[NDArray[np.generic]]:
    """Yield each frame as float32 `[n, channels]`."""
    to_float = av.AudioResampler(format="fltp")
    for frame in frames:
        if frame.sample_rate != rate:
            raise MediaError(f"audio changes its rate from {rate} to {frame.sample_rate} Hz midway; encode it again")
        _check_channels(frame.layout.nb_channels)
        try:
            converted = to_float.resample(frame)
        except ValueError as error:
            raise MediaError(f"audio changes its layout midway ({error}); encode it again") from error
        for piece in converted:
            yield piece.to_ndarray().T


class _Length:
    """How long a clip may be, checked by its header and again while it is decoded; and memory for as much."""

    def __init__(self, seconds: float | None, max_seconds: float, rate: int, need: Need) -> None:
        """`seconds` by its header, None where it does not say; `rate` of what is decoded."""
        self._max_seconds = max_seconds
        self._rate = rate
        self._need = need
        self._expected = 0.0
        self._expect(max_seconds if seconds is None else seconds)

    def check(self, seconds: float) -> None:
        """Raise if it is too long, so far."""
        _check_seconds(seconds, self._max_seconds)
        if seconds > self._expected:  # the header is wrong
            self._expect(self._max_seconds)

    def _expect(self, seconds: float) -> None:
        _check_seconds(seconds, self._max_seconds)
        self._expected = min(max(seconds, 0.0) + _MARGIN_SECONDS, self._max_seconds)
        self._need(math.ceil(self._expected * self._rate) * 4)


def _collect(blocks: Iterable[NDArray[np.generic]], rate: int, target_rate: int | None, length: _Length) -> AudioClip:
    """Average channels, check and resample block by block, so that memory follows the result and not the source."""
    resampler = StreamResampler(rate, rate if target_rate is None else target_rate)
    pieces: list[NDArray[np.float32]] = []
    count = 0
    cancellation = current_cancellation()
    for block in blocks:
        cancellation.check()
        count += len(block)
        length.check(count / rate)
        mono = _to_mono(block)
        if not np.isfinite(mono).all():
            raise MediaError("audio has NaN or infinite samples; encode it again")
        if np.abs(mono).max(initial=0.0) > _MAX_SAMPLE:
            raise MediaError(f"audio has samples over {_MAX_SAMPLE:g}, where 1 is full scale; scale it to -1..1")
        pieces.append(resampler.push(mono))
    samples = np.concatenate([*pieces, resampler.push(np.zeros(0, np.float32), last=True)])
    if count == 0 or len(samples) == 0:
        raise MediaError("audio has no samples; send at least a few milliseconds")
    return AudioClip(samples, rate if target_rate is None else target_rate)


class StreamResampler:
    """Resamples a stream chunk by chunk; the output lags a little and stays aligned."""

    def __init__(self, source: int, target: int, quality: str = "HQ") -> None:
        self._stream = None
        if source != target:
            self._stream = soxr.ResampleStream(source, target, 1, dtype="float32", quality=quality)

    def push(self, samples: NDArray[np.float32], *, last: bool = False) -> NDArray[np.float32]:
        """What these samples complete; with `last` also the remainder, after which nothing may follow."""
        if self._stream is None:
            return samples
        return np.asarray(self._stream.resample_chunk(samples, last=last), dtype=np.float32)


def _to_mono(block: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return a new `[n]` float32 array; integers are scaled to -1..1."""
    scale = 2.0 ** (1 - 8 * block.dtype.itemsize) if block.dtype.kind == "i" else 1.0
    mono = block.mean(axis=1, dtype=np.float64) if block.ndim == 2 else block.astype(np.float64)
    with np.errstate(over="ignore"):
        return (mono * scale).astype(np.float32)


def _from_array(
    samples: NDArray[np.generic], rate: int, target_rate: int | None, max_seconds: float, need: Need
) -> AudioClip:
    length = _Length(len(samples) / rate, max_seconds, rate if target_rate is None else target_rate, need)
    blocks = (samples[start : start + _BLOCK_FRAMES] for start in range(0, len(samples), _BLOCK_FRAMES))
    return _collect(blocks, rate, target_rate, length)


def _checked_array(source: tuple[object, ...]) -> tuple[NDArray[np.generic], int]:
    samples, rate = source if len(source) == 2 else (None, None)
    if not isinstance(samples, np.ndarray):
        raise InvalidRequestError("audio as a tuple must be (numpy samples, sample rate)")
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer):
        raise InvalidRequestError(f"the sample rate must be a whole number of Hz, got {type(rate).__name__}")
    _check_rate(int(rate), InvalidRequestError)
    if samples.ndim not in (1, 2):
        raise InvalidRequestError(f"audio array has shape {samples.shape}; give [n] or [n, channels]")
    if samples.ndim == 2 and not 1 <= samples.shape[1] <= _MAX_CHANNELS:
        raise InvalidRequestError(f"audio array has shape {samples.shape}; transpose it to [n, channels]")
    if samples.dtype.kind != "f" and samples.dtype not in (np.int16, np.int32):
        raise InvalidRequestError(f"audio array is of type {samples.dtype}; give floats in -1..1, int16 or int32")
    return samples, int(rate)


def _check_rate(rate: int, error: type[InvalidRequestError]) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise error(f"a sample rate of {rate} Hz is outside {MIN_RATE}..{MAX_RATE}; resample the audio")


def _check_channels(channels: int) -> None:
    if channels > _MAX_CHANNELS:
        raise MediaError(f"audio has {channels} channels, more than {_MAX_CHANNELS}; mix it down")


def _check_seconds(seconds: float, max_seconds: float) -> None:
    if seconds > max_seconds:
        raise LimitExceededError(
            f"audio of at least {seconds:.2f} seconds is over the limit of {max_seconds:g}; send less"
        )


def _wav_header_seconds(data: bytes) -> float:
    """The duration in a WAV header, 0 where it has none. libsndfile reports the file's real length instead."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return 0.0
    bytes_per_second, position = 0, 12
    while position + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, position)
        if name == b"fmt " and position + 20 <= len(data):
            bytes_per_second = struct.unpack_from("<I", data, position + 16)[0]
        if name == b"data":
            known = bytes_per_second > 0 and size not in _UNKNOWN_WAV_SIZES
            return size / bytes_per_second if known else 0.0
        position += 8 + size + size % 2
    return 0.0
