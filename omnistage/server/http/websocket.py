"""A WebSocket connection below the application: what it holds, and how slowly a message may arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context
from typing import Any

from uvicorn._types import ASGIReceiveEvent
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame
from websockets.http11 import Request

from omnistage.core.errors import QueueFullError
from omnistage.server.http.limits import FEED_BYTES, MIN_RATE, Hold, PieceCount, TransportLimits

HOLD = "omnistage.hold"
"""Where a connection's scope has its `Hold`: the application tells whose it is."""
_INVALID_DATA, _POLICY, _TRY_AGAIN_LATER = 1007, 1008, 1013
DISCONNECTED = "omnistage.disconnected"
"""Where it has a future with the code of the client's disconnect: known at once, whatever messages came before it."""
_ABNORMAL = 1006
_READ_AHEAD = 2**20
"""Bytes of messages that wait for the application while more is read: a disconnect is noticed only by reading."""
_CLOSE_SECONDS = 5.0
"""For a client to take the last bytes; closing would wait indefinitely for one that does not read."""
_MESSAGE_OVERHEAD = 256
"""What a message takes beside its bytes: one read may bring many thousands of tiny ones."""
_MAX_UNREAD_PONGS = 256 * 2**10
"""Bytes that wait to be sent when a ping comes: pongs are not paced by what the client reads."""


class WebSocketConnection(WebSocketsSansIOProtocol):
    """uvicorn's, which sees a message only when it is complete; here its bytes count as they arrive.

    They count until the application asks for the next message. A client may pause for `stall_seconds` in a message, at
    once or in total, plus the time for what it has sent at `MIN_RATE`; the time in which we do not read is not its own.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        limits: TransportLimits = config.app.state.transport  # type: ignore[union-attr]
        self._hold = Hold(limits.held_bytes)
        self._stall_seconds = limits.stall_seconds
        self._disconnected: asyncio.Future[int] = self.loop.create_future()
        self._queued: deque[int] = deque()
        """Sizes of messages that the application has not taken yet."""
        self._delivered = 0
        """Of these together, and of the message that it works on."""
        self._handled = 0
        self._partial = 0
        self._began: float | None = None
        """When the incomplete message began, later by the time in which we did not read."""
        self._grew = 0.0
        self._paused: float | None = None
        self._frames_seen, self._fed = PieceCount(), self.loop.time()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------- the connection

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), FEED_BYTES):
            if self.transport.is_closing():
                return
            self._feed(data[start : start + FEED_BYTES])

    def _feed(self, data: bytes) -> None:
        self.conn.receive_data(data)
        complete = bool(self.conn.events)
        now = self.loop.time()
        seconds, self._fed = now - self._fed, now
        if not self._frames_seen.add(len(self.conn.events), len(data), seconds):
            self._fail(_POLICY, "the frames are too small; send whole messages")
            return
        if self.conn.parser_exc is not None:
            self.handle_parser_exception()
        elif self.conn.handshake_exc is not None and not self.handshake_initiated:
            # uvicorn would leave the connection open, without an answer.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        else:
            self.handle_events()
        self._count(complete)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        received = self.conn.close_rcvd
        self._disconnected.set_result(_ABNORMAL if received is None else received.code)
        self._drop_partial()
        for timer in (self._stall_timer, self._abort_timer):
            if timer is not None:
                timer.cancel()
        self._stall_timer = self._abort_timer = None

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:  # messages that it has not taken, or was working on, count no longer
            self._queued.clear()
            self._delivered = self._handled = 0
            self._hold.set(0)

    async def receive(self) -> ASGIReceiveEvent:
        self._delivered -= self._handled
        self._handled = 0
        self._hold.set(self._partial + self._delivered)
        message = await super().receive()
        if message["type"] == "websocket.receive":
            self._handled = self._queued.popleft()
        if not self.read_paused and self._paused is not None:
            now = self.loop.time()
            if self._began is not None:
                self._began += now - self._paused
            self._grew, self._paused = now, None
        return message

    # ---------------------------------------------------------------------------------------------------- frames

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            self.scope["state"].update({HOLD: self._hold, DISCONNECTED: self._disconnected})

    def handle_text(self, event: Frame) -> None:
        self._begin("text", event)

    def handle_bytes(self, event: Frame) -> None:
        self._begin("bytes", event)

    def _begin(self, kind: Any, event: Frame) -> None:
        self.curr_msg_data_type = kind
        # One growing buffer: a list of many small fragments would take a hundred times the memory of its bytes.
        self.frames = [event.data if event.fin else bytearray(event.data)]  # type: ignore[list-item]
        if event.fin:
            self.send_receive_event_to_app()

    def handle_cont(self, event: Frame) -> None:
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.transport.get_write_buffer_size() > _MAX_UNREAD_PONGS:
            self.transport.abort()
            return
        super().handle_ping()

    def send_receive_event_to_app(self) -> None:
        (data,), self.frames = self.frames, []
        if self.close_sent or self.transport.is_closing():
            return
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": bytes(data)})
        else:
            try:
                self.queue.put_nowait({"type": "websocket.receive", "text": str(data, "utf-8")})
            except UnicodeDecodeError:
                self._fail(_INVALID_DATA, "text messages are UTF-8")
                return
        self._queued.append(len(data) + _MESSAGE_OVERHEAD)
        self._delivered += self._queued[-1]
        if not self.read_paused and self._delivered - self._handled > _READ_AHEAD:
            self.read_paused, self._paused = True, self.loop.time()
            self.transport.pause_reading()

    # --------------------------------------------------------------------------------------------------- bounds

    def _count(self, complete: bool) -> None:
        """Count what arrived; `complete`: some frame was, and so what is left in the buffers is all of another."""
        if self.transport.is_closing():
            self._drop_partial()
            if self._abort_timer is None:
                self._abort_timer = self._call_later(_CLOSE_SECONDS, self.transport.abort)
            return
        partial = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        try:
            self._hold.resize(partial + self._delivered)
        except QueueFullError as error:
            self._fail(_TRY_AGAIN_LATER, error.message)
            return
        begun = bool(partial) or self.conn.current_size is not None or not complete
        self._watch(partial, begun and self.handshake_complete)

    def _watch(self, partial: int, begun: bool) -> None:
        """Run a timer while a message is incomplete."""
        now = self.loop.time()
        if not begun:
            self._began = None
        else:
            if self._began is None:
                self._began = self._grew = now
            elif partial > self._partial:
                self._grew = now
            if self._stall_timer is None:
                self._stall_timer = self._call_later(self._stall_seconds, self._check_pace)
        self._partial = partial

    def _check_pace(self) -> None:
        self._stall_timer = None
        if self._began is None:
            return  # it is complete
        now = self.loop.time() if self._paused is None else self._paused
        silent, allowed = now - self._grew, self._stall_seconds + self._partial / MIN_RATE
        allowance = min(self._stall_seconds - silent, allowed - (now - self._began))
        if allowance > 0 or self._paused is not None:
            self._stall_timer = self._call_later(max(allowance, 0.05), self._check_pace)
        elif silent >= self._stall_seconds:
            self._fail(_POLICY, f"no more of a message arrived for {self._stall_seconds:g} s")
        else:
            self._fail(_POLICY, f"a message arrived at less than {MIN_RATE // 1024} KiB a second")

    def _fail(self, code: int, reason: str) -> None:
        """Close at once, without waiting for the rest of a message or for a client that does not read."""
        self.conn.fail(code, reason.encode()[:120].decode("utf-8", "ignore"))
        self.handle_parser_exception()
        self._drop_partial()
        if self._abort_timer is None:
            self._abort_timer = self._call_later(_CLOSE_SECONDS, self.transport.abort)

    def _drop_partial(self) -> None:
        self.frames, self._partial, self._began = [], 0, None
        self.conn.reader.discard()
        self._hold.set(self._delivered)

    def _call_later(self, seconds: float, callback: Any) -> asyncio.TimerHandle:
        """In an empty context: the current one may refer to a request."""
        return self.loop.call_later(seconds, callback, context=Context())
