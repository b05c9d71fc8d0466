"""Decoding and encoding sound."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from omnistage.core.clips import AudioClip
from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media import audio as audio_module
from omnistage.media.audio import decode_audio
from omnistage.media.audio_output import AudioOutput, encode_wav
from omnistage.media.limits import MediaLimits

LIMITS = MediaLimits()
ONE_SECOND = MediaLimits(max_audio_seconds=1.0)


def tone(seconds: float = 0.5, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def sound_file(samples: np.ndarray, rate: int = 16_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


class Pipe:
    """A file that cannot seek, so that the muxer cannot go back and write the duration."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, block: bytes) -> int:
        self.data += block
        return len(block)


def container(samples: np.ndarray, kind: str, codec: str, rate: int = 48_000, *, duration: bool = True) -> bytes:
    """Encode mono samples with PyAV."""
    buffer: Any = io.BytesIO() if duration else Pipe()
    with av.open(buffer, "w", format=kind) as out:
        stream = out.add_stream(codec, rate=rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[None, :], format="fltp", layout="mono")
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    return buffer.getvalue() if duration else bytes(buffer.data)


def wav_claiming(data_bytes: int, held: bytes = b"\0\1" * 100, rate: int = 16_000) -> bytes:
    fmt = struct.pack("<IHHIIHH", 16, 1, 1, rate, rate * 2, 2, 16)
    size = min(data_bytes + 36, 0xFFFFFFFF)
    return b"RIFF" + struct.pack("<I", size) + b"WAVEfmt " + fmt + b"data" + struct.pack("<I", data_bytes) + held


class TestFormats:
    def test_a_wav_comes_back_as_it_was(self) -> None:
        clip = decode_audio(sound_file(tone()), LIMITS)
        assert clip.sample_rate == 16_000
        assert clip.samples.dtype == np.float32
        assert clip.seconds == pytest.approx(0.5)
        np.testing.assert_allclose(clip.samples, tone(), atol=1e-4)
        assert repr(clip) == "AudioClip(0.50 s at 16000 Hz)"

    @pytest.mark.parametrize(
        ("kind", "subtype"), [("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]
    )
    def test_formats_of_soundfile(self, kind: str, subtype: str | None) -> None:
        clip = decode_audio(sound_file(tone(), kind=kind, subtype=subtype), LIMITS)
        assert clip.seconds == pytest.approx(0.5, abs=0.1)
        assert np.abs(clip.samples).max() == pytest.approx(0.5, abs=0.1)

    @pytest.mark.parametrize(
        ("kind", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("matroska", "aac"), ("adts", "aac")]
    )
    def test_formats_of_pyav(self, kind: str, codec: str) -> None:
        clip = decode_audio(container(tone(rate=48_000), kind, codec), LIMITS, target_rate=16_000)
        assert clip.sample_rate == 16_000
        assert clip.seconds == pytest.approx(0.5, abs=0.1)
        spectrum = np.abs(np.fft.rfft(clip.samples))
        assert np.argmax(spectrum) / clip.seconds == pytest.approx(440, abs=5)

    def test_channels_are_averaged(self) -> None:
        stereo = np.stack([np.full(100, 0.5), np.full(100, -0.25)], axis=1)
        np.testing.assert_allclose(decode_audio(sound_file(stereo), LIMITS).samples, 0.125, atol=1e-4)

    @pytest.mark.parametrize("rate", [8_000, 24_000, 44_100])
    def test_resampling_keeps_length_and_pitch(self, rate: int) -> None:
        clip = decode_audio(sound_file(tone(6, rate), rate), LIMITS, target_rate=16_000)
        assert len(clip.samples) == 96_000
        np.testing.assert_allclose(clip.samples[2000:-2000], tone(6)[2000:-2000], atol=2e-3)

    def test_a_wav_of_unknown_length_is_read_to_its_end(self) -> None:
        data = wav_claiming(0xFFFFFFFF, held=sound_file(tone())[44:])
        assert decode_audio(data, LIMITS).seconds == pytest.approx(0.5)

    def test_pcm16_is_24_khz_and_headerless(self) -> None:
        samples = np.array([0, 16384, -32768], "<i2")
        clip = decode_audio(samples.tobytes(), LIMITS, format="pcm16")
        assert clip.sample_rate == 24_000
        np.testing.assert_allclose(clip.samples, [0, 0.5, -1.0])

    def test_base64_is_read_where_the_caller_says_so(self) -> None:
        clip = decode_audio("AAAAQA==", LIMITS, format="pcm16", bare_base64=True)
        np.testing.assert_allclose(clip.samples, [0, 0.5])


class TestLimits:
    def test_a_ten_hour_header_is_refused_before_decoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(soundfile, "SoundFile", lambda *_: pytest.fail("opened"))
        with pytest.raises(LimitExceededError, match=r"36000\.00 seconds .* limit of 1800"):
            decode_audio(wav_claiming(36_000 * 32_000), LIMITS)

    def test_the_header_is_found_behind_other_chunks(self) -> None:
        plain = wav_claiming(36_000 * 32_000)
        junk = b"LIST" + struct.pack("<I", 5) + b"abcde\0"
        with pytest.raises(LimitExceededError, match="36000"):
            decode_audio(plain[:12] + junk + plain[12:], LIMITS)

    @pytest.mark.parametrize("kind", ["WAV", "FLAC"])
    def test_a_long_file_is_refused_from_its_header(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(audio_module, "_collect", lambda *_: pytest.fail("decoded"))
        with pytest.raises(LimitExceededError, match=r"2\.00 seconds is over the limit of 1"):
            decode_audio(sound_file(tone(2), kind=kind), ONE_SECOND)

    def test_a_long_container_is_refused_from_its_header(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = [container(tone(2, 48_000), kind, codec) for kind, codec in (("mp4", "aac"), ("webm", "libopus"))]
        monkeypatch.setattr(audio_module, "_collect", lambda *_: pytest.fail("decoded"))
        for item in data:
            with pytest.raises(LimitExceededError, match="limit of 1"):
                decode_audio(item, ONE_SECOND)

    def test_decoding_stops_at_the_limit_where_there_is_no_duration(self) -> None:
        data = container(tone(20, 48_000), "webm", "libopus", duration=False)
        assert decode_audio(data, LIMITS).seconds == pytest.approx(20, abs=0.1)
        with pytest.raises(LimitExceededError, match=r"at least 1\.0\d seconds"):
            decode_audio(data, ONE_SECOND)

    def test_decoding_stops_at_the_limit_where_the_header_says_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        frames = property(lambda self: np.iinfo(np.int64).max)
        data = sound_file(tone(20))
        monkeypatch.setattr(audio_module, "_wav_header_seconds", lambda _: 0.0)
        monkeypatch.setattr(soundfile.SoundFile, "frames", frames)
        with pytest.raises(LimitExceededError, match=r"at least [1-5]\.\d\d seconds"):
            decode_audio(data, ONE_SECOND)

    def test_pcm16_and_arrays_are_measured_too(self) -> None:
        with pytest.raises(LimitExceededError, match=r"2\.00 seconds"):
            decode_audio(bytes(2 * 2 * 24_000), ONE_SECOND, format="pcm16")
        with pytest.raises(LimitExceededError, match=r"2\.00 seconds"):
            decode_audio((tone(2), 16_000), ONE_SECOND)
        with pytest.raises(LimitExceededError, match=r"2\.00 seconds"):
            decode_audio(AudioClip(tone(2), 16_000), ONE_SECOND)

    def test_absurd_rates_and_channel_counts_are_refused(self) -> None:
        with pytest.raises(MediaError, match="sample rate of 500 Hz"):
            decode_audio(sound_file(tone(), 500), LIMITS)
        with pytest.raises(MediaError, match="33 channels"):
            decode_audio(sound_file(np.zeros((100, 33))), LIMITS)
        with pytest.raises(InvalidRequestError, match="sample rate of 10 Hz"):
            decode_audio(sound_file(tone()), LIMITS, target_rate=10)


class TestDamage:
    @pytest.mark.parametrize("data", [b"hello" * 100, b"RIFF\0\0\0\0WAVE", b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0"])
    def test_bytes_that_are_no_sound_are_an_error(self, data: bytes) -> None:
        with pytest.raises(MediaError, match="does not decode"):
            decode_audio(data, LIMITS)

    def test_a_truncated_flac_is_an_error(self) -> None:
        data = sound_file(tone(3), kind="FLAC")
        with pytest.raises(MediaError, match="truncated or damaged"):
            decode_audio(data[: len(data) // 2], LIMITS)

    def test_no_samples_are_an_error(self) -> None:
        for source, kind in (
            (sound_file(np.zeros(0)), None),
            ((np.zeros(0, np.float32), 16_000), None),
        ):
            with pytest.raises(MediaError, match="no samples"):
                decode_audio(source, LIMITS, 8_000, format=kind)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_nan_and_infinity_are_errors(self, value: float) -> None:
        samples = tone()
        samples[100] = value
        for source in ((samples, 16_000), sound_file(samples, subtype="FLOAT")):
            with pytest.raises(MediaError, match="NaN or infinite"):
                decode_audio(source, LIMITS)

    def test_samples_far_over_full_scale_are_errors(self) -> None:
        samples = tone() * np.float32(2**31)
        assert len(decode_audio((samples, 16_000), LIMITS).samples) == len(samples)
        for source in ((samples * 9, 16_000), sound_file(samples * 9, subtype="FLOAT")):
            with pytest.raises(MediaError, match="scale it"):
                decode_audio(source, LIMITS)

    def test_an_odd_number_of_pcm16_bytes_is_an_error(self) -> None:
        with pytest.raises(MediaError, match="odd number"):
            decode_audio(b"abc", LIMITS, format="pcm16")

    def test_a_file_without_an_audio_track_is_an_error(self) -> None:
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mp4") as out:
            stream = out.add_stream("mpeg4", rate=5)
            assert isinstance(stream, av.VideoStream)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            for packet in [*stream.encode(frame), *stream.encode(None)]:
                out.mux(packet)
        with pytest.raises(MediaError, match="no audio track"):
            decode_audio(buffer.getvalue(), LIMITS)

    def test_a_rate_or_layout_that_changes_midway_is_an_error(self) -> None:
        def frame(rate: int, layout: str, channels: int) -> av.AudioFrame:
            made = av.AudioFrame.from_ndarray(np.zeros((1, 64 * channels), np.int16), format="s16", layout=layout)
            made.sample_rate = rate
            return made

        with pytest.raises(MediaError, match="changes its rate"):
            list(audio_module._decoded_blocks([frame(16_000, "mono", 1), frame(8_000, "mono", 1)], 16_000))
        with pytest.raises(MediaError, match="changes its layout"):
            list(audio_module._decoded_blocks([frame(16_000, "mono", 1), frame(16_000, "stereo", 2)], 16_000))

    def test_a_playlist_cannot_make_the_decoder_open_other_files(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret.wav"
        secret.write_bytes(sound_file(tone()))
        for playlist in (
            f"ffconcat version 1.0\nfile {secret.name}\n",
            f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret.as_uri()}\n#EXT-X-ENDLIST\n",
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path)
                with pytest.raises(MediaError, match="does not decode"):
                    decode_audio(playlist.encode(), LIMITS)


class TestArrays:
    def test_arrays_of_one_or_more_channels_are_taken(self) -> None:
        np.testing.assert_array_equal(decode_audio((tone(), 16_000), LIMITS).samples, tone())
        stereo = np.stack([tone(), -tone()], axis=1)
        np.testing.assert_array_equal(decode_audio((stereo, 16_000), LIMITS).samples, 0)

    @pytest.mark.parametrize("dtype", [np.int16, np.int32])
    def test_integers_are_scaled(self, dtype: Any) -> None:
        samples = np.array([np.iinfo(dtype).min, 0], dtype)
        np.testing.assert_allclose(decode_audio((samples, 16_000), LIMITS).samples, [-1.0, 0.0])

    def test_the_result_shares_nothing_with_the_callers_array(self) -> None:
        mine = tone()
        decode_audio((mine, 16_000), LIMITS).samples[:] = 9
        assert mine.max() < 1

    @pytest.mark.parametrize(
        ("source", "why"),
        [
            ((np.zeros(4, np.float32),), "numpy samples, sample rate"),
            (([0.0], 16_000), "numpy samples, sample rate"),
            ((np.zeros(4, np.float32), 16_000.0), "whole number"),
            ((np.zeros(4, np.float32), True), "whole number"),
            ((np.zeros(4, np.float32), 5), "5 Hz"),
            ((np.zeros((4, 4, 4), np.float32), 16_000), "shape"),
            ((np.zeros((2, 16_000), np.float32), 16_000), "transpose"),
            ((np.zeros(4, np.uint8), 16_000), "uint8"),
        ],
    )
    def test_other_arrays_are_errors(self, source: Any, why: str) -> None:
        with pytest.raises(InvalidRequestError, match=why):
            decode_audio(source, LIMITS)


class TestEncoding:
    def test_a_wav_comes_back_within_16_bits(self) -> None:
        data = encode_wav(tone(rate=24_000), 24_000)
        clip = decode_audio(data, LIMITS)
        assert clip.sample_rate == 24_000
        np.testing.assert_allclose(clip.samples, tone(rate=24_000), atol=1e-4)

    def test_loud_samples_are_clipped_and_do_not_wrap_around(self) -> None:
        clip = decode_audio(encode_wav(np.array([2.0, -2.0]), 16_000), LIMITS)
        np.testing.assert_allclose(clip.samples, [1, -1], atol=1e-3)

    @pytest.mark.parametrize("extension", ["wav", "flac", "ogg", "mp3", "WAV"])
    def test_an_output_is_saved_by_its_extension(self, tmp_path: Path, extension: str) -> None:
        output = AudioOutput(tone(2, 24_000), 24_000)
        path = output.save(tmp_path / f"out.{extension}")
        clip = decode_audio(path, LIMITS)
        assert clip.sample_rate == 24_000
        assert clip.seconds == pytest.approx(output.seconds, abs=0.1)

    def test_an_unknown_extension_is_an_error_that_lists_the_known(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match=r"\.wav, \.flac, \.ogg, \.mp3"):
            AudioOutput(tone(), 16_000).save(tmp_path / "out.xyz")

    def test_a_rate_that_the_format_lacks_is_an_error_and_leaves_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(MediaError, match="cannot encode mp3 at 12345 Hz"):
            AudioOutput(tone(), 12_345).save(tmp_path / "out.mp3")
        assert not (tmp_path / "out.mp3").exists()

    def test_an_output_describes_itself(self) -> None:
        output = AudioOutput(tone(1.5, 24_000), 24_000)
        assert output.seconds == 1.5
        assert repr(output) == "AudioOutput(1.50 s at 24000 Hz)"
        assert output.to_wav_bytes() == encode_wav(output.samples, 24_000)

    def test_two_channels_are_kept(self, tmp_path: Path) -> None:
        output = AudioOutput(np.stack([tone(), 0.5 * tone()], axis=1), 16_000)
        assert (output.channels, output.seconds) == (2, AudioOutput(tone(), 16_000).seconds)
        for extension in ("wav", "flac"):
            samples, rate = soundfile.read(output.save(tmp_path / f"out.{extension}"))
            assert rate == 16_000
            np.testing.assert_allclose(samples, output.samples, atol=1e-4)

    @pytest.mark.parametrize(
        "samples", [np.array([np.nan]), np.zeros((2, 3)), np.zeros((2, 1, 1)), np.zeros(2, np.int16)]
    )
    def test_samples_that_are_not_finite_floats_of_one_or_two_channels_are_errors(self, samples: np.ndarray) -> None:
        with pytest.raises(MediaError, match="audio to encode"):
            encode_wav(samples, 16_000)
