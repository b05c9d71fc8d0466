"""Content keys: what caches of media encodings and prefix reuse compare instead of the media."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16


def content_key(kind: str, data: NDArray[np.generic] | bytes, *extra: str | int | float | bytes | None) -> bytes:
    """Return a 16-byte digest of `kind`, the data's type, shape and bytes, and `extra`.

    Equal content gives an equal key in every process and on every machine, whatever the array's memory layout
    or byte order. `extra` holds what else decides the result, such as a resize target or a model revision.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    _add(digest, b"kind", kind.encode())
    if isinstance(data, np.ndarray):
        if data.dtype.kind not in "biufc":
            raise TypeError(f"content_key takes numeric arrays or bytes, not an array of {data.dtype}")
        little = np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("<"))
        # The shape comes from `data`: ascontiguousarray turns a 0-d array into a 1-d one.
        _add(digest, b"array", f"{little.dtype.str}{data.shape}".encode())
        _add(digest, b"data", little.reshape(-1).view(np.uint8).data)
    else:
        _add(digest, b"bytes", data)
    for item in extra:
        # The type's name keeps 1, 1.0, True, "1" and b"1" apart.
        _add(digest, type(item).__name__.encode(), item if isinstance(item, bytes) else repr(item).encode())
    return digest.digest()


def _add(digest: hashlib.blake2b, tag: bytes, value: bytes | memoryview) -> None:
    """Feed one field, with lengths, so that no two sequences of fields read alike."""
    digest.update(len(tag).to_bytes(8, "little"))
    digest.update(tag)
    digest.update(len(value).to_bytes(8, "little"))
    digest.update(value)
