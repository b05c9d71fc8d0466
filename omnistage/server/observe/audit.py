"""Who asked what of which model, how much came out and how it ended. Never content.

One JSON line a request, through the logger `omnistage.audit`; where it goes is for whoever runs the service to say.
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
    """One request to the service, filled in as it goes on. Streams of one request add up."""

    endpoint: str
    client: str | None = None
    started: float = field(default_factory=time.monotonic)
    who: str | None = None
    tag: str | None = None
    """What the client calls its request: it can be asked for by this name before its answer has begun."""
    model: str | None = None
    status: int | None = None
    ended: str | None = None
    """The engine's reason, or the service's own: disconnected, slow_reader, error, refused, filtered."""
    requests: list[str] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    bytes_in: int = 0
    bytes_out: int = 0
    closed: bool = False

    def count(self, item: OutputChunk) -> None:
        """Count what an item gives; a request that never reaches its end is then still known by its size."""
        self.usage.completion_tokens += len(item.token_ids)
        if item.audio is not None:
            self.usage.audio_seconds += len(item.audio.samples) / item.audio.sample_rate
        if item.image is not None and not item.image.preview:
            self.usage.images += 1
        if item.video is not None and not item.video.preview:
            self.usage.video_seconds += len(item.video.frames) / item.video.fps
        if item.final is not None:
            self.usage.prompt_tokens += item.final.usage.prompt_tokens
            self.ended = self.ended or ended_by(item.final.finish_reason)

    def close(self) -> float:
        """Write the line, once. The seconds that the request took."""
        seconds = time.monotonic() - self.started
        if not self.closed:
            self.closed = True
            _log.info("%s", self._line(seconds))
        return seconds

    def _line(self, seconds: float) -> str:
        usage = self.usage
        values = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": self.who,
            "client": self.client,
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status,
            "ended": self.ended or ("refused" if (self.status or 0) >= 400 else "done"),
            "seconds": round(seconds, 4),
            "requests": self.requests,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "audio_seconds": round(usage.audio_seconds, 3),
            "images": usage.images,
            "video_seconds": round(usage.video_seconds, 3),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }
        return json.dumps(values, separators=(",", ":"))


CURRENT_RECORD: ContextVar[AuditRecord | None] = ContextVar("omnistage_record", default=None)
"""The request that this task works for."""


def ended_by(reason: FinishReason | None) -> str:
    return FILTERED if reason is FinishReason.CONTENT_FILTER else str(reason)


def log_to(file: Path) -> None:
    """Append the audit log to a file of its own."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False  # it is for this file, not for the terminal
