"""The limits of media: their defaults, their own bounds, and that each holds exactly where it is set."""

from __future__ import annotations

import base64
import json
import os
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media import source as source_module
from omnistage.media.audio import decode_audio
from omnistage.media.image import decode_image
from omnistage.media.limits import MediaLimits
from omnistage.media.source import _check_base64_length, load_bytes
from omnistage.pipeline.messages.chat import parse_messages
from omnistage.pipeline.messages.drawing import parse_drawing

REFERENCE = Path(__file__).parents[2] / "docs/configuration.md"


def test_the_defaults_are_those_of_the_reference_page() -> None:
    section = REFERENCE.read_text(encoding="utf-8").partition("### `limits.media`")[2]
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| `([^`]*)` \|", section, flags=re.MULTILINE)
    told = {name: json.loads(value) for name, value in rows}
    assert told == json.loads(MediaLimits().model_dump_json())


@pytest.mark.parametrize(
    ("field", "last", "beyond"),
    [
        *(
            (name, 1, 0)
            for name in ("max_bytes", "max_items", "max_text_chars", "max_total_pixels", "max_video_pixels")
        ),
        ("max_video_total_pixels", 1, 0),
        ("max_image_pixels", 1, 0),
        ("max_image_pixels", 178_000_000, 178_000_001),
        ("max_image_aspect", 1.0, 0.999),
        ("max_video_frames", 2, 1),
        ("max_decode_memory", 64 * 2**20, 64 * 2**20 - 1),
        *((f"max_{what}_seconds", 1e-9, 0.0) for what in ("audio", "video", "total_audio")),
        ("url_timeout_seconds", 1e-9, 0.0),
        ("url_hosts", ("*.example.org", "example.org:8443"), ("https://example.org",)),
    ],
)
def test_a_limit_has_bounds_of_its_own(field: str, last: object, beyond: object) -> None:
    assert getattr(MediaLimits.model_validate({field: last}), field) == last
    with pytest.raises(ValidationError, match=field):
        MediaLimits.model_validate({field: beyond})


# ------------------------------------------------------------------------------------------------- one item


def test_decoding_videos_has_a_time_of_its_own() -> None:
    limits = MediaLimits(max_decode_seconds=1.0, max_video_decode_seconds=2.0)
    assert [limits.decode_seconds(kind) for kind in ("image", "audio", "video")] == [1.0, 1.0, 2.0]


def test_limits_do_not_change_once_they_are_set() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MediaLimits().max_bytes = 1


def test_bytes_are_taken_up_to_the_limit_wherever_they_come_from(tmp_path: Path) -> None:
    limits = MediaLimits(max_bytes=9)
    for size, fits in ((9, True), (10, False)):
        data = bytes(range(1, size + 1))
        text = base64.b64encode(data).decode()
        file = tmp_path / str(size)
        file.write_bytes(data)
        sources: list[Any] = [data, bytearray(data), memoryview(data), file, str(file), file.as_uri()]
        sources += [f"data:image/png;base64,{text}", f"data:;base64,{' '.join(text)}\n"]
        for source in sources:
            if fits:
                assert load_bytes(source, limits) == data
            else:
                with pytest.raises(LimitExceededError, match="10 bytes is over the limit of 9"):
                    load_bytes(source, limits)
        if fits:
            assert load_bytes(text, limits, bare_base64=True) == data
        else:
            with pytest.raises(LimitExceededError):
                load_bytes(text, limits, bare_base64=True)


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_base64_is_measured_by_what_it_decodes_to(padding: int) -> None:
    data = bytes(range(30 - padding))
    text = base64.b64encode(data).decode()
    assert text.count("=") == padding
    escaped = text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D") + "%0A%20"
    for given in (text, escaped, "\t".join(text)):
        assert load_bytes(f"data:;base64,{given}", MediaLimits(max_bytes=len(data))) == data
        with pytest.raises(LimitExceededError):
            load_bytes(f"data:;base64,{given}", MediaLimits(max_bytes=len(data) - 1))


@pytest.mark.parametrize("size", [28, 29, 30, 300])
def test_base64_that_is_too_long_is_refused_before_it_is_copied(size: int) -> None:
    data = bytes(number % 251 for number in range(size))
    plain = base64.b64encode(data).decode()
    for text in (plain, "\r\n".join(plain), plain + " " * 40, f"head,{plain}"):
        start = 5 if text.startswith("head,") else 0
        _check_base64_length(text, start, MediaLimits(max_bytes=size))
        with pytest.raises(LimitExceededError, match=f"item of {size} bytes"):
            _check_base64_length(text, start, MediaLimits(max_bytes=size - 1))


def test_escaped_base64_is_refused_early_by_a_bound_that_is_never_too_high() -> None:
    data = b"\xfb" * 30  # "-/v7" in base64: nearly all of it is escaped
    plain = base64.b64encode(data).decode()
    half = plain.replace("+", "%2B").replace("/", "%2F")
    for text in (half, f"{half}%0A%20%0d", "".join(f"%{ord(character):02X}" for character in plain)):
        _check_base64_length(text, 0, MediaLimits(max_bytes=30))
        _check_base64_length(text, 0, MediaLimits(max_bytes=28))
        with pytest.raises(LimitExceededError, match="item of 28 bytes"):
            _check_base64_length(text, 0, MediaLimits(max_bytes=27))


def test_what_is_nothing_but_percent_signs_counts_for_a_third() -> None:
    _check_base64_length("%" * 1200, 0, MediaLimits(max_bytes=298))
    with pytest.raises(LimitExceededError, match="item of 298 bytes"):
        _check_base64_length("%" * 1200, 0, MediaLimits(max_bytes=297))


def test_escapes_are_read_in_urls_only() -> None:
    assert load_bytes("data:;base64,%2B%2B%2B%2B", MediaLimits()) == base64.b64decode("++++")
    with pytest.raises(MediaError, match="malformed base64"):
        load_bytes("%2B%2B%2B%2B", MediaLimits(), bare_base64=True)


# ------------------------------------------------------------------------------------------------- files


def changed_os(**functions: Any) -> SimpleNamespace:
    """The module `os` for the code under test alone."""
    return SimpleNamespace(**{**vars(os), **functions})


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "growing"
    file.write_bytes(bytes(100))
    about = SimpleNamespace(st_mode=file.stat().st_mode, st_size=1)
    monkeypatch.setattr(source_module, "os", changed_os(fstat=lambda descriptor: about))
    with pytest.raises(LimitExceededError, match="item of 10 bytes is over the limit of 9"):
        load_bytes(file, MediaLimits(max_bytes=9))  # and no more of it is read


def test_a_file_is_closed_however_its_reading_ends(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    before = sorted(os.listdir("/proc/self/fd"))
    load_bytes(file, MediaLimits())
    with pytest.raises(LimitExceededError):
        load_bytes(file, MediaLimits(max_bytes=9))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_folder_is_checked_again_of_what_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    limits = MediaLimits(allowed_path_roots=(tmp_path,))
    assert load_bytes(file, limits) == b"abc"
    monkeypatch.setattr(source_module, "os", changed_os(readlink=lambda path: "/etc/hostname"))
    with pytest.raises(InvalidRequestError, match="outside the allowed folders"):
        load_bytes(file, limits)


def test_a_file_may_lie_in_any_of_the_allowed_folders(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(name.encode())
    limits = MediaLimits(allowed_path_roots=(tmp_path / "a", tmp_path / "b"))
    assert [load_bytes(tmp_path / name / "file", limits) for name in "ab"] == [b"a", b"b"]
    with pytest.raises(InvalidRequestError, match="outside the allowed folders"):
        load_bytes(tmp_path / "c" / "file", limits)


def test_only_the_beginning_of_a_long_path_is_repeated() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        load_bytes("x" * 200, MediaLimits())
    assert f"'{'x' * 80}'" in str(caught.value)


def test_where_the_system_does_not_tell_what_is_open_the_path_must_still_lead_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"abc")
    other.write_bytes(b"def")

    def unknown(path: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(source_module, "os", changed_os(readlink=unknown))
    limits = MediaLimits(allowed_path_roots=(tmp_path,))
    assert load_bytes(file, limits) == b"abc"
    about = os.stat(other)
    monkeypatch.setattr(source_module, "os", changed_os(readlink=unknown, stat=lambda path: about))
    with pytest.raises(InvalidRequestError, match="it changed while it was opened"):
        load_bytes(file, limits)


def test_what_is_neither_a_url_nor_a_file_is_told_apart() -> None:
    with pytest.raises(InvalidRequestError, match="URL scheme 'ftp' is not supported"):
        load_bytes("ftp://example.org/a.png", MediaLimits())
    with pytest.raises(InvalidRequestError, match=f"URL scheme '{'a' * 13}' is not supported"):
        load_bytes(f"{'a' * 13}://x", MediaLimits())
    with pytest.raises(InvalidRequestError, match="no such file"):  # so far into the text that it is no scheme
        load_bytes(f"{'a' * 14}://x", MediaLimits())
    with pytest.raises(InvalidRequestError, match="text without a data: or http"):
        load_bytes("a.png", MediaLimits(allow_paths=False))
    with pytest.raises(InvalidRequestError, match="not allowed here"):
        load_bytes(Path("a.png"), MediaLimits(allow_paths=False))


def test_the_head_of_a_data_url_is_short() -> None:
    for length, fits in ((1023, True), (1024, False)):
        url = "data:" + "a" * (length - len("data:;base64")) + ";base64," + base64.b64encode(b"abc").decode()
        if fits:
            assert load_bytes(url, MediaLimits()) == b"abc"
        else:
            with pytest.raises(MediaError, match="no comma"):
                load_bytes(url, MediaLimits())


@pytest.mark.parametrize("size", [(20, 5), (5, 20), (10, 10)])
def test_an_image_has_as_many_pixels_as_the_limit_at_most(size: tuple[int, int]) -> None:
    assert decode_image(Image.new("RGB", size), MediaLimits(max_image_pixels=100)).size == size
    with pytest.raises(LimitExceededError, match="100 pixels is over the limit of 99"):
        decode_image(Image.new("RGB", size), MediaLimits(max_image_pixels=99))


@pytest.mark.parametrize("turned", [False, True])
def test_an_image_is_as_long_as_the_aspect_allows(turned: bool) -> None:
    limits = MediaLimits(max_image_aspect=2.5)
    for length, fits in ((10, True), (11, False)):
        image = Image.new("RGB", (4, length) if turned else (length, 4))
        if fits:
            assert decode_image(image, limits).size == image.size
        else:
            with pytest.raises(LimitExceededError, match=r"limit of 2\.5"):
                decode_image(image, limits)


@pytest.mark.parametrize("size", [(0, 1), (1, 0)])
def test_an_image_has_a_pixel_each_way_at_least(size: tuple[int, int]) -> None:
    assert decode_image(np.zeros((1, 1, 3), np.uint8), MediaLimits()).size == (1, 1)
    with pytest.raises(MediaError, match="empty"):
        decode_image(np.zeros((*size, 3), np.uint8), MediaLimits())


def wav_header(seconds: float) -> bytes:
    """A WAV file of 16-bit mono at 8 kHz that claims so much sound and holds four samples."""
    size = int(seconds * 16_000)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 8_000, 16_000, 2, 16)
    return b"RIFF" + struct.pack("<I", 36 + size) + b"WAVE" + form + struct.pack("<4sI", b"data", size) + bytes(8)


def test_a_sound_is_as_long_as_the_limit_at_most() -> None:
    limits = MediaLimits(max_audio_seconds=0.5)
    for samples, fits in ((12_000, True), (12_001, False)):
        for source, options in (
            ((np.zeros(samples, np.float32), 24_000), {}),
            (np.zeros(samples, "<i2").tobytes(), {"format": "pcm16"}),
        ):
            if fits:
                assert len(decode_audio(source, limits, **options).samples) == samples  # type: ignore[arg-type]
            else:
                with pytest.raises(LimitExceededError, match=r"limit of 0\.5"):
                    decode_audio(source, limits, **options)  # type: ignore[arg-type]


def test_a_header_that_claims_too_long_a_sound_is_believed() -> None:
    limits = MediaLimits(max_audio_seconds=0.5)
    assert len(decode_audio(wav_header(0.5), limits).samples) == 4
    with pytest.raises(LimitExceededError, match="audio of at least"):
        decode_audio(wav_header(0.501), limits)


# ------------------------------------------------------------------------------------------ a whole request


def picture(side: int) -> dict[str, object]:
    return {"type": "image", "image": Image.new("RGB", (side, side))}


def sound(samples: int) -> dict[str, object]:
    return {"type": "audio", "audio": (np.zeros(samples, np.float32), 16_000)}


def asked(*parts: object) -> list[dict[str, object]]:
    """One message for each part, so that limits are seen to count over all of them."""
    return [{"role": "user", "content": [part]} for part in parts]


TEXT = {"type": "text", "text": "12345"}


@pytest.mark.parametrize(
    ("limit", "parts", "holds"),
    [
        ("max_items", [picture(2), sound(160), picture(2), TEXT], 3),
        ("max_text_chars", [TEXT, TEXT, picture(2)], 10),
        ("max_total_pixels", [picture(10), picture(5), TEXT], 125),
        ("max_total_audio_seconds", [sound(16_000), sound(8_000), picture(2)], 1.5),
    ],
)
def test_what_all_messages_hold_together_is_bounded(limit: str, parts: list[object], holds: float) -> None:
    assert len(parse_messages(asked(*parts), MediaLimits.model_validate({limit: holds}))) == len(parts)
    less = holds - 1 if isinstance(holds, int) else holds - 0.001
    with pytest.raises(LimitExceededError, match=f"limit of {less:g}"):
        parse_messages(asked(*parts), MediaLimits.model_validate({limit: less}))


def test_the_words_of_tool_calls_are_counted_too() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "12345"}]
    assert len(parse_messages(messages, MediaLimits(max_text_chars=11))) == 2
    with pytest.raises(LimitExceededError, match="11 characters"):
        parse_messages(messages, MediaLimits(max_text_chars=10))


def test_pictures_to_draw_from_are_bounded_in_number_pixels_and_words() -> None:
    images = [np.zeros((10, 10, 3), np.uint8), np.zeros((5, 5, 3), np.uint8)]
    prompt = {"prompt": "12345", "images": images}
    for limit, holds in (("max_items", 2), ("max_total_pixels", 125), ("max_text_chars", 5)):
        assert len(parse_drawing(prompt, MediaLimits.model_validate({limit: holds})).images) == 2
        with pytest.raises(LimitExceededError, match=f"limit of {holds - 1}"):
            parse_drawing(prompt, MediaLimits.model_validate({limit: holds - 1}))
