"""Who may connect to `/v1/realtime`, what is refused there, and what happens to those who leave."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import websockets.sync.client as sockets
from websockets.exceptions import InvalidStatus

from omnistage.core.errors import InvalidRequestError
from omnistage.omni import AsyncOmni
from omnistage.server.access.hosts import origin_allowed
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.realtime import route as realtime
from omnistage.server.realtime.config import SessionConfig, updated
from omnistage.server.realtime.session import Session
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import Held, Running, aborted, serving, until
from tests.server.realtime_client import QUIET, RATE, TEXT, Raw, base64_of, raw_socket, said
from tests.voice import silence, voice

pytest.importorskip("onnxruntime")
KEY = "a-key-for-tests"


def error_of(server: Running, query: str = "?model=omni", **options: Any) -> tuple[int, dict[str, Any]]:
    """The status and the error of a connection that is refused."""
    with pytest.raises(InvalidStatus) as caught, raw_socket(server, query, **options):
        pass
    response = caught.value.response
    return response.status_code, json.loads(response.body)["error"]


@pytest.fixture
def guarded(service: Service) -> Iterator[Running]:
    service.keyring = Keyring([Holder("ann", digest_of(KEY), rate=1.0, models=frozenset({"lm"}))])
    with serving(service) as server:
        yield server


@pytest.fixture
def talk(server: Running) -> Iterator[Raw]:
    with raw_socket(server) as made:
        assert made.recv()["type"] == "session.created"
        made.send("session.update", session=TEXT)
        assert made.recv()["type"] == "session.updated"
        yield made


# ------------------------------------------------------------------------------------------------ who may connect


def test_a_key_is_asked_for(guarded: Running) -> None:
    status, error = error_of(guarded, "?model=lm")
    assert (status, error["code"]) == (401, "invalid_api_key")
    status, error = error_of(guarded, "?model=lm", additional_headers={"Authorization": "Bearer wrong-key"})
    assert status == 401
    status, error = error_of(guarded, "?model=omni", additional_headers={"Authorization": f"Bearer {KEY}"})
    assert (status, error["code"]) == (403, "permission_denied")
    with guarded.client(api_key=KEY) as client, client.realtime.connect(model="lm") as connection:
        assert connection.recv().type == "session.created"


def test_browsers_give_their_key_among_the_subprotocols(guarded: Running) -> None:
    with raw_socket(guarded, "?model=lm", subprotocols=["realtime", f"openai-insecure-api-key.{KEY}"]) as talk:
        assert talk.recv()["type"] == "session.created"
        assert talk.connection.subprotocol == "realtime"  # the key is not said back
    status, _ = error_of(guarded, "?model=lm", subprotocols=["realtime", "openai-insecure-api-key.other"])
    assert status == 401


def test_the_rate_of_a_key_holds_for_each_response(guarded: Running) -> None:
    with raw_socket(guarded, "?model=lm", additional_headers={"Authorization": f"Bearer {KEY}"}) as talk:
        talk.send("conversation.item.create", item=said("Hello"))
        talk.send("response.create", response={"max_output_tokens": 2})
        assert talk.until("response.done")[-1]["response"]["status"] in ("completed", "incomplete")
        talk.send("response.create", response={"max_output_tokens": 2})
        refused = talk.until("response.done")[-1]["response"]
        assert refused["status"] == "failed"
        assert refused["status_details"]["error"]["code"] == "rate_limit_exceeded"


def test_models_that_cannot_converse_are_refused(server: Running) -> None:
    status, error = error_of(server, "?model=nobody")
    assert (status, error["param"]) == (404, "model")
    status, error = error_of(server, "?model=draw")
    assert (status, error["code"]) == (400, "unsupported_modality")


@pytest.mark.parametrize(("state", "code"), [("loading", "loading"), ("draining", "shutting_down")])
def test_nobody_connects_while_loading_or_draining(service: Service, state: str, code: str) -> None:
    setattr(service, state, True)
    with serving(service) as server:
        status, error = error_of(server)
        assert (status, error["code"]) == (503, code)


def test_pages_of_other_origins_do_not_connect(service: Service) -> None:
    with serving(service, cors=("https://page.example",)) as server:
        port = server.url.rpartition(":")[2]
        own = f"http://127.0.0.1:{port}"
        for origin in ("https://evil.example", f"http://127.0.0.1:{int(port) ^ 1}", "null", "https://page.example:1"):
            status, error = error_of(server, origin=origin)
            assert (status, error["code"]) == (403, "permission_denied"), origin
        for origin in (own, own.upper().replace("HTTP", "http"), "https://page.example", None):
            with raw_socket(server, origin=origin) as talk:
                assert talk.recv()["type"] == "session.created"


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "may"),
    [
        ("https://a.example", "a.example", (), True),
        ("https://a.example", "a.example:443", (), True),
        ("http://a.example", "a.example:443", (), False),
        ("http://[::1]:8000", "[::1]:8000", (), True),
        ("http://a.example:99999", "a.example:99999", (), False),
        ("null", "", (), False),
        ("https://b.example", "a.example", ("*",), True),
        ("https://a.example.evil.example", "a.example", (), False),
    ],
)
def test_origins_are_compared_by_host_and_port(origin: str, host: str, allowed: tuple[str, ...], may: bool) -> None:
    assert origin_allowed(origin, host, allowed) is may


def test_sessions_are_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime, "Options", functools.partial(realtime.Options, max_sessions=1))
    with serving(service) as server:
        with raw_socket(server) as talk:
            talk.recv()
            assert error_of(server)[0] == 429
        until(lambda: not service.sessions, "the end of the session")
        with raw_socket(server) as talk:
            talk.recv()


def bearer(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


@pytest.mark.parametrize("most", [2, None])
def test_no_key_takes_every_session(service: Service, monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    """A key has as many as it may have requests; one that may have any number has a quarter of all."""
    monkeypatch.setattr(realtime, "Options", functools.partial(realtime.Options, max_sessions=8))
    ann, bob = Holder("ann", digest_of(KEY), max_concurrent=most), Holder("bob", digest_of("a-key-for-bob"))
    service.keyring = Keyring([ann, bob])
    with serving(service) as server:
        with raw_socket(server, "?model=lm", **bearer(KEY)) as first, raw_socket(server, "", **bearer(KEY)) as second:
            first.recv()
            second.recv()
            status, error = error_of(server, "?model=lm", **bearer(KEY))
            assert (status, error["code"]) == (429, "rate_limit_exceeded")
            assert "2 sessions" in error["message"]
            with raw_socket(server, "?model=lm", **bearer("a-key-for-bob")) as other:
                assert other.recv()["type"] == "session.created"
        until(lambda: ann.use.idle, "the end of the sessions")
        with raw_socket(server, "?model=lm", **bearer(KEY)) as again:
            again.recv()


def test_without_keys_one_client_may_have_every_session(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime, "Options", functools.partial(realtime.Options, max_sessions=2))
    with serving(service) as server, raw_socket(server) as first, raw_socket(server) as second:
        first.recv()
        assert second.recv()["type"] == "session.created"
        status, error = error_of(server)
        assert (status, error["code"]) == (429, "queue_full")


def test_a_refusal_has_a_body_and_leaves_no_trace_in_the_log(
    service: Service, audit: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    service.keyring = Keyring([Holder("ann", digest_of(KEY), models=frozenset({"lm"}))])
    refused = [("/v1/realtime", 401), ("/v1/other", 404), ("/v1/realtime/", 404), ("/", 404)]
    with serving(service) as server:
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)  # it hands nothing on
        url = server.url.replace("http://", "ws://")
        for path, expected in refused:
            with pytest.raises(InvalidStatus) as caught, sockets.connect(f"{url}{path}"):
                pass
            response = caught.value.response
            assert response.status_code == expected, path
            assert json.loads(response.body)["error"]["message"], path
            assert response.headers["Content-Type"] == "application/json"
        assert error_of(server, "?model=omni", **bearer(KEY))[0] == 403
        until(lambda: len(audit) == 4, "the records")
    assert [(line["endpoint"], line["status"], line["who"]) for line in audit] == [
        ("WS /v1/realtime", 401, None),
        ("unknown", 404, None),
        ("unknown", 404, None),
        ("WS /v1/realtime", 403, "ann"),
    ]
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_model_may_be_named_later(server: Running, audit: list[dict[str, Any]]) -> None:
    with raw_socket(server, "") as talk:
        assert "model" not in talk.recv()["session"]
        talk.send("response.create")
        assert talk.recv()["error"]["param"] == "model"
        talk.send("session.update", session={"type": "realtime", "model": "nobody"})
        assert talk.recv()["error"]["param"] == "session.model"
        talk.send("session.update", session={"type": "realtime", "model": "lm"})
        session = talk.recv()["session"]
        assert (session["model"], session["output_modalities"]) == ("lm", ["text"])
        talk.send("session.update", session={"type": "realtime", "model": "omni"})
        assert "cannot be changed" in talk.recv()["error"]["message"]
    until(lambda: bool(audit), "the session's record")
    assert audit[0]["model"] == "lm"


# --------------------------------------------------------------------------------------------- what is refused


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    ("input_audio_buffer.append", {"audio": "not base64!"}, "audio"),
    ("input_audio_buffer.append", {"audio": "AAA="}, None),  # two bytes: taken
    ("input_audio_buffer.append", {"audio": base64.b64encode(b"abc").decode()}, "audio"),
    ("input_audio_buffer.append", {}, "audio"),
    ("input_audio_buffer.commit", {}, None),
    ("output_audio_buffer.clear", {}, "type"),
    ("conversation.item.create", {"item": {"type": "message", "role": "user", "content": []}}, "item.content"),
    ("conversation.item.create", {"item": {**said("x"), "role": "tool"}}, "item.role"),
    ("conversation.item.create", {"item": said("")}, "item.content[0].text"),
    ("conversation.item.create", {"item": said("x"), "previous_item_id": "none"}, "previous_item_id"),
    (
        "conversation.item.create",
        {"item": {**said("x"), "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}},
        "item.content[0].image_url",
    ),
    (
        "conversation.item.create",
        {"item": {**said("x"), "role": "assistant", "content": [{"type": "input_audio", "audio": "AAAA"}]}},
        "item.content[0].type",
    ),
    ("conversation.item.retrieve", {"item_id": "none"}, "item_id"),
    ("conversation.item.delete", {"item_id": "none"}, "item_id"),
    ("conversation.item.truncate", {"item_id": "none", "content_index": 0, "audio_end_ms": 1}, "item_id"),
    ("conversation.item.truncate", {"item_id": "none", "content_index": 0, "audio_end_ms": -1}, "audio_end_ms"),
    ("session.update", {"session": {"voice": "nobody"}}, "session.audio.output.voice"),
    ("session.update", {"session": {"output_modalities": ["text", "audio"]}}, "session.output_modalities"),
    ("session.update", {"session": {"temperature": -1}}, "session.temperature"),
    ("session.update", {"session": {"temprature": 1}}, "session.temprature"),
    ("session.update", {"session": {"type": "transcription"}}, "session.type"),
    (
        "session.update",
        {"session": {"audio": {"input": {"turn_detection": {"type": "psychic_vad"}}}}},
        "session.audio.input.turn_detection",
    ),
    ("session.update", {"session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}}}, None),
    ("response.create", {"response": {"max_output_tokens": 0}}, None),
    ("response.create", {"response": {"conversation": "other"}}, "response.conversation"),
    ("response.create", {"response": {"input": [{"type": "item_reference", "id": "none"}]}}, "response.input[0].id"),
    ("response.cancel", {}, None),
    ("no.such.event", {}, "type"),
]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output_modalities": ["text", "audio"]}, 'must be ["text"] or ["audio"]; speech comes with its transcript'),
        ({"output_modalities": []}, 'must be ["text"] or ["audio"]'),
        ({"type": "transcription"}, "create_response of audio.input.turn_detection to false"),
        ({"tool_choice": {"name": "f"}}, '{"type": "function", "name": NAME}'),
        ({"tool_choice": {"type": "mcp", "name": "f"}}, '{"type": "function", "name": NAME}'),
        ({"audio": {"input": {"turn_detection": {"type": "psychic"}}}}, "one of 'server_vad', 'semantic_vad'"),
        ({"audio": {"input": {"turn_detection": {}}}}, "must have a `type`"),
    ],
)
def test_settings_are_refused_in_plain_words(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        updated(SessionConfig(), settings, "session")
    assert message in refused.value.message
    assert "Tuple" not in refused.value.message


def test_what_is_wrong_is_said_and_the_session_goes_on(talk: Raw) -> None:
    for index, (kind, fields, param) in enumerate(REFUSED):
        if fields.get("audio") == "AAA=":
            talk.send(kind, **fields)
            continue
        talk.send(kind, event_id=f"mine-{index}", **fields)
        answer = talk.recv()
        assert answer["type"] == "error", (kind, fields, answer)
        assert answer["error"]["event_id"] == f"mine-{index}"
        assert answer["error"]["message"]
        if param is not None:
            assert answer["error"]["param"] == param, (kind, fields, answer)
    for message in ("{", "[" * 100_000, "[1]", "null", '{"event_id": 1}', '{"type": []}', "\U0001f600"):
        talk.connection.send(message)
        assert talk.recv()["error"]["type"] == "invalid_request_error", message[:20]
    talk.connection.send(b"\x00\x01")
    assert "binary" in talk.recv()["error"]["message"]
    talk.send("conversation.item.create", item=said("Still here?"))
    talk.send("response.create")
    assert talk.until("response.done")[-1]["response"]["output"]


def test_a_model_that_does_not_hear_says_so(server: Running) -> None:
    with raw_socket(server, "?model=lm") as talk:
        session = talk.recv()["session"]
        assert session["output_modalities"] == ["text"]
        assert session["audio"]["input"]["turn_detection"] is None
        turns = {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        heard = {"type": "input_audio", "audio": base64_of(voice(0.2, RATE))}
        for kind, fields in (
            ("input_audio_buffer.append", {"audio": heard["audio"]}),
            ("conversation.item.create", {"item": {**said("x"), "content": [heard]}}),
            ("session.update", {"session": turns}),
            ("session.update", {"session": {"output_modalities": ["audio"]}}),
        ):
            talk.send(kind, **fields)
            assert talk.recv()["error"]["code"] == "unsupported_modality"


def test_without_the_extra_there_are_no_turns(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.media.vad._model_path", lambda: None)
    with raw_socket(server) as talk:
        assert talk.recv()["session"]["audio"]["input"]["turn_detection"] is None
        talk.send("session.update", session={"audio": {"input": {"turn_detection": {"type": "server_vad"}}}})
        error = talk.recv()["error"]
        assert (error["code"], "omnistage[realtime]" in error["message"]) == ("missing_dependency", True)


def test_a_message_that_is_too_long_ends_the_connection(service: Service) -> None:
    with serving(service, max_body_bytes=10_000) as server, raw_socket(server) as talk:
        talk.recv()
        talk.send("input_audio_buffer.append", audio="A" * 20_000)
        assert talk.until_closed() == ([], 1009)


def test_sound_and_items_are_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = realtime.Limits(buffer_seconds=1.0, conversation_bytes=80_000, items=3)
    monkeypatch.setattr(realtime, "Options", functools.partial(realtime.Options, limits=limits))
    second = base64_of(silence(0.9, RATE))
    with serving(service) as server, raw_socket(server) as talk:
        talk.recv()
        talk.send("session.update", session={**QUIET, "truncation": "disabled"})
        talk.recv()
        talk.send("input_audio_buffer.append", audio=second)
        talk.send("input_audio_buffer.append", audio=second)
        assert talk.recv()["error"]["code"] == "limit_exceeded"
        talk.send("input_audio_buffer.commit")
        first = talk.until("conversation.item.done")[-1]["item"]["id"]
        talk.send("input_audio_buffer.append", audio=second)
        talk.send("input_audio_buffer.commit")
        assert talk.recv()["error"]["code"] == "limit_exceeded"
        # Otherwise the oldest go, and the client is told.
        talk.send("session.update", session={"truncation": "auto"})
        talk.send("input_audio_buffer.commit")
        told = talk.until("conversation.item.done")
        assert [e["item_id"] for e in told if e["type"] == "conversation.item.deleted"] == [first]
        for _ in range(2):
            talk.send("conversation.item.create", item=said("x"))
            talk.until("conversation.item.done")
        talk.send("conversation.item.create", item=said("x"))
        assert talk.recv()["type"] == "conversation.item.deleted"
        talk.until("conversation.item.done")
        talk.send("conversation.item.create", item=said("x" * 80_000))
        assert talk.recv()["error"]["code"] == "limit_exceeded"


# ----------------------------------------------------------------------------------------------- who leaves


def begin(talk: Raw, event: str = "response.output_text.delta", **settings: Any) -> None:
    """A response of the text model, as far as this event."""
    talk.send("session.update", session={"max_output_tokens": 50, "temperature": 0, **settings})
    talk.send("conversation.item.create", item=said("Once"))
    talk.send("response.create")
    talk.until(event)


def test_who_leaves_ends_the_work(
    server: Running, lm: AsyncOmni, held: Held, audit: list[dict[str, Any]], service: Service
) -> None:
    before = aborted(lm)
    with raw_socket(server, "?model=lm") as talk:
        begin(talk, "response.created")  # and there is nothing to send that could fail
        until(lambda: lm.stats().inflight == 1, "the start of the request")
        talk.connection.socket.shutdown(socket.SHUT_RDWR)  # without a goodbye
        until(lambda: lm.stats().inflight == 0, "the end of the request")
        assert aborted(lm) == before + 1
        assert not held.go.is_set()
    until(lambda: len(audit) == 2, "both records")
    response, session = audit
    assert (response["endpoint"], response["status"], response["ended"]) == (
        "WS /v1/realtime response",
        499,
        "disconnected",
    )
    assert (session["endpoint"], session["status"], session["ended"]) == ("WS /v1/realtime", 101, "disconnected")
    assert (session["model"], session["who"]) == ("lm", "anonymous")
    assert session["bytes_in"] > 100
    assert session["bytes_out"] > 100
    assert not service.sessions


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_disconnect_is_noticed_behind_messages_that_wait(
    server: Running, service: Service, audit: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, goodbye: bool
) -> None:
    entered, ended = threading.Event(), threading.Event()

    async def handle(session: Session, text: str) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(Session, "handle", handle)
    with raw_socket(server, "?model=lm") as talk:
        for _ in range(20):
            talk.send("conversation.item.create", item=said("x" * 2000))
        assert entered.wait(HANG_SECONDS)
        if goodbye:
            talk.connection.close()
        else:
            talk.connection.socket.shutdown(socket.SHUT_RDWR)
        assert ended.wait(HANG_SECONDS)
        until(lambda: not service.sessions, "the end of the session")
    until(lambda: len(audit) == 1, "the record")
    assert audit[0]["ended"] == ("done" if goodbye else "disconnected")


def test_what_was_done_is_recorded_and_counted(server: Running, audit: list[dict[str, Any]]) -> None:
    with raw_socket(server, "?model=lm") as talk:
        begin(talk, max_output_tokens=4)
        talk.until("response.done")
    until(lambda: len(audit) == 2, "both records")
    assert (audit[0]["status"], audit[0]["completion_tokens"], audit[0]["model"]) == (200, 4, "lm")
    assert audit[1]["ended"] == "done"
    assert len(audit[0]["requests"]) == 1
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'omnistage_http_responses_total{endpoint="WS /v1/realtime",status="101"} 1.0' in metrics
    assert 'omnistage_http_responses_total{endpoint="WS /v1/realtime response",status="200"} 1.0' in metrics
    assert httpx.get(f"{server.url}/v1/requests/{audit[0]['requests'][0]}").status_code == 200


@pytest.mark.parametrize("held", [4], indirect=True)
def test_an_answer_may_finish_when_the_service_drains(
    server: Running, lm: AsyncOmni, held: Held, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in service.models.values():  # these models serve other tests too

        async def settled(omni: AsyncOmni = model.omni, **_: Any) -> None:
            await asyncio.to_thread(until, lambda: omni.stats().inflight == 0, "the end of the requests")

        monkeypatch.setattr(model.omni, "shutdown", settled)
    with raw_socket(server, "?model=lm") as busy, raw_socket(server, "?model=lm") as idle:
        idle.recv()
        begin(busy)
        draining = asyncio.run_coroutine_threadsafe(service.drain(HANG_SECONDS), server.loop)
        assert idle.until_closed() == ([], 1001)
        busy.send("response.create")
        held.go.set()
        seen, code = busy.until_closed()
        assert code == 1001
        assert seen[-1]["type"] == "response.done"
        assert [e["error"]["code"] for e in seen if e["type"] == "error"] == ["shutting_down"]
        draining.result(HANG_SECONDS)
    assert not service.sessions


def test_a_session_in_which_nothing_is_said_ends(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime, "Options", functools.partial(realtime.Options, idle_seconds=0.2))
    with serving(service) as server, raw_socket(server) as talk:
        talk.recv()
        assert talk.until_closed() == ([], 1000)


def test_a_slow_reader_is_cut_off(service: Service, audit: list[dict[str, Any]]) -> None:
    with serving(service, stall_seconds=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect((host, int(port)))
        with raw_socket(server, sock=line, max_queue=1, close_timeout=0.1) as talk:
            talk.send("session.update", session=QUIET)
            for _ in range(7):
                talk.send("input_audio_buffer.append", audio=base64_of(silence(2.0, RATE)))
            talk.send("input_audio_buffer.commit")
            item = talk.until("conversation.item.done")[-1]["item"]
            for _ in range(8):  # nearly a megabyte each
                talk.send("conversation.item.retrieve", item_id=item["id"])
            until(lambda: bool(audit), "the end of the connection")
            assert audit[0]["ended"] == "slow_reader"
    assert not service.sessions


def test_a_defect_is_named_and_ends_nothing(talk: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patch:
        patch.setattr("omnistage.server.realtime.session.parse_item", broken)
        talk.send("conversation.item.create", item=said("x"))
        error = talk.recv()["error"]
        assert (error["type"], "secret" in error["message"]) == ("server_error", False)
        patch.setattr("omnistage.server.realtime.response_runner.to_messages", broken)
        talk.send("response.create")
        failed = talk.until("response.done")[-1]["response"]
        assert failed["status"] == "failed"
        assert "secret" not in json.dumps(failed)
    talk.send("conversation.item.create", item=said("x"))
    talk.until("conversation.item.done")


def test_the_official_client_is_told_of_errors(client: openai.OpenAI) -> None:
    with client.realtime.connect(model="lm") as connection:
        connection.recv()
        connection.conversation.item.retrieve(item_id="none", event_id="mine")
        event = connection.recv()
        assert (event.type, event.error.event_id, event.error.param) == ("error", "mine", "item_id")
