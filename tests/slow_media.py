"""A small file that takes long to decode."""

from __future__ import annotations

import io
import struct

from PIL import Image


def slow_jpeg(scans: int = 50_000, side: int = 2048) -> bytes:
    """A progressive JPEG with empty scans, each of 16 bytes and some milliseconds: minutes of decoding, by default."""
    file = io.BytesIO()
    Image.new("L", (side, side), 100).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * scans + data[-2:]


def _box(kind: bytes, *parts: bytes, flags: int | None = None) -> bytes:
    body = b"".join(parts) if flags is None else struct.pack(">I", flags) + b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def video_of_many_samples(samples: int) -> bytes:
    """An MP4 of some 600 bytes whose tables name very many samples of a byte each: FFmpeg has 36 bytes for each."""
    matrix = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    times = struct.pack(">4I", 0, 0, 1000, 1000)
    entry = _box(
        b"jpeg",
        bytes(6) + struct.pack(">H", 1) + bytes(16) + struct.pack(">HH", 64, 48),
        struct.pack(">II", 0x480000, 0x480000) + bytes(4) + struct.pack(">H", 1) + bytes(32) + b"\0\x18\xff\xff",
    )
    tables = _box(
        b"stbl",
        _box(b"stsd", struct.pack(">I", 1), entry, flags=0),
        _box(b"stts", struct.pack(">3I", 1, samples, 1), flags=0),
        _box(b"stsc", struct.pack(">4I", 1, 1, samples, 1), flags=0),
        _box(b"stsz", struct.pack(">2I", 1, samples), flags=0),
        _box(b"stco", struct.pack(">2I", 1, 8), flags=0),
    )
    reference = _box(b"dref", struct.pack(">I", 1), _box(b"url ", flags=1), flags=0)
    media = _box(
        b"mdia",
        _box(b"mdhd", times, bytes(4), flags=0),
        _box(b"hdlr", struct.pack(">I4s", 0, b"vide"), bytes(12), b"v\0", flags=0),
        _box(b"minf", _box(b"vmhd", bytes(8), flags=1), _box(b"dinf", reference), tables),
    )
    size = struct.pack(">II", 64 << 16, 48 << 16)
    track = _box(b"tkhd", struct.pack(">5I", 0, 0, 1, 0, 1000), bytes(16), matrix, size, flags=3)
    head = _box(b"mvhd", times, struct.pack(">IH", 0x10000, 0x100), bytes(10), matrix, bytes(24), b"\0\0\0\2", flags=0)
    start = _box(b"ftyp", b"isom", struct.pack(">I", 512), b"isom") + _box(b"mdat", b"\xff" * 64)
    return start + _box(b"moov", head, _box(b"trak", track, media))
