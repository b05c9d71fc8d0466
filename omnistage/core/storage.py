"""Errors of a disk that is full, as what they are for a client."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from omnistage.core.errors import StorageFullError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_storage_full(error: BaseException | None) -> bool:
    """Whether an error says that no space is left, for files or for SQLite."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _FULL


def storage_full(advice: str) -> StorageFullError:
    return StorageFullError(f"no space is left on the disk of the service; {advice}")


@contextmanager
def storage_errors(advice: str) -> Iterator[None]:
    """Raise `StorageFullError` where the block finds no space; `advice` is what the client can do."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if is_storage_full(error):
            raise storage_full(advice) from error
        raise
