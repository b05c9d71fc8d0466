"""Malformed HTTP and WebSocket frames: refused one by one, without a traceback and without anything that stays."""

from __future__ import annotations

import logging
import random
import socket as sockets
from typing import Any

import httpx
import pytest

from omnistage.cli.serve import ServiceOptions
from omnistage.core.errors import InvalidRequestError
from omnistage.server.http.heads import StrictBuffer
from omnistage.server.service import Service
from tests.server.harness import Running, raw, serving, status_of, until
from tests.server.wire import PING, frame, websocket
from tests.unit.test_docs import tool

fuzz_wire = tool("fuzz_wire")
CASES = 150
HEALTH = "GET /health HTTP/1.1\r\nHost: x\r\n"


def answer_to(server: Running, request: str) -> int:
    host, port = server.url.removeprefix("http://").split(":")
    with sockets.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(request.encode())
        return status_of(line)


def test_a_connection_keeps_nothing_of_what_it_has_read() -> None:
    buffer = StrictBuffer()
    buffer += b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n"
    assert buffer.maybe_extract_lines() == [b"POST / HTTP/1.1", b"Content-Length: 3"]
    buffer += b"abc"
    assert buffer.maybe_extract_at_most(3) == b"abc"
    kept = [value for value in vars(buffer).values() if isinstance(value, bytearray)]
    assert kept == [b""]


@pytest.mark.parametrize(
    "request_head",
    [
        "GET /health HTTP/1.1\nHost: x\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\n\n",
        "GET /health HTTP/1.1\r\nHost: x\r\nX-Folded: a\r\n b\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\nX-Folded: a\r\n\tb\r\n\r\n",
        "GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
        "GET /health HTTP/1.9\r\nHost: x\r\n\r\n",
        "GET /health HTTP/0.9\r\nHost: x\r\n\r\n",
        "GET /health\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: a\n\r\n",
        "GET /v1/realtime HTTP/1.0\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_heads_that_a_proxy_may_read_otherwise_are_refused(server: Running, request_head: str) -> None:
    assert answer_to(server, request_head) == 400
    assert answer_to(server, f"{HEALTH}\r\n") == 200


def test_a_pipelined_head_is_checked_too(server: Running) -> None:
    with raw(server, b"", headers="Content-Length: 0\r\n", path="/health") as line:
        line.sendall(f"{HEALTH}X: a\n\r\n".encode())
        data = b""
        while piece := line.recv(4096):
            data += piece
    assert [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]] == [405, 400]


def is_cut_off(line: sockets.socket, data: bytes) -> bool:
    """Whether the other side closes the connection while data are sent again and again."""
    try:
        for _ in range(1000):
            line.sendall(data)
    except OSError:
        return True
    return False


CHUNKED = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "head", [CHUNKED, CHUNKED.replace("/v1/completions", "/nowhere"), CHUNKED.replace("POST", "GET")]
)
def test_a_body_of_tiny_chunks_is_broken_off(server: Running, head: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with sockets.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(head.encode())
        assert is_cut_off(line, b"1\r\n \r\n" * 1000)


def test_small_chunks_are_taken_where_they_are_few_or_not_tiny(server: Running) -> None:
    body = b'{"model": "lm", "prompt": "a", "max_tokens": 1}'

    def pieces(size: int, padding: int) -> list[bytes]:
        text = b" " * padding + body
        return [text[start : start + size] for start in range(0, len(text), size)]

    for size, padding in ((1, 0), (100, 200_000)):
        headers = {"Content-Type": "application/json"}
        content = iter(pieces(size, padding))
        sent = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)
        assert sent.status_code == 200, sent.text


def test_a_session_of_tiny_frames_is_ended(server: Running) -> None:
    with websocket(server.url) as socket:
        assert is_cut_off(socket.line, frame(b"", PING) * 1000)


def test_old_clients_are_served(server: Running) -> None:
    assert answer_to(server, "GET /health HTTP/1.0\r\n\r\n") == 200


def test_text_that_is_not_utf8_ends_the_session_quietly(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with websocket(server.url) as socket:
        socket.send(frame(b"\xff\xfe"))
        assert socket.close_code()[0] == 1007
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_a_proxy_says_of_a_session_is_used_only_if_it_is_an_address(
    server: Running, audit: list[dict[str, Any]]
) -> None:
    for header in ("not an address\\n<script>", "203.0.113.9"):
        with websocket(server.url, headers=f"X-Forwarded-For: {header}\r\n"):
            pass
    until(lambda: len(audit) == 2, "two lines of the audit log")
    assert sorted(str(line["client"]) for line in audit) == ["203.0.113.9", "None"]


def test_links_do_not_repeat_the_host_header(service: Service) -> None:
    body = {"model": "draw", "prompt": "a cat", "size": "32x32", "steps": 1, "response_format": "url"}

    def link(server: Running) -> str:
        headers = {"Host": "evil.example"}
        answer = httpx.post(f"{server.url}/v1/images/generations", json=body, headers=headers, timeout=60).json()
        return str(answer["data"][0]["url"])

    with serving(service) as server:
        url = link(server)
        assert url.startswith(f"{server.url}/files/")
        assert httpx.get(url).status_code == 200
    with serving(service, public_url="https://api.example.org/omni") as server:
        assert link(server).startswith("https://api.example.org/omni/files/")
    with serving(service, allowed_hosts=["evil.example"]) as server:
        assert link(server).startswith("http://evil.example/files/")


@pytest.mark.parametrize("url", ["api.example.org", "ftp://x", "https://", "https://x/?a=b", "https://x/#a"])
def test_a_public_url_is_checked(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="--public-url"):
        ServiceOptions(public_url=url).checked_public_url()
    assert ServiceOptions(public_url="https://x/y/").checked_public_url() == "https://x/y"


def test_random_mistakes_break_nothing(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with serving(service, stall_seconds=5.0) as server:
        target = fuzz_wire.Target(server.url, "/v1/realtime?model=omni")
        for case in (target.run_http, target.run_websocket):
            ends, failures = fuzz_wire.run(case, range(CASES))
            assert not failures
            assert len(ends) > 2, ends
        assert target.healthy()
        until(lambda: server.limits.held_bytes.total == 0, "the return of all bytes")
        until(lambda: not service.sessions, "the end of all sessions")
    assert "Traceback" not in caplog.text
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_cases_come_from_their_seed() -> None:
    for make in (fuzz_wire.http_case, fuzz_wire.websocket_case):
        assert make(random.Random(3)) == make(random.Random(3))
        assert len({b"".join(make(random.Random(seed))) for seed in range(100)}) > 90
