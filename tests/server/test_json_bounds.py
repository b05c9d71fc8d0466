"""One JSON body cannot stop the service: values, text and lists are counted before they are parsed and validated."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from omnistage.core.errors import InvalidRequestError, LimitExceededError
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.http import json_body, routing
from omnistage.server.http.json_body import JsonLimits, PartialBody, is_small, parse_json, run_json
from omnistage.server.openai.completions import CompletionRequest
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import Held, Running, data_url, longest_pause, serving, until

MANY = 2 * 2**20
"""Values in 4 MiB. Each of these bodies used to block the event loop for 5 to 20 seconds."""
FEWER = 200_000
"""Within the limit of values, and far beyond what any list may have."""
MESSAGES = [{"role": "user", "content": "a"}]


def zeros(count: int) -> str:
    return "[" + "0," * (count - 1) + "0]"


def pairs(count: int, value: str = "0") -> str:
    return "{" + ",".join(f'"{index}":{value}' for index in range(count)) + "}"


def body_with(field: str, value: str, **others: Any) -> bytes:
    return f'{json.dumps({"model": "lm", **others})[:-1]},"{field}":{value}}}'.encode()


HOSTILE: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "tools": ("chat/completions", lambda n: body_with("tools", zeros(n), messages=MESSAGES)),
    "messages": ("chat/completions", lambda n: body_with("messages", zeros(n))),
    "stop": ("chat/completions", lambda n: body_with("stop", zeros(n), messages=MESSAGES)),
    "logit_bias": ("chat/completions", lambda n: body_with("logit_bias", pairs(n, '"x"'), messages=MESSAGES)),
    "metadata": ("chat/completions", lambda n: body_with("metadata", pairs(n), messages=MESSAGES)),
    "modalities": ("chat/completions", lambda n: body_with("modalities", zeros(n), messages=MESSAGES)),
    "drawing": ("chat/completions", lambda n: body_with("drawing", pairs(n), messages=MESSAGES)),
    "messages[0].content": (
        "chat/completions",
        lambda n: body_with("messages", f'[{{"role":"user","content":{zeros(n)}}}]'),
    ),
    "messages[0].tool_calls": (
        "chat/completions",
        lambda n: body_with("messages", f'[{{"role":"assistant","content":null,"tool_calls":{zeros(n)}}}]'),
    ),
    "response_format.json_schema.schema": (
        "chat/completions",
        lambda n: body_with(
            "response_format", f'{{"type":"json_schema","json_schema":{{"schema":{pairs(n)}}}}}', messages=MESSAGES
        ),
    ),
    "input": ("responses", lambda n: body_with("input", zeros(n))),
    "include": ("responses", lambda n: body_with("include", zeros(n), input="a")),
    "prompt": ("completions", lambda n: body_with("prompt", zeros(n - 1)[:-1] + ',"a"]')),
    "stop_token_ids": ("completions", lambda n: body_with("stop_token_ids", pairs(n), prompt="a")),
}
"""By the field at fault: the endpoint, and its body with so many values."""


def post(server: Running, path: str, body: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers, timeout=120)


@pytest.mark.parametrize("field", ["tools", "messages", "stop", "logit_bias", "metadata", "input", "prompt"])
def test_millions_of_values_are_refused_at_once(empty: Running, field: str) -> None:
    path, make = HOSTILE[field]
    body = make(MANY // 5 if field in ("logit_bias", "metadata") else MANY)  # 4 MiB in either case
    with longest_pause(empty):
        answer = post(empty, path, body)
    assert answer.status_code == 413, answer.text
    message = answer.json()["error"]["message"]
    assert "JSON values" in message
    assert str(JsonLimits().max_values) in message


@pytest.mark.parametrize("field", HOSTILE)
def test_a_list_is_counted_before_its_items_are_validated(empty: Running, field: str) -> None:
    path, make = HOSTILE[field]
    body = make(FEWER)
    with longest_pause(empty):
        answer = post(empty, path, body)
    assert answer.status_code in (400, 413), answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    if field not in ("prompt", "stop_token_ids"):  # of the wrong kind, whatever their number
        assert f"has {FEWER} items, and may have" in error["message"]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "images/generations", "audio/speech", "videos"])
def test_unknown_fields_are_refused_with_the_first_of_them(empty: Running, path: str) -> None:
    required = {"model": "lm", "prompt": "a", "input": "a", "messages": MESSAGES}
    known = {"chat/completions": "messages", "responses": "input", "audio/speech": "input"}.get(path, "prompt")
    extra = {f"unknown-{index}": index for index in range(FEWER)}
    body = json.dumps({"model": "lm", known: required[known], **extra}).encode()
    with longest_pause(empty):
        answer = post(empty, path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "unknown-0"


def test_many_token_ids_are_not_tried_as_every_kind_of_prompt() -> None:
    """Pydantic holds the interpreter, and with it the event loop, while it collects an error for each of them."""
    values = {"model": "lm", "prompt": list(range(200_000))}
    start = time.thread_time()
    assert CompletionRequest.model_validate(values).prompt == tuple(values["prompt"])
    assert time.thread_time() - start < 0.2


def test_many_prompts_are_counted_before_they_are_validated(empty: Running) -> None:
    for item in ('"a"', "[]", "null"):
        with longest_pause(empty):
            answer = post(empty, "completions", body_with("prompt", f"[{','.join([item] * 100_000)}]"))
        assert answer.status_code == 413
        assert "exceed the limit of 64" in answer.json()["error"]["message"]


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [150, 900, 100_000])
def test_deep_nesting_is_refused(empty: Running, opening: str, depth: int) -> None:
    closing = {"[": "]", '{"a":': "}", '[{"a":': "}]"}[opening]
    with longest_pause(empty):
        answer = post(empty, "chat/completions", body_with("metadata", opening * depth + "1" + closing * depth))
    assert answer.status_code == 400, answer.text
    assert "nested" in answer.json()["error"]["message"]


def test_too_much_text_is_refused_and_says_so(empty: Running) -> None:
    for text in ("word, " * (12 * 2**20 // 6), "A" * (12 * 2**20)):  # the second could be base64 by its bytes
        with longest_pause(empty):
            answer = post(empty, "chat/completions", json.dumps({"model": "lm", "messages": text}).encode())
        assert answer.status_code == 413
        assert "besides media" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("begin", "piece", "reason"),
    [(b'{"tools":[', b"0,", b"JSON values"), (b'{"messages":"', b"word ", b"besides media")],
)
def test_a_body_with_too_much_is_refused_before_all_of_it_is_there(
    empty: Running, begin: bytes, piece: bytes, reason: bytes
) -> None:
    address = httpx.URL(empty.url)
    sent = begin + piece * (10 * 2**20 // len(piece))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % (60 * 2**20)
    with socket.create_connection((address.host, address.port or 80), 30) as line:
        line.sendall(head + sent)  # and no more
        answer = b""
        while reason not in answer and (piece := line.recv(2**16)):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413")
    assert reason in answer


def test_text_with_many_commas_passes_while_it_arrives() -> None:
    limits = JsonLimits(max_text_bytes=2**20, max_values=1000)
    body = PartialBody(limits)
    text = json.dumps({"input": 'a, "b", [c]' * 20_000, "data": "A" * 2**20}).encode()
    checks = 0
    for start in range(0, len(text), 2**16):
        if body.add(text[start : start + 2**16]):
            body.check()
            checks += 1
    assert body.join() == text
    assert 1 <= checks <= 12  # not with every chunk


def test_a_body_is_not_refused_for_a_medium_that_has_only_begun() -> None:
    body, text = PartialBody(JsonLimits(max_text_bytes=2**17)), b'{"input":[{"text":"' + b"a b " * (2**15 - 1000)
    for chunk in (text, b'","data":"' + b"A" * 6000, b"A" * 2**17, b'"}]}'):
        if body.add(chunk):
            body.check()
    parse_json(body.join(), JsonLimits(max_text_bytes=2**17))


@pytest.mark.parametrize("padding", ['"x": 0', f'"x": "{"y" * 70_000}"', f'"x": [{"0, " * 40_000}0]'])
@pytest.mark.parametrize(
    ("value", "message"),
    [(r'"\ud800"', "half of a surrogate pair"), ("NaN", "not a finite number"), ("1e999", "not a finite number")],
)
def test_what_cannot_be_read_is_located_in_bodies_of_any_size(padding: str, value: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        parse_json(f'{{{padding}, "a": [1, {{"b": {value}}}]}}'.encode(), JsonLimits())
    assert refused.value.param == "a[1].b"


def test_text_in_the_place_of_media_of_a_tool_is_text() -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"data": "A" * 2**17}}}
    with pytest.raises(LimitExceededError, match="besides media"):
        parse_json(json.dumps({"tools": [tool]}).encode(), JsonLimits(max_text_bytes=2**16))


def test_large_text_within_the_limit_is_served(server: Running) -> None:
    text = 'He said "no, [never]", and left.\n' * (6 * 2**20 // 40)  # more commas and brackets than values are allowed
    body = json.dumps({"model": "nobody", "messages": [{"role": "user", "content": text}]}).encode()
    with longest_pause(server):
        answer = post(server, "chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")  # all but its model is right


def test_a_large_image_is_no_text(server: Running) -> None:
    data = base64.b64decode(data_url().partition(",")[2]) + bytes(15 * 2**20)  # decoders ignore what follows an image
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    content = json.dumps({"model": "omni", "messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    for body in (content, content.replace("/", "\\/")):  # some writers escape slashes
        answer = post(server, "chat/completions", body.encode())
        assert answer.status_code == 200, answer.text


def test_a_hundred_thousand_token_ids_are_a_prompt(server: Running) -> None:
    body = json.dumps({"model": "lm", "prompt": [5] * 100_000, "max_tokens": 1}).encode()
    with longest_pause(server):
        answer = post(server, "completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_numbers_that_json_does_not_have_are_refused(empty: Running) -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        tools = f'[{{"type":"function","name":"a","parameters":{{"maximum":{value}}}}}]'
        answer = post(empty, "responses", body_with("tools", tools, input="a"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].parameters.maximum")


@pytest.mark.parametrize("more", [0, 5000])
def test_long_numbers_are_refused_before_they_are_read(more: int) -> None:
    """Python and pydantic read up to 4,300 digits, at a cost of their square: half a second for a body of 8 MiB."""
    numbers = ",".join(["9" * 4299] * 20 + ["1"] * more)
    with pytest.raises(InvalidRequestError, match="digits"):
        parse_json(f"[{numbers}]".encode(), JsonLimits())


@pytest.mark.parametrize("more", [0, 5000])
def test_digits_in_a_text_are_no_number(more: int) -> None:
    text = "7" * 100_000
    values, _ = parse_json(json.dumps([text, *range(more)]).encode(), JsonLimits())
    assert values == [text, *range(more)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_large_body_must_be_utf_8(encoding: str) -> None:
    limits = JsonLimits(max_text_bytes=100_000)
    body = json.dumps({"messages": [{"data": "A" * 100_000}]}).encode(encoding)
    arriving = PartialBody(limits)
    assert arriving.add(body[:120_000])
    for read in (arriving.check, lambda: parse_json(body, limits)):
        with pytest.raises(LimitExceededError, match="UTF-8"):
            read()


def test_many_values_count_in_the_memory_of_all_bodies(service: Service, held: Held) -> None:
    """A body of 20 kB with 10,000 values counts a megabyte while its request runs, here more than there is for all."""
    with serving(service, max_body_bytes=2**18, max_held_bytes=2**18) as server, ThreadPoolExecutor() as pool:
        body = body_with("prediction", f'{{"content":{zeros(10_000)}}}', messages=MESSAGES, max_tokens=1)
        first = pool.submit(post, server, "chat/completions", body)
        until(lambda: held.waits, "the first request runs")
        assert post(server, "chat/completions", body_with("messages", json.dumps(MESSAGES))).status_code == 429
        held.go.set()
        assert first.result(HANG_SECONDS).status_code == 200
        assert post(server, "chat/completions", body).status_code == 200


# ------------------------------------------------------------------------------------------------------ counting


def values_of(data: Any) -> int:
    """The number of values besides the first, as they are in memory."""
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return sum(1 + values_of(item) for item in items)


def any_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 5 else 5)
    if kind == 5:
        return [any_json(rng, depth + 1) for _ in range(rng.randrange(6))]
    if kind == 6:
        return {f'k{index}",[{{\\': any_json(rng, depth + 1) for index in range(rng.randrange(6))}
    text = "".join(rng.choices('ab,[]{}"\\\n\u00e9\U0001f600/', k=rng.randrange(12)))
    return (None, True, rng.randrange(10**6), rng.random(), text)[kind]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 2**20])
def test_values_are_counted_without_what_strings_contain(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "_PIECE", piece)
    rng = random.Random(piece)
    for _ in range(200):
        data = [any_json(rng) for _ in range(4)]
        body = json.dumps(data, ensure_ascii=rng.random() < 0.5).encode()
        count = json_body._count_values(body, 10**6)
        assert values_of(data) <= count <= json_body._separators(body)
        # An empty list or object is a bracket without a value.
        assert count <= values_of(data) + body.count(b"[") + body.count(b"{")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_values_are_counted_in_every_encoding(encoding: str) -> None:
    limits = JsonLimits(max_values=100_000)
    for letter in ("\u2201", "\u0122", "\u5c22"):  # half of each is a quote
        body = f'["{letter}",{"0," * 200_000}0]'.encode(encoding)
        with pytest.raises(LimitExceededError, match="JSON values or more"):
            parse_json(body, limits)
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_json('["a"]'.encode(encoding)[:-1], limits)


def test_a_refusal_needs_hardly_more_memory_than_the_body() -> None:
    body = HOSTILE["tools"][1](MANY)
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError):
            parse_json(body, JsonLimits())
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()


def test_long_strings_of_base64_are_media_wherever_they_begin() -> None:
    rng = random.Random(0)
    for _ in range(50):
        media = [base64.b64encode(rng.randbytes(rng.randrange(8_000, 40_000))).decode() for _ in range(3)]
        texts = ["x, " * rng.randrange(4_000) for _ in range(3)]
        body = json.dumps([*zip(media, texts, strict=True)]).encode()
        assert json_body._media_bytes(body) == sum(map(len, media))
        urls = json.dumps([f"data:image/png;base64,{one}" for one in media]).encode()
        assert json_body._media_bytes(urls) == sum(map(len, media))


def test_little_is_parsed_at_once_and_much_in_a_thread() -> None:
    assert is_small(b'{"model": "lm", "prompt": "Once"}')
    assert not is_small(b'"' + b"a" * 2**17 + b'"')
    assert not is_small(zeros(10_000).encode())


def test_large_bodies_are_parsed_one_at_a_time_and_keys_take_turns() -> None:
    go, order = threading.Event(), list[str]()

    def work(owner: str) -> None:
        go.wait(HANG_SECONDS)
        order.append(owner)

    async def main() -> None:
        owners = ("ann", "ann", "ann", "bob", "eve")
        tasks = [asyncio.create_task(run_json(functools.partial(work, one), small=False, owner=one)) for one in owners]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert order == ["ann", "bob", "eve", "ann", "ann"] or order == ["ann", "ann", "bob", "eve", "ann"]


def test_a_body_is_parsed_as_work_of_its_client(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[str | None] = []

    async def note(work: Callable[[], object], *, small: bool, owner: str | None) -> object:
        owners.append(owner)
        return await run_json(work, small=small, owner=owner)

    monkeypatch.setattr(routing, "run_json", note)
    body = {"model": "unknown", "prompt": "Once " * 2**15}
    with serving(service) as server:
        httpx.post(f"{server.url}/v1/completions", json=body)
        service.keyring = Keyring([Holder("ann", digest_of("a-key-for-tests"))])
        httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": "Bearer a-key-for-tests"})
    assert owners == ["127.0.0.1", "ann"]


def test_json_is_parsed_as_before() -> None:
    limits = JsonLimits()
    assert parse_json(b'\xef\xbb\xbf{"a": 1, "a": 2}', limits)[0] == {"a": 2}
    assert parse_json('{"a": "ä"}'.encode("utf-16"), limits)[0] == {"a": "ä"}
    for broken in (b"", b"{", b"[1,]", b'"\xff"', b"{} x", b"1" * 5000):
        with pytest.raises(InvalidRequestError, match="not valid JSON"):
            parse_json(broken, limits)
