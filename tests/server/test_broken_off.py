"""An answer that somebody ended in the middle never looks whole."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from omnistage.omni import AsyncOmni
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import Held, Running, raw, until

LONG: dict[str, Any] = {"model": "lm", "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {**LONG, "prompt": "Once", "max_tokens": 1500}),
    "chat": ("/v1/chat/completions", {**LONG, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1500}),
    "tool call": (
        "/v1/chat/completions",
        {
            "model": "lm",
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 1500,
            "tools": [TOOL],
            "tool_choice": "required",
            "seed": 3,
        },
    ),
    "responses": ("/v1/responses", {"model": "lm", "input": "a", "max_output_tokens": 1500}),
}


@pytest.fixture
def lm(models: dict[str, AsyncOmni]) -> AsyncOmni:
    return models["lm"]


@pytest.fixture
def held(lm: AsyncOmni, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(lm.orchestrator.stages[lm.orchestrator.graph.entry], monkeypatch, free=5)
    yield made
    made.go.set()
    until(lambda: lm.stats().inflight == 0, "the end of held requests")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_answer_is_an_error(
    server: Running,
    lm: AsyncOmni,
    held: Held,
    way: str,
    stream: bool,
) -> None:
    path, body = WAYS[way]
    name = f"broken-{way.replace(' ', '-')}-{stream}"
    got: list[httpx.Response] = []

    def ask() -> None:
        headers = {"X-Client-Request-Id": name}
        got.append(httpx.post(f"{server.url}{path}", json={**body, "stream": stream}, headers=headers, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: held.waits, "some tokens")
    assert lm.stats().inflight == 1
    assert httpx.delete(f"{server.url}/v1/requests/{name}").status_code == 200
    asking.join(HANG_SECONDS)
    answer = got[0]
    if not stream or way == "tool call":  # a call is held back until it is sure: nothing of it had been sent
        assert answer.status_code == 499, answer.text
        assert answer.json()["error"]["code"] == "cancelled"
        return
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    told = [json.loads(event) for event in events if event != "[DONE]"]
    assert len(told) > 1  # some of it had been sent
    if way == "responses":
        assert told[-1]["type"] == "response.failed"
        assert told[-1]["response"]["error"]["code"]
    else:
        assert told[-1]["error"]["code"] == "cancelled"
    assert not any(choice.get("finish_reason") for event in told for choice in event.get("choices", ()))


def test_a_refused_request_does_not_take_the_id_of_a_running_one(server: Running, lm: AsyncOmni, held: Held) -> None:
    path, body = WAYS["responses"]
    headers = {"X-Client-Request-Id": "twice"}
    got: list[httpx.Response] = []

    def ask() -> None:
        got.append(httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: held.waits, "some tokens")
    refused = httpx.post(f"{server.url}{path}", json={**body, "max_output_tokens": 10**9}, headers=headers, timeout=60)
    too_long = httpx.post(f"{server.url}{path}", json={**body, "input": "a" * 300_000}, headers=headers, timeout=60)
    assert (refused.status_code, too_long.status_code) == (400, 400)
    assert httpx.delete(f"{server.url}/v1/requests/twice").status_code == 200
    asking.join(HANG_SECONDS)
    assert got[0].status_code == 499


def test_every_answer_of_a_model_names_its_request(server: Running) -> None:
    with server.client() as client:
        asked: dict[str, Any] = {"model": "lm", "prompt": "Once", "max_tokens": 2}
        whole = client.completions.create(**asked)
        assert whole._request_id is not None
        trace = httpx.get(f"{server.url}/v1/requests/{whole._request_id}")
        assert trace.json()["request_id"] == whole._request_id
        with client.completions.with_streaming_response.create(**asked, stream=True) as streamed:
            assert streamed.headers["x-request-id"].startswith("req-")
        drawn = client.images.generate(model="draw", prompt="a", size="64x64", extra_body={"steps": 1})
        assert drawn._request_id is not None
        assert httpx.get(f"{server.url}/v1/requests/{drawn._request_id}").status_code == 200


@pytest.mark.parametrize("length", [100, 1_000_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/videos"])
def test_a_client_that_leaves_in_its_body_is_no_defect(
    server: Running, audit: list[dict[str, Any]], caplog: pytest.LogCaptureFixture, path: str, length: int
) -> None:
    raw(server, b'{"model":', f"Content-Length: {length}\r\n", path).close()
    until(lambda: len(audit) == 1, "the end of the request")
    assert audit[0]["ended"] == "disconnected"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
