"""Pictures written are read back with Pillow: pixels, metadata, and errors that say what to change."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from omnistage.core.errors import InvalidRequestError, MediaError
from omnistage.media.image_output import SOFTWARE, ImageOutput, contact_sheet, read_metadata

METADATA = {"prompt": "ein Schloß 城堡 \U0001f3f0", "seed": 7, "guidance": 3.5, "size": [48, 40], "lora": None}


def gradient(height: int = 40, width: int = 48) -> np.ndarray:
    ramp = np.zeros((height, width, 3), np.uint8)
    ramp[..., 0] = np.linspace(0, 255, width, dtype=np.uint8)
    ramp[..., 1] = np.linspace(255, 0, height, dtype=np.uint8)[:, None]
    ramp[..., 2] = 90
    return ramp


def decoded(data: bytes) -> tuple[str | None, np.ndarray]:
    with Image.open(io.BytesIO(data)) as image:
        return image.format, np.asarray(image.convert("RGB"))


def test_png_is_exact() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (37, 51, 3), np.uint8)
    kind, pixels = decoded(ImageOutput(noise).to_bytes())
    assert kind == "PNG"
    np.testing.assert_array_equal(pixels, noise)


@pytest.mark.parametrize("format", ["jpeg", "jpg", "webp", ".JPEG"])
def test_lossy_formats_are_close(format: str) -> None:
    kind, pixels = decoded(ImageOutput(gradient()).to_bytes(format))
    assert kind == ("WEBP" if format == "webp" else "JPEG")
    assert np.abs(pixels.astype(int) - gradient().astype(int)).mean() < 3


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_quality_sets_the_size(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    image = ImageOutput(noise)
    assert len(image.to_bytes(format, quality=20)) < len(image.to_bytes(format, quality=95)) / 1.5


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.JPEG", "a.webp"])
def test_metadata_is_in_the_file(tmp_path: Path, name: str) -> None:
    path = ImageOutput(gradient(), METADATA).save(tmp_path / name)
    assert path == tmp_path / name
    assert read_metadata(path) == METADATA
    assert read_metadata(str(path)) == METADATA
    assert read_metadata(path.read_bytes()) == METADATA
    with Image.open(path) as image:
        if image.format == "PNG":
            assert image.info["Software"] == SOFTWARE
        else:
            assert image.getexif()[ExifTags.Base.Software] == SOFTWARE
            assert '"seed": 7' in image.getexif()[ExifTags.Base.ImageDescription]


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_metadata_can_be_off(format: str) -> None:
    data = ImageOutput(gradient(), METADATA).to_bytes(format, metadata=False)
    assert read_metadata(data) == {}
    assert b"Omnistage" not in data
    assert b"seed" not in data
    with Image.open(io.BytesIO(data)) as image:
        assert not image.getexif()


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_no_metadata_names_the_software_alone(format: str) -> None:
    data = ImageOutput(gradient()).to_bytes(format)
    assert read_metadata(data) == {}
    assert SOFTWARE.encode() in data


def test_metadata_of_others_is_nothing() -> None:
    from PIL import PngImagePlugin

    for text in ("a castle\nSteps: 20, Seed: 1", "[1, 2]", "[" * 100_000):
        chunks = PngImagePlugin.PngInfo()
        chunks.add_text("parameters", text)
        file = io.BytesIO()
        Image.new("RGB", (4, 4)).save(file, "PNG", pnginfo=chunks)
        assert read_metadata(file.getvalue()) == {}


def test_reading_what_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="not a readable image"):
        read_metadata(b"hello")
    with pytest.raises(MediaError, match="there is no file"):
        read_metadata(tmp_path / "missing.png")


def test_long_metadata() -> None:
    image = ImageOutput(gradient(), {"prompt": "x" * 40_000})
    assert read_metadata(image.to_bytes("png")) == image.metadata
    with pytest.raises(InvalidRequestError, match="save as png") as caught:
        image.to_bytes("jpeg")
    assert caught.value.param == "metadata"


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_metadata_that_is_not_json(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
        ImageOutput(gradient(), {"bad": value}).to_bytes()


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        [[[1, 2, 3]]],
    ],
)
def test_wrong_arrays(pixels: object) -> None:
    with pytest.raises(MediaError, match=r"uint8 \[h, w, 3\], got"):
        ImageOutput(pixels)  # type: ignore[arg-type]


def test_unknown_formats_and_qualities(tmp_path: Path) -> None:
    image = ImageOutput(gradient())
    with pytest.raises(InvalidRequestError, match=r"end the name in \.png"):
        image.save(tmp_path / "a.tiff")
    with pytest.raises(InvalidRequestError, match=r"end the name in \.png"):
        image.save(tmp_path / "noending")
    with pytest.raises(InvalidRequestError, match="use one of png") as caught:
        image.to_bytes("bmp")
    assert caught.value.param == "format"
    with pytest.raises(InvalidRequestError, match="lossless"):
        image.to_bytes("png", quality=90)
    for quality in (0, 101):
        with pytest.raises(InvalidRequestError, match="1 to 100"):
            image.to_bytes("jpeg", quality=quality)
    assert not list(tmp_path.iterdir())


def test_too_wide_for_webp() -> None:
    with pytest.raises(MediaError, match="as webp"):
        ImageOutput(np.zeros((2, 16_400, 3), np.uint8)).to_bytes("webp")


def test_views_and_properties() -> None:
    image = ImageOutput(gradient(40, 48)[::2, ::-1])
    assert (image.width, image.height) == (48, 20)
    assert repr(image) == "ImageOutput(48x20)"
    np.testing.assert_array_equal(np.asarray(image.to_pil()), image.pixels)
    np.testing.assert_array_equal(decoded(image.to_bytes())[1], image.pixels)


def test_contact_sheet() -> None:
    images = [ImageOutput(np.full((20 + i, 30, 3), 50 * i + 40, np.uint8), {"seed": i}) for i in range(4)]
    sheet = contact_sheet(images, labels=False)
    assert (sheet.width, sheet.height) == (2 * 38 + 8, 2 * 31 + 8)
    assert sheet.metadata == {"images": [{"seed": i} for i in range(4)]}
    for index in range(4):
        middle = sheet.pixels[8 + (index // 2) * 31 + 11, 8 + (index % 2) * 38 + 15]
        assert (middle == 50 * index + 40).all()
    assert read_metadata(sheet.to_bytes()) == sheet.metadata


def test_contact_sheet_says_once_what_its_pictures_have_in_common() -> None:
    images = [ImageOutput(gradient(), {"seed": i, "prompt": "x" * 2000, "steps": 4}) for i in range(64)]
    sheet = contact_sheet(images)
    assert sheet.metadata == {"prompt": "x" * 2000, "steps": 4, "images": [{"seed": i} for i in range(64)]}
    assert read_metadata(sheet.to_bytes("jpeg")) == sheet.metadata
    assert contact_sheet(images[:1]).metadata == {"images": [images[0].metadata]}


def test_contact_sheet_columns_and_labels() -> None:
    images = [ImageOutput(gradient(), {"seed": 123}), ImageOutput(gradient())]
    column = contact_sheet(images, columns=1)
    row = contact_sheet(images, columns=5)
    assert column.height > column.width
    assert row.width > row.height
    plain = contact_sheet(images, labels=False, columns=1)
    assert column.height > plain.height
    strip = column.pixels[8 + 40 : 8 + 40 + 18, 8:56]
    assert strip.max() > 150  # there is writing in it
    for bad in ([], [ImageOutput(gradient())]):
        with pytest.raises(InvalidRequestError, match="at least"):
            contact_sheet(bad, columns=0)
