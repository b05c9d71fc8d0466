"""`WS /v1/realtime` and `WS /v1/audio/speech/stream`: admission, and the socket of a session.

The HTTP middlewares let WebSockets pass: key, origin, size and pace are checked here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic_core import to_json
from starlette.types import Message

from omnistage.core.errors import InternalError, InvalidRequestError, OmniError, QueueFullError
from omnistage.core.failures import log_defect
from omnistage.server.access.denial import deny
from omnistage.server.access.hosts import origin_allowed
from omnistage.server.access.keys import Holder
from omnistage.server.http.connection import address_of, cut
from omnistage.server.http.errors import CLIENT_CLOSED, NotFoundError, PermissionDeniedError
from omnistage.server.http.limits import MAX_MESSAGE_BYTES, Hold
from omnistage.server.http.websocket import DISCONNECTED, HOLD
from omnistage.server.observe.audit import CURRENT_RECORD, SLOW_READER, AuditRecord
from omnistage.server.observe.audit import DISCONNECTED as ENDED_DISCONNECTED
from omnistage.server.realtime.admission import check_model, model_for_session
from omnistage.server.realtime.base import JsonObject
from omnistage.server.realtime.events import ClientGoneError
from omnistage.server.realtime.preview import to_preview, wants_preview
from omnistage.server.realtime.session import Limits, Session
from omnistage.server.realtime.spoken_text import SpokenText
from omnistage.server.service import Service

router = APIRouter()
ENDPOINT = "WS /v1/realtime"
SPEECH_ENDPOINT = "WS /v1/audio/speech/stream"
_PROTOCOL = "realtime"
_KEY_PROTOCOL = "openai-insecure-api-key."
_NORMAL, _GOING_AWAY, _REFUSED, _TOO_BIG, _INTERNAL_ERROR = 1000, 1001, 1008, 1009, 1011
Data = TypeVar("Data", str, bytes)
_MAX_SHARE = 4
"""A key without a limit of its own may have one of this many parts of all sessions."""


@dataclass(frozen=True, slots=True)
class Options:
    """The application's settings for its sockets."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    stall_seconds: float = 60.0
    origins: Sequence[str] = ()
    idle_seconds: float = 900.0
    max_sessions: int = 256
    limits: Limits = field(default_factory=Limits)


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """A realtime session."""
    service: Service = websocket.app.state.service
    options: Options = websocket.app.state.realtime

    def open_session(holder: Holder, name: str | None, socket: _Socket, memory: Hold) -> Session:
        model = None if name is None else model_for_session(service, holder, name)
        return Session(service, holder, model, socket.send, memory, limits=options.limits, client=socket.record.client)

    await _serve(websocket, ENDPOINT, open_session)


@router.websocket("/v1/audio/speech/stream")
async def spoken_text(websocket: WebSocket) -> None:
    """Speech of a text that is still being written."""
    service: Service = websocket.app.state.service

    def open_session(holder: Holder, name: str | None, socket: _Socket, memory: Hold) -> SpokenText:
        if name is not None:
            check_model(service, holder, name)
        return SpokenText(service, holder, name, socket.send, socket.send_bytes, memory, socket.record.client)

    await _serve(websocket, SPEECH_ENDPOINT, open_session)


async def _serve(
    websocket: WebSocket, endpoint: str, open_session: Callable[[Holder, str | None, _Socket, Hold], _Session]
) -> None:
    """`open_session` raises what refuses the handshake."""
    service: Service = websocket.app.state.service
    options: Options = websocket.app.state.realtime
    with _audited(websocket, endpoint) as record, contextlib.ExitStack() as stack:
        socket = _Socket(websocket, options, record, preview=endpoint == ENDPOINT)
        try:
            holder = _admit(websocket, service, options, record)
            memory = Hold(websocket.app.state.transport.held_bytes, holder.use)
            session = open_session(holder, websocket.query_params.get("model"), socket, memory)
            share = max(1, options.max_sessions // _MAX_SHARE) if service.keyring.required else None
            stack.enter_context(holder.count("sessions", share))
        except OmniError as error:
            record.status = error.status
            await deny(error, websocket.scope, websocket.receive, websocket.send)
            return
        record.model, record.status = session.model_name, 101
        await websocket.accept(_PROTOCOL if _PROTOCOL in websocket.scope["subprotocols"] else None)
        messages: Hold = websocket.scope["state"][HOLD]
        messages.assign(holder)
        stack.callback(memory.set, 0)
        await _Connection(socket, session, service, options, holder.expires_at).run()


@router.websocket("/{path:path}")
async def unknown_path(websocket: WebSocket) -> None:
    """404 with a reason: without this route Starlette would refuse with 403 and none."""
    with _audited(websocket, "unknown") as record:
        error = NotFoundError("there is no WebSocket at this path; connect to /v1/realtime or /v1/audio/speech/stream")
        record.status = error.status
        await deny(error, websocket.scope, websocket.receive, websocket.send)


@contextlib.contextmanager
def _audited(websocket: WebSocket, endpoint: str) -> Iterator[AuditRecord]:
    """The audit record of a connection, closed and counted at its end."""
    record = AuditRecord(endpoint, address_of(websocket.scope))
    CURRENT_RECORD.set(record)
    try:
        yield record
    finally:
        if str(websocket.scope["path"]).startswith("/v1/"):  # as for HTTP requests
            service: Service = websocket.app.state.service
            service.metrics.observe_response(record, record.close())


def _admit(websocket: WebSocket, service: Service, options: Options, record: AuditRecord) -> Holder:
    """The key's holder. Raises the error that refuses the handshake."""
    authorization = websocket.headers.get("authorization")
    if authorization is None:  # browsers cannot set the header, and send the key among the subprotocols
        keys = [p.removeprefix(_KEY_PROTOCOL) for p in websocket.scope["subprotocols"] if p.startswith(_KEY_PROTOCOL)]
        authorization = f"Bearer {keys[0]}" if keys else None
    holder = service.keyring.authenticate(authorization, record.client)
    record.who = holder.name
    origin = websocket.headers.get("origin")
    if origin is not None and not origin_allowed(origin, websocket.headers.get("host", ""), options.origins):
        raise PermissionDeniedError("connections from this origin are not allowed; allow it with --cors")
    service.check_ready()
    if len(service.sessions) >= options.max_sessions:
        raise QueueFullError(f"there are {options.max_sessions} sessions, the maximum; try again later")
    return holder


class _Session(Protocol):
    """What one connection is for: a conversation, or a text that is spoken."""

    finished: asyncio.Event

    @property
    def busy(self) -> bool: ...
    @property
    def model_name(self) -> str | None: ...
    async def begin(self) -> None: ...
    async def handle(self, text: str) -> None: ...
    async def send_error(self, error: OmniError) -> None: ...
    async def close(self) -> None: ...
    def drain(self) -> None: ...


class _Socket:
    """The connection, one message at a time. It buffers nothing: a slow reader slows the sender down."""

    def __init__(self, websocket: WebSocket, options: Options, record: AuditRecord, *, preview: bool) -> None:
        self._websocket = websocket
        self.disconnected: asyncio.Future[int] = websocket.scope["state"][DISCONNECTED]
        self._stall_seconds = options.stall_seconds
        self.record = record
        self._lock = asyncio.Lock()
        self._closed = False
        self._preview = preview and wants_preview(websocket.headers.get("openai-beta"), websocket.scope["subprotocols"])

    async def send(self, event: JsonObject) -> None:
        """Send an event with an id of its own. Raises `ClientGoneError`."""
        payload = to_preview(event) if self._preview else event
        if payload is None:
            return
        text = to_json({"event_id": f"event_{uuid.uuid4().hex[:20]}", **payload}, inf_nan_mode="null").decode()
        await self._write(text, self._websocket.send_text)

    async def send_bytes(self, data: bytes) -> None:
        """Send sound. Raises `ClientGoneError`."""
        await self._write(data, self._websocket.send_bytes)

    async def _write(self, message: Data, write: Callable[[Data], Awaitable[None]]) -> None:
        async with self._lock:
            if self._closed:
                raise ClientGoneError("the connection is closed")
            try:
                async with asyncio.timeout(self._stall_seconds):
                    await write(message)
            except TimeoutError:
                self._closed = True
                self.record.ended, self.record.status = SLOW_READER, CLIENT_CLOSED
                await cut()
                raise ClientGoneError("the client does not read") from None
            except (WebSocketDisconnect, OSError, RuntimeError):
                self._closed = True
                raise ClientGoneError("the client has disconnected") from None
            self.record.bytes_out += len(message)

    async def receive(self) -> Message:
        return await self._websocket.receive()

    async def close(self, code: int, reason: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._websocket.close(code, reason)
        except TimeoutError:
            await cut()
        except (WebSocketDisconnect, OSError, RuntimeError):
            pass  # disconnected meanwhile


class _Connection:
    """A session on its socket, until one of them ends."""

    def __init__(
        self, socket: _Socket, session: _Session, service: Service, options: Options, expires_at: float | None
    ) -> None:
        """`expires_at`: when the client's token is no longer valid, in Unix seconds."""
        self._expires_at = expires_at
        self._socket = socket
        self._session = session
        self._service = service
        self._options = options
        self._record = socket.record

    async def run(self) -> None:
        session, disconnected = self._session, self._socket.disconnected
        reader = asyncio.ensure_future(self._read())
        self._service.sessions[session] = reader
        finished = asyncio.ensure_future(session.finished.wait())
        try:
            awaited: set[asyncio.Future[Any]] = {reader, finished, disconnected}
            valid = None if self._expires_at is None else max(0.0, self._expires_at - time.time())
            ended, _ = await asyncio.wait(awaited, timeout=valid, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                await self._socket.close(_REFUSED, "the token has expired; connect again with a new one")
            elif not reader.done() and disconnected.done():  # its result could not be delivered
                self._note_disconnect(disconnected.result())
            elif not reader.done():
                await self._socket.close(_GOING_AWAY, "the service is stopping")
        finally:
            reader.cancel()
            finished.cancel()
            await asyncio.wait({reader, finished})
            await session.close()
            self._record.model = session.model_name  # it may have been chosen in the session
            del self._service.sessions[session]

    def _note_disconnect(self, code: int | None) -> None:
        if code != _NORMAL:
            self._record.ended = self._record.ended or ENDED_DISCONNECTED

    async def _read(self) -> None:
        """Handle messages until the client disconnects."""
        record, session, max_bytes = self._record, self._session, self._options.max_message_bytes
        try:
            await session.begin()
            while (message := await self._next()) is not None:
                if message["type"] == "websocket.disconnect":
                    self._note_disconnect(message.get("code"))
                    return
                text = message.get("text")
                size = len(text.encode("utf-8", "surrogatepass")) if text is not None else len(message["bytes"])
                record.bytes_in += size
                if size > max_bytes:
                    await self._socket.close(_TOO_BIG, f"over the limit of {max_bytes} bytes")
                    return
                if text is None:
                    await session.send_error(InvalidRequestError("events are JSON text; send no binary messages"))
                else:
                    await session.handle(text)
        except ClientGoneError:
            record.ended = record.ended or ENDED_DISCONNECTED
        except Exception as error:
            log_defect("a realtime session", error)
            record.ended = "error"
            await self._socket.close(_INTERNAL_ERROR, InternalError.code)

    async def _next(self) -> Message | None:
        """The next message; None after closing a session that was idle for too long."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.idle_seconds):
                    return await self._socket.receive()
            if not self._session.busy:
                await self._socket.close(_NORMAL, "the session was idle for too long")
                return None
