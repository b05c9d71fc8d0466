"""A small HTTP client that knows when each piece of an answer arrived.

h11, which the service's own extra brings, does the protocol: a general client costs the generator several times as
much for each event, and whoever measures must not be the slowest part.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from omnistage.core.errors import InvalidRequestError, MissingDependencyError

try:
    import h11
except ModuleNotFoundError as error:
    raise MissingDependencyError("the load generator needs more: pip install 'omnistage[server]'") from error

_READ = 2**16
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where the service is."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise InvalidRequestError(f"{url!r} is no address like http://127.0.0.1:8000", param="URL")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class BrokenAnswerError(Exception):
    """The connection ended or spoke nonsense before the answer was whole."""


@dataclass(slots=True)
class Answer:
    """A response whose body is read as it arrives."""

    status: int
    headers: dict[str, str]
    _connection: _Connection = field(repr=False)

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """Pieces of the body, each with the moment at which it was here (`time.perf_counter`)."""
        async for piece in self._connection.body():
            yield piece

    async def read(self) -> bytes:
        return b"".join([data async for _, data in self.pieces()])


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self._arrived = 0.0

    async def ask(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        http = self._http
        try:
            head = http.send(h11.Request(method=method, target=target, headers=headers)) or b""
            self._writer.write(head + (http.send(h11.Data(data=body)) or b"") + (http.send(h11.EndOfMessage()) or b""))
            await self._writer.drain()
            while not isinstance(event := await self._next(), h11.Response):
                if not isinstance(event, h11.InformationalResponse):
                    raise BrokenAnswerError("no answer came")
        except (OSError, h11.ProtocolError) as error:
            raise BrokenAnswerError(_reason(error)) from error
        return Answer(event.status_code, {n.decode("latin-1"): v.decode("latin-1") for n, v in event.headers}, self)

    async def body(self) -> AsyncIterator[tuple[float, bytes]]:
        try:
            while not isinstance(event := await self._next(), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    raise BrokenAnswerError("the answer broke off")
                yield self._arrived, bytes(event.data)
        except (OSError, h11.ProtocolError) as error:
            raise BrokenAnswerError(_reason(error)) from error

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(_READ)
            self._arrived = time.perf_counter()
            self._http.receive_data(data)
        return event  # type: ignore[return-value]  # h11 types its markers as classes of themselves

    def reusable(self) -> bool:
        """Whether another request may follow on it; makes it ready for one."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE or self._reader.at_eof():
            return False
        self._http.start_next_cycle()
        return True

    @property
    def alive(self) -> bool:
        return not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()


def _reason(error: Exception) -> str:
    return type(error).__name__ if isinstance(error, OSError) else "the answer broke off"


class Client:
    """Sends requests, each on a connection that no other request is on; connections are kept for later requests."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self.address = address
        self._headers = [("Host", address.netloc), ("User-Agent", "omnistage-bench"), ("Accept", "*/*")]
        if api_key is not None:
            self._headers.append(("Authorization", f"Bearer {api_key}"))
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[_Connection] = []

    @contextlib.asynccontextmanager
    async def ask(self, path: str, body: bytes | None = None) -> AsyncIterator[Answer]:
        """The answer to a GET, or with a body to a POST. Raises `OSError` or `BrokenAnswerError`."""
        headers = [*self._headers]
        if body is not None:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        method, target = "GET" if body is None else "POST", f"{self.address.prefix}{path}"
        connection = self._kept()
        try:
            if connection is not None:
                try:
                    answer = await connection.ask(method, target, headers, body or b"")
                except BrokenAnswerError:
                    connection.close()  # the service had closed it while nothing was going on
                    connection = None
            if connection is None:
                connection = await self._open()
                answer = await connection.ask(method, target, headers, body or b"")
            yield answer
            if connection.reusable():
                self._idle.append(connection)
                connection = None
        finally:
            if connection is not None:
                connection.close()

    async def get(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of a page; None where it is none."""
        async with self.ask(path) as answer:
            data = await answer.read()
        try:
            return answer.status, json.loads(data)
        except ValueError:
            return answer.status, None

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
            connection.close()
        return None

    async def _open(self) -> _Connection:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return _Connection(
                    *await asyncio.open_connection(self.address.host, self.address.port, ssl=self._tls, limit=_READ)
                )
        except TimeoutError:
            raise ConnectionError("no connection within 10 s") from None


class EventReader:
    """Server-sent events out of pieces of bytes: the data of each, as JSON."""

    def __init__(self) -> None:
        self.done = False
        """Whether the mark was there with which OpenAI ends a stream."""
        self._held: list[bytes] = []
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> Iterator[Any]:
        self._held.append(piece)
        if b"\n" not in piece:
            return  # a picture comes in many pieces: they are joined once
        *lines, rest = b"".join(self._held).split(b"\n")
        self._held = [rest]
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                if data == b"[DONE]":
                    self.done = True
                else:
                    yield json.loads(data)
