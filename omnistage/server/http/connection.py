"""One request and its answer on one connection: whoever leaves or stops reading ends the work; each end is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar
from dataclasses import dataclass
from ipaddress import ip_address

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from omnistage.core.errors import InternalError, InvalidRequestError, OmniError
from omnistage.core.failures import log_defect
from omnistage.server.http.errors import CLIENT_CLOSED, BodyTimeoutError, response_of
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, SLOW_READER, AuditRecord
from omnistage.server.observe.metrics import RequestMetrics

_PIECE = 64 * 2**10
"""Bytes handed to the connection at once: after each it may make us wait, so that a large answer is not all copied."""
_METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS")
_MALFORMED = "omnistage.malformed"
_TRANSPORT: ContextVar[asyncio.Transport | None] = ContextVar("omnistage_transport", default=None)


class Connection(H11Protocol):
    """uvicorn's, which lets the application cut it: closing waits for a reader that may never read.

    Whoever begins a request has `head_seconds` to say what it is; how long a body may take is the application's rule.
    """

    head_seconds = 30.0
    _head: asyncio.TimerHandle | None = None
    _rest: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        _TRANSPORT.set(self.transport)  # tasks started from here on inherit it
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # else one that was reset stays in memory until its timer rings
        if self._rest is not None:
            self._rest.cancel()
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._rest is not None:
            self._rest.cancel()  # of a request before this one; else it keeps the connection until it is due
        # It was refused; what still comes of it is thrown away.
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._rest = self._later(self._rest_overdue, self.cycle)

    def _rest_overdue(self, refused: object) -> None:
        if self.cycle is refused and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def _watch_head(self) -> None:
        """Have a timer while a head is awaited, from its first byte on and not from its last."""
        taken_over = self.transport.get_protocol() is not self  # by a WebSocket
        awaited = not taken_over and not self.transport.is_closing() and self.conn.their_state is h11.IDLE
        if self._head is not None and not awaited:
            self._head.cancel()
            self._head = None
        elif self._head is None and awaited:
            self._head = self._later(self._head_overdue)

    def _later(self, callback: Callable[..., None], *given: object) -> asyncio.TimerHandle:
        """A timer in an empty context: ours has the connection in it, and is kept until it is due, even cancelled."""
        return self.loop.call_later(self.head_seconds, callback, *given, context=Context())

    def _head_overdue(self) -> None:
        self._head = None
        self._refuse(BodyTimeoutError("the request did not come; send it at one go"))

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in OpenAI's form; where an answer has begun it can only be broken off."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.scope["state"][_MALFORMED] = True  # for the record of the request whose body this was
        self._refuse(InvalidRequestError("this is not valid HTTP; check what sends it"))

    def _refuse(self, error: OmniError) -> None:
        """Answer without the application, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        answer = response_of(error)
        head = h11.Response(status_code=error.status, headers=[*answer.raw_headers, (b"connection", b"close")])
        for event in (head, h11.Data(bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class StalledError(OSError):
    """The client has not read for too long."""


@dataclass(slots=True)
class _State:
    started: bool = False
    complete: bool = False
    gone: bool = False
    """The client left before its answer was complete; what is answered after that is heard by nobody."""


class Exchange:
    """ASGI middleware around everything else.

    A client that leaves cancels its request's task wherever it is, and so aborts the work; one that reads nothing for
    `stall_seconds` is cut off. Nothing that fails inside gets out of here.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, stall_seconds: float) -> None:
        self._app = app
        self._metrics = metrics
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = AuditRecord(scope["method"], _address(scope))
        headers = dict(scope["headers"])
        tag = headers.get(b"x-client-request-id")
        record.tag = None if tag is None else tag.decode("latin-1")
        token = CURRENT_RECORD.set(record)
        # Whoever stands before us may go by the other of the two lengths, and take the rest for a request of its own.
        twice = b"content-length" in headers and b"transfer-encoding" in headers
        try:
            await self._run(scope, receive, send, record, _refuse_twice if twice else self._app)
        finally:
            CURRENT_RECORD.reset(token)
            # The pattern of the route, not the path, and known methods: the client's text has no end of names.
            pattern = getattr(scope.get("route"), "path", None)
            record.endpoint = f"{method_of(scope)} {pattern}" if pattern is not None else "unknown"
            if str(scope["path"]).startswith("/v1/"):
                self._metrics.observe_response(record, record.close())

    async def _run(self, scope: Scope, receive: Receive, send: Send, record: AuditRecord, app: ASGIApp) -> None:
        state = _State()
        body_read = asyncio.Event()

        async def counted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                record.bytes_in += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                state.gone = message["type"] == "http.disconnect" and not state.complete
                body_read.set()
            return message

        guarded = self._guarded(send, record, state)
        work = asyncio.ensure_future(_call(app, scope, counted, guarded))
        watch = asyncio.ensure_future(_until_gone(receive, body_read))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not state.complete:
                state.gone = True
                work.cancel()
            await asyncio.wait({work})
        finally:
            work.cancel()
            watch.cancel()
        if scope.get("state", {}).get(_MALFORMED):
            record.ended, record.status = "refused", 400
            return
        if state.gone and record.ended != SLOW_READER:
            record.ended, record.status = DISCONNECTED, CLIENT_CLOSED
        error = None if work.cancelled() else work.exception()
        if error is not None and record.ended not in (DISCONNECTED, SLOW_READER):
            await self._failed(error, scope, receive, guarded, record, state)

    def _guarded(self, send: Send, record: AuditRecord, state: _State) -> Send:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.started = True
                record.status = message["status"]
                if record.requests:  # OpenAI's clients show it; here it can also be traced and cancelled
                    named = (b"x-request-id", record.requests[-1].encode("ascii"))
                    message = {**message, "headers": [*message.get("headers", ()), named]}
                await self._timed(send, message, record)
                return
            body = message.get("body", b"")
            more = message.get("more_body", False)
            record.bytes_out += len(body)
            for start in range(0, max(len(body), 1), _PIECE):
                last = start + _PIECE >= len(body)
                piece = body if last and start == 0 else body[start : start + _PIECE]
                state.complete = last and not more
                await self._timed(send, {**message, "body": piece, "more_body": more or not last}, record)

        return guarded

    async def _timed(self, send: Send, message: Message, record: AuditRecord) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send(message)
        except TimeoutError:
            record.ended, record.status = SLOW_READER, CLIENT_CLOSED
            await cut()
            raise StalledError("the client does not read") from None

    async def _failed(
        self, error: BaseException, scope: Scope, receive: Receive, send: Send, record: AuditRecord, state: _State
    ) -> None:
        """Answer what no handler has answered; a stream that has begun can only be broken off."""
        record.ended = "error"
        if not isinstance(error, OmniError) and not isinstance(error.__cause__, OmniError):
            log_defect("a route", error)
        if state.started:
            await cut()
            return
        shown = error if isinstance(error, OmniError) else InternalError("a defect")
        await response_of(shown)(scope, receive, send)


def method_of(scope: Scope) -> str:
    """A request's method, for names: whatever else a client writes there is one."""
    return str(scope["method"]) if scope["method"] in _METHODS else "OTHER"


async def _refuse_twice(scope: Scope, receive: Receive, send: Send) -> None:
    answer = response_of(InvalidRequestError("a body has one length: Content-Length or Transfer-Encoding, not both"))
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)


def _address(scope: Scope) -> str | None:
    """Where a request comes from; a proxy's word for it is taken only if it is an address."""
    client = scope.get("client")
    try:
        return None if client is None else str(ip_address(client[0]))
    except ValueError:
        return None


async def _call(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


async def _until_gone(receive: Receive, body_read: asyncio.Event) -> None:
    """Return once the client has left. The body's messages are the application's: it waits until they are read."""
    await body_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


async def cut() -> None:
    """Break the connection that this task serves, whatever is still to be written."""
    transport = _TRANSPORT.get()
    if transport is not None:
        transport.abort()
        await asyncio.sleep(0)  # the connection hears of it in the loop's next turn
