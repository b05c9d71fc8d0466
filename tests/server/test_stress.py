"""What the service does when clients leave, stall, send nonsense or too much."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from omnistage.core.errors import StageError
from omnistage.omni import AsyncOmni
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import LONG, SHORT, SMALL_BODY, Held, Running, aborted, raw, serving, status_of, until

# -------------------------------------------------------------------------------------------------- who leaves


@pytest.mark.parametrize("held", [20], indirect=True)
def test_a_reader_of_a_stream_that_leaves_ends_its_work(server: Running, lm: AsyncOmni, held: Held) -> None:
    before = aborted(lm)
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()  # kept: without it the connection is closed at once
        next(lines)
        assert lm.stats().inflight == 1
    until(lambda: lm.stats().inflight == 0, "the end of the request")
    assert aborted(lm) == before + 1
    assert not held.go.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_the_first_token_frees_its_place_before_the_step_ends(
    server: Running, lm: AsyncOmni, held: Held, stream: bool
) -> None:
    before = aborted(lm)
    connection = raw(server, json.dumps({**LONG, "stream": stream}).encode())
    until(lambda: lm.stats().inflight == 1, "the start of the request")
    connection.close()
    until(lambda: lm.stats().inflight == 0, "the end of the request")  # and no step has ended since
    assert aborted(lm) == before + 1
    assert not held.go.is_set()


def test_a_disconnect_is_recorded(server: Running, lm: AsyncOmni, held: Held, audit: list[dict[str, Any]]) -> None:
    raw(server, json.dumps(LONG).encode()).close()
    until(lambda: bool(audit), "a line in the audit log")
    assert (audit[0]["status"], audit[0]["ended"]) == (499, "disconnected")


def test_who_leaves_while_it_is_admitted_has_its_request_in_the_audit_log(
    server: Running, lm: AsyncOmni, audit: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine took it, and it may have taken a step: it must be found by its id."""
    start, starts, go = lm.orchestrator.start, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        starts.set()
        assert go.wait(HANG_SECONDS)
        return start(*args)

    monkeypatch.setattr(lm.orchestrator, "start", slow)
    before = aborted(lm)
    connection = raw(server, json.dumps(LONG).encode())
    assert starts.wait(HANG_SECONDS)
    connection.close()
    until(lambda: bool(audit), "a line in the audit log")
    assert (audit[0]["ended"], audit[0]["requests"]) == ("disconnected", [])
    go.set()
    until(lambda: len(audit) == 2, "a line for the engine's request")
    assert (audit[1]["endpoint"], audit[1]["ended"], len(audit[1]["requests"])) == ("background", "disconnected", 1)
    until(lambda: aborted(lm) == before + 1, "the end of the request")


def test_a_slow_reader_is_cut_off(service: Service, lm: AsyncOmni, audit: list[dict[str, Any]]) -> None:
    body = {**LONG, "max_tokens": 400, "n": 4, "logprobs": 5, "stream": True}  # a megabyte and more
    with serving(service, stall_seconds=0.5) as server:
        connection = raw(server, json.dumps(body).encode())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        until(lambda: bool(audit), "the end of the connection")
        assert audit[0]["ended"] == "slow_reader"
        # What was written before it was cut is bounded by buffers, not by the answer.
        assert audit[0]["bytes_out"] < 400_000
        assert lm.stats().inflight == 0
        got = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                got += piece
        connection.close()
        assert b"[DONE]" not in got
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT).status_code == 200


# ---------------------------------------------------------------------------------------------------- too much


def test_a_body_that_announces_too_much_is_refused_unread(service: Service) -> None:
    with serving(service, max_body_bytes=SMALL_BODY) as server:
        for length in (SMALL_BODY + 1, 10**18):
            connection = raw(server, b"", f"Content-Length: {length}\r\n")  # and no byte of it follows
            assert status_of(connection) == 413
            connection.close()


def test_a_body_without_a_length_is_refused_once_it_is_too_much(service: Service) -> None:
    with serving(service, max_body_bytes=SMALL_BODY) as server:
        chunk = b"%x\r\n%s\r\n" % (SMALL_BODY, b" " * SMALL_BODY)
        connection = raw(server, chunk * 2, "Transfer-Encoding: chunked\r\n")  # it never ends
        assert status_of(connection) == 413
        connection.close()
        fits = json.dumps(SHORT).encode()
        connection = raw(server, b"%x\r\n%s\r\n0\r\n\r\n" % (len(fits), fits), "Transfer-Encoding: chunked\r\n")
        assert status_of(connection) == 200
        connection.close()


def test_a_body_that_stops_is_given_up(service: Service) -> None:
    with serving(service, stall_seconds=0.2) as server:
        connection = raw(server, b'{"model"', "Content-Length: 100\r\n")
        assert status_of(connection) == 408
        connection.close()


def test_a_full_queue_says_when_to_come_again(
    server: Running, lm: AsyncOmni, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm.orchestrator, "max_inflight", 2)
    waiting = [raw(server, json.dumps(SHORT).encode()) for _ in range(2)]
    until(lambda: lm.stats().inflight == 2, "a full queue")
    with server.client() as client, pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**SHORT)
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    held.go.set()
    assert [status_of(connection) for connection in waiting] == [200, 200]
    for connection in waiting:
        connection.close()


def test_two_requests_of_many_answers_leave_room_for_others(
    server: Running, lm: AsyncOmni, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm.orchestrator, "max_inflight", 8)
    many = raw(server, json.dumps({**SHORT, "n": 4}).encode())
    until(lambda: lm.stats().inflight == 1, "the first")
    with server.client() as client, pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**SHORT, n=4)
    assert caught.value.code == "queue_full"
    assert "beyond the first" in caught.value.message
    others = [raw(server, json.dumps(SHORT).encode()) for _ in range(2)]
    until(lambda: lm.stats().inflight == 3, "the others")
    held.go.set()
    assert [status_of(connection) for connection in (many, *others)] == [200] * 3
    with server.client() as client:
        assert len(client.completions.create(**SHORT, n=8).choices) == 8
    for connection in (many, *others):
        connection.close()


def test_the_prompts_of_a_request_count_as_its_answers_do(
    server: Running, lm: AsyncOmni, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm.orchestrator, "max_inflight", 8)
    many = raw(server, json.dumps({**SHORT, "prompt": ["a", "b", "c", "d"], "n": 2}).encode())
    until(lambda: lm.stats().inflight == 4, "all of its prompts")
    with server.client() as client, pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**{**SHORT, "prompt": ["a", "b"]})
    assert "4 places together, and 7 of them are taken" in caught.value.message
    held.go.set()
    assert status_of(many) == 200
    many.close()
    with server.client() as client:
        assert len(client.completions.create(**{**SHORT, "prompt": ["a", "b"]}).choices) == 2
        with pytest.raises(openai.APIStatusError) as caught_more:
            client.completions.create(**{**SHORT, "prompt": ["a", "b", "c"], "n": 3})
    assert (caught_more.value.status_code, caught_more.value.param) == (413, "prompt")
    assert "9 answers are over the limit of 8" in caught_more.value.message


# ------------------------------------------------------------------------------------------------ not now, too late


@pytest.mark.parametrize(("state", "code"), [("loading", "loading"), ("draining", "shutting_down")])
def test_no_work_is_taken_while_loading_or_draining(service: Service, state: str, code: str) -> None:
    setattr(service, state, True)
    with serving(service) as server, server.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**SHORT)
        assert (caught.value.status_code, caught.value.code) == (503, code)
        assert httpx.get(f"{server.url}/ready").json() == {"status": state}
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        connection = raw(server, b"", "Content-Length: 1000\r\n")  # said before the body is read
        assert status_of(connection) == 503
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_without_anything_made_is_408(client: openai.OpenAI, held: Held, stream: bool) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**SHORT, stream=stream, extra_body={"timeout": 0.1})
    assert (caught.value.status_code, caught.value.code) == (408, "deadline_exceeded")
    assert caught.value.param == "timeout"


def test_a_deadline_with_something_made_is_an_answer(
    client: openai.OpenAI, lm: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, deadlines = lm.orchestrator.stages[lm.orchestrator.graph.entry], lm.orchestrator._timer
    step, steps = stage.step, itertools.count()

    def late_after_some() -> object:
        if next(steps) == 6:  # some tokens are there
            monkeypatch.setattr(deadlines, "_clock", lambda: time.monotonic() + 60)
            deadlines.tick()
        return step()

    monkeypatch.setattr(stage, "step", late_after_some)
    answer = client.completions.create(
        model="lm", prompt="Once", max_tokens=1500, extra_body={"timeout": 60.0, "ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens < 1500


def test_a_cancelled_request_ends_with_its_own_status(server: Running, lm: AsyncOmni, held: Held) -> None:
    connection = raw(server, json.dumps(LONG).encode())
    until(lambda: lm.stats().inflight == 1, "the start of the request")
    (request_id,) = lm.orchestrator._runs
    assert httpx.get(f"{server.url}/v1/requests/{request_id}").json()["request_id"] == request_id
    assert httpx.delete(f"{server.url}/v1/requests/{request_id}").json()["cancelled"] is True
    assert status_of(connection) == 499
    assert httpx.delete(f"{server.url}/v1/requests/{request_id}").status_code == 404
    connection.close()


# ------------------------------------------------------------------------------------------------------- defects


@pytest.mark.parametrize("make_error", [partial(StageError, "the stage fails"), partial(ZeroDivisionError, "secret")])
def test_what_fails_is_answered_and_harms_no_other(
    server: Running, lm: AsyncOmni, monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], Exception]
) -> None:
    build = lm._requests.build

    def failing(prompt: Any, *rest: Any) -> object:
        if prompt == "fail":
            raise make_error()
        return build(prompt, *rest)

    monkeypatch.setattr(lm._requests, "build", failing)

    async def both() -> tuple[httpx.Response, list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=server.url) as client:
            good = [client.post("/v1/completions", json=SHORT) for _ in range(4)]
            bad, *rest = await asyncio.gather(client.post("/v1/completions", json={**SHORT, "prompt": "fail"}), *good)
            return bad, rest

    bad, rest = asyncio.run(both())
    assert bad.status_code == 500
    assert "secret" not in bad.text
    assert bad.json()["error"]["type"] == "server_error"
    assert {answer.status_code for answer in rest} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in rest}) == 1


# ---------------------------------------------------------------------------------------------------- a mixed load

MALFORMED = (b"", b"{", b"[" * 20_000, b"\xff\xfe", b"null", b'{"model": "lm"}', b'{"model": "lm", "prompt": NaN}')


async def mixed(url: str, count: int) -> dict[str, int]:
    """Requests of every kind at once, each with the statuses that are right for it; how many there were of each."""
    chance = random.Random(0)
    seen: dict[str, int] = {}
    expected: str | None = None
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=48)) as client:

        async def valid() -> None:
            nonlocal expected
            answer = await client.post("/v1/completions", json=SHORT)
            assert answer.status_code in (200, 429), answer.text
            if answer.status_code == 200:
                expected = expected or answer.json()["choices"][0]["text"]
                assert answer.json()["choices"][0]["text"] == expected
            else:
                assert int(answer.headers["Retry-After"]) >= 1

        async def leaves() -> None:
            body = {**LONG, "stream": chance.random() < 0.5}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.random() * 0.2):
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code in (200, 429), answer.text

        async def breaks_off() -> None:
            async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                assert answer.status_code in (200, 429)
                async for _ in answer.aiter_lines():
                    break

        async def malformed() -> None:
            headers = {"Content-Type": "application/json"}
            answer = await client.post("/v1/completions", content=chance.choice(MALFORMED), headers=headers)
            assert answer.status_code == 400, answer.text

        async def oversize() -> None:
            answer = await client.post("/v1/completions", json={**SHORT, "prompt": "x" * 2**18})
            assert answer.status_code == 413, answer.text

        async def cancelled() -> None:
            async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                if answer.status_code == 429:
                    return
                lines = [line async for line in answer.aiter_lines() if await stop(line)]
                assert lines[-1] == "data: [DONE]"

        async def stop(line: str) -> bool:
            if line.startswith("data: {") and '"finish_reason":null' in line:
                ended = await client.delete(f"/v1/requests/{json.loads(line[6:])['id']}")
                assert ended.status_code in (200, 404)
            return bool(line)

        async def late() -> None:
            answer = await client.post("/v1/completions", json={**LONG, "timeout": 0.02})
            assert answer.status_code in (200, 408, 429), answer.text

        async def draws() -> None:
            body = {"model": "draw", "prompt": "a hat", "size": "64x64", "steps": 2}
            answer = await client.post("/v1/images/generations", json=body)
            assert answer.status_code in (200, 429), answer.text

        kinds = (valid, valid, valid, leaves, breaks_off, malformed, malformed, oversize, cancelled, late, draws)
        room = asyncio.Semaphore(40)

        async def one() -> None:
            kind = chance.choice(kinds)
            async with room:
                await kind()
            seen[kind.__name__] = seen.get(kind.__name__, 0) + 1

        await asyncio.gather(*(one() for _ in range(count)))
    return seen


def test_a_mixed_load_leaves_nothing_behind(service: Service, lm: AsyncOmni, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm.orchestrator, "max_inflight", 12)
    with serving(service, max_body_bytes=2**17) as server:
        seen = asyncio.run(mixed(server.url, 250))
        assert sum(seen.values()) == 250
        assert len(seen) == 8
        for model in service.models.values():
            until(lambda m=model: m.omni.stats().inflight == 0, f"the end of all requests of {model.name}")  # type: ignore[misc]
            model.omni.orchestrator.check_idle()
            for stage in model.omni.orchestrator.stages.values():
                check = getattr(stage, "check_integrity", None)
                if check is not None:
                    check()
            stats = model.omni.stats()
            assert stats.admitted == sum(stats.finished.values())
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60).status_code == 200
