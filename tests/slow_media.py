"""A small file that takes long to decode."""

from __future__ import annotations

import io

from PIL import Image


def slow_jpeg(scans: int = 50_000, side: int = 2048) -> bytes:
    """A progressive JPEG with empty scans, each of 16 bytes and some milliseconds: minutes of decoding, by default."""
    file = io.BytesIO()
    Image.new("L", (side, side), 100).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * scans + data[-2:]
