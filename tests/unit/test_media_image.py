"""Decoding images: every mode becomes upright RGB, and size is refused from the header."""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media.image import PIXEL_BYTES, _from_array, decode_image, decode_image_bytes
from omnistage.media.limits import MediaLimits
from tests.slow_media import slow_jpeg

LIMITS = MediaLimits()


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost no pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


def colour(image: Image.Image, x: int = 0, y: int = 0) -> tuple[int, ...]:
    assert image.mode == "RGB"
    pixel = image.getpixel((x, y))
    assert isinstance(pixel, tuple)
    return tuple(int(value) for value in pixel)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_common_formats_decode(kind: str) -> None:
    image = decode_image(encoded(Image.new("RGB", (20, 10), (250, 0, 0)), kind), LIMITS)
    assert image.size == (20, 10)
    assert np.abs(np.array(colour(image)) - [250, 0, 0]).max() < 12


def test_formats_outside_the_list_are_refused() -> None:
    with pytest.raises(MediaError, match="PNG, JPEG"):
        decode_image(encoded(Image.new("RGB", (4, 4)), "EPS"), LIMITS)


class TestModes:
    def test_alpha_is_laid_over_white(self) -> None:
        assert colour(decode_image(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0))), LIMITS)) == (255, 255, 255)
        half = colour(decode_image(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128))), LIMITS))
        assert half == (127, 127, 127)

    def test_grey_with_alpha_is_laid_over_white(self) -> None:
        assert colour(decode_image(encoded(Image.new("LA", (2, 2), (9, 0))), LIMITS)) == (255, 255, 255)

    @pytest.mark.parametrize(("mode", "fill"), [("RGBa", (0, 0, 0, 0)), ("La", (0, 0))])
    def test_premultiplied_alpha_is_laid_over_white(self, mode: str, fill: tuple[int, ...]) -> None:
        assert colour(decode_image(Image.new(mode, (2, 2), fill), LIMITS)) == (255, 255, 255)

    def test_a_palette_becomes_its_colours(self) -> None:
        image = Image.new("RGB", (4, 4), (0, 200, 0)).quantize(4)
        assert colour(decode_image(encoded(image), LIMITS)) == (0, 200, 0)

    def test_a_transparent_palette_entry_becomes_white(self) -> None:
        image = Image.new("P", (2, 2), 0)
        image.putpalette([10, 20, 30] * 256)
        assert colour(decode_image(encoded(image, transparency=0), LIMITS)) == (255, 255, 255)

    @pytest.mark.parametrize(("mode", "fill", "expected"), [("L", 77, 77), ("1", 1, 255)])
    def test_grey_and_bilevel(self, mode: str, fill: int, expected: int) -> None:
        assert colour(decode_image(encoded(Image.new(mode, (2, 2), fill)), LIMITS)) == (expected,) * 3

    def test_cmyk(self) -> None:
        red = colour(decode_image(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), LIMITS))
        assert red[0] > 240
        assert max(red[1:]) < 15

    def test_16_bit_grey_is_scaled_and_not_clipped(self) -> None:
        image = Image.fromarray(np.array([[0, 0x8080, 0xFFFF]], np.uint16))
        for kind in ("PNG", "TIFF"):
            decoded = decode_image(encoded(image, kind), LIMITS)
            assert [colour(decoded, x)[0] for x in range(3)] == [0, 128, 255]

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (np.array([[0, 65535]], np.int32), [0, 255]),
            (np.array([[0, 200]], np.int32), [0, 200]),
            (np.array([[0.0, 1.0]], np.float32), [0, 255]),
            (np.array([[0.0, 200.0]], np.float32), [0, 200]),
        ],
    )
    def test_32_bit_and_float_grey(self, values: np.ndarray, expected: list[int]) -> None:
        decoded = decode_image(encoded(Image.fromarray(values), "TIFF"), LIMITS)
        assert [colour(decoded, x)[0] for x in range(2)] == expected

    def test_nan_pixels_are_an_error(self) -> None:
        with pytest.raises(MediaError, match="NaN"):
            decode_image(encoded(Image.fromarray(np.full((2, 2), np.nan, np.float32)), "TIFF"), LIMITS)

    def test_an_animation_gives_its_first_frame(self) -> None:
        red, blue = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
        for kind in ("GIF", "WEBP"):
            image = decode_image(encoded(red, kind, save_all=True, append_images=[blue]), LIMITS)
            assert colour(image)[0] > 240


class TestOrientation:
    @pytest.mark.parametrize("kind", ["JPEG", "PNG"])
    def test_exif_orientation_is_applied(self, kind: str) -> None:
        image = Image.new("RGB", (32, 16), (255, 0, 0))
        image.paste((0, 0, 255), (16, 0, 32, 16))
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was turned: rotate clockwise to see it upright
        decoded = decode_image(encoded(image, kind, exif=exif), LIMITS)
        assert decoded.size == (16, 32)
        assert colour(decoded, 8, 4)[0] > 240
        assert colour(decoded, 8, 28)[2] > 240

    @pytest.mark.parametrize("orientation", [0, 1, 99])
    def test_a_meaningless_orientation_changes_nothing(self, orientation: int) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert decode_image(encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif), LIMITS).size == (8, 4)

    @pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"])
    def test_damaged_exif_does_not_cost_the_image(self, exif: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert decode_image(encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif), LIMITS).size == (8, 4)


class TestLimits:
    def test_a_huge_image_is_refused_from_its_header_without_allocating(self) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(LimitExceededError, match=r"2500000000 pixels .* limit of 64000000"):
                decode_image(png_header(50_000, 50_000), LIMITS)
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("action", ["ignore", "error"])
    def test_an_image_that_pillow_only_warns_about_is_refused_too(self, action: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            with pytest.raises(LimitExceededError, match="100000000"):
                decode_image(png_header(10_000, 10_000), LIMITS)

    def test_the_limit_holds_where_another_library_lifted_pillows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        with pytest.raises(LimitExceededError, match="50000x50000 = 2500000000"):
            decode_image(png_header(50_000, 50_000), LIMITS)

    def test_an_extreme_aspect_is_refused_both_ways(self) -> None:
        for size in ((201, 1), (1, 201)):
            with pytest.raises(LimitExceededError, match="aspect ratio over the limit of 200"):
                decode_image(Image.new("RGB", size), LIMITS)
        assert decode_image(Image.new("RGB", (200, 1)), LIMITS).size == (200, 1)

    def test_pil_images_and_arrays_are_measured_too(self) -> None:
        small = MediaLimits(max_image_pixels=10)
        for source in (Image.new("RGB", (4, 4)), np.zeros((4, 4, 3), np.uint8)):
            with pytest.raises(LimitExceededError, match="4x4 = 16"):
                decode_image(source, small)

    def test_an_empty_image_is_an_error(self) -> None:
        for source in (Image.new("RGB", (0, 4)), np.zeros((4, 0, 3), np.uint8)):
            with pytest.raises(MediaError, match="empty"):
                decode_image(source, LIMITS)


class TestDamage:
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
    def test_a_truncated_image_is_an_error(self, kind: str) -> None:
        noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
        data = encoded(Image.fromarray(noise), kind)
        with pytest.raises(MediaError):
            decode_image(data[: len(data) // 2], LIMITS)

    def test_a_lazily_opened_truncated_image_is_an_error(self) -> None:
        data = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)))
        with pytest.raises(MediaError, match="truncated"):
            decode_image(Image.open(io.BytesIO(data[: len(data) // 2])), LIMITS)

    def test_bytes_that_are_no_image_are_an_error(self) -> None:
        with pytest.raises(MediaError, match="not a readable image"):
            decode_image(b"hello", LIMITS)

    @settings(max_examples=150, deadline=None)
    @given(data=st.data(), kind=st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "WEBP"]))
    def test_flipped_bytes_give_an_image_or_one_of_our_errors(self, data: st.DataObject, kind: str) -> None:
        original = bytearray(encoded(Image.new("RGB", (16, 16), (1, 2, 3)), kind))
        for _ in range(data.draw(st.integers(1, 4))):
            original[data.draw(st.integers(0, len(original) - 1))] = data.draw(st.integers(0, 255))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                image = decode_image(bytes(original), MediaLimits(max_image_pixels=1_000_000))
            except (MediaError, LimitExceededError):
                return
        assert image.mode == "RGB"


class TestArrays:
    @pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (4, 6, 3), (4, 6, 4)])
    def test_uint8_arrays_are_taken(self, shape: tuple[int, ...]) -> None:
        assert decode_image(np.full(shape, 255, np.uint8), LIMITS).size == (6, 4)

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_floats_are_scaled_from_0_to_1(self, dtype: Any) -> None:
        assert colour(decode_image(np.full((2, 2, 3), 0.5, dtype), LIMITS)) == (128, 128, 128)

    def test_a_view_with_odd_strides_is_taken(self) -> None:
        array = np.zeros((4, 4, 3), np.uint8)
        array[..., 2] = 9
        assert colour(decode_image(array[::-1, ::2, ::-1], LIMITS)) == (9, 0, 0)

    @pytest.mark.parametrize("shape", [(4,), (3, 4, 6), (4, 6, 2), (1, 4, 6, 3)])
    def test_other_shapes_are_errors(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InvalidRequestError, match="shape"):
            decode_image(np.zeros(shape, np.uint8), LIMITS)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -0.1, 1.1])
    def test_floats_that_are_nan_or_out_of_range_are_errors(self, value: float) -> None:
        array = np.zeros((4, 4, 3), np.float32)
        array[1, 1, 1] = value
        with pytest.raises(InvalidRequestError, match=r"NaN or values outside 0\.\.1"):
            decode_image(array, LIMITS)

    @pytest.mark.parametrize("dtype", [np.int64, np.bool_, object])
    def test_other_types_are_errors(self, dtype: Any) -> None:
        with pytest.raises(InvalidRequestError, match="type"):
            decode_image(np.zeros((4, 4, 3), dtype), LIMITS)


def test_the_result_shares_nothing_with_the_callers_image() -> None:
    mine = Image.new("RGB", (2, 2))
    decoded = decode_image(mine, LIMITS)
    decoded.putpixel((0, 0), (9, 9, 9))
    assert colour(mine) == (0, 0, 0)


def test_a_damaged_avif_is_a_media_error() -> None:
    """Its decoder raises RuntimeError, where others raise OSError."""
    rng = np.random.default_rng(0)
    whole = encoded(Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8)), "AVIF")
    refused = 0
    for position in range(0, len(whole), 7):
        data = bytearray(whole)
        data[position] ^= 0xFF
        try:
            decode_image(bytes(data), LIMITS)
        except MediaError as error:
            refused += isinstance(error.__cause__, RuntimeError)
    assert refused


# ------------------------------------------------------------------------------------- exact values


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("F", [0.0, 0.5, 1.0], [0, 128, 255]),
        ("F", [0.0, 1.5, 200.4], [0, 2, 200]),
        ("I", [0, 7, 255], [0, 7, 255]),
        ("I", [-5, 256, 257 * 9], [0, 1, 9]),
        ("I", [0, 257, 70_000], [0, 1, 255]),
        ("I;16", [0, 257, 65_535], [0, 1, 255]),
        ("I;16", [0, 200, 129], [0, 1, 1]),
    ],
)
def test_deep_grey_keeps_its_ends_and_is_scaled_between(mode: str, values: list[float], expected: list[int]) -> None:
    kinds = {"F": np.float32, "I": np.int32, "I;16": np.uint16}
    image = Image.fromarray(np.array([values], kinds[mode]))
    assert image.mode == mode
    assert [colour(decode_image(image, LIMITS), x)[0] for x in range(3)] == expected


def test_floats_from_0_to_1_reach_both_ends() -> None:
    image = decode_image(np.array([[0.0, 0.5, 1.0]], np.float32), LIMITS)
    assert [colour(image, x)[0] for x in range(3)] == [0, 128, 255]


@pytest.mark.parametrize("orientation", range(1, 10))
def test_every_orientation_is_turned_upright_as_pillow_does(orientation: int) -> None:
    pixels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3) * 14
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(pixels), exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert (np.asarray(decode_image(data, LIMITS)) == np.asarray(upright)).all()
    assert (orientation in range(2, 9)) == (np.asarray(upright).tolist() != pixels.tolist())


def test_an_image_whose_exif_cannot_be_read_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Image.Image) -> None:
        raise SyntaxError

    monkeypatch.setattr(Image.Image, "getexif", damaged)
    assert decode_image(Image.new("RGB", (3, 2), (1, 2, 3)), LIMITS).size == (3, 2)


def test_a_jpeg_is_refused_by_the_number_of_its_scans() -> None:
    data = slow_jpeg(scans=20, side=16)
    assert decode_image_bytes(data, LIMITS).size == (16, 16)
    with pytest.raises(LimitExceededError, match="JPEG with over 10 scans"):
        decode_image_bytes(data, MediaLimits(max_image_scans=10))


def test_memory_is_reserved_for_the_pixels_of_files_and_arrays() -> None:
    sizes: list[int] = []
    decode_image_bytes(encoded(Image.new("RGB", (6, 4))), LIMITS, sizes.append)
    _from_array(np.zeros((4, 6, 3), np.uint8), LIMITS, sizes.append)
    assert sizes == [6 * 4 * PIXEL_BYTES] * 2


@pytest.mark.parametrize(("values", "grey"), [([-5.0, 1.5, 200.0], [0, 2, 200]), ([0.0, 1.5], [0, 2]), ([1.0], [255])])
def test_grey_numbers_beyond_one_are_taken_as_they_are_and_clipped(values: list[float], grey: list[int]) -> None:
    image = Image.fromarray(np.array([values], dtype=np.float32))
    assert np.asarray(decode_image(image, LIMITS))[0, :, 0].tolist() == grey
