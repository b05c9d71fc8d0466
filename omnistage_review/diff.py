"""Reads unified diffs: git's with renames, binary files and quoted paths, and plain ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

from omnistage_review.model import ChangedFile, Hunk

MAX_DIFF_BYTES = 32 * 1024 * 1024

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ESCAPE = re.compile(rb'\\([0-7]{1,3}|[abtnvfr"\\])')
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}


def parse_diff(text: str) -> list[ChangedFile]:
    """The files of a unified diff; text between them, such as a commit message, is skipped."""
    return list(_Reader(text).files())


def _unquote(name: str) -> str:
    """A path as git prints it: quoted, with octal escapes, where it has unusual characters."""
    name = name.rstrip("\r\t")  # git adds a tab to names with blanks
    if not (len(name) > 1 and name.startswith('"') and name.endswith('"')):
        return name.partition("\t")[0]

    def replace(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 255]) if code[:1].isdigit() else _ESCAPES.get(code, code)

    return _ESCAPE.sub(replace, name[1:-1].encode()).decode("utf-8", "replace")


def _path(name: str) -> str | None:
    """The path of a `---` or `+++` line; none where the file does not exist on that side."""
    name = _unquote(name)
    if name == "/dev/null":
        return None
    return name[2:] if name.startswith(("a/", "b/")) else name


def _git_paths(header: str) -> tuple[str, str]:
    """Both paths of a `diff --git` line. Where unquoted ones hold blanks, both are the same or a rename names them."""
    rest = header[len("diff --git ") :].rstrip("\r")
    quoted = re.fullmatch(r'("(?:[^"\\]|\\.)*"|\S+) ("(?:[^"\\]|\\.)*"|\S+)', rest)
    if quoted is not None:
        return _path(quoted[1]) or "", _path(quoted[2]) or ""
    half = len(rest) // 2
    return _path(rest[:half]) or "", _path(rest[half + 1 :]) or ""


class _Reader:
    def __init__(self, text: str) -> None:
        # Not splitlines: a form feed or U+2028 inside a line is not the end of it.
        self._lines = text.split("\n")
        self._at = 0

    def files(self) -> Iterator[ChangedFile]:
        lines, file = self._lines, None
        while self._at < len(lines):
            line = lines[self._at]
            if line.startswith("diff --git "):
                if file is not None:
                    yield file
                old, new = _git_paths(line)
                file = ChangedFile(new, old_path=old if old != new else None)
            elif self._starts_plain_file(line, file):
                if file is not None:
                    yield file
                file = ChangedFile("")
                continue
            elif file is not None:
                self._header_line(line, file)
            self._at += 1
        if file is not None:
            yield file

    def _starts_plain_file(self, line: str, file: ChangedFile | None) -> bool:
        """Whether a `---` line begins a file of a diff without git's headers."""
        following = self._lines[self._at + 1] if self._at + 1 < len(self._lines) else ""
        is_header = line.startswith("--- ") and following.startswith("+++ ")
        return is_header and (file is None or bool(file.hunks))

    def _header_line(self, line: str, file: ChangedFile) -> None:
        if line.startswith("@@ ") and (match := _HUNK.match(line)):
            self._hunk(match, file)
        elif line.startswith("new file mode"):
            file.status = "added"
            file.binary = line.rstrip().endswith(("120000", "160000"))  # a symbolic link or a submodule
        elif line.startswith("deleted file mode"):
            file.status = "deleted"
        elif line.startswith("index ") and line.rstrip().endswith((" 120000", " 160000")):
            file.binary = True  # a symbolic link or a submodule
        elif line.startswith("rename from "):
            file.status, file.old_path = "renamed", _unquote(line[len("rename from ") :])
        elif line.startswith("rename to "):
            file.path = _unquote(line[len("rename to ") :])
        elif line.startswith(("Binary files ", "GIT binary patch")):
            file.binary = True
        elif line.startswith("--- ") and not file.hunks:
            old = _path(line[4:])
            if old is None:
                file.status = "added"
            else:
                file.path = file.path or old
        elif line.startswith("+++ ") and not file.hunks:
            new = _path(line[4:])
            if new is None:
                file.status = "deleted"
            else:
                file.path = new

    def _hunk(self, match: re.Match[str], file: ChangedFile) -> None:
        """Reads as many lines as the hunk's header counts, so that no line of it is taken for a header."""
        old_start, old_count, new_start, new_count = (
            int(group) if group is not None else 1 for group in match.groups()
        )
        old: list[str] = []
        new: list[str] = []
        added: set[int] = set()
        while (len(old) < old_count or len(new) < new_count) and self._at + 1 < len(self._lines):
            line = self._lines[self._at + 1]
            kind, text = line[:1], line[1:].removesuffix("\r")
            if kind == "-":
                old.append(text)
                file.removed += 1
            elif kind == "+":
                added.add(new_start + len(new))
                new.append(text)
            elif kind in (" ", ""):  # some tools strip the blank of an empty line
                old.append(text)
                new.append(text)
            elif kind != "\\":  # not "\ No newline at end of file": the hunk was cut
                break
            self._at += 1
        file.hunks.append(Hunk(old_start, new_start, tuple(old), tuple(new), frozenset(added)))
