"""`WS /v1/realtime`: who may connect, and the socket's side of a session.

The middlewares that guard requests let WebSockets pass, so that key, origin, size and pace are looked after here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from starlette.types import Message

from omnistage.core.errors import InternalError, InvalidRequestError, OmniError, QueueFullError
from omnistage.core.failures import log_defect
from omnistage.server.access.denial import deny
from omnistage.server.access.hosts import origin_allowed
from omnistage.server.access.keys import Holder
from omnistage.server.http.connection import cut
from omnistage.server.http.errors import CLIENT_CLOSED, NotFoundError, PermissionDeniedError
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, SLOW_READER, AuditRecord
from omnistage.server.realtime import preview
from omnistage.server.realtime.events import GoneError
from omnistage.server.realtime.response_events import Event
from omnistage.server.realtime.session import Limits, Session, chosen_model
from omnistage.server.service import ServedModel, Service

router = APIRouter()
ENDPOINT = "WS /v1/realtime"
_PROTOCOL = "realtime"
_KEY_PROTOCOL = "openai-insecure-api-key."
_NORMAL, _GOING_AWAY, _TOO_BIG, _DEFECT = 1000, 1001, 1009, 1011
_SHARES = 4


@dataclass(frozen=True, slots=True)
class Options:
    """How the application wants its sockets."""

    max_message_bytes: int = 64 * 2**20
    stall_seconds: float = 60.0
    origins: Sequence[str] = ()
    idle_seconds: float = 900.0
    max_sessions: int = 256
    limits: Limits = field(default_factory=Limits)


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """Hold a conversation."""
    service: Service = websocket.app.state.service
    options: Options = websocket.app.state.realtime
    with _recorded(websocket, ENDPOINT) as record, contextlib.ExitStack() as counted:
        try:
            holder, model = _admitted(websocket, service, options, record)
            counted.enter_context(holder.count_session(_share(service, options)))
        except OmniError as error:
            record.status = error.status
            await deny(error, websocket.scope, websocket.receive, websocket.send)
            return
        record.model, record.status = None if model is None else model.name, 101
        await websocket.accept(_PROTOCOL if _PROTOCOL in websocket.scope["subprotocols"] else None)
        socket = _Socket(websocket, options, record)
        session = Session(service, holder, model, socket.send, limits=options.limits, client=record.client)
        await _Conversing(socket, session, service, options).run()


@router.websocket("/{path:path}")
async def nowhere(websocket: WebSocket) -> None:
    """Say that there is nothing here: without this a WebSocket would be refused with 403 and no reason."""
    with _recorded(websocket, "unknown") as record:
        error = NotFoundError("there is no WebSocket at this path; connect to /v1/realtime")
        record.status = error.status
        await deny(error, websocket.scope, websocket.receive, websocket.send)


@contextlib.contextmanager
def _recorded(websocket: WebSocket, endpoint: str) -> Iterator[AuditRecord]:
    """The record of a connection, which is written and counted when the connection has ended."""
    record = AuditRecord(endpoint, websocket.client.host if websocket.client is not None else None)
    CURRENT_RECORD.set(record)
    try:
        yield record
    finally:
        if str(websocket.scope["path"]).startswith("/v1/"):  # as of requests
            service: Service = websocket.app.state.service
            service.metrics.observe_response(record, record.close())


# ----------------------------------------------------------------------------------------------------- who comes in


def _admitted(
    websocket: WebSocket, service: Service, options: Options, record: AuditRecord
) -> tuple[Holder, ServedModel | None]:
    """Whose key this is, and the model that it asks for. Raises what is answered instead of a socket."""
    holder = service.keyring.authenticate(_authorization(websocket))
    record.who = holder.name
    origin = websocket.headers.get("origin")
    if origin is not None and not origin_allowed(origin, websocket.headers.get("host", ""), options.origins):
        raise PermissionDeniedError("pages of this origin may not connect; allow it with --cors")
    service.check_ready()
    if len(service.sessions) >= options.max_sessions:
        raise QueueFullError(f"there are {options.max_sessions} sessions, the most there may be; try again later")
    name = websocket.query_params.get("model")
    return holder, None if name is None else chosen_model(service, holder, name)


def _share(service: Service, options: Options) -> int | None:
    """Sessions that one holder may have whose key does not say: no key takes them all from the others."""
    return max(1, options.max_sessions // _SHARES) if service.keyring.required else None


def _authorization(websocket: WebSocket) -> str | None:
    """The key in its header; browsers cannot send one, and put it among the subprotocols."""
    header = websocket.headers.get("authorization")
    if header is not None:
        return header
    keys = [p.removeprefix(_KEY_PROTOCOL) for p in websocket.scope["subprotocols"] if p.startswith(_KEY_PROTOCOL)]
    return f"Bearer {keys[0]}" if keys else None


# ------------------------------------------------------------------------------------------------------- the socket


class _Socket:
    """The connection, one message at a time. It keeps nothing back: who reads slowly slows down who sends."""

    def __init__(self, websocket: WebSocket, options: Options, record: AuditRecord) -> None:
        self._websocket = websocket
        self._stall_seconds = options.stall_seconds
        self.record = record
        self._turn = asyncio.Lock()
        self._closed = False
        self._previewing = preview.asked_for(websocket.headers.get("openai-beta"), websocket.scope["subprotocols"])

    async def send(self, event: Event) -> None:
        """Send an event under an id of its own. Raises `GoneError` where nobody is there, or nobody reads."""
        for shown in preview.renamed(event) if self._previewing else (event,):
            text = json.dumps({"event_id": f"event_{uuid.uuid4().hex[:20]}", **shown}, separators=(",", ":"))
            async with self._turn:
                await self._write(text)

    async def _write(self, text: str) -> None:
        if self._closed:
            raise GoneError("the connection is closed")
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._websocket.send_text(text)
        except TimeoutError:
            self._closed = True
            self.record.ended, self.record.status = SLOW_READER, CLIENT_CLOSED
            await cut()
            raise GoneError("the client does not read") from None
        except (WebSocketDisconnect, OSError, RuntimeError):
            self._closed = True
            raise GoneError("the client has left") from None
        self.record.bytes_out += len(text)

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
            pass  # it has left meanwhile


class _Conversing:
    """A session on its socket, until one of them ends."""

    def __init__(self, socket: _Socket, session: Session, service: Service, options: Options) -> None:
        self._socket = socket
        self._session = session
        self._service = service
        self._options = options
        self._record = socket.record

    async def run(self) -> None:
        session = self._session
        reading = asyncio.ensure_future(self._read())
        self._service.sessions[session] = reading
        finished = asyncio.ensure_future(session.finished.wait())
        try:
            await asyncio.wait({reading, finished}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._socket.close(_GOING_AWAY, "the service is stopping")
        finally:
            reading.cancel()
            finished.cancel()
            await asyncio.wait({reading, finished})
            await session.close()
            self._record.model = session.config.model  # it may have been named only now
            del self._service.sessions[session]

    async def _read(self) -> None:
        """Do what the client says until it has nothing more to say."""
        record, session = self._record, self._session
        try:
            await session.begin()
            while (message := await self._next()) is not None:
                if message["type"] == "websocket.disconnect":
                    if message.get("code") != _NORMAL:
                        record.ended = record.ended or DISCONNECTED
                    return
                text = message.get("text")
                size = len(text.encode("utf-8", "surrogatepass")) if text is not None else len(message["bytes"])
                record.bytes_in += size
                if size > self._options.max_message_bytes:
                    await self._socket.close(_TOO_BIG, f"over the limit of {self._options.max_message_bytes} bytes")
                    return
                if text is None:
                    await session.tell(InvalidRequestError("events are JSON text; send no binary messages"))
                else:
                    await session.handle(text)
        except GoneError:
            record.ended = record.ended or DISCONNECTED
        except Exception as error:
            log_defect("a realtime session", error)
            record.ended = "error"
            await self._socket.close(_DEFECT, InternalError.code)

    async def _next(self) -> Message | None:
        """The next message; None where none came for too long and nothing was being made."""
        while True:
            try:
                async with asyncio.timeout(self._options.idle_seconds):
                    return await self._socket.receive()
            except TimeoutError:
                if not self._session.busy:
                    await self._socket.close(_NORMAL, "nothing was said for too long")
                    return None
