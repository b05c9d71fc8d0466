"""One bound for all bytes that clients make the service hold, whatever door they come through."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import threading
from collections.abc import Iterator

import pytest

from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.http.limits import HeldBytes, TransportLimits
from omnistage.server.http.websocket import WebSocketConnection
from omnistage.server.realtime.session import Session
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import Running, raw, serving, status_of, until
from tests.server.wire import CONTINUATION, PING, TEXT, WireSocket, frame, websocket

MIB = 2**20
EMPTY_COMMIT = json.dumps({"type": "input_audio_buffer.commit"}).encode()


def held_by(server: Running) -> HeldBytes:
    return server.limits.held_bytes


@pytest.fixture
def small(service: Service) -> Iterator[Running]:
    """A service that holds 4 MiB, and one message of at most 2."""
    with serving(service, max_body_bytes=2 * MIB, max_held_bytes=4 * MIB) as server:
        yield server


def half(size: int, length: int = 2 * MIB) -> bytes:
    """The first bytes of a frame that never ends."""
    return frame(b"x" * size, length=length)


def test_half_messages_of_all_sessions_count_together(small: Running) -> None:
    held = held_by(small)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(websocket(small.url)) for _ in range(4)]
        for number, socket in enumerate(sockets[:3]):
            socket.send(half(MIB))
            until(lambda n=number: held.total >= (n + 1) * MIB, "the arrival of half a message")  # type: ignore[misc]
        sockets[3].send(half(3 * MIB // 2))
        code, reason = sockets[3].close_code()
        assert code == 1013
        assert "as many bytes as allowed" in reason
        # A body of another door is refused by the same bound.
        with raw(small, b"x" * (3 * MIB // 2)) as line:
            assert status_of(line) == 429
    until(lambda: held.total == 0, "the return of all bytes")
    with websocket(small.url) as socket:
        socket.send(frame(EMPTY_COMMIT))
        assert b"input_audio_buffer_commit_empty" in socket.read()[1]


def test_what_a_half_message_held_is_freed_when_its_client_leaves(small: Running) -> None:
    def connections() -> int:
        gc.collect()
        return sum(isinstance(thing, WebSocketConnection) for thing in gc.get_objects())

    before = connections()
    with websocket(small.url) as socket:
        socket.send(frame(b"x" * MIB, fin=False))
        until(lambda: held_by(small).total >= MIB, "the arrival of half a message")
        assert connections() == before + 1
    until(lambda: held_by(small).total == 0, "the return of all bytes")
    until(lambda: connections() == before, "the end of the connection")


@pytest.mark.parametrize("what", ["a frame", "a header", "a fragmented message", "a fragmented message between pings"])
def test_half_a_message_that_stalls_ends_the_session(service: Service, what: str) -> None:
    parts = {
        "a frame": half(100),
        "a header": half(0),
        "a fragmented message": frame(b"{", fin=False),
        "a fragmented message between pings": frame(b"{", fin=False),
    }
    with serving(service, stall_seconds=0.3) as server, websocket(server.url) as socket:
        socket.send(parts[what])
        if what.endswith("pings"):
            socket.send(frame(b"still here", PING))
        code, reason = socket.close_code()
        assert code == 1008
        assert "no more of a message arrived for 0.3 s" in reason
        until(lambda: held_by(server).total == 0, "the return of all bytes")


def test_a_message_must_arrive_at_a_minimum_rate(service: Service) -> None:
    with serving(service, stall_seconds=0.5) as server, websocket(server.url) as socket:
        socket.line.settimeout(0.05)
        socket.send(half(1))
        for _ in range(200):  # one byte after another, each in time
            with contextlib.suppress(TimeoutError, ConnectionError):
                code, reason = socket.close_code()
                break
            socket.send(b"x")
        assert code == 1008
        assert "less than 64 KiB a second" in reason


def test_a_session_without_a_half_message_may_be_silent(service: Service) -> None:
    with serving(service, stall_seconds=0.2) as server, websocket(server.url) as socket:
        socket.send(half(100, length=100))
        assert b"error" in socket.read()[1]
        socket.line.settimeout(1.0)
        with pytest.raises(TimeoutError):
            socket.read()


def test_many_small_fragments_take_no_more_memory_than_their_bytes(small: Running) -> None:
    with websocket(small.url) as socket:
        socket.send(frame(b"{", fin=False))
        socket.send(frame(b" " * 64, CONTINUATION, fin=False) * 900)  # not so small that they are refused
        until(lambda: held_by(small).total >= 900 * 64, "the arrival of the fragments")
        (connection,) = (thing for thing in gc.get_objects() if isinstance(thing, WebSocketConnection) and thing.frames)
        assert len(connection.frames) == 1
        socket.send(frame(b"}", CONTINUATION))
        assert b"error" in socket.read()[1]


def test_a_client_that_pings_and_does_not_read_is_cut_off(small: Running) -> None:
    def flood(socket: WireSocket) -> None:
        ping = frame(b"x" * 125, PING) * 500
        for _ in range(2000):  # 125 MB
            socket.send(ping)

    with websocket(small.url) as socket, pytest.raises((ConnectionError, TimeoutError)):
        flood(socket)


def test_the_audio_of_sessions_counts(small: Running) -> None:
    audio = base64.b64encode(bytes(MIB)).decode()
    append = frame(json.dumps({"type": "input_audio_buffer.append", "audio": audio}).encode())
    settings = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
    with contextlib.ExitStack() as stack:
        answers: list[bytes] = []
        for _ in range(4):
            socket = stack.enter_context(websocket(small.url))
            socket.send(frame(json.dumps({"type": "session.update", "session": settings}).encode()))
            socket.read()
            socket.send(append)
            socket.send(frame(b"{}"))  # refused, and so answered
            answers.append(socket.read()[1])
        # The third's message and its audio are more than the 2 MiB that are left.
        assert [b"queue_full" in answer for answer in answers] == [False, False, True, True]
    until(lambda: held_by(small).total == 0, "the return of all bytes")


def test_a_message_in_which_a_session_breaks_does_not_count_for_ever(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Session, text: str) -> None:
        raise RuntimeError("broken")

    lost, connection_lost = threading.Event(), WebSocketConnection.connection_lost

    def note_lost(self: WebSocketConnection, error: Exception | None) -> None:
        connection_lost(self, error)
        lost.set()

    monkeypatch.setattr(Session, "handle", broken)
    monkeypatch.setattr(WebSocketConnection, "connection_lost", note_lost)
    with websocket(small.url) as socket:
        socket.send(frame(EMPTY_COMMIT) + frame(b"{}"))
        assert socket.close_code()[0] == 1011
        until(lambda: held_by(small).total == 0, "the end of the session")
    assert lost.wait(HANG_SECONDS)
    assert held_by(small).total == 0


def test_one_key_cannot_take_all_of_it(service: Service) -> None:
    keys = ("a-key-for-tests", "another-key-for-tests")
    service.keyring = Keyring([Holder(key, digest_of(key)) for key in keys])
    first, second = (f"Authorization: Bearer {key}\r\n" for key in keys)
    with serving(service, max_body_bytes=MIB, max_held_bytes=8 * MIB) as server, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(websocket(server.url, headers=first)) for _ in range(3)]
        for number, socket in enumerate(sockets[:2]):
            socket.send(half(900_000, MIB))
            until(lambda n=number: held_by(server).total >= (n + 1) * 900_000, "half a message")  # type: ignore[misc]
        sockets[2].send(half(900_000, MIB))
        assert sockets[2].close_code()[0] == 1013
        body = b"x" * 900_000
        lengths = f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n"
        with raw(server, body, headers=lengths + first) as line:
            assert status_of(line) == 429
        with raw(server, body, headers=lengths + second) as line:
            assert status_of(line) == 400


def test_a_large_message_arrives_whole(service: Service) -> None:
    with serving(service) as server, websocket(server.url) as socket:
        socket.send(frame(b'{"type": "' + b"x" * 5 * MIB + b'"}', TEXT))
        assert b"error" in socket.read()[1]
        assert isinstance(server.limits, TransportLimits)
