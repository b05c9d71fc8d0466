"""The memory of requests' media is bounded for all of them together, and given back however they end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import random
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from omnistage.media.budget import MediaBudget, MediaHold, media_budget
from omnistage.media.decode_pool import decode_processes
from omnistage.media.limits import MIB
from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.service import Service
from tests.server.harness import Running, awaited, serving, until

KEY = "a-key-for-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}
HOLDER = Holder("ann", digest_of(KEY))


def picture(side: int) -> dict[str, Any]:
    data = io.BytesIO()
    Image.new("RGB", (side, side), (1, 2, 3)).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*sides: int, **options: object) -> dict[str, Any]:
    content = [*map(picture, sides), {"type": "text", "text": "What is it?"}]
    return {"model": "omni", "max_tokens": 2, "messages": [{"role": "user", "content": content}], **options}


@pytest.fixture
def budget() -> Iterator[MediaBudget]:
    """Garbage is not collected: large media must not wait for that."""
    gc.collect()
    gc.disable()
    try:
        with media_budget(256 * MIB) as limits:
            yield limits
    finally:
        gc.enable()


@pytest.fixture
def server(models: dict[str, AsyncOmni], budget: MediaBudget) -> Iterator[Running]:
    service = Service(keyring=Keyring([HOLDER]))
    for name, omni in models.items():
        service.add(name, omni)
    service.loading = False
    with decode_processes(2), serving(service) as running:
        yield running


def is_free(budget: MediaBudget) -> bool:
    return not (budget.used_bytes or budget.waiting or HOLDER.use.counts["requests"])


@awaited
async def test_requests_wait_for_each_others_memory(server: Running, budget: MediaBudget) -> None:
    """Of these, two at most fit at a time."""
    highest, over = 0, asyncio.Event()

    async def watch() -> None:
        nonlocal highest
        while not over.is_set():
            highest = max(highest, budget.used_bytes)
            await asyncio.sleep(0.001)

    body, url = chat(1200, 1200, 1200), f"{server.url}/v1/chat/completions"
    watching = asyncio.ensure_future(watch())
    async with httpx.AsyncClient(timeout=60, headers=HEADERS) as client:
        answers = await asyncio.gather(*(client.post(url, json=body) for _ in range(10)))
    over.set()
    await watching
    assert [answer.status_code for answer in answers] == [200] * 10
    assert 0 < highest <= budget.max_bytes
    await asyncio.to_thread(until, lambda: is_free(budget), "the end of all of them")


def images() -> list[Image.Image]:
    return [each for each in gc.get_objects() if type(each) is Image.Image]


def test_what_one_request_cannot_have_is_refused(server: Running, budget: MediaBudget) -> None:
    others = images()  # those that other tests hold
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat(1000, 4000), headers=HEADERS, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "limit_exceeded"), answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"
    until(lambda: is_free(budget), "the end of the request")
    until(lambda: all(any(each is other for other in others) for each in images()), "the end of its pictures")


def test_a_timeout_ends_a_request_that_waits_for_memory(server: Running, budget: MediaBudget) -> None:
    holds = [MediaHold(budget, owner) for owner in ("a", "b")]
    for hold in holds:
        hold.reserve(128 * MIB)
    body = chat(1000, timeout=0.3)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 408, answer.text
    for hold in holds:
        hold.close()
    until(lambda: is_free(budget), "the end of the request")


@pytest.mark.parametrize("limit", [1, None])
def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    server: Running, budget: MediaBudget, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(HOLDER, "max_concurrent", limit)
    chances = random.Random(0)
    address = urlsplit(server.url)
    with httpx.Client() as client:
        request = client.build_request(
            "POST", f"{server.url}/v1/chat/completions", json=chat(900, 1400, max_tokens=200)
        )
    head = f"POST {request.url.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(request.content)}\r\n\r\n"
    for _ in range(30):
        connection = socket.create_connection((str(address.hostname), address.port))
        connection.sendall(head.encode() + request.content)
        connection.settimeout(chances.choice((0.001, 0.01, 0.05, 0.1, 0.2, 0.4)))
        with contextlib.suppress(TimeoutError):
            connection.recv(1)
        connection.close()
    until(lambda: is_free(budget), "the end of all of them")
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat(100), headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
