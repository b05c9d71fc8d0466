"""Videos written are read back with PyAV and Pillow: frames, times, sound, metadata."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from omnistage.core.errors import InvalidRequestError, MediaError
from omnistage.media import video_output
from omnistage.media.audio_output import AudioOutput
from omnistage.media.image_output import read_metadata
from omnistage.media.video_output import VideoOutput, read_video_metadata

METADATA = {"prompt": "ein Schloß 城堡", "seed": 3}


def moving(frames: int = 9, height: int = 48, width: int = 64) -> np.ndarray:
    """A coloured ramp that changes its brightness with time."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    video[..., 0] = np.linspace(30, 220, width, dtype=np.uint8)
    video[..., 1] = np.linspace(220, 30, height, dtype=np.uint8)[:, None]
    video[..., 2] = np.linspace(20, 230, frames, dtype=np.uint8)[:, None, None]
    return video


def tone(seconds: float, rate: int) -> AudioOutput:
    times = np.arange(int(seconds * rate)) / rate
    return AudioOutput((0.5 * np.sin(2 * np.pi * 440 * times)).astype(np.float32), rate)


def read(data: bytes) -> tuple[np.ndarray, list[float]]:
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    return np.stack([f.to_ndarray(format="rgb24") for f in frames]), [float(f.time or 0) for f in frames]


def difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


@pytest.mark.parametrize("fps", [16.0, 24.0, 23.976, 12.5, 0.5])
def test_mp4_frames_and_times(fps: float) -> None:
    video = VideoOutput(moving(), fps)
    frames, times = read(video.to_bytes())
    assert frames.shape == video.frames.shape
    assert difference(frames, video.frames) < 3
    np.testing.assert_allclose(times, np.arange(9) / fps, atol=2e-3)
    assert video.seconds == 9 / fps


def test_mp4_is_h264_with_the_index_first() -> None:
    data = VideoOutput(moving(), 16.0).to_bytes()
    with av.open(io.BytesIO(data)) as container:
        context = container.streams.video[0].codec_context
        assert context.name == "h264"
        assert context.pix_fmt == "yuv420p"
        assert (context.colorspace, context.color_range) == (6, 1)
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_mpeg4_where_there_is_no_h264(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_output, "_CODECS", ("libx264-missing", "mpeg4"))
    video = VideoOutput(moving(), 23.976, tone(0.3, 16_000))
    data = video.to_bytes()
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].codec_context.name == "mpeg4"
    frames, times = read(data)
    assert difference(frames, video.frames) < 4
    np.testing.assert_allclose(times, np.arange(9) / 23.976, atol=2e-3)


@pytest.mark.parametrize(("height", "width"), [(47, 63), (48, 63), (47, 64), (1, 1), (17, 16)])
def test_odd_sizes_are_padded(height: int, width: int) -> None:
    video = VideoOutput(moving(3, height, width), 8.0)
    frames, _ = read(video.to_bytes())
    assert frames.shape == (3, height + height % 2, width + width % 2, 3)
    assert difference(frames[:, :height, :width], video.frames) < 6


def test_one_frame() -> None:
    frames, times = read(VideoOutput(moving(1), 16.0).to_bytes())
    assert frames.shape[0] == 1
    assert times == [0.0]


@pytest.mark.parametrize("rate", [24_000, 16_000, 48_000, 22_050, 10_000])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 3.0])
def test_sound(rate: int, seconds: float) -> None:
    sound = tone(seconds, rate)
    video = VideoOutput(moving(32), 16.0, sound)
    data = video.to_bytes()
    with av.open(io.BytesIO(data)) as container:
        track = container.streams.audio[0]
        assert track.codec_context.name == "aac"
        assert track.codec_context.sample_rate == (48_000 if rate == 10_000 else rate)
        pieces = [f.to_ndarray()[0] for f in container.decode(track)]
        heard_rate = track.codec_context.sample_rate
    heard = np.concatenate(pieces)
    assert abs(len(heard) / heard_rate - seconds) < 2 * 1024 / heard_rate + 0.005
    middle = heard[len(heard) // 4 : -len(heard) // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(np.argmax(spectrum) * heard_rate / len(middle) - 440) < 10
    assert abs(np.sqrt((middle**2).mean()) - 0.5 / np.sqrt(2)) < 0.03
    assert read(data)[0].shape == video.frames.shape


def test_tracks_are_interleaved() -> None:
    data = VideoOutput(moving(64), 16.0, tone(4.0, 24_000)).to_bytes()
    with av.open(io.BytesIO(data)) as container:
        kinds = [packet.stream.type for packet in container.demux() if packet.dts is not None]
    first_sound, last_picture = kinds.index("audio"), len(kinds) - 1 - kinds[::-1].index("video")
    assert first_sound < len(kinds) // 2 < last_picture


def test_no_sound_no_track() -> None:
    for sound in (None, AudioOutput(np.zeros(0, np.float32), 24_000)):
        with av.open(io.BytesIO(VideoOutput(moving(), 16.0, sound).to_bytes())) as container:
            assert not container.streams.audio


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.webp", "a.MP4"])
def test_metadata_on_and_off(tmp_path: Path, name: str) -> None:
    video, path = VideoOutput(moving(), 16.0, metadata=METADATA), tmp_path / name
    reader = read_video_metadata if name.lower().endswith("mp4") else read_metadata
    assert video.save(path) == path
    assert reader(path) == METADATA
    assert reader(path.read_bytes()) == METADATA
    video.save(path, metadata=False)
    assert reader(path) == {}
    assert b"seed" not in path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("format", ["gif", "webp"])
def test_animations(format: str) -> None:
    video = VideoOutput(moving(), 16.0, tone(0.5, 16_000))
    data = video.to_bytes(format)
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == format.upper()
        assert image.n_frames == 9
        assert image.info["loop"] == 0
        durations, frames = [], []
        for index in range(9):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")))
            durations.append(image.info["duration"])
    assert abs(sum(durations) - 1000 * video.seconds) <= 10
    assert difference(np.stack(frames), video.frames) < 8


def test_wrong_arrays_and_rates() -> None:
    for frames in (np.zeros((4, 4, 3), np.uint8), np.zeros((2, 4, 4, 3)), np.zeros((0, 4, 4, 3), np.uint8), [1]):
        with pytest.raises(MediaError, match=r"uint8 \[frames, h, w, 3\], got"):
            VideoOutput(frames, 16.0)  # type: ignore[arg-type]
    for fps in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequestError, match="above 0") as caught:
            VideoOutput(moving(), fps)
        assert caught.value.param == "fps"
    with pytest.raises(MediaError, match="NaN"):
        VideoOutput(moving(), 16.0, AudioOutput(np.full(10, np.nan, np.float32), 16_000))


def test_unknown_formats(tmp_path: Path) -> None:
    video = VideoOutput(moving(), 16.0)
    with pytest.raises(InvalidRequestError, match="use one of mp4"):
        video.to_bytes("avi")
    with pytest.raises(InvalidRequestError, match=r"end the name in \.mp4"):
        video.save(tmp_path / "a.mov")
    assert not list(tmp_path.iterdir())


def test_what_the_encoder_refuses() -> None:
    with pytest.raises(MediaError, match="cannot encode a video of 20000x2"):
        VideoOutput(np.zeros((1, 2, 20_000, 3), np.uint8), 16.0).to_bytes()


def test_reading_what_is_no_video(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="does not decode"):
        read_video_metadata(b"hello")
    with pytest.raises(MediaError, match="cannot read"):
        read_video_metadata(tmp_path / "missing.mp4")


def test_repr() -> None:
    assert repr(VideoOutput(moving(), 16.0)) == "VideoOutput(64x48, 0.56 s at 16 fps)"
    assert repr(VideoOutput(moving(), 16.0, tone(0.1, 8000))).endswith("audio)")
