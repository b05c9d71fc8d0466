"""A bound on request bodies, checked before they are read: by their announced length, and again as they arrive."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.errors import InvalidRequestError, LimitExceededError, OmniError
from omnistage.server.errors import BodyTimeoutError, response_of

_MOST_DIGITS = 18


class BodyLimit:
    """ASGI middleware: 413 to a body of more than `max_bytes`, 408 to one that stops for `stall_seconds`."""

    def __init__(self, app: ASGIApp, max_bytes: int, stall_seconds: float = 60.0) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._announced(dict(scope["headers"]).get(b"content-length", b"0"))
        if problem is not None:
            await response_of(problem)(scope, receive, send)
            return
        seen, complete = 0, False
        failure: OmniError | None = None

        async def counted() -> Message:
            nonlocal seen, complete, failure
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(self._stall_seconds):
                    message = await receive()
            except TimeoutError:
                failure = BodyTimeoutError(f"no more of the body came for {self._stall_seconds:g} s; send it again")
                raise _RefusedError from None
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                failure = self._too_large(str(seen))
                raise _RefusedError
            return message

        async def unless_refused(message: Message) -> None:
            # Whoever reads the body may turn our error into an answer of its own, which would be the wrong one.
            if failure is None:
                await send(message)

        with contextlib.suppress(_RefusedError):
            await self._app(scope, counted, unless_refused)
        if failure is not None:
            await response_of(failure)(scope, receive, send)

    def _announced(self, length: bytes) -> OmniError | None:
        if not length.isdigit():
            return InvalidRequestError("the header Content-Length is not a number; correct it")
        if len(length) > _MOST_DIGITS or int(length) > self._max_bytes:
            return self._too_large(length[:_MOST_DIGITS].decode("ascii"))
        return None

    def _too_large(self, size: str) -> LimitExceededError:
        return LimitExceededError(f"the body has {size} bytes or more, over the limit of {self._max_bytes}; send less")


class _RefusedError(Exception):
    """Raised into whoever reads the body; never leaves this file."""
