"""Decoding video: evenly spaced frames within bounds."""

from __future__ import annotations

import io
import math
import struct
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.core.clips import VideoClip
from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media import video as video_module
from omnistage.media.container import open_container
from omnistage.media.limits import MediaLimits
from omnistage.media.video import decode_video

LIMITS = MediaLimits()


def clip_bytes(
    count: int = 20,
    rate: int = 10,
    size: tuple[int, int] = (64, 48),
    kind: str = "mp4",
    codec: str = "mpeg4",
    sound: bool = False,
) -> bytes:
    """Encode a clip whose frame i is grey at level 10 * i, with its left half black."""
    buffer = io.BytesIO()
    width, height = size
    with av.open(buffer, "w", format=kind) as out:
        stream = out.add_stream(codec, rate=rate)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        track = out.add_stream("libopus" if kind == "webm" else "aac", rate=48_000) if sound else None
        if track is not None:
            assert isinstance(track, av.AudioStream)
            track.layout = "mono"
        for index in range(count):
            pixels = np.full((height, width, 3), min(10 * index, 255), np.uint8)
            pixels[:, : width // 2] = 0
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode(None):
            out.mux(packet)
        if track is not None:
            wave = 0.3 * np.sin(np.arange(48_000 * count // rate) / 10, dtype=np.float32)
            frame = av.AudioFrame.from_ndarray(wave[None, :].astype(np.float32), format="fltp", layout="mono")
            frame.sample_rate = 48_000
            for sound_packet in [*track.encode(frame), *track.encode(None)]:
                out.mux(sound_packet)
    return buffer.getvalue()


def levels(clip: VideoClip) -> list[int]:
    """Which frame each sampled one was."""
    right = clip.frames[:, :, clip.frames.shape[2] * 3 // 4, 0].mean(axis=1)
    return [round(float(level) / 10) for level in right]


class TestSampling:
    @pytest.mark.parametrize(
        ("kind", "codec"),
        [("mp4", "mpeg4"), ("mp4", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4")],
    )
    def test_frames_are_evenly_spaced_from_first_to_last(self, kind: str, codec: str) -> None:
        clip = decode_video(clip_bytes(kind=kind, codec=codec), LIMITS, fps=2.0)
        assert clip.frames.shape == (4, 48, 64, 3)
        assert clip.frames.dtype == np.uint8
        assert levels(clip) == [0, 6, 13, 19]
        assert clip.seconds == pytest.approx(2.0)
        assert clip.fps == pytest.approx(2.0)
        assert clip.audio is None
        assert repr(clip) == "VideoClip(4 frames of 64x48 at 2.00 fps, 2.00 s, without audio)"

    def test_the_rate_decides_the_count(self) -> None:
        assert len(decode_video(clip_bytes(), LIMITS, fps=5.0).frames) == 10
        assert levels(decode_video(clip_bytes(), LIMITS, fps=1000.0)) == list(range(20))

    def test_the_count_is_clamped_and_even(self) -> None:
        data = clip_bytes()
        assert len(decode_video(data, LIMITS, fps=0.1).frames) == 4
        assert len(decode_video(data, LIMITS, fps=0.1, min_frames=7).frames) == 8
        assert len(decode_video(data, LIMITS, fps=10.0, max_frames=7).frames) == 6
        assert len(decode_video(data, MediaLimits(max_video_frames=2), fps=10.0).frames) == 2
        assert len(decode_video(clip_bytes(count=7), LIMITS, fps=100.0).frames) == 6

    def test_a_video_of_one_frame_keeps_it(self) -> None:
        assert decode_video(clip_bytes(count=1), LIMITS).frames.shape == (1, 48, 64, 3)

    @given(
        total=st.integers(1, 20_000),
        source_fps=st.floats(0.5, 240),
        fps=st.floats(0.01, 100),
        least=st.integers(1, 50),
        most=st.integers(2, 768),
    )
    def test_indices_are_distinct_ordered_even_and_as_qwen_counts_them(
        self, total: int, source_fps: float, fps: float, least: int, most: int
    ) -> None:
        sampling = video_module._sampling(fps, least, most, LIMITS)
        indices = sampling.indices(total, total / source_fps).tolist()
        assert indices == sorted(set(indices))
        assert indices[0] == 0
        assert indices[-1] in (0, total - 1)
        assert len(indices) <= min(most, total)
        if total >= 2:
            low, high = math.ceil(least / 2) * 2, most // 2 * 2
            qwen = math.floor(min(min(max(total / source_fps * fps, low), high), total) / 2) * 2
            assert len(indices) == max(qwen, 2)

    def test_packets_that_show_nothing_do_not_shift_the_spacing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measure = video_module._measure

        def three_too_many(data: bytes, limits: MediaLimits) -> Any:
            total, rate = measure(data, limits)
            return total + 3, rate

        monkeypatch.setattr(video_module, "_measure", three_too_many)
        clip = decode_video(clip_bytes(), LIMITS)
        assert levels(clip) == [0, 6, 13, 19]
        assert clip.seconds == pytest.approx(2.0)

    @pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_rate_must_be_above_zero(self, fps: float) -> None:
        with pytest.raises(InvalidRequestError, match="fps"):
            decode_video(b"x", LIMITS, fps=fps)

    def test_counts_must_make_sense(self) -> None:
        with pytest.raises(InvalidRequestError, match="max_frames must be at least 2"):
            decode_video(b"x", LIMITS, max_frames=1)
        with pytest.raises(InvalidRequestError, match="min_frames must be at least 1"):
            decode_video(b"x", LIMITS, min_frames=0)
        with pytest.raises(LimitExceededError, match="1000 frames of video are over the limit of 768"):
            decode_video(b"x", LIMITS, max_frames=1000)


class TestRotation:
    @pytest.mark.parametrize(("matrix", "upright_is"), [((0, 1, -1, 0), "top"), ((0, -1, 1, 0), "bottom")])
    def test_a_rotated_track_is_turned_upright(self, matrix: tuple[int, ...], upright_is: str) -> None:
        data = bytearray(clip_bytes())
        # The matrix of the track header: a b u, c d v, x y w, in 16.16 fixed point.
        start = data.index(b"tkhd") + 4 + 40
        a, b, c, d = (value << 16 for value in matrix)
        data[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
        clip = decode_video(bytes(data), LIMITS)
        assert clip.frames.shape == (4, 64, 48, 3)
        last = clip.frames[-1, :, :, 0].astype(float)
        dark = "top" if last[:32].mean() < last[32:].mean() else "bottom"
        assert dark == upright_is


class TestAudio:
    @pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx")])
    def test_the_sound_comes_along_where_asked(self, kind: str, codec: str) -> None:
        data = clip_bytes(kind=kind, codec=codec, sound=True)
        clip = decode_video(data, LIMITS, with_audio=True, audio_rate=16_000)
        assert clip.audio is not None
        assert clip.audio.sample_rate == 16_000
        assert clip.audio.seconds == pytest.approx(2.0, abs=0.1)
        assert "with audio" in repr(clip)
        assert decode_video(data, LIMITS).audio is None

    def test_a_silent_video_has_none(self) -> None:
        assert decode_video(clip_bytes(), LIMITS, with_audio=True).audio is None

    def test_its_length_is_bounded_by_the_videos_limit(self) -> None:
        clip = decode_video(clip_bytes(sound=True), MediaLimits(max_audio_seconds=0.5), with_audio=True)
        assert clip.audio is not None


class TestLimits:
    def test_a_long_video_is_refused_before_decoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(video_module, "_keep", lambda *_: pytest.fail("decoded"))
        with pytest.raises(LimitExceededError, match=r"2\.00 seconds is over the limit of 1"):
            decode_video(clip_bytes(), MediaLimits(max_video_seconds=1.0))

    def test_a_large_frame_is_refused_before_decoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(video_module, "_keep", lambda *_: pytest.fail("decoded"))
        with pytest.raises(LimitExceededError, match=r"64x48 = 3072 pixels are over the limit of 3000"):
            decode_video(clip_bytes(), MediaLimits(max_video_pixels=3000))

    def test_a_frame_far_over_the_limit_is_not_even_probed(self) -> None:
        with pytest.raises((MediaError, LimitExceededError), match=r"frame size|over the limit"):
            decode_video(clip_bytes(), MediaLimits(max_video_pixels=100))

    def test_countless_frames_in_few_seconds_are_refused(self) -> None:
        with pytest.raises(LimitExceededError, match="over 5 frames"):
            decode_video(clip_bytes(rate=1000), MediaLimits(max_video_seconds=0.02))

    def test_frames_are_scaled_down_to_the_pixels_that_one_video_may_hold(self) -> None:
        clip = decode_video(clip_bytes(), MediaLimits(max_video_total_pixels=4 * 32 * 24))
        assert clip.frames.shape == (4, 24, 32, 3)
        assert levels(clip) == [0, 6, 13, 19]

    def test_decoding_stops_after_the_last_wanted_frame(self) -> None:
        limits = MediaLimits()
        seen: list[int] = []

        def frames() -> Any:
            for index in range(100):
                seen.append(index)
                yield av.VideoFrame.from_ndarray(np.zeros((8, 8, 3), np.uint8), format="rgb24")

        video_module._keep(frames(), [0, 4], limits)
        assert seen == [0, 1, 2, 3, 4]

    def test_a_frame_that_grows_midway_is_refused(self) -> None:
        frames = (av.VideoFrame.from_ndarray(np.zeros((s, s, 3), np.uint8), format="rgb24") for s in (8, 64))
        with pytest.raises(LimitExceededError, match="64x64"):
            video_module._keep(frames, [0, 5], MediaLimits(max_video_pixels=100))


class TestDamage:
    def test_bytes_that_are_no_video_are_an_error(self) -> None:
        with pytest.raises(MediaError, match="does not decode"):
            decode_video(b"hello" * 100, LIMITS)

    @pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
    def test_a_video_cut_within_its_header_is_an_error(self, kind: str) -> None:
        with pytest.raises(MediaError):
            decode_video(clip_bytes(kind=kind)[:200], LIMITS)

    def test_packets_of_noise_are_an_error(self) -> None:
        data = bytearray(clip_bytes(codec="libx264"))
        start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
        data[start:end] = np.random.default_rng(0).bytes(end - start)
        with pytest.raises(MediaError):
            decode_video(bytes(data), LIMITS)

    def test_an_unknown_codec_is_an_error(self) -> None:
        data = clip_bytes(kind="matroska", sound=True)
        with pytest.raises(MediaError, match="unknown codec"):
            decode_video(data.replace(b"V_MPEG4", b"V_ZZZZZ"), LIMITS)
        with pytest.raises(MediaError, match="unknown codec"):
            decode_video(data.replace(b"A_AAC", b"A_ZZZ"), LIMITS, with_audio=True)

    def test_a_track_that_appears_midway_is_an_error(self) -> None:
        with (
            pytest.raises(MediaError, match="tracks change midway"),
            open_container(clip_bytes(), "video", max_frame_pixels=10_000) as container,
        ):
            container.streams.get(7)

    def test_a_video_without_packets_is_an_error(self) -> None:
        with pytest.raises(MediaError):
            decode_video(clip_bytes(count=0), LIMITS)

    def test_no_frame_that_decodes_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(video_module, "_keep", lambda *_: (None, 0))
        with pytest.raises(MediaError, match="no frames that decode"):
            decode_video(clip_bytes(), LIMITS)

    def test_a_sound_file_is_no_video(self) -> None:
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mp4") as out:
            track = out.add_stream("aac", rate=48_000)
            assert isinstance(track, av.AudioStream)
            track.layout = "mono"
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 4800), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 48_000
            for packet in [*track.encode(frame), *track.encode(None)]:
                out.mux(packet)
        with pytest.raises(MediaError, match="no video track"):
            decode_video(buffer.getvalue(), LIMITS)


class TestArrays:
    def test_frames_with_their_rate_are_sampled_alike(self) -> None:
        frames = np.zeros((20, 8, 8, 3), np.uint8) + np.arange(20, dtype=np.uint8)[:, None, None, None]
        clip = decode_video((frames, 10), LIMITS, fps=2.0)
        assert clip.frames[:, 0, 0, 0].tolist() == [0, 6, 13, 19]
        assert clip.seconds == 2.0
        assert clip.fps == 2.0

    def test_a_clip_is_checked_and_returned(self) -> None:
        clip = VideoClip(np.zeros((4, 8, 8, 3), np.uint8), 2.0, 2.0)
        assert decode_video(clip, LIMITS) is clip
        with pytest.raises(LimitExceededError, match="4 frames"):
            decode_video(clip, MediaLimits(max_video_frames=2))

    @pytest.mark.parametrize(
        ("source", "why"),
        [
            ((np.zeros((4, 8, 8, 3), np.uint8),), "numpy frames, fps"),
            (([1, 2], 2.0), "numpy frames, fps"),
            ((np.zeros((4, 8, 8, 3), np.uint8), "2"), "must be a number"),
            ((np.zeros((4, 8, 8, 3), np.uint8), True), "must be a number"),
            ((np.zeros((4, 8, 8, 3), np.uint8), 0), "above 0"),
            ((np.zeros((4, 8, 8, 3), np.uint8), math.nan), "above 0"),
            ((np.zeros((4, 8, 8, 3), np.float32), 2.0), "uint8"),
            ((np.zeros((4, 3, 8, 8), np.uint8), 2.0), r"\[n, h, w, 3\]"),
            ((np.zeros((8, 8, 3), np.uint8), 2.0), r"\[n, h, w, 3\]"),
            ((np.zeros((0, 8, 8, 3), np.uint8), 2.0), "no frames"),
            ((np.zeros((4, 0, 8, 3), np.uint8), 2.0), "frame size"),
        ],
    )
    def test_other_arrays_are_errors(self, source: Any, why: str) -> None:
        with pytest.raises(InvalidRequestError, match=why):
            decode_video(source, LIMITS)

    def test_a_long_array_is_refused(self) -> None:
        with pytest.raises(LimitExceededError, match="4000"):
            decode_video((np.zeros((4, 8, 8, 3), np.uint8), 0.001), LIMITS)
