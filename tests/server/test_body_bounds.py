"""How much of all bodies is held at once, how many a key may be sending, how slowly one may come."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.http.body_limits import MIN_RATE, BodyLimit
from omnistage.server.http.connection import Connection
from omnistage.server.http.errors import RateLimitError
from omnistage.server.http.limits import HeldBytes
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import SHORT, Held, Running, awaited, raw, serving, status_of, until

KEY, OTHER = "a-key-for-tests", "another-key-for-tests"


class Client:
    """One request to the middleware, piece by piece, and what is answered to it."""

    def __init__(self, length: int | None, holder: Holder | None) -> None:
        announced = (b"transfer-encoding", b"chunked") if length is None else (b"content-length", b"%d" % length)
        self.scope: Scope = {"type": "http", "headers": [announced], "state": {}}
        if holder is not None:
            self.scope["state"]["holder"] = holder
        self._pieces: asyncio.Queue[Message] = asyncio.Queue()
        self.answers: list[Message] = []
        self.asked = False
        """Whether the service has wanted to read any of it."""

    async def send(self, size: int, *, more: bool = True) -> None:
        """Send a piece, and let the service read and judge it."""
        self._pieces.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
        await settled()

    async def receive(self) -> Message:
        self.asked = True
        return await self._pieces.get()

    async def answer(self, message: Message) -> None:
        self.answers.append(message)

    @property
    def status(self) -> int | None:
        return self.answers[0]["status"] if self.answers else None

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.answers[0]["headers"])

    @property
    def error(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.answers[1]["body"])["error"]
        return told


async def settled() -> None:
    """More turns of the loop than anything here needs that waits for no time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)


class Bench:
    """The middleware over an application that reads a body and works on it until it may finish."""

    def __init__(self, **limits: Any) -> None:
        given = {"max_bytes": 100, "max_total_bytes": 200, **limits}
        self.held = HeldBytes(given.pop("max_total_bytes"), max_item=given["max_bytes"])
        self.limit = BodyLimit(self._work, held_bytes=self.held, **given)
        self.finish = asyncio.Event()

    async def _work(self, _scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        await self.finish.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    @asynccontextmanager
    async def request(self, length: int | None = None, holder: Holder | None = None) -> AsyncIterator[Client]:
        client = Client(length, holder)
        task = asyncio.ensure_future(self.limit(client.scope, client.receive, client.answer))
        await settled()
        yield client
        task.cancel()
        await asyncio.wait({task})

    async def probe(self, length: int | None, holder: Holder | None = None) -> int | None:
        async with self.request(length, holder) as client:
            return client.status


# ---------------------------------------------------------------------------------------------------- all of them


@awaited
async def test_what_all_bodies_hold_is_bounded() -> None:
    bench = Bench()
    async with bench.request() as first, bench.request() as second, bench.request() as third:
        await first.send(100)
        await second.send(60, more=False)  # it is worked on, and held as well
        await third.send(40)
        assert third.status is None
        await third.send(1)
        assert third.status == 429
        assert (third.error["code"], third.error["type"]) == ("queue_full", "rate_limit_error")
        assert int(third.headers[b"retry-after"]) >= 1
        # What was refused is not held any more.
        async with bench.request() as fourth:
            await fourth.send(40)
            assert fourth.status is None


@awaited
async def test_a_body_that_cannot_fit_any_more_is_refused_unread() -> None:
    bench = Bench()
    async with bench.request() as first, bench.request() as second:
        await first.send(100)
        await second.send(50)
        assert await bench.probe(51) == 429
        assert await bench.probe(50) is None  # nothing of it has come: it takes no room by what it says
        assert await bench.probe(50) is None


@pytest.mark.parametrize("ends", ["answered", "cancelled", "too large"])
@awaited
async def test_a_request_that_ends_gives_its_bytes_back(ends: str) -> None:
    bench = Bench(max_total_bytes=100)
    async with bench.request() as client:
        await client.send(100, more=ends != "answered")
        assert await bench.probe(1) == 429
        if ends == "answered":
            bench.finish.set()
            await settled()
        if ends == "too large":
            await client.send(1)
    assert client.status == {"answered": 200, "cancelled": None, "too large": 413}[ends]
    bench.finish.clear()
    assert await bench.probe(100) is None


@awaited
async def test_one_body_of_the_largest_size_always_fits() -> None:
    bench = Bench(max_total_bytes=10)
    async with bench.request(100) as client:
        await client.send(100)
        assert client.status is None
        assert await bench.probe(1) == 429


# ------------------------------------------------------------------------------------------------------ one key's


@awaited
async def test_a_key_sends_no_more_bodies_at_once_than_it_may_have_requests() -> None:
    bench, ann, bob = Bench(), Holder("ann", b"", max_concurrent=2), Holder("bob", b"")
    async with bench.request(10, ann) as first, bench.request(None, ann) as second:
        async with bench.request(10, ann) as third:
            assert third.status == 429
            assert third.error["code"] == "rate_limit_exceeded"
            assert b"retry-after" in third.headers
            assert not third.asked
        assert await bench.probe(None, ann) == 429
        assert await bench.probe(0, ann) is None  # no body
        assert await bench.probe(10, bob) is None
        assert await bench.probe(10) is None
        await first.send(10, more=False)  # it runs now, and counts as that
        assert ann.use.counts["uploads"] == 1
        assert await bench.probe(10, ann) is None
        await second.send(101)
        assert second.status == 413
        assert ann.use.counts["uploads"] == 0


@awaited
async def test_who_leaves_in_the_middle_of_a_body_may_send_another() -> None:
    bench, ann = Bench(), Holder("ann", b"", max_concurrent=1)
    async with bench.request(10, ann) as client:
        await client.send(1)
        assert await bench.probe(10, ann) == 429
    assert await bench.probe(10, ann) is None


def test_a_holder_of_tokens_who_sends_or_converses_is_not_forgotten() -> None:
    keyring = Keyring(max_token_holders=1)
    ann = Holder("jwt:ann", b"", use=keyring._usage_of("jwt:ann"))
    for busy in (ann.count("uploads"), ann.count("sessions")):
        with busy, pytest.raises(RateLimitError):
            keyring._usage_of("jwt:bob")
    assert keyring._usage_of("jwt:bob") is not ann.use


# ---------------------------------------------------------------------------------------------------- how slowly


class Clock:
    """Time that passes only while pieces of a body are awaited."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def paced(size: int, every: float, pieces: int, stall_seconds: float = 8.0) -> Client:
    """A body of which a piece comes every so many seconds."""
    clock = Clock()
    bench = Bench(max_bytes=2**30, max_total_bytes=2**30, stall_seconds=stall_seconds, clock=clock)
    bench.finish.set()
    client = Client(size * pieces, None)
    came = 0

    async def receive() -> Message:
        nonlocal came
        await asyncio.sleep(0)  # here it is noticed that the time is over
        came += 1
        clock.now += every
        return {"type": "http.request", "body": b"x" * size, "more_body": came < pieces}

    await bench.limit(client.scope, receive, client.answer)
    return client


@awaited
async def test_a_body_that_drips_is_given_up_though_it_is_never_silent() -> None:
    client = await paced(1, every=4.0, pieces=100)
    assert (client.status, client.error["code"]) == (408, "body_timeout")
    assert "64 KiB" in client.error["message"]
    assert client.headers[b"connection"] == b"close"


@awaited
async def test_a_large_body_may_take_longer_than_a_silence() -> None:
    assert (await paced(4 * MIN_RATE, every=4.0, pieces=20)).status == 200
    assert (await paced(4 * MIN_RATE, every=4.2, pieces=20)).status == 200  # four seconds late in all
    assert (await paced(4 * MIN_RATE, every=5.0, pieces=20)).status == 408


# ----------------------------------------------------------------------------------------------- over a connection


@pytest.fixture
def guarded(service: Service) -> Iterator[Running]:
    service.keyring = Keyring([Holder("ann", digest_of(KEY), max_concurrent=1), Holder("bob", digest_of(OTHER))])
    with serving(service) as server:
        yield server


def post(server: Running, key: str = "none") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=SHORT, headers=headers)


def test_a_key_with_an_unfinished_body_waits_for_its_end(guarded: Running, service: Service) -> None:
    ann = service.keyring.authenticate(f"Bearer {KEY}")
    line = raw(guarded, b"{", f"Authorization: Bearer {KEY}\r\nContent-Length: 1000\r\n")
    until(lambda: ann.use.counts["uploads"] == 1, "the start of the body")
    refused = post(guarded, KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["Retry-After"]) >= 1
    models = httpx.get(f"{guarded.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert models.status_code == 200
    assert post(guarded, OTHER).status_code == 200
    line.close()
    until(lambda: ann.use.idle, "the end of the body")
    assert post(guarded, KEY).status_code == 200


def sent(server: Running, body: bytes) -> int:
    with raw(server, body) as line:
        return status_of(line)


def test_bodies_of_running_requests_are_held(service: Service, lm: AsyncOmni, held: Held) -> None:
    body = json.dumps(SHORT).encode()
    with serving(service, max_body_bytes=2 * len(body) - 1, max_held_bytes=0) as server:
        running = raw(server, body)
        until(lambda: lm.stats().inflight == 1, "the start of the request")
        assert sent(server, body) == 429
        held.go.set()
        assert status_of(running) == 200
        running.close()
        until(lambda: sent(server, body) == 200, "room for the same once more")


def dripped(line: socket.socket, piece: bytes) -> bytes:
    """Send a little every few milliseconds until the connection is closed; all that came back."""
    came, give_up = b"", time.monotonic() + HANG_SECONDS
    try:
        while time.monotonic() < give_up:
            if select.select([line], [], [], 0.01)[0]:
                got = line.recv(65536)
                if not got:
                    return came
                came += got
            line.sendall(piece)
    except ConnectionError:
        return came
    raise AssertionError("the connection is still open")


def test_a_connection_that_drips_is_closed(service: Service) -> None:
    with serving(service, stall_seconds=0.5) as server, raw(server, b"", "Content-Length: 60000000\r\n") as line:
        assert dripped(line, b" ").startswith(b"HTTP/1.1 408 ")


def test_who_is_refused_does_not_go_on_sending_for_ever(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_seconds", 0.5)
    chunked = "Transfer-Encoding: chunked\r\n"
    with serving(service, max_body_bytes=4) as server, raw(server, b"8\r\n        \r\n", chunked) as line:
        assert dripped(line, b"1\r\n \r\n").startswith(b"HTTP/1.1 413 ")
