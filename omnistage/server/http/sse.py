"""Server-sent events: a body that is written as the work goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


def event(data: dict[str, Any] | str, name: str | None = None) -> bytes:
    """One event; a text goes out as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {text}\n\n".encode()


class _ClosingResponse(StreamingResponse):
    """Closes its source however it ends: a client that left must not wait for the garbage collector."""

    source: AsyncIterator[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The source too: a body that never began does not close it.
            await _close(self.body_iterator)
            await _close(self.source)


async def stream_response(items: AsyncIterator[bytes], media_type: str = "text/event-stream") -> StreamingResponse:
    """A response whose first piece is there already: what is wrong with the request raises here, with its status.

    Closing the response closes the iterator, which aborts the request.
    """
    first = await anext(items, None)

    async def rest() -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield first
            async for item in items:
                yield item
        finally:
            await _close(items)

    response = _ClosingResponse(rest(), media_type=media_type, headers={"Cache-Control": "no-store"})
    response.source = items
    return response


async def _close(items: object) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()
