"""A real HTTP server on a free port, stages that can be held, and connections below HTTP's clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn
from PIL import Image

from omnistage.core.stage import Stage
from omnistage.core.types import FinishReason
from omnistage.models.registry import REGISTRY
from omnistage.omni import AsyncOmni
from omnistage.server.http.app import create_app
from omnistage.server.http.limits import TransportLimits
from omnistage.server.http.run import server_config
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.hang_guard import until as until

SERVE_LIMITS = ("limits.media.allow_paths=false",)
LONG: dict[str, Any] = {"model": "lm", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
SHORT: dict[str, Any] = {"model": "lm", "prompt": "Once", "max_tokens": 4, "temperature": 0}
SMALL_BODY = 4096


@dataclass
class Running:
    """A server and the address of its API."""

    service: Service
    url: str
    loop: asyncio.AbstractEventLoop
    limits: TransportLimits

    def client(self, **options: object) -> openai.OpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)  # type: ignore[arg-type]

    def async_client(self, **options: object) -> openai.AsyncOpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **given)  # type: ignore[arg-type]


@contextlib.contextmanager
def serving(service: Service, **options: Any) -> Iterator[Running]:
    """Run the application in a thread of its own until the block ends."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # as the command's is
    listening.bind(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # a slow reader is noticed soon
    app = create_app(service, **options)
    server = uvicorn.Server(server_config(app))
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0)
        started.set()
        await task

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    until(lambda: started.is_set() or not thread.is_alive(), "the start of the server")
    assert started.is_set()
    try:
        yield Running(service, f"http://127.0.0.1:{listening.getsockname()[1]}", loop, app.state.transport)
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)
        loop.close()


@contextlib.contextmanager
def longest_pause(server: Running, limit: float = 2.0) -> Iterator[None]:
    """Fail where the event loop does nothing else for longer than `limit` seconds in which this process computes."""
    pauses: list[float] = []

    def clocks() -> tuple[float, float]:
        return time.monotonic(), time.process_time()

    async def tick() -> None:
        last = clocks()
        while True:
            await asyncio.sleep(0.005)
            now = clocks()
            pauses.append(min(end - begin for end, begin in zip(now, last, strict=True)))  # others' load does not count
            last = now

    ticking = asyncio.run_coroutine_threadsafe(tick(), server.loop)
    try:
        yield
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        ticking.cancel()
    assert max(pauses) < limit


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        async def main() -> None:
            await test(**given)

        asyncio.run(main())

    return run


def make(family: str, folder: Path, **options: Any) -> Path:
    folder.mkdir()
    tiny = REGISTRY.family(family).tiny
    assert tiny is not None
    tiny(folder, seed=0, **options)
    return folder


class Held:
    """A stage whose steps wait: requests that are in it stay there for as long as a test needs them to.

    `free` steps go on before the first that waits.
    """

    def __init__(self, stage: Stage, patch: pytest.MonkeyPatch, free: int = 0) -> None:
        self.go = threading.Event()
        self.waits = False
        """A step has come that waits."""
        step, steps = stage.step, itertools.count()

        def waiting() -> object:
            if next(steps) >= free:
                self.waits = True
                assert self.go.wait(HANG_SECONDS)
            return step()

        patch.setattr(stage, "step", waiting)


def raw(server: Running, body: bytes, headers: str = "", path: str = "/v1/completions") -> socket.socket:
    """A connection on which a request has been sent and nothing was read."""
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    length = "" if "transfer-encoding" in headers.lower() else f"Content-Length: {len(body)}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers or length}\r\n"
    made.sendall(head.encode() + body)
    return made


def status_of(connection: socket.socket) -> int:
    line = b""
    while not line.endswith(b"\r\n"):
        byte = connection.recv(1)
        assert byte, "the connection ended without an answer"
        line += byte
    return int(line.split()[1])


def aborted(omni: AsyncOmni) -> int:
    return omni.stats().finished[FinishReason.ABORT]


def data_url(seed: int = 0) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
