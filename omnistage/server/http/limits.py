"""Bounds that every connection shares: the bytes that clients make the service hold, and how slowly they may send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from omnistage.core.errors import QueueFullError
from omnistage.server.access.keys import Holder, HolderUsage
from omnistage.server.http.errors import RateLimitError

MAX_HELD_BYTES = 2**30
"""Of all clients together, or one body of the largest size where that is more."""
MAX_MESSAGE_BYTES = 16 * 2**20
"""Of one WebSocket message. OpenAI's limit for an event with audio is 15 MiB."""
MIN_RATE = 64 * 2**10
"""Bytes a second at which a body or a message must arrive, beyond the time in which a client may send nothing."""
_MAX_SHARE = 4
"""One key may hold one of this many parts of all bytes."""


class HeldBytes:
    """Counts bytes that clients have sent and the service holds: bodies, messages, audio and conversations of sessions.

    One is shared by HTTP and WebSocket. With `shared` no key can take all of it. Used from the event loop only.
    """

    def __init__(self, max_bytes: int, *, max_item: int = 0, shared: bool = False) -> None:
        """One item of `max_item` bytes always fits into an empty one, and into a key's share."""
        self.max_bytes = max(max_bytes, max_item)
        self.max_share = max(self.max_bytes // _MAX_SHARE, max_item) if shared else None
        self.total = 0


@dataclass(slots=True)
class Hold:
    """The bytes of one body, connection or session. It begins with none; `set(0)` gives them back at its end."""

    held_bytes: HeldBytes
    usage: HolderUsage | None = None
    """Of the key's holder."""
    size: int = 0

    def resize(self, size: int) -> None:
        """Hold this many from now on. Raises, and changes nothing, where they do not fit."""
        if size > self.size:
            self.check(size)
        self.set(size)

    def check(self, size: int) -> None:
        """Raise the client's error if it could not hold this many."""
        held_bytes, usage, more = self.held_bytes, self.usage, size - self.size
        if held_bytes.total + more > held_bytes.max_bytes:
            raise QueueFullError(
                f"requests and sessions hold as many bytes as allowed ({held_bytes.max_bytes}); send it again later"
            )
        if usage is not None and held_bytes.max_share is not None and usage.held_bytes + more > held_bytes.max_share:
            raise RateLimitError(
                f"this key's requests and sessions hold as many bytes as it may ({held_bytes.max_share}); "
                "send it again once some have ended",
                retry_after=1.0,
            )

    def set(self, size: int) -> None:
        """Hold this many, which are there already."""
        change, self.size = size - self.size, size
        self.held_bytes.total += change
        if self.usage is not None:
            self.usage.held_bytes += change

    def assign(self, holder: Holder) -> None:
        """Count it as this holder's from now on."""
        size = self.size
        self.set(0)
        self.usage = holder.use
        self.set(size)


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """An application's settings for its connections, in `app.state.transport`."""

    held_bytes: HeldBytes = field(default_factory=lambda: HeldBytes(MAX_HELD_BYTES))
    stall_seconds: float = 60.0
    max_connections: int | None = None
    """Beyond it idle ones are closed, and those without any get 503; None: no limit."""


@dataclass(slots=True)
class PieceCount:
    """Chunks of a body, or frames of a WebSocket: each costs the same work, however few bytes it brings."""

    FREE: ClassVar[int] = 256
    BYTES_EACH: ClassVar[int] = 64
    _credit: float = float(FREE)

    def add(self, pieces: int, nbytes: int, seconds: float = 0.0) -> bool:
        """Count what arrived, `seconds` after the last; False once there are too many for their bytes."""
        earned = nbytes / self.BYTES_EACH + seconds * self.FREE / 2
        self._credit = min(self._credit + earned, float(self.FREE)) - pieces
        return self._credit >= 0


FEED_BYTES = 2 * 2**10
"""Bytes that are parsed at once before pieces are counted: 2 KiB of one-byte chunks take 12 ms to parse."""
