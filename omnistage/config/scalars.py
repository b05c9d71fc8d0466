"""The types of single values, and the base of every section."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from omnistage.core.validation import short_repr

_PREFIXES = "kmgt"
_UNITS = {
    "b": 1,
    **{f"{prefix}ib": 2 ** (10 * power) for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix}b": 10 ** (3 * power) for power, prefix in enumerate(_PREFIXES, 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")
_MAX_SIZE = 2**63 - 1
_MAX_SIZE_CHARS = 64
_SIZE_HELP = "use bytes or a number with a unit, like 2GiB or 512MiB"
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")
_PICTURE_SIZE = re.compile(r"([1-9]\d{1,4})x([1-9]\d{1,4})(?:x([1-9]\d{0,3}))?")
_BINARY_UNITS = ("TiB", "GiB", "MiB", "KiB")


def parse_size(value: object) -> int:
    """Bytes from `2GiB`, `1.5 GB` or a whole number of bytes. Raises ValueError with the accepted forms."""
    size: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and len(value) <= _MAX_SIZE_CHARS:
        match = _SIZE.fullmatch(value.strip())
        if value.isdecimal():
            size = int(value)
        elif match is not None and match[2].lower() in _UNITS:
            size = round(float(match[1]) * _UNITS[match[2].lower()])
    if size is None:
        raise ValueError(f"{short_repr(value)} is not a size; {_SIZE_HELP}")
    if size < 0:
        raise ValueError(f"a size must not be negative; {_SIZE_HELP}")
    if size > _MAX_SIZE:
        raise ValueError(f"{short_repr(value)} is larger than any memory; {_SIZE_HELP}")
    return size


def format_size(value: int) -> str:
    """The shortest exact spelling that `parse_size` reads back."""
    for unit in _BINARY_UNITS:
        factor = _UNITS[unit.lower()]
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return f"{value}B"


def _parse_size_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from error


def _format_size_or_auto(value: int | str) -> str:
    return value if isinstance(value, str) else format_size(value)


def refuse_bool(value: object) -> object:
    """For numbers: YAML reads `yes` as true and pydantic reads true as 1, which is never intended."""
    if isinstance(value, bool):
        raise ValueError(f"use a number, not {str(value).lower()}")
    return value


def _check_device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError(f"{short_repr(value)} is not a device; use auto, cpu, cuda, cuda:N or mps")
    return value


def _check_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or "@" in parts.netloc or re.search(r"[\s\x00-\x1f\x7f]", value):
        raise ValueError(f"{short_repr(value)} is not a server's address; use one like http://127.0.0.1:8001/v1")
    return value


def picture_size(value: str) -> tuple[int, int, int]:
    """(width, height, frames) of `512x512` or `832x480x81`. Raises ValueError with the accepted forms."""
    match = _PICTURE_SIZE.fullmatch(value)
    width, height, frames = (int(number or 1) for number in match.groups()) if match is not None else (1, 1, 1)
    if width % 16 or height % 16:
        raise ValueError(
            f"{short_repr(value)} is not a picture's size; use multiples of 16 like 512x512, with frames 832x480x81"
        )
    return width, height, frames


def _check_picture_size(value: str) -> str:
    picture_size(value)
    return value


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size, return_type=str, when_used="json")]
"""Bytes, written as `2GiB`."""
SizeOrAuto = Annotated[
    int | Literal["auto"],
    BeforeValidator(_parse_size_or_auto),
    PlainSerializer(_format_size_or_auto, return_type=str, when_used="json"),
]
Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]
"""A whole number of at least one."""
CountOrZero = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)]
PictureSize = Annotated[str, AfterValidator(_check_picture_size)]
"""`512x512`, or `832x480x81` with the frames of a video."""
Seconds = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, allow_inf_nan=False)]
ServerUrl = Annotated[str, AfterValidator(_check_url)]
"""`http://127.0.0.1:8001/v1`; keys and passwords do not belong into it."""
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
"""Name of an environment variable."""
DeviceName = Annotated[str, AfterValidator(_check_device)]


class ConfigModel(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
