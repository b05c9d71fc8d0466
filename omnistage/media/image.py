"""Decoding images: everything becomes an RGB `PIL.Image`, sized before it is decoded."""

from __future__ import annotations

import io
import re
import struct
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media.budget import ItemBytes, current_hold
from omnistage.media.decode_pool import active_decode_pool
from omnistage.media.limits import MediaLimits, Need, no_need
from omnistage.media.source import BytesSource, load_bytes

ImageSource = BytesSource | Image.Image | NDArray[np.generic]

# Named one by one: Pillow also opens formats that start other programs (EPS) or that no client needs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    EOFError,
    RuntimeError,  # the AVIF decoder's
    struct.error,
    zlib.error,
)
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_ORIENTATION_TAG = 0x0112
_JPEG, _SCAN, _JPEG_END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"
PIXEL_BYTES = 4
"""Of Pillow's RGB images."""
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""Not zeros that follow a data byte, nor markers without a segment: TEM, RSTn, SOI."""


def decode_image(source: ImageSource, limits: MediaLimits) -> Image.Image:
    """Return `source` as a new RGB image.

    EXIF orientation is applied, transparency is laid over white, an animation gives its first frame. Arrays are
    `[h, w]` or `[h, w, 1|3|4]`, `uint8` or floats in 0..1. Size and aspect are checked from the header, before
    any pixel is decoded. Raises `MediaError` for what does not decode, `LimitExceededError` for what is too big.
    Encoded images are decoded in another process where `use_decode_pool` has set that up.
    """
    with current_hold().decoding() as item:
        image = _decode(source, limits, item)
        item.keep(image.width * image.height * PIXEL_BYTES)
        return image


def _decode(source: ImageSource, limits: MediaLimits, item: ItemBytes) -> Image.Image:
    if isinstance(source, np.ndarray):
        return _from_array(source, limits, item.need)
    if isinstance(source, Image.Image):
        _check_size(*source.size, limits)
        item.need(source.width * source.height * PIXEL_BYTES)
        return _convert(source)
    data = load_bytes(source, limits)
    pool = active_decode_pool()
    return decode_image_bytes(data, limits, item.need) if pool is None else pool.decode_image(data, limits, item)


def decode_image_bytes(data: bytes, limits: MediaLimits, need: Need = no_need, *, copy: bool = True) -> Image.Image:
    """Decode an encoded image in this process; without `copy` the result may be the opened file itself."""
    with _open(data, limits) as image:
        _check_size(*image.size, limits)
        need(image.width * image.height * PIXEL_BYTES)
        if data.startswith(_JPEG):
            _check_scans(data, limits.max_image_scans)
        return _convert(image, copy=copy)


def _open(data: bytes, limits: MediaLimits) -> Image.Image:
    """Read the header only."""
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except _BOMB as error:
        pixels = re.search(r"\d+", str(error))
        raise _too_many_pixels(pixels.group() if pixels else "too many", limits) from None
    except _DECODE_ERRORS as error:
        raise MediaError(f"not a readable image; send one of {', '.join(_FORMATS)}") from error


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"image of {width}x{height} pixels is empty; both sides must be at least 1")
    if width * height > limits.max_image_pixels:
        raise _too_many_pixels(f"{width}x{height} = {width * height}", limits)
    if max(width, height) > limits.max_image_aspect * min(width, height):
        raise LimitExceededError(
            f"image of {width}x{height} has an aspect ratio over the limit of {limits.max_image_aspect:g}; crop it"
        )


def _check_scans(data: bytes, max_scans: int) -> None:
    """Refuse a JPEG by the number of its scans, from its markers; those of a thumbnail inside of it do not count."""
    if data.count(_SCAN) <= max_scans:
        return
    scans, position = 0, 2
    while (marker := _JPEG_MARKER.search(data, position)) is not None and marker.group() != _JPEG_END:
        scans += marker.group() == _SCAN
        if scans > max_scans:
            raise LimitExceededError(f"JPEG with over {max_scans} scans, the limit; save it with fewer, or as PNG")
        position = marker.end()
        position += int.from_bytes(data[position : position + 2], "big")  # every other marker begins a segment


def _too_many_pixels(pixels: str, limits: MediaLimits) -> LimitExceededError:
    return LimitExceededError(
        f"image of {pixels} pixels is over the limit of {limits.max_image_pixels}; scale it down before sending"
    )


def _convert(image: Image.Image, *, copy: bool = True) -> Image.Image:
    """Decode, turn upright and flatten to RGB; with `copy` the result shares nothing with `image`."""
    try:
        image.load()
        return _to_rgb(_upright(image), copy=copy)
    except (*_DECODE_ERRORS, *_BOMB) as error:
        raise MediaError(f"image does not decode ({error}); it may be truncated or damaged") from error


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except _DECODE_ERRORS:
        return image  # damaged EXIF does not make an image unreadable
    if orientation not in range(2, 9):
        return image
    return ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image, *, copy: bool = True) -> Image.Image:
    mode = image.mode
    if mode in ("I", "F") or mode.startswith("I;16"):
        return _from_deep_grey(image)
    if mode in ("RGBa", "La"):
        image = image.convert("RGBA" if mode == "RGBa" else "LA")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    if mode == "RGB":
        return image.copy() if copy else image
    return image.convert("RGB")


def _from_deep_grey(image: Image.Image) -> Image.Image:
    """Scale 16-bit, 32-bit and float grey to 8 bits; Pillow's own conversion clips it instead."""
    values = np.asarray(image, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ValueError("pixels are NaN or infinite")
    if image.mode == "F" and values.max() <= 1.0:
        scaled = values * 255.0
    elif image.mode.startswith("I;16") or values.max() > 255:
        scaled = values / 257.0
    else:
        scaled = values
    return Image.fromarray(np.rint(scaled.clip(0, 255)).astype(np.uint8)).convert("RGB")


def _from_array(array: NDArray[np.generic], limits: MediaLimits, need: Need) -> Image.Image:
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise InvalidRequestError(f"image array has shape {array.shape}; give [h, w, 3] (or [h, w], 1 or 4 channels)")
    height, width = array.shape[:2]
    _check_size(width, height, limits)
    need(width * height * PIXEL_BYTES)
    if array.dtype == np.uint8:
        pixels = array
    elif array.dtype.kind == "f":
        # Written so that NaN fails it too.
        if not (array.min() >= 0.0 and array.max() <= 1.0):
            raise InvalidRequestError("float image array has NaN or values outside 0..1; scale it, or give uint8")
        pixels = np.rint(array.astype(np.float32) * 255.0).astype(np.uint8)
    else:
        raise InvalidRequestError(f"image array is of type {array.dtype}; give uint8, or floats in 0..1")
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return _to_rgb(Image.fromarray(np.ascontiguousarray(pixels)))
