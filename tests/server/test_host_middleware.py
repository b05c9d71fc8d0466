"""A page of a stranger cannot reach a service on this machine by pointing a name of its own at it."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
import websockets.sync.client
from websockets.exceptions import InvalidStatus

from omnistage.omni import AsyncOmni
from omnistage.server.access.hosts import is_loopback
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.service import Service
from tests.server.harness import serving


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1", "[::1]"])
def test_own_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "192.168.1.2", "localhost.evil.example", "127.0.0.1.evil.example", "", "::"]
)
def test_other_addresses(host: str) -> None:
    assert not is_loopback(host)


def asked(url: str, host: str) -> httpx.Response:
    return httpx.get(f"{url}/v1/models", headers={"Host": host})


def test_strange_names_are_refused(service: Service) -> None:
    with serving(service, allowed_hosts=["box.example"]) as server:
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "box.example", "BOX.example:80"):
            assert asked(server.url, host).status_code == 200, host
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", ""):
            refused = asked(server.url, host)
            assert refused.status_code == 403, host
            assert "--allow-host" in refused.json()["error"]["message"]
        address = f"{server.url.replace('http', 'ws')}/v1/realtime?model=lm"
        with pytest.raises(InvalidStatus) as caught:
            connect(address, "evil.example")
        assert caught.value.response.status_code == 403
        assert "--allow-host" in json.loads(caught.value.response.body)["error"]["message"]
        connect(address, "localhost").close()


def connect(address: str, host: str) -> Any:
    """A WebSocket that calls by a name of its own."""
    target = address.removeprefix("ws://").partition("/")[0]
    name, port = target.split(":")
    connection = socket.create_connection((name, int(port)), timeout=20)
    return websockets.sync.client.connect(address.replace(target, f"{host}:{port}"), sock=connection)


FORM = {"model": (None, "lm"), "prompt": (None, "a")}


@pytest.mark.parametrize("path", ["images/edits", "videos", "audio/transcriptions", "completions"])
def test_a_form_of_another_page_is_refused_without_keys(service: Service, path: str) -> None:
    with serving(service, cors=["https://friend.example"]) as server:
        for origin in ("https://evil.example", "null", "http://127.0.0.1", "http://localhost:1", "http://x:y"):
            answer = httpx.post(f"{server.url}/v1/{path}", files=FORM, headers={"Origin": origin})
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error"), origin
        for origin in (server.url, "https://friend.example"):
            answer = httpx.post(f"{server.url}/v1/{path}", files=FORM, headers={"Origin": origin})
            assert answer.status_code in (400, 404), answer.text  # it was read
        assert httpx.post(f"{server.url}/v1/{path}", files=FORM).status_code in (400, 404)
        assert httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://evil.example"}).status_code == 200


def test_with_keys_it_is_the_key_that_counts(models: dict[str, AsyncOmni]) -> None:
    service = Service(keyring=Keyring([Holder("ann", digest_of("a-long-key"))]))
    service.add("lm", models["lm"])
    service.loading = False
    with serving(service) as server:
        headers = {"Origin": "https://elsewhere.example", "Authorization": "Bearer a-long-key"}
        body = {"model": "lm", "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200


def test_without_the_rule_every_name_does(service: Service) -> None:
    with serving(service) as server:
        assert asked(server.url, "evil.example").status_code == 200
