"""Files that clients fetch after the response: in one folder, limited in bytes and count, the oldest dropped first."""

from __future__ import annotations

import os
import re
import secrets
import threading
from pathlib import Path

from omnistage.core.errors import ConfigError, LimitExceededError
from omnistage.core.storage import storage_errors

CONTENT_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
DEFAULT_MAX_BYTES = 2**30
DEFAULT_MAX_FILES = 10_000
# 192 random bits: a name cannot be guessed.
_NAME = re.compile(r"[A-Za-z0-9_-]{32}\.(?:png|jpeg|webp)")


def private_folder(path: Path) -> Path:
    """Create a folder that only this user reads. Raises `ConfigError`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the folder {path}: {error.strerror}; choose another --state") from error
    return path


def write_whole(target: Path, data: bytes) -> None:
    """Write a file that exists with all its bytes or not at all, whenever the process dies."""
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


class FileStore:
    """Keeps files under names that cannot be guessed. Thread-safe; it blocks, so it belongs in a worker thread.

    Files of an earlier run are kept and counted.
    """

    def __init__(self, folder: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, max_files: int = DEFAULT_MAX_FILES) -> None:
        self._folder = private_folder(folder)
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        """By name, the oldest first."""
        self._total = 0
        files = [(path.stat(), path) for path in self._folder.iterdir() if path.is_file()]
        for stat, path in sorted(files, key=lambda pair: pair[0].st_mtime_ns):
            if _NAME.fullmatch(path.name):
                self._sizes[path.name] = stat.st_size
                self._total += stat.st_size
            elif path.name.endswith(".part"):  # of an interrupted write
                path.unlink(missing_ok=True)
        self._make_room(0, 0)

    def put(self, data: bytes, kind: str) -> str:
        """Keep a file of one of `CONTENT_TYPES` and return its name. Raises if it alone is over the limit."""
        if len(data) > self._max_bytes:
            raise LimitExceededError(
                f"an image of {len(data)} bytes is over the limit of {self._max_bytes}; "
                "set response_format to b64_json",
                param="response_format",
            )
        name = f"{secrets.token_urlsafe(24)}.{kind}"
        with self._lock, storage_errors("set response_format to b64_json, or try again later"):
            self._make_room(len(data), 1)
            write_whole(self._folder / name, data)
            self._sizes[name] = len(data)
            self._total += len(data)
        return name

    def get(self, name: str) -> tuple[bytes, str] | None:
        """A file's bytes and content type; None where it does not exist or was dropped."""
        if not _NAME.fullmatch(name):
            return None
        try:
            data = (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        return data, CONTENT_TYPES[name.rpartition(".")[2]]

    def _make_room(self, size: int, count: int) -> None:
        while self._sizes and (self._total + size > self._max_bytes or len(self._sizes) + count > self._max_files):
            oldest = next(iter(self._sizes))
            self._total -= self._sizes.pop(oldest)
            (self._folder / oldest).unlink(missing_ok=True)
