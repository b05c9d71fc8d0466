"""Decoding video: a bounded number of evenly spaced frames, with memory for those frames only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from omnistage.core.cancellation import current_cancellation
from omnistage.core.clips import VideoClip
from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media.audio import decode_audio_track
from omnistage.media.budget import current_hold
from omnistage.media.container import check_decoder, open_container
from omnistage.media.decode_pool import active_decode_pool
from omnistage.media.decode_protocol import VideoJob
from omnistage.media.limits import MediaLimits, Need, no_need
from omnistage.media.source import BytesSource, load_bytes

# Models that fold frames in pairs need an even number of them.
FRAME_FACTOR = 2
MIN_FRAMES = 4
# Bounds the frames to be decoded, where a file has few seconds but countless frames.
_MAX_SOURCE_FPS = 240

VideoSource = BytesSource | VideoClip | tuple[NDArray[np.generic], float]


@dataclass(frozen=True, slots=True)
class _Sampling:
    """How many frames are wanted; valid by construction."""

    fps: float
    min_frames: int
    max_frames: int

    def indices(self, total: int, seconds: float) -> NDArray[np.int64]:
        """Return the evenly spaced frames to keep, by the rule of Qwen's `smart_nframes`."""
        target = min(max(seconds * self.fps, self.min_frames), self.max_frames, total)
        count = math.floor(target / FRAME_FACTOR) * FRAME_FACTOR
        # A video of one frame keeps it: there is nothing to pair it with.
        return np.linspace(0, total - 1, max(count, min(total, FRAME_FACTOR))).round().astype(np.int64)


def decode_video(
    source: VideoSource,
    limits: MediaLimits,
    fps: float = 2.0,
    max_frames: int | None = None,
    min_frames: int = MIN_FRAMES,
    with_audio: bool = False,
    audio_rate: int = 16_000,
    max_audio_seconds: float | None = None,
) -> VideoClip:
    """Return frames of `source` sampled at `fps`, at least `min_frames` and at most `max_frames` where it has them.

    The number of frames is even (but for a video of one frame) and they are evenly spaced from the first to the
    last. `source` is what `load_bytes` takes, a clip (checked, and returned as it is) or `(frames, fps)` with
    frames uint8 `[n, h, w, 3]`. `with_audio` also decodes the first audio track, of at most `max_audio_seconds`;
    `audio` stays None where the video has none. Length and frame size are checked before decoding, and again while it
    goes on. Encoded videos are decoded in another process where `use_decode_pool` has set that up.
    """
    sampling = _sampling(fps, min_frames, max_frames, limits)
    if isinstance(source, VideoClip):
        _check_array(source.frames, limits)
        _check_frame_count(len(source.frames), limits)
        return source
    if isinstance(source, tuple):
        return _sample_array(source, sampling, limits)
    data = load_bytes(source, limits)
    pool = active_decode_pool()
    job = VideoJob(
        fps=fps,
        min_frames=min_frames,
        max_frames=max_frames,
        with_audio=with_audio,
        audio_rate=audio_rate,
        max_audio_seconds=limits.max_video_seconds if max_audio_seconds is None else max_audio_seconds,
    )
    with current_hold().decoding() as item:
        if pool is None:
            clip = decode_video_bytes(data, limits, job, item.need)
        else:
            clip = pool.decode_video(data, limits, job, item)
        item.keep(clip.frames.nbytes + (0 if clip.audio is None else clip.audio.samples.nbytes))
        return clip


def decode_video_bytes(data: bytes, limits: MediaLimits, job: VideoJob, need: Need = no_need) -> VideoClip:
    """Decode a video file in this process."""
    sampling = _sampling(job.fps, job.min_frames, job.max_frames, limits)
    total, source_fps = _measure(data, limits)
    seconds = float(total / source_fps)
    audio, audio_bytes = None, 0
    if job.with_audio:  # first: where it is too long, no frame is decoded
        max_seconds = min(job.max_audio_seconds, limits.max_video_seconds)
        audio = decode_audio_track(data, job.audio_rate, max_seconds=max_seconds, kind="video", need=need)
        audio_bytes = 0 if audio is None else audio.samples.nbytes

    def need_frames(nbytes: int) -> None:
        need(nbytes + audio_bytes)

    frames, decoded = _sample_file(data, sampling.indices(total, seconds), limits, need_frames)
    if frames is None and decoded:
        # Some codecs have packets without a frame. Sample again by the true count.
        seconds = float(decoded / source_fps)
        frames, _ = _sample_file(data, sampling.indices(decoded, seconds), limits, need_frames)
    if frames is None:
        raise MediaError("video has no frames that decode; the file may be damaged")
    return VideoClip(frames, len(frames) / seconds, seconds, audio)


def _sampling(fps: float, min_frames: int, max_frames: int | None, limits: MediaLimits) -> _Sampling:
    if not (math.isfinite(fps) and fps > 0):
        raise InvalidRequestError(f"fps must be a number above 0, got {fps}")
    if min_frames < 1:
        raise InvalidRequestError(f"min_frames must be at least 1, got {min_frames}")
    if max_frames is None:
        max_frames = limits.max_video_frames
    if max_frames < FRAME_FACTOR:
        raise InvalidRequestError(f"max_frames must be at least {FRAME_FACTOR}, got {max_frames}")
    _check_frame_count(max_frames, limits)
    even_min = math.ceil(min_frames / FRAME_FACTOR) * FRAME_FACTOR
    return _Sampling(fps, even_min, max_frames)


def _measure(data: bytes, limits: MediaLimits) -> tuple[int, Fraction]:
    """Return the number of frames and their rate, from the headers and the packets; nothing is decoded."""
    with _open_video(data, limits) as (container, stream):
        if container.duration is not None:
            _check_seconds(container.duration / av.time_base, limits)
        rate = stream.average_rate or stream.guessed_rate
        if not rate or rate <= 0:
            raise MediaError("video has no frame rate; encode it again")
        max_packets = math.ceil(limits.max_video_seconds * _MAX_SOURCE_FPS)
        total = 0
        # Counted: the header's number may be missing or wrong.
        cancellation = current_cancellation()
        for packet in container.demux(stream):
            cancellation.check()
            if not packet.size:
                continue
            total += 1
            _check_seconds(float(total / rate), limits)
            if total > max_packets:
                raise LimitExceededError(f"video has over {max_packets} frames; use under {_MAX_SOURCE_FPS} fps")
    if total == 0:
        raise MediaError("video has no frames; send one with at least one frame")
    return total, rate


def _sample_file(
    data: bytes, indices: NDArray[np.int64], limits: MediaLimits, need: Need
) -> tuple[NDArray[np.uint8] | None, int]:
    """Decode up to the last wanted frame; return the wanted frames, or None and the count where there were fewer."""
    with _open_video(data, limits) as (container, stream):
        stream.thread_type = "AUTO"
        return _keep(container.decode(stream), indices.tolist(), limits, need)


def _keep(
    decoded: Iterator[av.VideoFrame], indices: list[int], limits: MediaLimits, need: Need = no_need
) -> tuple[NDArray[np.uint8] | None, int]:
    frames: NDArray[np.uint8] | None = None
    width = height = turns = count = position = 0
    cancellation = current_cancellation()
    for frame in decoded:
        cancellation.check()
        _check_frame_size(frame.width, frame.height, limits)
        if indices[count] == position:
            if frames is None:
                width, height = _fit(frame.width, frame.height, len(indices), limits)
                turns = round(frame.rotation / 90) % 4  # counter-clockwise
                shape = (width, height) if turns % 2 else (height, width)
                need(len(indices) * width * height * 3)
                frames = np.empty((len(indices), *shape, 3), np.uint8)
            # A later frame of another size is scaled to the first one's.
            pixels = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
            frames[count] = np.rot90(pixels, turns)
            count += 1
        position += 1
        if count == len(indices):
            return frames, position
    return None, position


@contextmanager
def _open_video(data: bytes, limits: MediaLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    # Somewhat above the limit, so that a frame just over it is refused by its own numbers.
    with open_container(data, "video", max_frame_pixels=4 * limits.max_video_pixels) as container:
        if not container.streams.video:
            raise MediaError("the file has no video track; send a video, or this file as audio")
        stream = container.streams.video[0]
        check_decoder(stream, "video")
        _check_frame_size(stream.codec_context.width, stream.codec_context.height, limits)
        yield container, stream


def _fit(width: int, height: int, count: int, limits: MediaLimits) -> tuple[int, int]:
    """Return the size at which `count` frames stay within the pixels that one video may hold."""
    scale = math.sqrt(limits.max_video_total_pixels / (count * width * height))
    if scale >= 1.0:
        return width, height
    return max(1, int(width * scale)), max(1, int(height * scale))


def _sample_array(source: tuple[object, ...], sampling: _Sampling, limits: MediaLimits) -> VideoClip:
    frames, source_fps = source if len(source) == 2 else (None, None)
    if not isinstance(frames, np.ndarray):
        raise InvalidRequestError("a video as a tuple must be (numpy frames, fps)")
    if isinstance(source_fps, bool) or not isinstance(source_fps, int | float | np.number):
        raise InvalidRequestError(f"the fps of video frames must be a number, got {type(source_fps).__name__}")
    if not (math.isfinite(source_fps) and source_fps > 0):
        raise InvalidRequestError(f"the fps of video frames must be above 0, got {source_fps}")
    _check_array(frames, limits)
    seconds = len(frames) / float(source_fps)
    _check_seconds(seconds, limits)
    selected = frames[sampling.indices(len(frames), seconds)]
    return VideoClip(selected, len(selected) / seconds, seconds)


def _check_array(frames: NDArray[np.generic], limits: MediaLimits) -> None:
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8:
        raise InvalidRequestError(f"video frames are {frames.dtype} {frames.shape}; give uint8 [n, h, w, 3]")
    if len(frames) == 0:
        raise MediaError("video has no frames; send at least one")
    _check_frame_size(frames.shape[2], frames.shape[1], limits)


def _check_frame_size(width: int, height: int, limits: MediaLimits) -> None:
    if width < 1 or height < 1:
        raise MediaError("video has no readable frame size, or one far over the limit; encode it again, smaller")
    if width * height > limits.max_video_pixels:
        raise LimitExceededError(
            f"video frames of {width}x{height} = {width * height} pixels are over the limit of "
            f"{limits.max_video_pixels}; scale the video down"
        )


def _check_frame_count(count: int, limits: MediaLimits) -> None:
    if count > limits.max_video_frames:
        raise LimitExceededError(
            f"{count} frames of video are over the limit of {limits.max_video_frames}; sample fewer"
        )


def _check_seconds(seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.max_video_seconds:
        raise LimitExceededError(
            f"video of at least {seconds:.2f} seconds is over the limit of {limits.max_video_seconds:g}; cut it"
        )
