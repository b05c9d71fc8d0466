"""Parsing chat messages: what clients send, and what each mistake answers."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, TextPart, ToolCall, VideoPart
from omnistage.media import AudioClip, MediaLimits, VideoClip
from omnistage.pipeline.messages import chat
from omnistage.pipeline.messages.chat import parse_messages

LIMITS = MediaLimits()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def png(size: tuple[int, int] = (6, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    return buffer.getvalue()


def wav(seconds: float = 0.1, rate: int = 8_000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(int(seconds * rate)), rate, format="WAV")
    return buffer.getvalue()


def mp4(sound: bool = False) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=10)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        track = out.add_stream("aac", rate=48_000, layout="mono") if sound else None
        frames = [av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24") for _ in range(20)]
        for frame in [*frames, None]:
            for packet in stream.encode(frame):
                out.mux(packet)
        if track is not None:
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 48_000), np.float32), format="fltp", layout="mono")
            noise.sample_rate = 48_000
            assert isinstance(track, av.AudioStream)
            for packet in [*track.encode(noise), *track.encode(None)]:
                out.mux(packet)
    return buffer.getvalue()


PNG_URL = f"data:image/png;base64,{b64(png())}"
WAV_URL = f"data:audio/wav;base64,{b64(wav())}"
MP4_URL = f"data:video/mp4;base64,{b64(mp4())}"


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def only_part(part: Any, **options: Any) -> Any:
    (message,) = parse_messages(user(part), LIMITS, **options)
    (parsed,) = message.parts
    return parsed


class TestText:
    def test_a_string_is_one_text_part(self) -> None:
        assert parse_messages([{"role": "user", "content": "hi"}], LIMITS) == [ChatMessage("user", (TextPart("hi"),))]

    @pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
    def test_text_parts(self, kind: str) -> None:
        assert only_part({"type": kind, "text": "hi"}) == TextPart("hi")

    @pytest.mark.parametrize(
        ("role", "expected"),
        [
            ("system", "system"),
            ("developer", "system"),
            ("user", "user"),
            ("assistant", "assistant"),
            ("tool", "tool"),
        ],
    )
    def test_roles(self, role: str, expected: str) -> None:
        assert parse_messages([{"role": role, "content": "x"}], LIMITS)[0].role == expected

    @pytest.mark.parametrize("content", ["", None])
    def test_a_question_may_not_be_empty(self, content: Any) -> None:
        (message,) = parse_messages([{"role": "assistant", "content": content, "tool_calls": []}], LIMITS)
        assert message.parts == (TextPart(""),)
        for role in ("user", "system"):
            with pytest.raises(InvalidRequestError) as caught:
                parse_messages([{"role": role, "content": content}], LIMITS)
            assert caught.value.param == "messages[0].content"

    @pytest.mark.parametrize(
        ("arguments", "kept"),
        [
            ('{"n": 1}', {"n": 1}),
            ('{"n": ', '{"n": '),
            ("[1]", "[1]"),
            (r'{"n": "\ud800"}', r'{"n": "\ud800"}'),
            ('{"a":' * 80 + "1" + "}" * 80, '{"a":' * 80 + "1" + "}" * 80),
            ("[" * 100_000, "[" * 100_000),
        ],
        ids=["object", "cut off", "list", "surrogate", "deep", "very deep"],
    )
    def test_arguments_of_calls_are_objects_or_what_was_written(self, arguments: str, kept: object) -> None:
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        (message,) = parse_messages([{"role": "assistant", "tool_calls": [call]}], LIMITS)
        assert message.tool_calls == (ToolCall("f", kept, "c"),)

    @pytest.mark.parametrize("calls", [1, 100])
    def test_arguments_are_counted_before_they_are_parsed(self, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("omnistage.pipeline.messages.chat.json", None)
        for text in ('{"a":[' + "0," * (300_000 // calls) + "0]}", " " * (LIMITS.max_text_chars // calls + 1)):
            call = {"function": {"name": "f", "arguments": text}}
            with pytest.raises(LimitExceededError) as caught:
                parse_messages([{"role": "assistant", "tool_calls": [call]}] * calls, LIMITS)
            assert caught.value.param == "messages"

    def test_a_tool_may_give_nothing_but_must_say_so(self) -> None:
        assert parse_messages([{"role": "tool", "content": ""}], LIMITS)[0].parts == (TextPart(""),)
        with pytest.raises(InvalidRequestError):
            parse_messages([{"role": "tool", "content": None}], LIMITS)

    def test_order_is_kept_among_parts_and_messages(self) -> None:
        messages = [
            {"role": "system", "content": "be brief"},
            *user(
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": PNG_URL},
                {"type": "text", "text": "b"},
            ),
        ]
        parsed = parse_messages(messages, LIMITS)
        assert [message.role for message in parsed] == ["system", "user"]
        assert [type(part) for part in parsed[1].parts] == [TextPart, ImagePart, TextPart]


class TestMedia:
    @pytest.mark.parametrize(
        "part",
        [
            {"type": "image_url", "image_url": {"url": PNG_URL, "detail": "high"}},
            {"type": "image_url", "image_url": PNG_URL},
            {"type": "input_image", "image_url": PNG_URL},
            {"type": "image", "image": PNG_URL},
            {"type": "image", "image": png()},
            {"type": "image", "image": Image.new("RGBA", (6, 4))},
            {"type": "image", "image": np.zeros((4, 6, 3), np.uint8)},
        ],
    )
    def test_images(self, part: dict[str, Any]) -> None:
        parsed = only_part(part)
        assert isinstance(parsed, ImagePart)
        assert parsed.image.size == (6, 4)
        assert parsed.image.mode == "RGB"

    def test_an_image_from_a_path(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(png())
        assert only_part({"type": "image", "image": tmp_path / "a.png"}).image.size == (6, 4)

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "input_audio", "input_audio": {"data": b64(wav()), "format": "wav"}},
            {"type": "input_audio", "input_audio": {"data": b64(wav())}},
            {"type": "input_audio", "input_audio": {"data": WAV_URL, "format": "wav"}},
            {"type": "input_audio", "input_audio": {"data": b64(bytes(4800)), "format": "pcm16"}},
            {"type": "audio_url", "audio_url": {"url": WAV_URL}},
            {"type": "audio", "audio": wav()},
            {"type": "audio", "audio": (np.zeros(800, np.float32), 8_000)},
            {"type": "audio", "audio": AudioClip(np.zeros(800, np.float32), 8_000)},
        ],
    )
    def test_sounds_are_resampled(self, part: dict[str, Any]) -> None:
        parsed = only_part(part, audio_rate=24_000)
        assert isinstance(parsed, AudioPart)
        assert parsed.clip.sample_rate == 24_000
        assert parsed.clip.seconds == pytest.approx(0.1)

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "video_url", "video_url": {"url": MP4_URL}},
            {"type": "video_url", "video_url": MP4_URL},
            {"type": "video", "video": mp4()},
            {"type": "video", "video": (np.zeros((20, 32, 32, 3), np.uint8), 10)},
        ],
    )
    def test_videos_are_sampled(self, part: dict[str, Any]) -> None:
        parsed = only_part(part, video_fps=4.0)
        assert isinstance(parsed, VideoPart)
        assert parsed.clip.frames.shape == (8, 32, 32, 3)
        assert not parsed.use_audio

    def test_a_clip_is_taken_as_it_is(self) -> None:
        clip = VideoClip(np.zeros((4, 8, 8, 3), np.uint8), 2.0, 2.0)
        assert only_part({"type": "video", "video": clip}).clip is clip

    def test_sampling_may_be_set_beside_a_video(self) -> None:
        assert len(only_part({"type": "video", "video": mp4(), "fps": 10}).clip.frames) == 20
        assert len(only_part({"type": "video", "video": mp4(), "fps": 10, "max_frames": 6}).clip.frames) == 6
        assert len(only_part({"type": "video", "video": mp4(), "min_frames": 12}).clip.frames) == 12

    def test_sound_in_video_is_used_only_where_there_is_some(self) -> None:
        loud = only_part({"type": "video", "video": mp4(sound=True)}, use_audio_in_video=True)
        assert loud.use_audio
        assert loud.clip.audio.sample_rate == 16_000
        assert not only_part({"type": "video", "video": mp4()}, use_audio_in_video=True).use_audio
        assert not only_part({"type": "video", "video": mp4(sound=True)}).use_audio


SIMPLE = {"role": "user", "content": "hi"}
CONTENT = "messages[0].content"


class TestMistakes:
    @pytest.mark.parametrize(
        ("messages", "param", "why"),
        [
            ([], "messages", "empty"),
            ("hi", "messages", "list of messages, got str"),
            ({"role": "user"}, "messages", "list of messages, got dict"),
            (None, "messages", "list of messages"),
            (["hi"], "messages[0]", '"role" and "content", got str'),
            (
                [SIMPLE, {"content": "x"}],
                "messages[1].role",
                "one of system, developer, user, assistant, tool, got nothing",
            ),
            ([{"role": "robot", "content": "x"}], "messages[0].role", "got 'robot'"),
            ([{"role": ["user"], "content": "x"}], "messages[0].role", "got list"),
            ([{"role": "user"}], CONTENT, "string or a list of parts, got nothing"),
            ([{"role": "user", "content": 7}], CONTENT, "got int"),
            ([{"role": "user", "content": []}], CONTENT, "is empty"),
            ([{"role": "assistant", "content": []}], CONTENT, "is empty"),
            ([{"role": "user", "content": ""}], CONTENT, "is empty"),
            (
                [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
                "messages[0].tool_calls[0]",
                "must be a call",
            ),
            (user("hi"), f"{CONTENT}[0]", 'object with a "type", got str'),
            (user({"text": "x"}), f"{CONTENT}[0].type", "must be one of text, .* got nothing"),
            (user({"type": "smell"}), f"{CONTENT}[0].type", "video_url, video, got 'smell'"),
            (user({"type": ["text"]}), f"{CONTENT}[0].type", "got list"),
            (user({"type": "text"}), f"{CONTENT}[0].text", "string, got nothing"),
            (user({"type": "text", "text": ""}), f"{CONTENT}[0].text", "is empty"),
            (user({"type": "image_url"}), f"{CONTENT}[0].image_url", "must be a URL"),
            (user({"type": "image_url", "image_url": {}}), f"{CONTENT}[0].image_url.url", "got nothing"),
            (user({"type": "image_url", "image_url": {"url": ""}}), f"{CONTENT}[0].image_url.url", "empty string"),
            (user({"type": "input_image", "file_id": "f"}), f"{CONTENT}[0].file_id", "data:"),
            (user({"type": "image_url", "image_url": np.zeros(3)}), f"{CONTENT}[0].image_url", "got ndarray"),
            (user({"type": "image"}), f"{CONTENT}[0].image", "missing or empty"),
            (user({"type": "image", "image": 7}), f"{CONTENT}[0].image", "got int"),
            (user({"type": "audio_url", "audio_url": {"url": 3}}), f"{CONTENT}[0].audio_url.url", "got int"),
            (user({"type": "audio", "audio": ""}), f"{CONTENT}[0].audio", "missing or empty"),
            (user({"type": "input_audio"}), f"{CONTENT}[0].input_audio", '"data" and "format"'),
            (user({"type": "input_audio", "input_audio": {}}), f"{CONTENT}[0].input_audio.data", "base64"),
            (
                user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "midi"}}),
                f"{CONTENT}[0].input_audio.format",
                "one of wav, mp3",
            ),
            (user({"type": "video"}), f"{CONTENT}[0].video", "missing or empty"),
            (user({"type": "video_url", "video_url": None}), f"{CONTENT}[0].video_url", "must be a URL"),
            (user({"type": "video", "video": b"x", "fps": 0}), f"{CONTENT}[0].fps", "above 0"),
            (user({"type": "video", "video": b"x", "fps": "2"}), f"{CONTENT}[0].fps", "above 0"),
            (user({"type": "video", "video": b"x", "max_frames": 1}), f"{CONTENT}[0].max_frames", "at least 2"),
            (user({"type": "video", "video": b"x", "min_frames": True}), f"{CONTENT}[0].min_frames", "at least 1"),
        ],
    )
    def test_each_mistake_names_its_place_and_its_fix(self, messages: Any, param: str, why: str) -> None:
        with pytest.raises(InvalidRequestError, match=why) as caught:
            parse_messages(messages, LIMITS)
        assert caught.value.param == param

    @pytest.mark.parametrize(
        ("part", "param"),
        [
            ({"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}, "image_url.url"),
            ({"type": "image", "image": b"junk"}, "image"),
            ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, "input_audio.data"),
            ({"type": "audio_url", "audio_url": "data:;base64,AAAA"}, "audio_url"),
            ({"type": "video_url", "video_url": {"url": "data:;base64,AAAA"}}, "video_url.url"),
        ],
    )
    def test_media_that_does_not_decode_is_named_by_its_place(self, part: dict[str, Any], param: str) -> None:
        with pytest.raises(MediaError) as caught:
            parse_messages([SIMPLE, *user({"type": "text", "text": "x"}, part)], LIMITS)
        assert caught.value.param == f"messages[1].content[1].{param}"

    def test_a_media_error_keeps_its_class_and_message(self) -> None:
        with pytest.raises(LimitExceededError, match="6x4 = 24 pixels is over the limit of 10") as caught:
            parse_messages(user({"type": "image_url", "image_url": PNG_URL}), MediaLimits(max_image_pixels=10))
        assert type(caught.value) is LimitExceededError
        assert caught.value.param == "messages[0].content[0].image_url"

    def test_urls_and_paths_that_are_not_allowed_are_named_by_their_place(self) -> None:
        for url in ("https://example.com/a.png", "/etc/hostname"):
            with pytest.raises(InvalidRequestError, match="data:") as caught:
                parse_messages(user({"type": "image_url", "image_url": {"url": url}}), MediaLimits(allow_paths=False))
            assert caught.value.param == "messages[0].content[0].image_url.url"


class TestLimits:
    def test_too_many_items_are_refused_before_any_is_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat, "decode_image", lambda *_: pytest.fail("decoded"))
        part = {"type": "image_url", "image_url": PNG_URL}
        with pytest.raises(LimitExceededError, match="3 media items are over the limit of 2") as caught:
            parse_messages([*user(part, part), *user(part)], MediaLimits(max_items=2))
        assert caught.value.param == "messages"

    def test_text_is_counted_over_all_messages(self) -> None:
        limits = MediaLimits(max_text_chars=5)
        assert parse_messages([{"role": "user", "content": "abcde"}], limits)
        with pytest.raises(LimitExceededError, match="6 characters of text are over the limit of 5"):
            parse_messages([{"role": "user", "content": "abc"}, *user({"type": "text", "text": "def"})], limits)

    def test_a_mistake_in_the_last_message_costs_no_decoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat, "decode_image", lambda *_: pytest.fail("decoded"))
        with pytest.raises(InvalidRequestError, match="robot"):
            parse_messages(
                [*user({"type": "image_url", "image_url": PNG_URL}), {"role": "robot", "content": "x"}], LIMITS
            )


class TestTotals:
    """Many items together may not hold what one of them may not."""

    def test_pixels_are_counted_over_images_and_video_frames(self, monkeypatch: pytest.MonkeyPatch) -> None:
        frames = np.zeros((4, 10, 10, 3), np.uint8)
        parts = [{"type": "video", "video": (frames, 2.0)}, {"type": "image", "image": np.zeros((10, 10), np.uint8)}]
        assert parse_messages(user(*parts), MediaLimits(max_total_pixels=500))
        seen: list[object] = []
        real = chat.decode_image
        monkeypatch.setattr(chat, "decode_image", lambda *given: seen.append(1) or real(*given))
        with pytest.raises(LimitExceededError, match=r"600 pixels .* limit of 599 together") as caught:
            parse_messages([*user(*parts, parts[1]), *user(parts[1])], MediaLimits(max_total_pixels=599))
        assert caught.value.param == "messages[0].content[2].image"
        assert len(seen) == 2  # the one after the limit was never decoded

    def test_seconds_are_counted_over_sounds_and_videos(self) -> None:
        sound = {"type": "audio", "audio": (np.zeros(16_000, np.float32), 16_000)}
        clip = VideoClip(np.zeros((2, 4, 4, 3), np.uint8), 2.0, 1.0, AudioClip(np.zeros(16_000, np.float32), 16_000))
        assert parse_messages(user(sound, sound), MediaLimits(max_total_audio_seconds=2.0))
        with pytest.raises(LimitExceededError, match=r"audio lasts 3\.00 seconds .* limit of 2\.5 together") as caught:
            parse_messages(
                user(sound, {"type": "video", "video": clip}, sound), MediaLimits(max_total_audio_seconds=2.5)
            )
        assert caught.value.param == "messages[0].content[2].audio"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "system", "content": "a\ud800"}], "messages[0].content"),
        (user({"type": "text", "text": "ok"}, {"type": "text", "text": "\udfff"}), "messages[0].content[1].text"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_where_it_is(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair") as caught:
        parse_messages(messages, LIMITS)
    assert caught.value.param == param
