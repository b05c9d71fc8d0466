"""File descriptors: the process's limit, the number of connections below it, and accepting when there are none left."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import time
from typing import Any

from omnistage.core.errors import ConfigError, OmniError

_log = logging.getLogger(__name__)
MAX_DESCRIPTORS = 65_536
"""The process's own limit is raised up to here: more costs memory in the kernel for nothing."""
PROBES = 16
"""Connections beyond the limit, so that the service can still be asked whether it is alive."""
_MIN_OTHERS = 32
"""Descriptors for the rest: files of uploads, fetched media, the database, devices. An eighth of all if more."""
_MIN_CONNECTIONS = 8
_EPISODE_SECONDS = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.01


class CrowdedError(OmniError, status=503, code="too_many_connections"):
    """The service has as many connections as it may, and none of them is idle."""


def raise_descriptor_limit() -> int | None:
    """Raise this process's limit of open files as far as it may; the limit from now on, None where there is none."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    target = MAX_DESCRIPTORS if hard == unlimited else min(hard, MAX_DESCRIPTORS)
    if soft != unlimited and soft < target:
        with contextlib.suppress(OSError, ValueError):  # macOS may refuse what it names as the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    return None if soft == unlimited else soft


def connections_below(limit: int | None, requested: int | None = None) -> int | None:
    """How many connections fit below a limit of descriptors, or those wanted. Raises `ConfigError` for too many."""
    if limit is None:
        return requested
    available = max(_MIN_CONNECTIONS, limit - max(_MIN_OTHERS, limit // 8) - PROBES)
    if requested is not None and requested > available:
        raise ConfigError(
            f"{requested} connections do not fit: the process may open {limit} files, which is enough for {available}; "
            "raise the limit (ulimit -n, LimitNOFILE=) or choose fewer",
            param="--max-connections",
        )
    return available if requested is None else requested


class Episode:
    """Something that goes on for a while: told once, and again only after a pause."""

    def __init__(self, seconds: float = _EPISODE_SECONDS) -> None:
        self._seconds = seconds
        self._last: float | None = None

    def begins(self) -> bool:
        """Whether it has not happened for a while. Called each time that it happens."""
        now = time.monotonic()
        last, self._last = self._last, now
        return last is None or now - last > self._seconds


class ListeningSocket(socket.socket):
    """Accepts connections also when no descriptor is left, to close them: asyncio would log thousands of errors.

    One descriptor is kept in reserve for that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spare: int | None = self._open_spare()
        self._exhausted = Episode()

    def accept(self) -> tuple[socket.socket, Any]:
        """As a socket's; raises `BlockingIOError` where a connection was closed at once."""
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._refuse_one(error)
            raise BlockingIOError(errno.EAGAIN, "no descriptor is left") from None
        if self._spare is None:
            self._spare = self._open_spare()
        return connection, address

    def _refuse_one(self, error: OSError) -> None:
        if self._exhausted.begins():
            _log.warning(
                "connections are closed at once: %s; raise the limit of open files (ulimit -n, LimitNOFILE=) or lower "
                "--max-connections",
                error.strerror,
            )
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        try:
            super().accept()[0].close()
        except OSError:
            time.sleep(_PAUSE_SECONDS)  # the socket stays readable: without a pause the loop would only spin
        self._spare = self._open_spare()

    @staticmethod
    def _open_spare() -> int | None:
        try:
            return os.open(os.devnull, os.O_RDONLY)
        except OSError:
            return None

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
