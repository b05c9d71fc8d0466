"""Bounds on request bodies: how large one may be, how slowly it may come, how much of all of them is held at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError, QueueFullError
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import BodyTimeoutError, response_of

MOST_HELD = 512 * 2**20
"""Bytes of all bodies together, or one body of the largest size where that is more."""
PACE = 64 * 2**10
"""Bytes a second that a body has to come at, beyond the time in which a client may be silent."""
_MOST_DIGITS = 18


class BodyLimit:
    """ASGI middleware: 413 to a body that is too large, 408 to one that comes too slowly, 429 to one too many.

    A body counts from its first byte until its request has ended, as it is in memory for so long. One that would be
    too much beside the others is refused, and so is one of a key that is sending as many as it may have requests.
    A client may be silent for `stall_seconds`, at once or in all, with the time for what it has sent at `PACE` added.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        stall_seconds: float = 60.0,
        most_held: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._stall_seconds = stall_seconds
        self._most_held = max(max_bytes, MOST_HELD if most_held is None else most_held)
        self._clock = clock
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        failure = await self._run(scope, receive, send)
        if failure is not None:
            response = response_of(failure)
            if isinstance(failure, BodyTimeoutError):
                response.headers["Connection"] = "close"  # else it could go on dripping, to be thrown away
            await response(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> OmniError | None:
        """Let the request through with its body counted; why it is refused, if it is."""
        with contextlib.ExitStack() as sending:
            try:
                self._admit(scope, sending)
            except OmniError as error:
                return error
            seen, waited, complete = 0, 0.0, False
            failure: OmniError | None = None

            async def counted() -> Message:
                nonlocal seen, waited, complete, failure
                if complete:
                    return await receive()
                began = self._clock()
                try:
                    message = await self._next(receive, seen, waited)
                    size = len(message.get("body", b""))
                    seen += size
                    self._held += size
                    self._check(seen)
                except OmniError as error:
                    failure = error
                    raise _RefusedError from None
                waited += self._clock() - began
                complete = message["type"] != "http.request" or not message.get("more_body", False)
                if complete:
                    sending.close()
                return message

            async def unless_refused(message: Message) -> None:
                # Whoever reads the body may turn our error into an answer of its own, which would be the wrong one.
                if failure is None:
                    await send(message)

            try:
                with contextlib.suppress(_RefusedError):
                    await self._app(scope, counted, unless_refused)
            finally:
                self._held -= seen
            return failure

    def _admit(self, scope: Scope, sending: contextlib.ExitStack) -> None:
        """Judge a request by its head alone. Raises what is answered instead of reading its body."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise InvalidRequestError("the header Content-Length is not a number; correct it")
        if len(length) > _MOST_DIGITS or int(length) > self._max_bytes:
            raise self._too_large(length[:_MOST_DIGITS].decode("ascii"))
        if self._held + int(length) > self._most_held:
            raise _full()
        holder = scope.get("state", {}).get("holder")
        if isinstance(holder, Holder) and (int(length) or b"transfer-encoding" in headers):
            sending.enter_context(holder.count("uploads"))

    async def _next(self, receive: Receive, seen: int, waited: float) -> Message:
        """The body's next piece. Only waiting counts: what we do with the last one is not the client's time."""
        left = self._stall_seconds + seen / PACE - waited
        try:
            async with asyncio.timeout(min(left, self._stall_seconds)):
                return await receive()
        except TimeoutError:
            silent = f"no more of the body came for {self._stall_seconds:g} s"
            slow = f"the body came at less than {PACE // 1024} KiB a second"
            raise BodyTimeoutError(f"{slow if left < self._stall_seconds else silent}; send it again") from None

    def _check(self, seen: int) -> None:
        if seen > self._max_bytes:
            raise self._too_large(str(seen))
        if self._held > self._most_held:
            raise _full()

    def _too_large(self, size: str) -> LimitExceededError:
        return LimitExceededError(f"the body has {size} bytes or more, over the limit of {self._max_bytes}; send less")


def _full() -> QueueFullError:
    return QueueFullError("the requests that are here hold as many bytes as they may; send it again later")


class _RefusedError(Exception):
    """Raised into whoever reads the body; never leaves this file."""
