"""WebSocket connections whose frames a test writes itself, whole or in parts."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
_MASK = b"\x01\x02\x03\x04"


def frame(payload: bytes, opcode: int = TEXT, *, fin: bool = True, length: int | None = None) -> bytes:
    """A masked frame. `length`: what it claims, where that is not the length of the payload."""
    size = len(payload) if length is None else length
    if size < 126:
        head = struct.pack("!BB", fin << 7 | opcode, 0x80 | size)
    elif size < 2**16:
        head = struct.pack("!BBH", fin << 7 | opcode, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", fin << 7 | opcode, 0x80 | 127, size)
    keys = (_MASK * (len(payload) // 4 + 1))[: len(payload)]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(keys, "big")).to_bytes(len(payload), "big")
    return head + _MASK + masked


class WireSocket:
    """A connection after its handshake."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line

    def send(self, data: bytes) -> None:
        self.line.sendall(data)

    def read(self) -> tuple[int, bytes]:
        """The next frame: its opcode and payload."""
        first, second = self._exactly(2)
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(self._exactly(2 if size == 126 else 8), "big")
        return first & 0x0F, self._exactly(size)

    def close_code(self) -> tuple[int | None, str]:
        """The code and the reason with which the server closes; everything before is skipped. None: it is cut off."""
        try:
            while True:
                opcode, payload = self.read()
                if opcode == CLOSE:
                    return int.from_bytes(payload[:2], "big"), payload[2:].decode()
        except (EOFError, ConnectionError):
            return None, ""

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.line.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data


@contextlib.contextmanager
def websocket(url: str, *, path: str = "/v1/realtime?model=omni", headers: str = "") -> Iterator[WireSocket]:
    """Open a connection to a service at `url`, and read its first event."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        key = "dGhlIHNhbXBsZSBub25jZQ=="
        line.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n{headers}\r\n".encode()
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = line.recv(1)
            assert byte, head
            head += byte
        assert head.startswith(b"HTTP/1.1 101 "), head
        made = WireSocket(line)
        made.read()  # session.created
        yield made
