"""A connection, and one request and its response on it.

Client disconnects and stalled reads cancel the request; how each request ended is recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import Context, ContextVar
from functools import lru_cache
from ipaddress import ip_address

import h11
from h11._writers import ChunkedWriter
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from omnistage.core.errors import InvalidRequestError, OmniError
from omnistage.server.http.errors import CLIENT_CLOSED, BodyTimeoutError, error_for_client, response_of
from omnistage.server.http.heads import HTTP_VERSIONS, StrictBuffer
from omnistage.server.http.limits import FEED_BYTES, PieceCount, TransportLimits
from omnistage.server.http.listening import PROBES, CrowdedError, Episode
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, SLOW_READER, AuditRecord, is_tag
from omnistage.server.observe.metrics import RequestMetrics

_WRITE_BYTES = 64 * 2**10
"""Bytes passed to the connection at once: it may pause us after each, so that a large response is not copied whole."""
_FEW_LINES = 64
"""In what one read gives of a body in chunks: these few are parsed at once."""
_METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS")
_MALFORMED = "omnistage.malformed"
CROWDED = "omnistage.crowded"
"""In the state of requests whose connection is beyond the limit."""
_PROBE_PATHS = ("/health", "/ready", "/metrics")
_PROBE_SECONDS = 2.0
_EVICTED_SHARE = 16
_CLOSE_SECONDS = 2.0
"""After its last response a TLS connection that is to close may take this long."""
_log = logging.getLogger(__name__)
_crowd = Episode()
_TRANSPORT: ContextVar[asyncio.Transport | None] = ContextVar("omnistage_transport", default=None)


class Connection(H11Protocol):
    """uvicorn's, which the application can abort: closing waits for a client that may never read.

    A client that begins a request has `head_seconds` to send its headers; how long a body may take is the
    application's rule.
    """

    head_seconds = 30.0
    idle_since = 0.0
    """When it was opened, or its last response was complete."""
    held_writes: _HeldWrites | None = None
    """Of its last response."""
    _crowded = False
    """It is beyond the limit, and only for probes."""
    _chunked = False
    _chunks_fit = True
    _head_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _close_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._chunks = PieceCount()
        self.conn._receive_buffer = StrictBuffer()
        self._next_event, self.conn.next_event = self.conn.next_event, self._counted_event  # type: ignore[method-assign]
        self.idle_since = self.loop.time()
        limits: TransportLimits = self.config.app.state.transport  # type: ignore[union-attr]
        if limits.max_connections is not None and len(self.connections) > limits.max_connections:
            self._join_crowd(limits.max_connections)
        self._watch_head()

    def _join_crowd(self, limit: int) -> None:
        """Make room by closing connections that have been idle longest; without any, serve only probes, or nothing."""
        if _crowd.begins():
            _log.warning("there are %d connections, the maximum; idle ones are closed, others refused", limit)
        idle = [one for one in self.connections if isinstance(one, Connection) and one is not self and one.idle]
        idle.sort(key=lambda one: one.idle_since)
        for one in idle[: max(1, limit // _EVICTED_SHARE)]:  # several: looking for them takes a while
            self.connections.discard(one)
            one.transport.abort()
        if len(self.connections) <= limit:
            return
        if len(self.connections) > limit + PROBES:
            self._refuse(crowded())
            return
        self._crowded, self.head_seconds = True, _PROBE_SECONDS
        self.app_state = {**self.app_state, CROWDED: True}

    @property
    def idle(self) -> bool:
        """Whether no request of it runs; its headers may be on their way."""
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if self._crowded:
            self._refuse(crowded())
        elif event.http_version != b"1.1":
            self._refuse(InvalidRequestError("a WebSocket needs HTTP/1.1; check the client that opens it"))
        else:
            super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        _TRANSPORT.set(self.transport)  # tasks started from here on inherit it
        while data:
            # A body of a given length comes as one piece a read, however long; only chunks may be many.
            in_body = self.conn.their_state is h11.SEND_BODY
            whole = in_body and (not self._chunked or data.count(b"\r\n") < _FEW_LINES)
            piece, data = (data, b"") if whole else (data[:FEED_BYTES], data[FEED_BYTES:])
            super().data_received(piece)
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                break
            if not self._chunks_fit:
                self._refuse_body(InvalidRequestError("the chunks of the body are too small; send larger ones"))
                break
        self._watch_head()

    def _counted_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """h11's next event, with the chunks of a body counted."""
        event = self._next_event()
        if type(event) is h11.Data:
            self._chunks_fit = self._chunks.add(1, len(event.data)) and self._chunks_fit
        elif type(event) is h11.Request:
            self._chunks, self._chunks_fit = PieceCount(), True
            self._chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
        return event

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # else a connection that was reset stays in memory until its timer fires
        for timer in (self._rest_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self._watch_head()

    def shutdown(self) -> None:
        """Close where no request runs. Over TLS that waits for the client's own close, and idle clients send none."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            delay = self.idle_since + _CLOSE_SECONDS - self.loop.time()
            self._close_timer = self.loop.call_later(max(0.0, delay), self.transport.abort)

    def on_response_complete(self) -> None:
        if self.held_writes is not None:
            self.held_writes.release()  # before the next request, which may have arrived, is responded to
        super().on_response_complete()
        self.idle_since = self.loop.time()
        if self._rest_timer is not None:
            self._rest_timer.cancel()  # of an earlier request; else it keeps the connection until it is due
        # The request was refused; the rest of its body is discarded.
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._rest_timer = self._call_later(self._rest_overdue, self.cycle)

    def _rest_overdue(self, cycle: object) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def _watch_head(self) -> None:
        """Run a timer while headers are awaited, from their first byte on and not from the last."""
        # A TLS transport that was aborted has no protocol; that of a WebSocket is another.
        own = not self.transport.is_closing() and self.transport.get_protocol() is self
        awaited = own and self.conn.their_state is h11.IDLE
        if self._head_timer is not None and not awaited:
            self._head_timer.cancel()
            self._head_timer = None
        elif self._head_timer is None and awaited:
            self._head_timer = self._call_later(self._head_overdue)

    def _call_later(self, callback: Callable[..., None], *args: object) -> asyncio.TimerHandle:
        """A timer in an empty context: ours refers to the connection, and the timer lives until it is due."""
        return self.loop.call_later(self.head_seconds, callback, *args, context=Context())

    def _head_overdue(self) -> None:
        self._head_timer = None
        self._refuse(BodyTimeoutError("the headers did not arrive in time; send the request again"))

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP in OpenAI's form; a response that has begun can only be broken off."""
        self._refuse_body(InvalidRequestError("this is not valid HTTP; check the client that sends it"))

    def _refuse_body(self, error: OmniError) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.scope["state"][_MALFORMED] = True  # for the record of the request whose body this was
        self._refuse(error)

    def _refuse(self, error: OmniError) -> None:
        """Respond without the application, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        response = response_of(error)
        response.headers["Connection"] = "close"
        head = h11.Response(status_code=error.status, headers=response.raw_headers)
        for event in (head, h11.Data(bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class StalledError(OSError):
    """The client has not read for too long."""


class _HeldWrites:
    """The transport of one response: what is written while it holds goes to the system in one call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.pieces: list[bytes] = []
        self.holds = False
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self.holds and not self.pieces:
            self.transport.write(data)
            return
        self.pieces.append(data)
        if not self.holds:
            self.release()

    def release(self) -> None:
        self.holds = False
        if self.pieces:
            self.transport.write(b"".join(self.pieces))
            self.pieces.clear()

    def close(self) -> None:
        self.release()
        self.transport.close()


class _Transfer:
    """A request's messages, counted; the client has `stall_seconds` to take each piece of the response."""

    def __init__(self, receive: Receive, send: Send, record: AuditRecord, stall_seconds: float) -> None:
        self._receive, self._send = receive, send
        transport = _TRANSPORT.get()
        connection = None if transport is None else transport.get_protocol()
        self._connection, self._writes, self._chunked = None, None, False
        if isinstance(connection, Connection) and transport is not None:
            self._connection, self._writes = connection, _HeldWrites(transport)
            connection.held_writes = connection.cycle.transport = self._writes  # type: ignore[assignment]
        self._record = record
        self._stall_seconds = stall_seconds
        self._body_read = asyncio.Event()
        self.started = self.complete = False
        """Of the response."""
        self.gone = False
        """The client left before its response was complete; what is sent after that is lost."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._record.bytes_in += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.gone = message["type"] == "http.disconnect" and not self.complete
            self._body_read.set()
        return message

    async def watch(self) -> None:
        """Return once the client has left. The body's messages are the application's: wait until it has them."""
        await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        record, connection, writes = self._record, self._connection, self._writes
        is_body = message["type"] == "http.response.body"
        waits = connection is None or connection.flow.write_paused
        pieces: tuple[Message, ...] = (message,)
        if is_body:
            body = message.get("body", b"")
            record.bytes_out += len(body)
            if len(body) > _WRITE_BYTES:
                pieces = _split(message, body)
            elif self._chunked and not waits and message.get("more_body", False) and writes is not None:
                # As h11 writes it: a piece of a streamed body changes nothing of the connection's state.
                if body and not writes.is_closing():
                    chunk = b"%x\r\n%b\r\n" % (len(body), body)
                    if writes.pieces:  # the head
                        writes.pieces.append(chunk)
                        writes.release()
                    else:
                        writes.transport.write(chunk)
                return
        else:
            self.started = True
            record.status = message["status"]
            if headers := _headers_of(record):
                pieces = ({**message, "headers": [*message.get("headers", ()), *headers]},)
        try:
            for piece in pieces:
                self.complete = is_body and not piece.get("more_body", False)
                if writes is not None and (self.complete or not is_body):
                    writes.holds = True  # the head goes with the first of the body, the end with the last
                # Without waiting it needs no timeout.
                async with asyncio.timeout(self._stall_seconds) if waits else nullcontext():
                    await self._send(piece)
                waits = connection is None or connection.flow.write_paused
                if writes is not None and is_body:
                    writes.release()
        except TimeoutError:
            record.ended, record.status = SLOW_READER, CLIENT_CLOSED
            await cut()
            raise StalledError("the client does not read") from None
        if not is_body and connection is not None:
            self._chunked = type(connection.conn._writer) is ChunkedWriter


class Exchange:
    """ASGI middleware around everything else.

    A client that leaves cancels its request's task wherever it is, and so aborts the work; one that reads nothing for
    `stall_seconds` is disconnected. No exception leaves this class.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, stall_seconds: float) -> None:
        self._app = app
        self._metrics = metrics
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = AuditRecord(scope["method"], address_of(scope))
        headers = dict(scope["headers"])
        tag = headers.get(b"x-client-request-id")
        if tag is not None:
            record.tag = tag.decode("latin-1")
        elif (header := headers.get(b"x-request-id")) is not None and is_tag(name := header.decode("latin-1")):
            record.tag, record.echo = name, True  # a proxy may send one of any form: then it is no name for ours
        token = CURRENT_RECORD.set(record)
        # A proxy in front of us may go by the other of the two lengths, and take the rest for another request.
        refusal: OmniError | None = None
        if b"content-length" in headers and b"transfer-encoding" in headers:
            refusal = InvalidRequestError("send Content-Length or Transfer-Encoding, not both")
        if scope.get("http_version", "1.1") not in HTTP_VERSIONS:
            refusal = InvalidRequestError("this version of HTTP is not supported; use HTTP/1.1")
        if CROWDED in scope.get("state", ()) and scope["path"] not in _PROBE_PATHS:
            refusal = crowded()
        app = self._app
        if refusal is not None:
            app = response_of(refusal)
            app.headers["Connection"] = "close"
        try:
            await self._run(scope, receive, send, record, app)
        finally:
            CURRENT_RECORD.reset(token)
            # The route's pattern, not the path, and known methods: there is no end to the names a client may send.
            pattern = getattr(scope.get("route"), "path", None)
            record.endpoint = f"{method_of(scope)} {pattern}" if pattern is not None else "unknown"
            if str(scope["path"]).startswith("/v1/"):
                self._metrics.observe_response(record, record.close())

    async def _run(self, scope: Scope, receive: Receive, send: Send, record: AuditRecord, app: ASGIApp) -> None:
        transfer = _Transfer(receive, send, record, self._stall_seconds)
        working = asyncio.ensure_future(app(scope, transfer.receive, transfer.send))
        watching = asyncio.ensure_future(transfer.watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                if not transfer.complete:
                    transfer.gone = True
                    working.cancel()
                await asyncio.wait({working})
        except asyncio.CancelledError:  # the process ends without waiting for this request
            transfer.gone = True
            await cut()
        finally:
            working.cancel()
            watching.cancel()
        if scope.get("state", {}).get(_MALFORMED):
            record.ended, record.status = "refused", 400
            return
        if transfer.gone and record.ended != SLOW_READER:
            record.ended, record.status = DISCONNECTED, CLIENT_CLOSED
        error = None if not working.done() or working.cancelled() else working.exception()
        if error is not None and record.ended not in (DISCONNECTED, SLOW_READER):
            # No handler has this error; a response that has begun can only be broken off.
            record.ended = "error"
            public_error = error_for_client(error)
            await (cut() if transfer.started else response_of(public_error)(scope, receive, transfer.send))


def _headers_of(record: AuditRecord) -> list[tuple[bytes, bytes]]:
    """What every response says of its request."""
    headers = []
    # OpenAI's clients show the id; here it also names the request's trace.
    if record.echo and record.tag is not None:
        headers.append((b"x-request-id", record.tag.encode("ascii")))
    elif record.requests:
        headers.append((b"x-request-id", record.requests[-1].encode("ascii")))
    if record.ignored:
        headers.append((b"x-omnistage-ignored", ", ".join(record.ignored).encode("ascii")))
    return headers


def crowded() -> CrowdedError:
    return CrowdedError("the service has as many connections as it may; try again later")


def method_of(scope: Scope) -> str:
    """A request's method as a label: every other word that a client may send is one label."""
    return str(scope["method"]) if scope["method"] in _METHODS else "OTHER"


async def cut() -> None:
    """Abort the connection that this task serves, whatever is still to be written."""
    transport = _TRANSPORT.get()
    if transport is not None:
        transport.abort()
        await asyncio.sleep(0)  # the connection learns of it in the loop's next iteration


def _split(message: Message, body: bytes) -> tuple[Message, ...]:
    """A body message as several, the last of which ends the body if the message does."""
    starts = range(0, len(body), _WRITE_BYTES)
    pieces = tuple({**message, "body": body[start : start + _WRITE_BYTES], "more_body": True} for start in starts)
    pieces[-1]["more_body"] = message.get("more_body", False)
    return pieces


def address_of(scope: Scope) -> str | None:
    """Where a request comes from; what a proxy says is used only if it is an address."""
    client = scope.get("client")
    return None if client is None else _checked_address(client[0])


@lru_cache(maxsize=1024)
def _checked_address(text: str) -> str | None:
    try:
        return str(ip_address(text))
    except ValueError:
        return None
