"""Refusing what comes in, request or WebSocket, in one form."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from omnistage.core.errors import OmniError
from omnistage.server.http.errors import response_of


async def deny(error: OmniError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error; a WebSocket that is not yet accepted gets the same status and body as a request."""
    await response_of(error)(scope, receive, send)
    if scope["type"] == "websocket":
        # uvicorn hears in the loop's next turn that the connection is closed; whoever returns before that is logged
        # as one that never answered.
        await asyncio.sleep(0)
