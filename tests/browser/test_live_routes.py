"""What the page watches, without a browser: its files, a request's events, the gauges."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import httpx
import pytest

from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.page import route as page
from omnistage.server.service import Service
from tests.server.harness import Held, Running, serving, until

FOLDER = files("omnistage.server") / "page"
FILES = sorted(entry.name for entry in FOLDER.iterdir() if not entry.name.startswith("__") and entry.name != "route.py")
BODY: dict[str, Any] = {"model": "lm", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 12}


@pytest.fixture
def held(models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(models["lm"].orchestrator.stages["thinker"], monkeypatch)
    yield made
    made.go.set()
    until(lambda: models["lm"].stats().inflight == 0, "the end of held requests")


def posted(server: Running, tag: str, **headers: str) -> threading.Thread:
    """Send a request from another thread: it is held, so its answer comes later."""
    given = {"X-Client-Request-Id": tag, **headers}
    thread = threading.Thread(
        target=lambda: httpx.post(f"{server.url}/v1/chat/completions", json=BODY, headers=given, timeout=60)
    )
    thread.start()
    return thread


def traces(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


# ----------------------------------------------------------------------------------------------- the page's files


def test_the_page_runs_no_script_but_its_own(server: Running) -> None:
    answer = httpx.get(f"{server.url}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_and_stays_within_the_service(server: Running, name: str) -> None:
    answer = httpx.get(f"{server.url}/page/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    again = httpx.get(f"{server.url}/page/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.head(f"{server.url}/page/{name}").status_code == 200
    others = set(re.findall(r"https?://[^\s\"'`]+", answer.text)) - {"http://www.w3.org/2000/svg"}
    assert others == set()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", answer.text)
    for path in re.findall(r"""(?:from |import\()["']\./([\w.-]+)["']|(?:src|href)="page/([\w.-]+)\"""", answer.text):
        assert (FOLDER / "".join(path)).is_file(), path
    if name == "index.html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! (?:type=\"module\" )?src=)", answer.text)


def test_nothing_but_the_pages_files_is_served(server: Running) -> None:
    for path in (
        "/page/",
        "/page/nothing.js",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page/__init__.py",
        "/page/route.py",
    ):
        assert httpx.get(f"{server.url}{path}").status_code == 404, path


def test_files_of_the_page_are_of_a_readable_size() -> None:
    for name in FILES:
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= 350, name
    assert set(page._files()) == set(FILES)


# ------------------------------------------------------------------------------------------------------- events


def test_events_follow_a_request_to_its_end(server: Running, held: Held) -> None:
    thread = posted(server, "mine")
    with httpx.stream("GET", f"{server.url}/v1/requests/mine/events?wait=30", timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        seen = traces(answer)
        first = next(seen)
        assert first["finished"] is None
        assert list(first["stages"]) == ["thinker"]
        assert first["stages"]["thinker"]["started"] is None
        later = next(seen)  # nothing is new, but it is later
        assert later["now"] > first["now"]
        held.go.set()
        rest = list(seen)
    thread.join()
    last = rest[-1]
    assert last["finished"] == last["now"]
    assert last["stages"]["thinker"]["finish"] in ("stop", "length")
    assert [trace for trace in rest if trace["finished"] is not None] == [last]
    got = httpx.get(f"{server.url}/v1/requests/mine").json()
    assert {**got, "now": last["now"]} == last
    with httpx.stream("GET", f"{server.url}/v1/requests/{last['request_id']}/events", timeout=60) as answer:
        assert list(traces(answer)) == [last]


def test_who_leaves_while_it_waits_for_a_request_waits_no_more(server: Running, audit: list[dict[str, Any]]) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(b"GET /v1/requests/nobody/events?wait=30 HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.close()
    until(lambda: bool(audit), "a line in the audit log")
    assert (audit[0]["endpoint"], audit[0]["ended"]) == ("GET /v1/requests/{request_id}/events", "disconnected")


def test_a_request_can_be_cancelled_by_its_clients_name(
    server: Running, models: dict[str, AsyncOmni], held: Held
) -> None:
    thread = posted(server, "a.name-of_mine")
    until(lambda: models["lm"].stats().inflight == 1, "the start of the request")
    assert httpx.delete(f"{server.url}/v1/requests/a.name-of_mine").status_code == 200
    thread.join()
    assert models["lm"].stats().inflight == 0


@pytest.mark.parametrize(("wait", "status"), [("0", 404), ("0.2", 404), ("31", 400), ("-1", 400), ("soon", 400)])
def test_an_unknown_request_has_no_events(server: Running, wait: str, status: int) -> None:
    answer = httpx.get(f"{server.url}/v1/requests/nobody/events?wait={wait}", timeout=30)
    assert answer.status_code == status


@pytest.mark.parametrize("tag", ["", "a b", "x" * 129, "../up"])
def test_a_name_that_is_none_is_refused(server: Running, tag: str) -> None:
    headers = {"X-Client-Request-Id": tag}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert "X-Client-Request-Id" in answer.json()["error"]["message"]


def test_a_key_sees_its_own_requests_and_models_only(service: Service, held: Held) -> None:
    ann, bob = (
        Holder("ann", digest_of("key-of-ann"), models=frozenset({"lm", "draw"})),
        Holder("bob", digest_of("key-of-bob")),
    )
    service.keyring = Keyring([ann, bob])
    with serving(service) as server:
        assert httpx.get(f"{server.url}/").status_code == 200  # the page itself holds nothing of anyone
        assert httpx.get(f"{server.url}/v1/stats").status_code == 401
        of_ann, of_bob = ({"Authorization": f"Bearer key-of-{name}"} for name in ("ann", "bob"))
        thread = posted(server, "shared-name", **of_ann)
        until(lambda: service.models["lm"].omni.stats().inflight == 1, "the start of the request")
        events = f"{server.url}/v1/requests/shared-name/events"
        assert httpx.get(events).status_code == 401
        assert httpx.get(events, headers=of_bob).status_code == 404
        with httpx.stream("GET", events, headers=of_ann, timeout=30) as answer:
            request_id = next(traces(answer))["request_id"]
        assert httpx.get(f"{server.url}/v1/requests/{request_id}/events", headers=of_bob).status_code == 404
        assert set(httpx.get(f"{server.url}/v1/stats", headers=of_ann).json()["models"]) == {"lm", "draw"}
        assert len(httpx.get(f"{server.url}/v1/stats", headers=of_bob).json()["models"]) == 3
        held.go.set()
        thread.join()


# ------------------------------------------------------------------------------------------------------- gauges


def test_gauges_show_what_is_held(server: Running, models: dict[str, AsyncOmni], held: Held) -> None:
    thread = posted(server, "counted")
    until(lambda: models["lm"].stats().inflight == 1, "the start of the request")
    stats = httpx.get(f"{server.url}/v1/stats").json()
    lm = stats["models"]["lm"]
    assert (lm["inflight"], lm["max_inflight"]) == (1, models["lm"].orchestrator.max_inflight)
    assert lm["stages"]["thinker"]["extra"]["blocks"] > 0
    assert 10 * 2**20 < stats["memory"]["process"] < stats["memory"]["host"]
    assert stats["limits"]["max_body_bytes"] == 64 * 2**20
    held.go.set()
    thread.join()


def test_models_say_their_stages_and_defaults(server: Running) -> None:
    listed = {model["id"]: model for model in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert listed["omni"]["stages"] == ["thinker", "talker", "token2wav"]
    assert set(listed["omni"]["defaults"]) == {"sampling"}
    assert listed["omni"]["defaults"]["sampling"]["max_tokens"] >= 1
    assert set(listed["draw"]["defaults"]) == {"drawing"}
    assert listed["draw"]["defaults"]["drawing"]["steps"] >= 1
