"""Encoding generated videos: MP4 through FFmpeg, animations through Pillow."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from omnistage.core.errors import InvalidRequestError, MediaError
from omnistage.core.validation import short_repr
from omnistage.media.audio_output import AudioOutput
from omnistage.media.image_output import check_pixels, encode, exif, metadata_json, parse_metadata

_FORMATS = ("mp4", "gif", "webp")
# In order of preference; every build of FFmpeg has the last.
_CODECS = ("libx264", "libopenh264", "mpeg4")
# x264's macroblock tree reads memory that it never wrote when a video is a few blocks large: the same frames then
# gave three different files. Without it the same frames always give the same bytes.
_CODEC_OPTIONS = {"libx264": {"crf": "18", "x264-params": "mbtree=0"}, "mpeg4": {"q:v": "3", "qmin": "2", "qmax": "4"}}
_AAC_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)
_LAYOUTS = {1: "mono", 2: "stereo"}
_MAX_FPS = 1000.0
# Frames are converted with the coefficients of ITU-R BT.601, which every decoder assumes that reads no tags; those
# that do read them get sRGB's primaries and transfer curve.
_COLOURS = {"colorspace": 6, "color_primaries": 1, "color_trc": 13, "color_range": 1}


@dataclass(frozen=True, slots=True, eq=False)
class VideoOutput:
    """A generated video: `frames` is `uint8 [n, h, w, 3]`; `metadata` (prompt, seed, ...) is embedded in files."""

    frames: NDArray[np.uint8]
    fps: float
    audio: AudioOutput | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pixels(self.frames, 4, "a video must be uint8 [frames, h, w, 3]")
        if not 0.0 < self.fps <= _MAX_FPS:  # written so that NaN fails it too
            raise InvalidRequestError(f"must be above 0 and at most {_MAX_FPS:g}, got {self.fps}", param="fps")
        if self.audio is not None and not np.isfinite(self.audio.samples).all():
            raise MediaError("the video's audio has NaN or infinite samples")
        if self.audio is not None and self.audio.channels not in _LAYOUTS:
            raise MediaError(f"the video's audio has {self.audio.channels} channels; it must have 1 or 2")

    @property
    def width(self) -> int:
        return int(self.frames.shape[2])

    @property
    def height(self) -> int:
        return int(self.frames.shape[1])

    @property
    def seconds(self) -> float:
        return len(self.frames) / self.fps

    def to_bytes(self, format: str = "mp4", *, metadata: bool = True) -> bytes:
        """A file's bytes as mp4 (with audio, if there is any), or as an animation: gif, webp.

        MP4 has even sides only; an odd one is padded with its last pixels. Metadata is embedded as a comment (mp4, gif)
        or in EXIF (webp).
        """
        kind = format.lower().lstrip(".")
        if kind not in _FORMATS:
            raise InvalidRequestError(
                f"cannot encode a video as {short_repr(format)}; use one of {', '.join(_FORMATS)}", param="format"
            )
        embedded = self.metadata if metadata else None
        if kind == "mp4":
            return _mp4(self.frames, _rate(self.fps), self.audio, embedded)
        return _animation(self.frames, self.fps, kind, embedded)

    def save(self, path: str | os.PathLike[str], *, metadata: bool = True) -> Path:
        """Write to `path` in the format of its extension (mp4, gif, webp) and return the path."""
        target = Path(path)
        if target.suffix.lower()[1:] not in _FORMATS:
            endings = ", ".join(f".{name}" for name in _FORMATS)
            raise InvalidRequestError(f"cannot save a video as {target.name!r}; end the name in {endings}")
        target.write_bytes(self.to_bytes(target.suffix, metadata=metadata))
        return target

    def __repr__(self) -> str:
        audio = ", audio" if self.audio is not None else ""
        return f"VideoOutput({self.width}x{self.height}, {self.seconds:.2f} s at {self.fps:g} fps{audio})"


def read_video_metadata(source: str | os.PathLike[str] | bytes) -> dict[str, object]:
    """What an mp4 of ours says of itself; empty if nothing. Animations are read by `read_metadata`."""
    from omnistage.media.container import open_container

    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise MediaError(f"cannot read {short_repr(str(source))}: {error.strerror}") from error
    with open_container(data, "video", max_frame_pixels=2**28) as container:
        return parse_metadata(container.metadata.get("comment"))


# ----------------------------------------------------------------------------------------------------- mp4


def _mp4(
    frames: NDArray[np.uint8], rate: Fraction, audio: AudioOutput | None, metadata: Mapping[str, object] | None
) -> bytes:
    # A file, not a buffer: FFmpeg reads it again to move the index to its start, so that players need not wait.
    with tempfile.TemporaryDirectory(prefix="omnistage-") as folder:
        path = Path(folder, "video.mp4")
        try:
            with av.open(str(path), mode="w", options={"movflags": "+faststart"}) as container:
                if metadata:
                    container.metadata["comment"] = metadata_json(metadata)
                _write_tracks(container, _even(frames), rate, audio)
        except av.FFmpegError as error:
            size = f"{frames.shape[2]}x{frames.shape[1]}"
            raise MediaError(f"cannot encode a video of {size} at {float(rate):g} fps ({error.strerror})") from error
        return path.read_bytes()


def _write_tracks(
    container: OutputContainer, frames: NDArray[np.uint8], rate: Fraction, audio: AudioOutput | None
) -> None:
    codec = _video_codec()
    video = cast(VideoStream, container.add_stream(codec, rate=rate, options=_CODEC_OPTIONS.get(codec, {})))
    video.height, video.width = frames.shape[1:3]
    video.pix_fmt = "yuv420p"
    for name, value in _COLOURS.items():
        setattr(video.codec_context, name, value)
    track = None
    if audio is not None and len(audio.samples):
        rate_out = audio.sample_rate if audio.sample_rate in _AAC_RATES else 48000
        track = container.add_stream("aac", rate=rate_out)
        track.layout = _LAYOUTS[audio.channels]
    position = 0
    for index, pixels in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
        frame.pts, frame.time_base = index, 1 / rate
        container.mux(video.encode(frame))
        if track is not None and audio is not None:  # as it goes along: players want the tracks interleaved
            until = min(int((index + 1) / rate * audio.sample_rate), len(audio.samples))
            _write_audio(container, track, audio, position, until)
            position = until
    container.mux(video.encode(None))
    if track is not None and audio is not None:
        _write_audio(container, track, audio, position, len(audio.samples))
        container.mux(track.encode(None))


def _write_audio(container: OutputContainer, track: AudioStream, audio: AudioOutput, start: int, end: int) -> None:
    if end <= start:
        return
    samples = np.asarray(audio.samples[start:end], dtype=np.float32).clip(-1.0, 1.0).reshape(end - start, -1)
    planes = np.ascontiguousarray(samples.T)  # [channels, n]
    frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=_LAYOUTS[audio.channels])
    frame.sample_rate, frame.pts, frame.time_base = audio.sample_rate, start, Fraction(1, audio.sample_rate)
    container.mux(track.encode(frame))


def _video_codec() -> str:
    for name in _CODECS[:-1]:
        try:
            av.codec.Codec(name, "w")
        except ValueError:  # this build of FFmpeg is without it
            continue
        return name
    return _CODECS[-1]


def _even(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Colour is kept for every second pixel, so both sides must be even."""
    height, width = frames.shape[1:3]
    if not height % 2 and not width % 2:
        return np.ascontiguousarray(frames)
    return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _rate(fps: float) -> Fraction:
    """As a fraction that encoders take: 23.976 is 24000/1001."""
    return Fraction(fps).limit_denominator(1001) or Fraction(1, 1001)


# ---------------------------------------------------------------------------------------------- animations


def _animation(frames: NDArray[np.uint8], fps: float, kind: str, metadata: Mapping[str, object] | None) -> bytes:
    first, *more = (Image.fromarray(np.ascontiguousarray(frame)) for frame in frames)
    options: dict[str, Any] = {"save_all": True, "append_images": more, "loop": 0}
    if kind == "gif":
        options["duration"] = _durations(len(frames), fps, 10)
        if metadata:
            options["comment"] = metadata_json(metadata).encode("ascii")
    else:
        options |= {"duration": _durations(len(frames), fps, 1), "quality": 90}
        if metadata is not None:
            options["exif"] = exif(metadata)
    return encode(first, kind.upper(), options)


def _durations(frames: int, fps: float, unit: int) -> list[int]:
    """Milliseconds per frame, in whole units; rounding errors do not add up."""
    ends = [round((index + 1) * 1000 / fps / unit) * unit for index in range(frames)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
