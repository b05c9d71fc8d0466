"""Where a change comes from on this machine: a range of commits, a diff file, a tree."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from omnistage_review.contents import decode, new_version
from omnistage_review.diff import MAX_DIFF_BYTES, parse_diff
from omnistage_review.model import Change, ChangedFile, ReviewError
from omnistage_review.processes import Output, run

MAX_FILE_BYTES = 4 * 1024 * 1024
_DIFF_OPTIONS = [
    "--no-ext-diff", "--no-textconv", "--no-color", "--find-renames", "--src-prefix=a/", "--dst-prefix=b/",
    "--no-relative",
]  # fmt: skip
_SKIPPED_FOLDERS = {".git", ".venv", "venv", "__pycache__", "node_modules", "build", "dist", ".tox", ".mypy_cache"}
_TREE_SUFFIXES = {".py", ".pyi", ".yaml", ".yml", ".toml", ".json", ".ini", ".cfg"}


def git(arguments: list[str], root: Path, *, limit: int = MAX_DIFF_BYTES) -> Output:
    try:
        return run(["git", "-c", "core.quotepath=on", *arguments], cwd=root, limit=limit)
    except FileNotFoundError:
        raise ReviewError("git is not installed; install it, or pass a diff with --diff FILE") from None


def _text(output: Output) -> str:
    return output.data.decode("utf-8", "replace")


def cut_note(name: str) -> str:
    return f"{name} is larger than {MAX_DIFF_BYTES // 1024 // 1024} MB; what comes after that was not read"


def _commit(name: str, root: Path) -> str:
    """The object that a revision names."""
    if name.startswith("-"):
        raise ReviewError(f"{name!r} is not a revision; use --range BASE..HEAD")
    result = git(["rev-parse", "--verify", "--quiet", "--end-of-options", name], root)
    if result.code:
        where = git(["rev-parse", "--git-dir"], root)
        reason = "this is not a git repository" if where.code else f"git knows no revision {name!r}"
        raise ReviewError(f"{reason}; fetch it first, or check the spelling")
    return _text(result).strip()


def _before_first(name: str, root: Path) -> str:
    """The empty tree for the parent of a commit that has none; nothing for all else."""
    child = re.sub(r"(\^|~)1?$", "", name)
    if name.startswith("-") or child == name:
        return ""
    result = git(["rev-list", "--parents", "--max-count=1", child, "--"], root)
    if result.code or b" " in result.data:
        return ""
    return _text(git(["hash-object", "-t", "tree", "--stdin"], root)).strip()


def from_range(spec: str, root: Path) -> Change:
    """What a branch adds since it left its base: the diff from their merge base, without what it merged from there."""
    base_name, dots, head_name = spec.partition("...") if "..." in spec else spec.partition("..")
    if not dots:
        raise ReviewError(f"{spec!r} is not a range; use BASE..HEAD, for one commit {spec}^..{spec}")
    head = _commit(head_name or "HEAD", root)
    base = _before_first(base_name, root) or _commit(base_name or "HEAD", root)
    result = git(["merge-base", base, head], root)
    start = _text(result).strip() if result.code == 0 else base  # no common commit, or a tree: the plain difference
    output = git(["diff", *_DIFF_OPTIONS, start, head, "--"], root)
    if output.code:
        raise ReviewError(f"git diff failed: {output.error}")
    change = Change(f"range {spec}", files=parse_diff(_text(output)))
    if output.cut:
        change.notes.append(cut_note("the diff"))
    span = f"{start}..{head}" if result.code == 0 else head
    log = git(["log", "--format=%s%n%n%b", "--max-count=100", span, "--"], root)
    messages = _text(log).strip() if log.code == 0 else ""
    change.title, _, change.description = messages.partition("\n")
    for file in change.files:
        if file.status != "deleted" and not file.binary:
            blob = git(["cat-file", "blob", f"{head}:{file.path}"], root, limit=MAX_FILE_BYTES)
            if blob.code == 0 and not blob.cut:
                file.text = decode(blob.data, file.path)
    return change


def from_diff(path: str, root: Path) -> Change:
    """A diff from a file or, for `-`, from standard input. Files of the folder that fit the diff complete it."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_DIFF_BYTES + 1)
        else:
            with Path(path).open("rb") as stream:
                data = stream.read(MAX_DIFF_BYTES + 1)
    except OSError as error:
        raise ReviewError(f"{path} cannot be read: {error.strerror or error}") from error
    text = decode(data[:MAX_DIFF_BYTES], path)
    if text is None:
        raise ReviewError(f"{path} is a binary file; a unified diff is needed, as `git diff` prints it")
    change = Change(f"diff {path}", files=parse_diff(text))
    if not change.files and text.strip():
        raise ReviewError(f"{path} holds no unified diff; make one with `git diff BASE HEAD > FILE`")
    if len(data) > MAX_DIFF_BYTES:
        change.notes.append(cut_note(path))
    if re.search(r"^@@@", text, re.MULTILINE):
        change.notes.append(f"{path} holds combined diffs of a merge, which were not checked; use --range BASE..HEAD")
    for file in change.files:
        if file.status != "deleted" and not file.binary:
            file.text = new_version(_read_inside(root, file.old_path or file.path, file.path), file)
    return change


def _read_inside(root: Path, *names: str) -> str | None:
    """The first of these files that is there. A path of the diff that leads out of the folder is not read."""
    base = root.resolve()
    for name in reversed(names):
        file = (base / name).resolve()
        if file.is_relative_to(base) and file.is_file() and file.stat().st_size <= MAX_FILE_BYTES:
            return decode(file.read_bytes(), name)
    return None


def from_tree(paths: list[str], root: Path) -> Change:
    """Every line of every file below these paths, of which links and git's ignored ones are left out."""
    change = Change(f"tree {' '.join(paths)}", title="whole tree", is_tree=True)
    visited: set[Path] = set()
    for name in paths:
        place = (root / name).resolve()
        if not place.exists():
            raise ReviewError(f"{name}: no such file or folder")
        for file in [place] if place.is_file() else _files(place):
            if file.suffix in _TREE_SUFFIXES and file not in visited and file.is_file() and not file.is_symlink():
                visited.add(file)
                _add_tree_file(change, file, root.resolve(), place)
    return change


def _add_tree_file(change: Change, file: Path, root: Path, place: Path) -> None:
    path = (file.relative_to(root) if file.is_relative_to(root) else file.relative_to(place.parent)).as_posix()
    if file.stat().st_size > MAX_FILE_BYTES:
        change.notes.append(f"{path}: larger than {MAX_FILE_BYTES // 1024 // 1024} MB; not checked")
        return
    try:
        text = decode(file.read_bytes(), path)
    except OSError as error:
        change.notes.append(f"{path}: cannot be read ({error.strerror})")
        return
    change.files.append(ChangedFile(path, "added", binary=text is None, text=text, all_lines=True))


def _files(folder: Path) -> Iterator[Path]:
    """The files that git knows or would add; without git, or in a folder that it ignores, all of them."""
    try:
        result = git(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."], folder)
    except ReviewError:
        result = Output(1, b"", "", False)
    if result.code == 0 and result.data:
        yield from sorted(folder / name.decode("utf-8", "surrogateescape") for name in result.data.split(b"\0") if name)
        return
    for file in sorted(folder.rglob("*")):
        if not _SKIPPED_FOLDERS & set(file.relative_to(folder).parts[:-1]):
            yield file
