"""Streamed responses, and server-sent events as their usual content."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

DONE_EVENT = b"data: [DONE]\n\n"
"""The last event of a streamed chat or completion."""


class LastPiece(bytes):
    """What ends a streamed response: nothing comes after it."""


def event(data: Mapping[str, object], name: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    if name is None:
        return b"data: %b\n\n" % to_json(data)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(data))


class _StreamedResponse(StreamingResponse):
    """Sends pieces as they come and closes their generator however the response ends.

    Starlette's would watch for a disconnect itself, which `Exchange` does for every route, and would leave the
    generator of a cancelled response to the garbage collector.
    """

    def __init__(self, first: bytes | None, pieces: AsyncGenerator[bytes], media_type: str) -> None:
        super().__init__(pieces, media_type=media_type, headers={"Cache-Control": "no-store"})
        self._first = first
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # In a task of its own: otherwise every piece would resume the coroutines of all middleware.
            await asyncio.create_task(self._send(send))
        finally:
            await self._pieces.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        piece = self._first
        while piece is not None:
            last = type(piece) is LastPiece
            await send({"type": "http.response.body", "body": piece, "more_body": not last})
            if last:
                return
            piece = await anext(self._pieces, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_response(pieces: AsyncGenerator[bytes], media_type: str = "text/event-stream") -> StreamingResponse:
    """A response whose first piece exists already: an error before it raises here and keeps its HTTP status.

    Closing the response closes the generator, which aborts the request.
    """
    return _StreamedResponse(await anext(pieces, None), pieces, media_type)
