"""Sends malformed HTTP heads and WebSocket frames to a running service, from a seed.

    python tools/fuzz_wire.py http://127.0.0.1:8000 --cases 5000 --seed 1

A case fails where the service responds with 500 or with what is not HTTP, or closes a WebSocket with 1011 (internal
error). At the end `/health` must return 200. The service's log must have no traceback: look there too.
"""

from __future__ import annotations

import argparse
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_QUIET_SECONDS = 0.25
_INTERNAL_ERROR = 1011
_SESSION_PATH = "/v1/realtime"
_EVENTS = (
    b'{"type":"input_audio_buffer.clear"}',
    b'{"type":"session.update","session":{"type":"realtime"}}',
    b'{"type":"conversation.item.create","item":{"type":"message","role":"user","content":[]}}',
    b'{"type":"input_audio_buffer.append","audio":"AAAA"}',
    b"{}",
    b"[[[[",
)

# --------------------------------------------------------------------------------------------------------- HTTP heads


def http_case(rng: random.Random) -> list[bytes]:
    """The bytes of a request with some mistakes, in pieces."""
    method = rng.choice(["GET", "POST", "POST", "HEAD", "OPTIONS", "get", "BREW", "PRI", "X" * rng.randrange(1, 300)])
    path = rng.choice(["/health", "/v1/models", "/v1/completions", "/v1/images/edits", "/files/%00", "*", "//", "/%ff"])
    version = rng.choice(["HTTP/1.1"] * 8 + ["HTTP/1.0", "HTTP/0.9", "HTTP/1.9", "HTTP/2.0", "HTTP/11", "http/1.1", ""])
    body = rng.choice([b"", b"{}", b'{"model":"x"}', rng.randbytes(rng.randrange(200))])
    headers = ["Host: 127.0.0.1", f"Content-Length: {len(body)}", "Content-Type: application/json"]
    for _ in range(rng.randrange(4)):
        headers.insert(rng.randrange(len(headers) + 1), _odd_header(rng))
    if rng.random() < 0.2:
        rng.shuffle(headers)
    if rng.random() < 0.1:
        headers.remove("Host: 127.0.0.1")
    ends = ["\r\n"] * 80 + ["\n", "\r", "\r\n ", "\r\n\t", "\0", "\r\r\n"]
    text = "".join(f"{line}{rng.choice(ends)}" for line in (f"{method} {path} {version}", *headers))
    data = bytearray(text.encode("latin-1", "replace") + rng.choice([b"\r\n"] * 9 + [b"\n", b""]) + body)
    for _ in range(rng.choice([0, 0, 0, 1, 4])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    if rng.random() < 0.1:
        data = data * 2  # pipelined
    return _pieces(rng, bytes(data))


def _odd_header(rng: random.Random) -> str:
    return rng.choice(
        [
            "Transfer-Encoding: chunked",
            "Transfer-Encoding: chunked, identity",
            "Transfer-Encoding : chunked",
            "Content-Length: -1",
            "Content-Length: 99999999999999999999",
            "Content-Length: 1, 2",
            "Content-Length: 0x10",
            "Connection: close, upgrade",
            "Upgrade: websocket",
            "Upgrade: h2c",
            "Expect: 100-continue",
            "Host: evil.example",
            "X-Forwarded-For: " + "a" * rng.randrange(200),
            "Authorization: Bearer \xe9\x00",
            "Content-Type: multipart/form-data; boundary=" + "-" * rng.randrange(300),
            ": empty",
            "No-Colon",
            "X-Long: " + "x" * rng.choice([10, 9000, 70_000]),
            "Range: bytes=" + ",".join(f"{n}-" for n in range(rng.randrange(50))),
        ]
    )


# ----------------------------------------------------------------------------------------------------- WebSocket frames


def frame(
    payload: bytes,
    opcode: int,
    *,
    fin: bool = True,
    reserved: int = 0,
    masked: bool = True,
    length: int | None = None,
    form: int | None = None,
) -> bytes:
    """One frame of a client. `length`: what it claims; `form`: bytes of the length's field, 0, 2 or 8."""
    size = len(payload) if length is None else length
    form = form if form is not None else 0 if size < 126 else 2 if size < 2**16 else 8
    first = fin << 7 | reserved << 4 | opcode
    flag = 0x80 if masked else 0
    if form == 0:
        head = struct.pack("!BB", first, flag | min(size, 125))
    elif form == 2:
        head = struct.pack("!BBH", first, flag | 126, min(size, 2**16 - 1))
    else:
        head = struct.pack("!BBQ", first, flag | 127, size)
    if not masked:
        return head + payload
    mask = b"\x11\x22\x33\x44"
    return head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


def websocket_case(rng: random.Random) -> list[bytes]:
    """Frames with some mistakes, in pieces."""
    data = b"".join(_odd_frame(rng) for _ in range(rng.randrange(1, 8)))
    if rng.random() < 0.2:
        data = data[: rng.randrange(1, len(data) + 1)]
    return _pieces(rng, data)


def _odd_frame(rng: random.Random) -> bytes:
    event = rng.choice(_EVENTS)
    kind = rng.randrange(12)
    if kind < 3:
        return frame(event, 1)
    if kind == 3:  # in fragments, with pings between
        cuts = [event[i : i + 7] for i in range(0, len(event), 7)]
        frames = [frame(cut, 0 if i else 1, fin=i == len(cuts) - 1) for i, cut in enumerate(cuts)]
        return frame(b"in between", 9).join(frames)
    if kind == 4:
        return frame(rng.randbytes(rng.randrange(100)), 1)  # not UTF-8
    if kind == 5:
        return frame(event, rng.choice([3, 4, 7, 11, 15]))
    if kind == 6:
        return frame(event, 1, reserved=rng.randrange(1, 8))
    if kind == 7:
        return frame(event, 1, masked=False)
    if kind == 8:
        return frame(b"x" * 10, 1, length=rng.choice([11, 2**16, 2**31, 2**63, 2**64 - 1]), form=8)
    if kind == 9:
        return frame(rng.randbytes(rng.choice([0, 1, 2, 100])), 8)  # a close frame, mostly invalid
    if kind == 10:
        return frame(b"x" * rng.choice([0, 125, 126, 1000]), rng.choice([9, 10]), fin=rng.random() < 0.8)
    return frame(event, rng.choice([0, 1, 2]), fin=rng.random() < 0.5, form=rng.choice([2, 8]))


def _pieces(rng: random.Random, data: bytes) -> list[bytes]:
    if rng.random() < 0.6 or len(data) < 2:
        return [data]
    cuts = sorted(rng.sample(range(1, len(data)), min(len(data) - 1, rng.randrange(1, 4))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# ---------------------------------------------------------------------------------------------------------- the client


class Target:
    """Runs cases against a service."""

    def __init__(self, url: str, session: str = _SESSION_PATH) -> None:
        host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
        self._address = (host, int(port or 80))
        self._session = session

    def run_http(self, seed: int) -> str:
        """What became of a case: a status, or `closed`. Raises `AssertionError` for what must not be."""
        data = self._exchange(http_case(random.Random(seed)))
        if not data:
            return "closed"
        status = _STATUS.match(data)
        if status is None:
            raise AssertionError(f"case {seed}: the response is not HTTP: {data[:60]!r}")
        if int(status[1]) == 500:
            raise AssertionError(f"case {seed}: 500")
        return status[1].decode()

    def run_websocket(self, seed: int) -> str:
        """What became of a case: a close code, `open` or `cut`. Raises `AssertionError` for what must not be."""
        with socket.create_connection(self._address, timeout=10) as line:
            if not self._open(line):
                return "refused"
            data = self._exchange(
                [*websocket_case(random.Random(seed)), frame(b"sync", 9)], line, until=b"\x8a\x04sync"
            )
        if b"\x8a\x04sync" in data:
            return "open"
        at = data.rfind(b"\x88")
        if at < 0 or len(data) < at + 4:
            return "cut"
        code = int.from_bytes(data[at + 2 : at + 4], "big")
        if code == _INTERNAL_ERROR:
            raise AssertionError(f"case {seed}: closed with 1011")
        return str(code)

    def _open(self, line: socket.socket) -> bool:
        line.sendall(
            f"GET {self._session} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = b""
        while b"\r\n\r\n" not in head:
            piece = line.recv(4096)
            if not piece:
                return False
            head += piece
        return head.startswith(b"HTTP/1.1 101 ")

    def _exchange(
        self, pieces: Sequence[bytes], line: socket.socket | None = None, until: bytes = b"\r\n\r\n"
    ) -> bytes:
        """Send, and read until the service has answered, closed or says no more."""
        data = b""
        made = line or socket.create_connection(self._address, timeout=10)
        try:
            for piece in pieces:
                made.sendall(piece)
            made.settimeout(_QUIET_SECONDS)
            while until not in data and (piece := made.recv(65_536)):
                data += piece
        except OSError:  # closed in the middle, or quiet
            pass
        finally:
            if line is None:
                made.close()
        return data

    def healthy(self) -> bool:
        return self._exchange([b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"]).startswith(b"HTTP/1.1 200 ")

    def memory(self) -> float:
        """Bytes of the process, as it says itself; 0 where it does not."""
        with socket.create_connection(self._address, timeout=10) as line:
            line.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            data = b"".join(iter(lambda: line.recv(65_536), b""))
        found = re.search(rb"^process_resident_memory_bytes ([\d.e+]+)", data, re.MULTILINE)
        return float(found[1]) if found else 0.0


def run(case: Callable[[int], str], seeds: Sequence[int], threads: int = 8) -> tuple[Counter[str], list[str]]:
    """How cases ended, and what failed."""

    def one(seed: int) -> tuple[str, str | None]:
        try:
            return case(seed), None
        except AssertionError as error:
            return "failed", str(error)

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(one, seeds))
    return Counter(result for result, _ in results), [failure for _, failure in results if failure is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=2000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--session", default=_SESSION_PATH, help="path of the WebSocket, with ?model=NAME")
    options = parser.parse_args()
    target, failures = Target(options.url, options.session), []
    seeds = range(options.seed, options.seed + options.cases)
    run(target.run_http, seeds[:200]), run(target.run_websocket, seeds[:200])
    before = target.memory()
    for name, case in (("http", target.run_http), ("websocket", target.run_websocket)):
        began = time.monotonic()
        ends, failed = run(case, seeds)
        failures += failed
        print(f"{name}: {options.cases} cases in {time.monotonic() - began:.0f} s: {dict(ends.most_common())}")
    print(f"memory: {before / 2**20:.0f} MiB after 200 cases of each, {target.memory() / 2**20:.0f} MiB after all")
    if not target.healthy():
        failures.append("/health does not return 200")
    print("\n".join(failures[:20]) or "no failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
