"""One way to refuse HTTP requests and WebSocket handshakes."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from omnistage.core.errors import OmniError
from omnistage.server.http.errors import response_of


async def deny(error: OmniError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error; a WebSocket that is not accepted yet gets the same status and body as a request."""
    await response_of(error)(scope, receive, send)
    if scope["type"] == "websocket":
        # uvicorn sees the closed connection in the loop's next iteration; returning before it logs a missing response.
        await asyncio.sleep(0)
