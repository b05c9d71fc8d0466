"""Encoding generated images, with their metadata embedded."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageDraw, ImageFont, PngImagePlugin

from omnistage import __version__
from omnistage.core.errors import InvalidRequestError, MediaError
from omnistage.core.validation import short_repr

SOFTWARE = f"Omnistage {__version__}"
_FORMATS = {"png": "PNG", "jpg": "JPEG", "jpeg": "JPEG", "webp": "WEBP"}
_DEFAULT_QUALITY = {"JPEG": 95, "WEBP": 90}
_PNG_KEY = "parameters"
# The charset mark with which EXIF wants a UserComment to start; the JSON is ASCII.
_ASCII_MARK = b"ASCII\0\0\0"
_MAX_EXIF_BYTES = 65_533
_READ_ERRORS = (OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError, RuntimeError)


@dataclass(frozen=True, slots=True, eq=False)
class ImageOutput:
    """A generated image: `pixels` is `uint8 [h, w, 3]`; `metadata` (prompt, seed, ...) is embedded in files."""

    pixels: NDArray[np.uint8]
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pixels(self.pixels, 3, "an image must be uint8 [h, w, 3]")

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    def to_pil(self) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(self.pixels))

    def to_bytes(self, format: str = "png", *, quality: int | None = None, metadata: bool = True) -> bytes:
        """A file's bytes as png, jpeg or webp. `quality` (1 to 100) is for the last two.

        Metadata is embedded in PNG's text chunks, or in EXIF.
        """
        kind = _FORMATS.get(format.lower().lstrip("."))
        if kind is None:
            raise InvalidRequestError(
                f"cannot encode an image as {short_repr(format)}; use one of {', '.join(_FORMATS)}", param="format"
            )
        options: dict[str, Any] = {}
        if kind == "PNG":
            if quality is not None:
                raise InvalidRequestError("png is lossless; leave quality out, or use jpeg or webp", param="quality")
            if metadata:
                options["pnginfo"] = _png_text(self.metadata)
        else:
            options["quality"] = _checked_quality(quality, kind)
            if kind == "JPEG":
                options["subsampling"] = 0  # full colour resolution keeps sharp edges
            if metadata:
                options["exif"] = exif(self.metadata)
        return encode(self.to_pil(), kind, options)

    def save(self, path: str | os.PathLike[str], *, quality: int | None = None, metadata: bool = True) -> Path:
        """Write to `path` in the format of its extension (png, jpg, jpeg, webp) and return the path."""
        target = Path(path)
        if target.suffix.lower()[1:] not in _FORMATS:
            endings = ", ".join(f".{name}" for name in _FORMATS)
            raise InvalidRequestError(f"cannot save an image as {target.name!r}; end the name in {endings}")
        target.write_bytes(self.to_bytes(target.suffix, quality=quality, metadata=metadata))
        return target

    def __repr__(self) -> str:
        return f"ImageOutput({self.width}x{self.height})"


def read_metadata(source: str | os.PathLike[str] | bytes) -> dict[str, object]:
    """The metadata embedded in an image (png, jpeg, webp) or an animation (gif, webp); empty if there is none."""
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file, formats=("PNG", "JPEG", "WEBP", "GIF")) as image:
            text = _embedded_text(image)
    except FileNotFoundError as error:
        raise MediaError(f"there is no file {short_repr(str(source))}") from error
    except (*_READ_ERRORS, Image.DecompressionBombError) as error:
        raise MediaError("not a readable image; give a png, jpeg, webp or gif") from error
    return parse_metadata(text)


def contact_sheet(images: Sequence[ImageOutput], *, columns: int | None = None, labels: bool = True) -> ImageOutput:
    """All images in one, row by row, each with its seed (or number) below.

    Cells are as large as the largest image; by default there are about as many columns as rows.
    """
    if not images:
        raise InvalidRequestError("a contact sheet needs at least one image", param="images")
    if columns is not None and columns < 1:
        raise InvalidRequestError(f"must be at least 1, got {columns}", param="columns")
    across = min(columns or math.ceil(math.sqrt(len(images))), len(images))
    gap, label = 8, 18 if labels else 0
    cell_w, cell_h = max(i.width for i in images) + gap, max(i.height for i in images) + gap + label
    rows = math.ceil(len(images) / across)
    sheet = Image.new("RGB", (across * cell_w + gap, rows * cell_h + gap), (24, 24, 24))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for index, image in enumerate(images):
        left, top = gap + index % across * cell_w, gap + index // across * cell_h
        inset_x, inset_y = (cell_w - gap - image.width) // 2, (cell_h - gap - label - image.height) // 2
        sheet.paste(image.to_pil(), (left + inset_x, top + inset_y))
        if labels:
            seed = image.metadata.get("seed")
            text = f"{index + 1}" if seed is None else f"seed {seed}"
            draw.text((left, top + cell_h - gap - label + 3), text, fill=(220, 220, 220), font=font)
    return ImageOutput(np.asarray(sheet), _sheet_metadata([image.metadata for image in images]))


def _sheet_metadata(each: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Common metadata once (mostly the prompt: EXIF is small), then what differs per image."""
    first, *others = each
    common = {k: v for k, v in first.items() if others and all(k in other and other[k] == v for other in others)}
    return {**common, "images": [{k: v for k, v in metadata.items() if k not in common} for metadata in each]}


# --------------------------------------------------------------------- shared with the encoder of videos


def check_pixels(pixels: object, ndim: int, expected: str) -> None:
    """Refuse anything but a `uint8` RGB array with at least one pixel."""
    if not isinstance(pixels, np.ndarray):
        raise MediaError(f"{expected}, got {type(pixels).__name__}")
    if pixels.dtype != np.uint8 or pixels.ndim != ndim or pixels.shape[-1] != 3 or not pixels.size:
        raise MediaError(f"{expected}, got {pixels.dtype} {list(pixels.shape)}")


def encode(image: Image.Image, kind: str, options: Mapping[str, Any]) -> bytes:
    """The bytes of a file of Pillow's `kind`."""
    encoded = io.BytesIO()
    try:
        image.save(encoded, kind, **options)
    except (OSError, ValueError) as error:
        size = f"{image.width}x{image.height}"
        raise MediaError(f"cannot encode {size} pixels as {kind.lower()} ({error}); use another format") from error
    return encoded.getvalue()


def metadata_json(metadata: Mapping[str, object]) -> str:
    """One line of ASCII, for any container's text fields."""
    try:
        return json.dumps(dict(metadata), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"cannot be written as JSON ({error}); keep to text, numbers, lists and mappings", param="metadata"
        ) from error


def parse_metadata(text: str | None) -> dict[str, object]:
    """The inverse of `metadata_json`; empty for text of other programs."""
    if text is None:
        return {}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def exif(metadata: Mapping[str, object]) -> bytes:
    """EXIF that names the software and holds the metadata, as description and as user comment."""
    tags = Image.Exif()
    tags[ExifTags.Base.Software] = SOFTWARE
    if metadata:
        text = metadata_json(metadata)
        tags[ExifTags.Base.ImageDescription] = text
        tags.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = _ASCII_MARK + text.encode("ascii")
    encoded = tags.tobytes()
    if len(encoded) > _MAX_EXIF_BYTES:
        raise InvalidRequestError(
            f"takes {len(encoded)} bytes of EXIF, over the limit of {_MAX_EXIF_BYTES}; save as png, or without it",
            param="metadata",
        )
    return encoded


# ------------------------------------------------------------------------------------------------- private


def _checked_quality(quality: int | None, kind: str) -> int:
    if quality is None:
        return _DEFAULT_QUALITY[kind]
    if not 1 <= quality <= 100:
        raise InvalidRequestError(f"must be 1 to 100, got {quality}", param="quality")
    return quality


def _png_text(metadata: Mapping[str, object]) -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("Software", SOFTWARE)
    if metadata:
        chunks.add_text(_PNG_KEY, metadata_json(metadata))
    return chunks


def _embedded_text(image: Image.Image) -> str | None:
    """The JSON in an image's text chunk, user comment or comment, depending on its format."""
    text: object = image.info.get(_PNG_KEY) if image.format == "PNG" else None
    if image.format == "GIF":
        text = image.info.get("comment")
    elif image.format in ("JPEG", "WEBP"):
        text = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
    if isinstance(text, bytes):
        text = text.removeprefix(_ASCII_MARK).decode("ascii", errors="replace")
    return text if isinstance(text, str) else None
