"""The audit log: who ran what on which model, how much came out and how it ended. Never content.

One JSON line a request, through the logger `omnistage.audit`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from omnistage.core.errors import ConfigError
from omnistage.core.types import FinishReason
from omnistage.pipeline.outputs import OutputChunk, Usage

AUDIT_LOGGER = "omnistage.audit"
DISCONNECTED = "disconnected"
SLOW_READER = "slow_reader"
FILTERED = "filtered"
_TAG = re.compile(r"[A-Za-z0-9._-]{1,128}")
_log = logging.getLogger(AUDIT_LOGGER)
_problems = logging.getLogger(__name__)


@dataclass(slots=True)
class AuditRecord:
    """One request to the service, filled in as it runs. Several streams of one request add up."""

    endpoint: str
    client: str | None = None
    started: float = field(default_factory=time.monotonic)
    who: str | None = None
    tag: str | None = None
    """The client's own id, by which its request can be found before the response has begun."""
    model: str | None = None
    status: int | None = None
    ended: str | None = None
    """The engine's finish reason, or the service's: disconnected, slow_reader, error, refused, filtered."""
    requests: list[str] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    bytes_in: int = 0
    bytes_out: int = 0
    closed: bool = False
    echo: bool = False
    """Whether the response's x-request-id is `tag`, which the client sent under that name."""
    ignored: list[str] = field(default_factory=list)
    """Fields without effect; a header of the response names them."""

    def count(self, chunk: OutputChunk) -> None:
        """Count a chunk's content as it passes: a request may never reach its end."""
        usage = self.usage
        usage.completion_tokens += len(chunk.token_ids)
        if chunk.audio is not None:
            usage.audio_seconds += len(chunk.audio.samples) / chunk.audio.sample_rate
        if chunk.image is not None and not chunk.image.preview:
            usage.images += 1
        if chunk.video is not None and not chunk.video.preview:
            usage.video_seconds += len(chunk.video.frames) / chunk.video.fps
        if chunk.final is not None:
            usage.prompt_tokens += chunk.final.usage.prompt_tokens
            self.ended = self.ended or ended_by(chunk.final.finish_reason)

    def close(self) -> float:
        """Write the line, once; return the request's duration in seconds."""
        seconds = time.monotonic() - self.started
        if self.closed:
            return seconds
        self.closed = True
        if not _log.isEnabledFor(logging.INFO):
            return seconds
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": self.who,
            "client": self.client,
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status,
            "ended": self.ended or ("refused" if (self.status or 0) >= 400 else "done"),
            "seconds": round(seconds, 4),
            "requests": self.requests,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "audio_seconds": round(self.usage.audio_seconds, 3),
            "images": self.usage.images,
            "video_seconds": round(self.usage.video_seconds, 3),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }
        _log.info("%s", json.dumps(line, separators=(",", ":")))
        return seconds


CURRENT_RECORD: ContextVar[AuditRecord | None] = ContextVar("omnistage_record", default=None)
"""The record of the request that this task works for."""


def is_tag(text: str) -> bool:
    """Whether a client may name its request so."""
    return _TAG.fullmatch(text) is not None


def note_ignored(*fields: str) -> None:
    """Have a header of the current response name fields that were accepted and have no effect."""
    if (record := CURRENT_RECORD.get()) is not None:
        record.ignored += [name for name in fields if name not in record.ignored]


def ended_by(reason: FinishReason | None) -> str:
    return FILTERED if reason is FinishReason.CONTENT_FILTER else str(reason)


class AuditFile(logging.Handler):
    """Appends lines to a file. One that cannot be written counts in `lost_lines`, and is logged once while it lasts."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._fd = self._open()
        self._torn = False
        """Part of a line is in the file, and could not be taken back."""
        self.failing = False
        self.lost_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode()
        try:
            self._append(b"\n" + line if self._torn else line)
        except OSError as error:
            self.lost_lines += 1
            if not self.failing:
                _problems.error("the audit log %s cannot be written: %s", self._file, error.strerror)
            self.failing = True
            return
        self._torn = False
        if self.failing:
            self.failing = False
            _problems.warning("the audit log %s is written again; lines lost so far: %d", self._file, self.lost_lines)

    def _append(self, line: bytes) -> None:
        """Write the whole line or nothing of it."""
        if self._fd < 0:  # `logging.config`, which uvicorn uses, closes every handler that is there
            self._fd = self._open()
        num_bytes = os.write(self._fd, line)
        if num_bytes == len(line):
            return
        try:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - num_bytes)
        except OSError:
            self._torn = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> int:
        return os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().close()


def log_to(file: Path) -> AuditFile:
    """Append the audit log to a file, and only there. Raises `ConfigError`."""
    try:
        handler = AuditFile(file)
    except OSError as error:
        raise ConfigError(
            f"cannot open the audit log {file}: {error.strerror}; choose another", param="--audit-log"
        ) from error
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    return handler
