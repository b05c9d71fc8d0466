"""Limits on request bodies: the size of one, how slowly it may arrive, how many bytes are held together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import BodyTimeoutError, response_of
from omnistage.server.http.limits import MIN_RATE, HeldBytes, Hold

_MAX_DIGITS = 18
BODY_HOLD = "body_hold"
"""In a request's state: the `Hold` of its body, for what it becomes."""


class BodyLimit:
    """ASGI middleware: 413 for a body that is too large, 408 for one that is too slow, 429 for one too many.

    A body counts in `held_bytes` from its first byte until its request has ended, as it stays in memory for so long.
    One that would exceed the total or its key's share is refused, and so is one of a key that is already sending as
    many as it may have requests.
    A client may pause for `stall_seconds`, at once or in total, plus the time for what it has sent at `MIN_RATE`.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        held_bytes: HeldBytes,
        stall_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._stall_seconds = stall_seconds
        self._held_bytes = held_bytes
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        holder = state.get("holder")
        hold = state[BODY_HOLD] = Hold(self._held_bytes, None if holder is None else holder.use)
        size, silent_seconds, complete = 0, 0.0, False

        async def receive_piece() -> Message:
            """Raises where a limit is exceeded. Only waiting counts: the time in which we process a piece does not."""
            nonlocal size, silent_seconds, complete
            if complete:
                return await receive()
            began, limit = self._clock(), self._stall_seconds + size / MIN_RATE - silent_seconds
            try:
                async with asyncio.timeout(min(limit, self._stall_seconds)):
                    message = await receive()
            except TimeoutError:
                silent = f"no more of the body arrived for {self._stall_seconds:g} s"
                slow = f"the body arrived at less than {MIN_RATE // 1024} KiB a second"
                raise BodyTimeoutError(f"{slow if limit < self._stall_seconds else silent}; send it again") from None
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise self._too_large(str(size))
            hold.resize(size)
            silent_seconds += self._clock() - began
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if complete:
                sending.close()
            return message

        try:
            with contextlib.ExitStack() as holding, contextlib.ExitStack() as sending:
                holding.callback(hold.set, 0)
                self._admit(scope, sending, hold, holder)
                await self._app(scope, receive_piece, send)
        except OmniError as error:
            await response_of(error)(scope, receive, send)

    def _admit(self, scope: Scope, sending: contextlib.ExitStack, hold: Hold, holder: Holder | None) -> None:
        """Check a request by its headers alone. Raises what is answered instead of reading its body."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise InvalidRequestError("the header Content-Length is not a number; correct it")
        if len(length) > _MAX_DIGITS or int(length) > self._max_bytes:
            raise self._too_large(length[:_MAX_DIGITS].decode("ascii"))
        hold.check(int(length))
        if holder is not None and (int(length) or b"transfer-encoding" in headers):
            sending.enter_context(holder.count("uploads"))

    def _too_large(self, size: str) -> LimitExceededError:
        return LimitExceededError(f"the body has {size} bytes or more, over the limit of {self._max_bytes}; send less")
