"""Who may come in, and how often."""

from __future__ import annotations

import io
import json
import socket
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.service import Service
from tests.server.harness import Running, serving, until

SHORT: dict[str, Any] = {"model": "lm", "prompt": "Once", "max_tokens": 2}
KEY, OTHER, TEXT_ONLY = "a-key-for-tests", "another-key-for-tests", "a-key-for-text"


# ------------------------------------------------------------------------------------------------ over HTTP


@pytest.fixture
def guarded(models: dict[str, AsyncOmni]) -> Iterator[Running]:
    holders = [
        Holder("ann", digest_of(KEY)),
        Holder("bob", digest_of(OTHER), rate=1),
        Holder("cy", digest_of(TEXT_ONLY), models=frozenset({"lm"})),
    ]
    service = Service(keyring=Keyring(holders))
    for name, omni in models.items():
        service.add(name, omni)
    service.loading = False
    with serving(service) as running:
        yield running


def test_a_right_key_comes_in(guarded: Running) -> None:
    with guarded.client(api_key=KEY) as client:
        assert client.completions.create(**SHORT).choices
        assert {model.id for model in client.models.list()} == {"lm", "omni", "draw"}


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic YTpi", f"bearer{KEY}", "Bearer \xff\xfe"])
def test_no_key_or_a_wrong_one_is_401(guarded: Running, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for path in ("/v1/models", "/v1/models/lm", "/v1/requests/x", "/v1/nothing"):
        answer = httpx.get(f"{guarded.url}{path}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_stranger_is_told_before_the_body_is_read(guarded: Running) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    for path in ("/v1/completions", "/v1/images/edits"):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head.encode())  # and no byte of the body
            assert connection.recv(100).startswith(b"HTTP/1.1 401")
    malformed = httpx.post(f"{guarded.url}/v1/completions", content=b"{")
    assert malformed.status_code == 401  # not 400: what is wrong with it is for those who may ask


def test_every_route_of_the_api_asks_for_a_key(guarded: Running) -> None:
    paths = httpx.get(f"{guarded.url}/openapi.json").json()["paths"]
    asked = [(path, method) for path, methods in paths.items() for method in methods if path.startswith("/v1/")]
    assert len(asked) > 8
    for path, method in asked:
        assert httpx.request(method, f"{guarded.url}{path.replace('{', '').replace('}', '')}").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/metrics", "/load"])
def test_health_is_open(guarded: Running, path: str) -> None:
    assert httpx.get(f"{guarded.url}{path}").status_code == 200


def test_a_key_sees_and_uses_its_models_only(guarded: Running) -> None:
    with guarded.client(api_key=TEXT_ONLY) as client:
        assert [model.id for model in client.models.list()] == ["lm"]
        assert client.get("/audio/voices", cast_to=httpx.Response).json() == {"voices": []}
        assert client.completions.create(**SHORT).choices
        with pytest.raises(openai.PermissionDeniedError) as caught:
            client.images.generate(model="draw", prompt="a hat")
        assert (caught.value.param, caught.value.type) == ("model", "permission_error")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("draw")


def test_a_rate_is_429_with_the_time_to_wait(guarded: Running) -> None:
    with guarded.client(api_key=OTHER) as client:
        client.completions.create(**SHORT)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**SHORT)
    assert caught.value.code == "rate_limit_exceeded"
    assert 50 <= int(caught.value.response.headers["Retry-After"]) <= 60


def test_a_request_is_its_keys_own(guarded: Running) -> None:
    with guarded.client(api_key=KEY) as client:
        answer_id = client.completions.create(**SHORT).id
    url = f"{guarded.url}/v1/requests/{answer_id}"
    assert httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    assert httpx.get(url, headers={"Authorization": f"Bearer {TEXT_ONLY}"}).status_code == 404
    assert httpx.delete(url, headers={"Authorization": f"Bearer {TEXT_ONLY}"}).status_code == 404


# ------------------------------------------------------------------------------------ audit, metrics and origins


def test_the_audit_log_tells_who_and_how_much_not_what(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="omnistage.audit")
    with guarded.client(api_key=KEY) as client:
        answer = client.completions.create(model="lm", prompt="a secret of mine", max_tokens=3, temperature=0)
        httpx.get(f"{guarded.url}/v1/private-path-of-mine")
        httpx.get(f"{guarded.url}/health")
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "omnistage.audit"]
    assert len(lines) == 2
    first = lines[0]
    assert (first["who"], first["model"], first["endpoint"]) == ("ann", "lm", "POST /v1/completions")
    assert (first["status"], first["ended"]) == (200, answer.choices[0].finish_reason)
    assert answer.usage is not None
    assert first["prompt_tokens"] == answer.usage.prompt_tokens
    assert first["completion_tokens"] == answer.usage.completion_tokens
    assert first["seconds"] > 0
    assert (lines[1]["who"], lines[1]["status"], lines[1]["ended"]) == (None, 401, "refused")
    for hidden in ("secret", "private", KEY):
        assert hidden not in caplog.text


MARKER = "xq7marker"


def test_no_endpoint_writes_content_into_the_logs(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    headers = {"Authorization": f"Bearer {KEY}", "User-Agent": MARKER, "X-Client-Request-Id": MARKER}
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 9, 9)).save(picture, "PNG")
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(16_000))
    messages = [{"role": "user", "name": MARKER, "content": MARKER}]
    tool = {"type": "function", "function": {"name": MARKER, "description": MARKER}}
    small: dict[str, Any] = {"size": "64x64", "steps": 1}
    posts: list[tuple[str, dict[str, Any], int]] = [
        ("chat/completions", {"model": "lm", "messages": messages, "max_tokens": 2, "user": MARKER}, 200),
        ("chat/completions", {"model": "lm", "messages": messages, "max_tokens": 2, "stream": True}, 200),
        ("chat/completions", {"model": "lm", "messages": messages, "max_tokens": 2, "tools": [tool]}, 200),
        ("chat/completions", {"model": "lm", "messages": [{"role": MARKER, "content": MARKER}]}, 400),
        ("chat/completions", {"model": MARKER, "messages": messages}, 404),
        ("chat/completions", {"model": "lm", "messages": messages, MARKER: MARKER}, 400),
        ("completions", {"model": "lm", "prompt": MARKER, "max_tokens": 2, "stop": [MARKER]}, 200),
        ("responses", {"model": "lm", "input": MARKER, "instructions": MARKER, "max_output_tokens": 2}, 200),
        ("audio/speech", {"model": "omni", "input": MARKER, "voice": MARKER}, 400),
        ("images/generations", {"model": "draw", "prompt": MARKER, "negative_prompt": MARKER, **small}, 200),
        ("videos", {"model": "draw", "prompt": MARKER}, 400),
    ]
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=60) as client:
        for path, body, status in posts:
            answer = client.post(f"/v1/{path}", json=body)
            assert answer.status_code == status, (path, answer.text)
        forms: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("images/edits", {"model": "draw", "prompt": MARKER, **small}, {"image": (MARKER, picture.getvalue())}),
            (
                "audio/transcriptions",
                {"model": "omni", "prompt": MARKER, "timeout": "0.2"},
                {"file": (MARKER, sound.getvalue())},
            ),
        ]
        for path, data, files in forms:
            assert client.post(f"/v1/{path}", data=data, files=files).status_code in (200, 400, 408), path
        for path in ("models", "requests", "videos", "nothing"):
            assert client.get(f"/v1/{path}/{MARKER}-1?{MARKER}={MARKER}").status_code == 404
        assert client.delete(f"/v1/requests/{MARKER}-2").status_code == 404
        assert client.post("/v1/completions", content=f"{{{MARKER}".encode()).status_code == 400
        client.request(MARKER.upper(), "/v1/models")
        client.get("/v1/models", headers={"Authorization": f"Bearer {MARKER}"})

    def audited() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "omnistage.audit"]

    # The last line is written when its answer has gone out, which may be later than it was read.
    until(lambda: len(audited()) >= len(posts) + len(forms) + 8, "a line for each request")
    lines = audited()
    assert len(lines) == len(posts) + len(forms) + 8
    assert {json.loads(line)["who"] for line in lines} == {"ann", None}
    # Everything that the package logs, not only there.
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("omnistage")]
    assert not [line for line in ours if MARKER in line.lower()]


def test_media_come_from_nowhere_unless_they_are_allowed_to(guarded: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for url in ("https://media.example.org/a.png", "file:///etc/hostname", "/etc/hostname"):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "see"}]
        body = {"model": "omni", "messages": [{"role": "user", "content": parts}]}
        answer = httpx.post(f"{guarded.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert "data:" in answer.json()["error"]["message"]  # what to send instead


def test_times_and_errors_are_measured(server: Running) -> None:
    with server.client() as client:
        client.completions.create(**SHORT)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**{**SHORT, "model": "nobody"})
    text = httpx.get(f"{server.url}/metrics").text
    for line in (
        'omnistage_time_to_first_token_seconds_count{model="lm"} 1.0',
        'omnistage_request_seconds_count{endpoint="POST /v1/completions"} 2.0',
        'omnistage_http_responses_total{endpoint="POST /v1/completions",status="200"} 1.0',
        'omnistage_http_errors_total{status="404"} 1.0',
    ):
        assert line in text.splitlines()
    assert "nobody" not in text


def test_other_origins_are_refused_unless_they_are_named(service: Service) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with serving(service) as closed:
        answer = httpx.options(f"{closed.url}/v1/completions", headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    with serving(service, cors=("https://page.example",)) as opened:
        answer = httpx.options(f"{opened.url}/v1/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = httpx.options(f"{opened.url}/v1/completions", headers={**headers, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
