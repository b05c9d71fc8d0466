"""The text of files: decoding, and the new version from an old one and a diff."""

from __future__ import annotations

import codecs
import io
import tokenize

from omnistage_review.model import ChangedFile


def decode(data: bytes, path: str) -> str | None:
    """The text of a file with `\\n` as its line end; none for a binary one. Bytes that do not decode are replaced."""
    if b"\0" in data[:8192] and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return None
    encoding = "utf-8-sig"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif path.endswith((".py", ".pyi")):
        try:
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        except SyntaxError:  # an unknown encoding, or bytes that are not UTF-8
            encoding = "utf-8-sig"
    return data.decode(encoding, "replace").replace("\r\n", "\n")


def is_new_version(text: str, file: ChangedFile) -> bool:
    """Whether a text holds every line of the diff's new side where the diff says."""
    return _holds(text.split("\n"), [(hunk.new_start, hunk.new_lines) for hunk in file.hunks])


def _holds(lines: list[str], pieces: list[tuple[int, tuple[str, ...]]]) -> bool:
    return all(tuple(lines[start - 1 : start - 1 + len(piece)]) == piece for start, piece in pieces if piece)


def new_version(text: str | None, file: ChangedFile) -> str | None:
    """The new version of a file from what is at hand: itself, the old version, or a diff that adds it whole."""
    if file.status == "added" and len(file.hunks) == 1 and file.hunks[0].new_start == 1:
        return "\n".join(file.hunks[0].new_lines) + "\n"
    if text is None:
        return None
    if is_new_version(text, file):
        return text
    lines = text.split("\n")
    if not _holds(lines, [(hunk.old_start, hunk.old_lines) for hunk in file.hunks]):
        return None
    for hunk in sorted(file.hunks, key=lambda hunk: -hunk.old_start):
        start = hunk.old_start - 1 if hunk.old_lines else hunk.old_start
        lines[start : start + len(hunk.old_lines)] = hunk.new_lines
    return "\n".join(lines)
