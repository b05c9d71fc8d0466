"""Sources of media: bytes, base64, files, URLs; sizes are checked before anything is read."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media.fetch import fetch_url
from omnistage.media.limits import MediaLimits

BytesSource = bytes | bytearray | memoryview | str | Path

_SHOWN_CHARS = 80
# Opening a pipe must not block, and a terminal must not become the controlling one.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
_WHITESPACE = b" \t\r\n"
_MAX_HEAD = 1024
"""Longest `data:<type>;base64` before the comma."""
_ESCAPED_BLANKS = ("%20", "%09", "%0D", "%0d", "%0A", "%0a")
_ESCAPES = {b"%2B": b"+", b"%2b": b"+", b"%2F": b"/", b"%2f": b"/", b"%3D": b"=", b"%3d": b"="} | {
    code.encode(): b"" for code in _ESCAPED_BLANKS
}


def load_bytes(source: BytesSource, limits: MediaLimits, *, bare_base64: bool = False) -> bytes:
    """Return the encoded bytes of one media item, at most `limits.max_bytes` of them.

    A `str` is a `data:` URL, an `http(s)://` URL, a `file://` URL or a path. With `bare_base64` it is base64
    text, with or without a `data:` prefix, and never a URL or a path.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        size = source.nbytes if isinstance(source, memoryview) else len(source)
        check_size(size, limits)
        data = bytes(source)
    elif isinstance(source, str):
        data = _load_text(source, limits, bare_base64)
    elif isinstance(source, Path):
        data = _read_file(source, limits)
    else:
        raise InvalidRequestError(f"expected bytes, a data: URL, a URL or a file path, got {type(source).__name__}")
    if not data:
        raise MediaError("media item is empty (0 bytes); send an encoded image, audio or video")
    return data


def _load_text(source: str, limits: MediaLimits, bare_base64: bool) -> bytes:
    scheme = source[:8].lower()
    if scheme.startswith("data:"):
        comma = source.find(",", 0, _MAX_HEAD)
        if comma < 0:
            raise MediaError("data: URL has no comma after its type; write data:<type>;base64,<data>")
        if source[:comma].rpartition(";")[2].strip().lower() != "base64":
            raise MediaError("data: URL is not base64; write data:<type>;base64,<data>")
        return _decode_base64(source, comma + 1, limits, escaped=True)
    if bare_base64:
        return _decode_base64(source, 0, limits)
    if scheme.startswith(("http://", "https://")):
        return fetch_url(source, limits)
    return _read_file(_path_of(source, limits), limits)


def check_size(size: int, limits: MediaLimits) -> None:
    """Refuse an item of `size` encoded bytes that is over the limit."""
    if size > limits.max_bytes:
        raise LimitExceededError(
            f"media item of {size} bytes is over the limit of {limits.max_bytes}; send a smaller file"
        )


def _check_base64_length(text: str, start: int, limits: MediaLimits) -> None:
    """Refuse base64 by its length before it is copied, by a lower bound of the bytes that it decodes to."""
    escapes = text.count("%", start)
    escaped_blanks = sum(text.count(code, start) for code in _ESCAPED_BLANKS) if escapes else 0
    length = len(text) - start - sum(text.count(chr(blank), start) for blank in _WHITESPACE) - 3 * escaped_blanks
    # An escape is three characters for one; text that is all escapes is a third of its length.
    length = max(length - 2 * (escapes - escaped_blanks), length // 3)
    padding = 2 if escapes else "".join(text[-64:].split())[-2:].count("=")
    check_size(length // 4 * 3 - padding, limits)


def _decode_base64(text: str, start: int, limits: MediaLimits, *, escaped: bool = False) -> bytes:
    _check_base64_length(text, start, limits)
    try:
        encoded = text[start:].encode("ascii")
    except UnicodeEncodeError:
        raise MediaError("base64 text has characters that are not ASCII; encode the bytes again") from None
    if escaped:
        # "+" and "/" arrive percent-encoded from clients that treat the whole as a URL. Not `unquote_to_bytes`, which
        # creates an object for every escape.
        for escape, byte in _ESCAPES.items():
            encoded = encoded.replace(escape, byte)
    compact = encoded.translate(None, _WHITESPACE)
    check_size(len(compact) // 4 * 3 - compact[-2:].count(b"="), limits)
    try:
        return base64.b64decode(compact, validate=True)
    except binascii.Error as error:
        raise MediaError(f"malformed base64 ({error}); encode the bytes again with standard base64") from None


def _path_of(source: str, limits: MediaLimits) -> Path:
    """Return the path that a non-URL string or a file:// URL names."""
    if not limits.allow_paths:
        # Without the text, which may be a whole file in base64 without its prefix.
        raise InvalidRequestError(
            "file paths are not allowed here; send the bytes as data:<type>;base64,<data> (text without a data: "
            "or http(s):// prefix is read as a path)"
        )
    if "://" not in source[:16]:
        return Path(source)
    parts = urlsplit(source)
    if parts.scheme.lower() != "file":
        raise InvalidRequestError(
            f"URL scheme {parts.scheme[:_SHOWN_CHARS]!r} is not supported; use data:, http(s):// or a file path"
        )
    if parts.netloc not in ("", "localhost"):
        raise InvalidRequestError("a file:// URL must name a local file, as in file:///folder/name.png")
    return Path(unquote(parts.path))


def _read_file(path: Path, limits: MediaLimits) -> bytes:
    if not limits.allow_paths:
        raise InvalidRequestError("file paths are not allowed here; send the bytes as data:<type>;base64,<data>")
    display_path = repr(str(path)[:_SHOWN_CHARS])
    try:
        resolved = path.resolve()
        # Before the file is opened, so that the error does not tell which files exist elsewhere.
        _check_roots(resolved, display_path, limits)
        descriptor = os.open(resolved, _OPEN_FLAGS)
        try:
            data = _read_open(descriptor, resolved, display_path, limits)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise InvalidRequestError(f"no such file: {display_path}; give the path of an existing regular file") from error
    except OSError as error:
        raise InvalidRequestError(f"cannot read file {display_path}: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:  # an embedded NUL; a loop of symbolic links
        raise InvalidRequestError(f"not a usable file path: {display_path}") from error
    check_size(len(data), limits)
    return data


def _read_open(descriptor: int, resolved: Path, display_path: str, limits: MediaLimits) -> bytes:
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise InvalidRequestError(f"no such file: {display_path}; give the path of an existing regular file")
    # Again for the opened file: a folder in the path may have become a link meanwhile.
    _check_roots(_real_path(descriptor, resolved), display_path, limits)
    check_size(about.st_size, limits)
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(limits.max_bytes + 1)


def _real_path(descriptor: int, resolved: Path) -> Path:
    """The path of an open file: from /proc on Linux, elsewhere resolved again and compared."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except FileNotFoundError:
        again = resolved.resolve()
        if not os.path.samestat(os.stat(again), os.fstat(descriptor)):
            raise OSError("it changed while it was opened") from None
        return again


def _check_roots(resolved: Path, display_path: str, limits: MediaLimits) -> None:
    roots = limits.allowed_path_roots
    if roots and not any(resolved.is_relative_to(root.resolve()) for root in roots):
        raise InvalidRequestError(f"file {display_path} is outside the allowed folders; move it into one of them")
