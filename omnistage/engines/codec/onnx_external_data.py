"""Which other files an ONNX file reads its weights from.

ONNX Runtime follows these references while it loads, and not all of its versions keep them inside the folder. This
reads just enough of the format to know them before: the messages that lead to a tensor, by their field numbers in
onnx.proto, and nothing else.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omnistage.core.errors import CheckpointError

_TENSOR, _ENTRY = "tensor", "entry"
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: _TENSOR, 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: _TENSOR, 2: _TENSOR},
    _TENSOR: {13: _ENTRY},
}
_MAX_DEPTH = 200
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MALFORMED = "it is not a readable ONNX file"


class _Field(NamedTuple):
    number: int
    start: int
    end: int


def external_files(path: Path) -> frozenset[str]:
    """The locations that the file's tensors name, as they are written. Raises `CheckpointError` where it is broken."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return frozenset(_locations(data, path))
    except (OSError, ValueError) as error:  # a file of no bytes cannot be mapped
        raise CheckpointError(f"{path} cannot be read as an ONNX file ({error}); fetch it again") from error


def check_external_files(path: Path) -> None:
    """Raise `CheckpointError` unless all that the file refers to is in its folder or below."""
    folder = path.parent.resolve()
    for name in sorted(external_files(path)):
        # The file itself may be a link (the hub's cache is made of them); its place may not be elsewhere.
        if "\0" in name or Path(name).is_absolute() or not (folder / name).parent.resolve().is_relative_to(folder):
            raise CheckpointError(f"{path} reads weights from {name[:200]!r}, which is outside its folder; refused")


def _locations(data: mmap.mmap, path: Path) -> Iterator[str]:
    pending = [("model", 0, len(data), 0)]
    while pending:
        kind, start, end, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{path} is nested deeper than {_MAX_DEPTH}; {_MALFORMED}")
        if kind == _ENTRY:
            values = {field.number: data[field.start : field.end] for field in _fields(data, start, end)}
            if values.get(1) == b"location":
                yield values.get(2, b"").decode("utf-8")  # a UnicodeDecodeError is a ValueError
            continue
        fields = _FIELDS[kind]
        for field in _fields(data, start, end):
            if field.number in fields:
                pending.append((fields[field.number], field.start, field.end, depth + 1))


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    """The length-delimited fields of a message, where messages and texts are."""
    at = start
    while at < end:
        key, at = _varint(data, at, end)
        if key >= 2**32:  # readers of the format drop the bits above: to them it would be another field
            raise ValueError(_MALFORMED)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            _, at = _varint(data, at, end)
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        elif wire == _BYTES:
            length, at = _varint(data, at, end)
            if length > end - at:
                raise ValueError(_MALFORMED)
            yield _Field(number, at, at + length)
            at += length
        else:
            raise ValueError(_MALFORMED)


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(_MALFORMED)
