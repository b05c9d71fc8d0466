"""Responses that later requests may continue (`previous_response_id`) or fetch: in memory, bounded, for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omnistage.core.validation import short_repr
from omnistage.server.http.errors import NotFoundError

KEEP_SECONDS = 24 * 3600.0
MAX_RESPONSES, MAX_BYTES = 4096, 128 * 2**20
_SHARE = 4
"""One holder of a key takes at most this part of both, where there are keys."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    holder: str
    response: Mapping[str, object]
    items: tuple[Mapping[str, object], ...]
    """The conversation up to its end: all input, then its output."""
    inputs: int
    """How many of them are its own input and that of the responses before it."""
    size: int
    expires: float


class ResponseStore:
    """The last responses; the oldest are dropped first. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._responses: dict[str, StoredResponse] = {}
        self.size = 0

    def keep(
        self,
        holder: str,
        response: Mapping[str, object],
        items: tuple[Mapping[str, object], ...],
        inputs: int,
        size: int,
        *,
        shared: bool,
    ) -> None:
        """Keep a response, unless it is larger than what its holder may keep. `shared`: with holders of other keys."""
        most_bytes, most = (MAX_BYTES // _SHARE, MAX_RESPONSES // _SHARE) if shared else (MAX_BYTES, MAX_RESPONSES)
        if size > most_bytes:
            return
        own = [name for name, one in self._responses.items() if shared and one.holder == holder]
        own_size = sum(self._responses[name].size for name in own)
        while own and (len(own) >= most or own_size + size > most_bytes):
            own_size -= self._responses[own[0]].size
            self._drop(own.pop(0))
        while self._responses and (len(self._responses) >= MAX_RESPONSES or self.size + size > MAX_BYTES):
            self._drop(next(iter(self._responses)))
        expires = self._clock() + KEEP_SECONDS
        self._responses[str(response["id"])] = StoredResponse(holder, response, items, inputs, size, expires)
        self.size += size

    def get(self, holder: str, response_id: str) -> StoredResponse:
        """A response of this holder's. Raises `NotFoundError`."""
        stored = self._responses.get(response_id)
        if stored is not None and stored.expires < self._clock():
            self._drop(response_id)
            stored = None
        if stored is None or stored.holder != holder:
            raise NotFoundError(
                f"there is no response {short_repr(response_id)}, or it was dropped; send the conversation in input",
                param="response_id",
            )
        return stored

    def delete(self, holder: str, response_id: str) -> None:
        self.get(holder, response_id)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self.size -= self._responses.pop(response_id).size
