"""Each rule about statuses by itself, on every endpoint that it is for."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.http.app import create_app
from omnistage.server.http.connection import Connection
from omnistage.server.openai.videos.jobs import new_job
from omnistage.server.openai.videos.route import _owner
from omnistage.server.service import Service
from tests.server.harness import LONG, SHORT, SMALL_BODY, Held, Running, raw, serving, status_of, until

KEY = "a-key-for-tests"
POSTS = sorted(
    path
    for path, operations in create_app(Service()).openapi()["paths"].items()
    if "post" in operations and path.startswith("/v1/")
)


def told(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's form."""
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer on a raw connection; the connection may stay open."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        assert piece, "the connection ended without an answer"
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += connection.recv(65536)
    return int(first.split()[1]), headers, body


@pytest.fixture
def small(service: Service) -> Iterator[Running]:
    with serving(service, max_body_bytes=SMALL_BODY) as running:
        yield running


# ------------------------------------------------------------------------------------------------------- 413


def test_who_asks_before_sending_is_told_413_and_never_to_go_on(small: Running) -> None:
    connection = raw(small, b"", f"Content-Length: {SMALL_BODY + 1}\r\nExpect: 100-continue\r\n")
    status, _, body = read_answer(connection)
    assert status == 413  # and not 100
    assert json.loads(body)["error"]["code"] == "limit_exceeded"
    connection.close()


def test_who_asks_before_sending_what_fits_is_told_to_go_on(small: Running) -> None:
    body = json.dumps(SHORT).encode()
    connection = raw(small, b"", f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n")
    assert connection.recv(12) == b"HTTP/1.1 100"
    connection.sendall(body)
    while b"HTTP/1.1 200" not in (seen := connection.recv(65536)):
        assert seen
    connection.close()


@pytest.mark.parametrize("path", POSTS)
def test_every_endpoint_refuses_too_large_a_body_unread(small: Running, path: str) -> None:
    connection = raw(small, b"", f"Content-Length: {10**12}\r\n", path)
    status, _, body = read_answer(connection)
    assert status == 413
    assert str(SMALL_BODY) in json.loads(body)["error"]["message"]
    connection.close()


def test_a_connection_is_good_for_more_after_a_refused_body(small: Running) -> None:
    with httpx.Client(base_url=small.url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", content=b" " * (SMALL_BODY * 40)).status_code == 413
            assert client.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("length", ["-1", "many", "1, 2"])
def test_a_length_that_is_none_is_400(small: Running, length: str) -> None:
    connection = raw(small, b"{}", f"Content-Length: {length}\r\n")
    status, headers, body = read_answer(connection)
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    connection.close()


# ------------------------------------------------------------------------------------- no HTTP, no such path


def test_what_is_no_http_is_400_in_the_same_form(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for nonsense in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(nonsense)
            status, headers, body = read_answer(connection)
            assert (status, headers["connection"]) == (400, "close")
            assert json.loads(body)["error"]["message"]


def test_a_broken_body_behind_a_begun_answer_only_ends_the_connection(small: Running) -> None:
    chunk = b"%x\r\n%s\r\n" % (SMALL_BODY + 1, b" " * (SMALL_BODY + 1))
    connection = raw(small, chunk, "Transfer-Encoding: chunked\r\n")
    assert status_of(connection) == 413
    connection.sendall(b"zz\r\n")
    while connection.recv(65536):
        pass
    connection.close()
    assert httpx.post(f"{small.url}/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/nowhere", 404),
        ("POST", "/v1/chat/completions/more", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/requests/req-none", 404),
        ("GET", "/v1/videos/video_none", 404),
        ("GET", "/files/none.png", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PATCH", "/health", 405),
        ("OPTIONS", "/v1/models", 405),
        ("HEAD", "/v1/completions", 405),
    ],
)
def test_what_is_not_there_is_said_in_the_same_form(server: Running, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, f"{server.url}{path}")
    assert answer.status_code == status
    if status == 405:
        assert answer.headers["Allow"]
    if method != "HEAD":
        told(answer)


# ------------------------------------------------------------------------------------------------- 503, 401, 422


def test_a_service_that_loads_says_what_it_is_doing(service: Service) -> None:
    service.loading = True
    with serving(service) as server:
        assert httpx.get(f"{server.url}/ready").json() == {"status": "loading"}
        service.report_loading("chat", "thinker: compiling", 0.6)
        step = httpx.get(f"{server.url}/ready").json()["step"]
    assert re.fullmatch(r"chat: thinker: compiling, 60% after \d+ s", step)


@pytest.mark.parametrize("state", ["loading", "draining"])
def test_every_endpoint_says_503_and_when_to_come_again(service: Service, state: str) -> None:
    setattr(service, state, True)
    with serving(service) as server, httpx.Client(base_url=server.url) as client:
        for path in POSTS:
            answer = client.post(path, json=SHORT)
            assert answer.status_code == 503, path
            assert int(answer.headers["Retry-After"]) >= 1
            assert told(answer)["type"] == "service_unavailable_error"


def test_every_endpoint_says_401_before_anything_else(models: dict[str, AsyncOmni]) -> None:
    service = Service(keyring=Keyring([Holder("ann", digest_of(KEY))]))
    service.loading = True  # a stranger does not learn of it
    with serving(service) as server, httpx.Client(base_url=server.url) as client:
        for path in POSTS:
            answer = client.post(path, json={}, headers={"Authorization": "Bearer nonsense"})
            assert (answer.status_code, told(answer)["type"]) == (401, "authentication_error"), path
            assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", POSTS)
def test_what_does_not_validate_is_400_and_shows_nothing_of_our_insides(server: Running, path: str) -> None:
    with httpx.Client(base_url=server.url) as client:
        for answer in (
            client.post(path, json={}),
            client.post(path, json=[]),
            client.post(path, content=b"{", headers={"Content-Type": "application/json"}),
            client.post(path, content=b"\x00", headers={"Content-Type": "application/octet-stream"}),
            client.post(path, data={"no_such_field": "1"}),
            client.post(path, files={"no_such_file": b"1"}),
        ):
            error = told(answer)
            assert answer.status_code == 400, (path, error)
            assert not any(word in answer.text for word in ("Traceback", "pydantic", "omnistage.", ".py"))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {**SHORT, "stop": 5}, "stop"),
        ("/v1/completions", {**SHORT, "prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {**SHORT, "stream_options": {"x": 1}}, "stream_options.x"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/responses", {"model": "lm", "input": 5}, "input"),
        ("/v1/images/generations", {"model": "draw", "prompt": "a", "n": "x"}, "n"),
    ],
)
def test_a_path_names_the_field_and_not_the_types_that_were_tried(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    assert told(httpx.post(f"{server.url}{path}", json=body))["param"] == param


def test_a_query_is_named_too(server: Running) -> None:
    assert told(httpx.get(f"{server.url}/v1/videos?limit=0"))["param"] == "limit"


# ------------------------------------------------------------------------------------------------- 408, 429, 499


@pytest.fixture
def held(models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    lm = models["lm"]
    made = Held(lm.orchestrator.stages[lm.orchestrator.graph.entry], monkeypatch)
    yield made
    made.go.set()
    until(lambda: lm.stats().inflight == 0, "the end of held requests")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", SHORT),
        ("/v1/chat/completions", {"model": "lm", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"model": "lm", "input": "a"}),
    ],
)
def test_a_deadline_is_408_wherever_it_is_given(
    server: Running, held: Held, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = httpx.post(f"{server.url}{path}", json={**body, "timeout": 0.05, "stream": stream})
    assert answer.status_code == 408
    assert (told(answer)["code"], told(answer)["param"]) == ("deadline_exceeded", "timeout")


def test_a_body_that_breaks_off_is_recorded_as_a_disconnect(
    server: Running, audit: list[dict[str, Any]], models: dict[str, AsyncOmni]
) -> None:
    before = models["lm"].stats().admitted
    raw(server, b'{"model": "lm", ', "Content-Length: 1000\r\n").close()
    until(lambda: bool(audit), "a line in the audit log")
    assert (audit[0]["status"], audit[0]["ended"]) == (499, "disconnected")
    assert models["lm"].stats().admitted == before


def test_a_stalled_body_is_408_in_the_same_form(service: Service) -> None:
    with serving(service, stall_seconds=0.2) as server:
        for headers in ("Content-Length: 100\r\n", "Transfer-Encoding: chunked\r\n"):
            connection = raw(server, b"", headers)
            status, _, body = read_answer(connection)
            assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")
            connection.close()


def test_a_body_of_two_lengths_is_refused_and_nothing_after_it_is_heard(server: Running) -> None:
    both = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    connection = raw(server, b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n", both)
    heard = b""
    while piece := connection.recv(4096):
        heard += piece
    assert heard.startswith(b"HTTP/1.1 400")
    assert heard.count(b"HTTP/1.1") == 1


def test_only_addresses_are_recorded_as_such(server: Running, audit: list[dict[str, Any]]) -> None:
    for given in ("hello this is content", "203.0.113.9"):
        httpx.get(f"{server.url}/v1/models", headers={"X-Forwarded-For": given})
    until(lambda: len(audit) == 2, "two lines in the audit log")
    assert [line.get("client") for line in audit] == [None, "203.0.113.9"]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_whoever_does_not_say_what_it_wants_is_cut_off(
    server: Running, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_seconds", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent)
        status, _, body = read_answer(connection)
    assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")


def test_a_second_request_on_a_connection_has_to_come_too(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_seconds", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(whole)
        assert status_of(connection) == 200
        connection.sendall(whole[:10])
        rest = b""
        while piece := connection.recv(4096):
            rest += piece
        assert b"HTTP/1.1 408" in rest


def test_the_time_for_a_head_does_not_count_for_what_comes_after(
    server: Running, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_seconds", 0.05)
    connection = raw(server, json.dumps(SHORT).encode())
    threading.Timer(0.3, held.go.set).start()  # the answer takes longer than a head may
    assert status_of(connection) == 200
    connection.close()


def test_a_key_with_too_much_running_is_told_when_to_come_again(models: dict[str, AsyncOmni], held: Held) -> None:
    service = Service(keyring=Keyring([Holder("ann", digest_of(KEY), max_concurrent=1)]))
    service.add("lm", models["lm"])
    service.loading = False
    with serving(service) as server:
        head = f"Authorization: Bearer {KEY}\r\n"
        body = json.dumps(LONG).encode()
        first = raw(server, body, f"{head}Content-Length: {len(body)}\r\n")
        until(lambda: models["lm"].stats().inflight == 1, "the first request")
        with server.client(api_key=KEY) as client, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**SHORT)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        first.close()
        until(lambda: models["lm"].stats().inflight == 0, "the end of the first request")


# ------------------------------------------------------------------------------------------------------- 416


def test_a_wrong_range_is_refused_in_the_same_form(service: Service, server: Running) -> None:
    job = new_job(_owner(service.keyring.authenticate(None)), "film", "a cat", "32x32", "1")
    store = service.jobs._store
    store.add(job)
    store.complete(job.id, b"0123456789", "1", "32x32")
    url = f"{server.url}/v1/videos/{job.id}/content"
    assert httpx.get(url, headers={"Range": "bytes=2-4"}).content == b"234"
    beyond = httpx.get(url, headers={"Range": "bytes=50-60"})
    assert (beyond.status_code, told(beyond)["code"]) == (416, "range_not_satisfiable")
    assert beyond.headers["Content-Range"] == "bytes */10"
    wrong = httpx.get(url, headers={"Range": "pages=1"})
    assert (wrong.status_code, told(wrong)["param"]) == (400, "Range")
