"""The audit log: who ran what on which model, how much came out and how it ended. Never content.

One JSON line a request, through the logger `omnistage.audit`.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from omnistage.core.types import FinishReason
from omnistage.pipeline.outputs import OutputChunk, Usage

AUDIT_LOGGER = "omnistage.audit"
DISCONNECTED = "disconnected"
SLOW_READER = "slow_reader"
FILTERED = "filtered"
_log = logging.getLogger(AUDIT_LOGGER)


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


def ended_by(reason: FinishReason | None) -> str:
    return FILTERED if reason is FinishReason.CONTENT_FILTER else str(reason)


def log_to(file: Path) -> None:
    """Append the audit log to a file, and only there."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
