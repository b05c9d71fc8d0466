"""What clients of OpenAI, vLLM and agents rely on beside the plain protocol, each with its effect."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from omnistage.cli.serve import ServiceOptions
from omnistage.core.errors import ConfigError, InvalidRequestError
from omnistage.core.voices import OPENAI_VOICES, VoiceNames
from omnistage.server.http.errors import NotFoundError
from omnistage.server.openai.responses.store import MAX_BYTES, ResponseStore
from tests.server.harness import Running
from tests.server.starter_harness import HELLO, server, starter

__all__ = ["server", "starter"]  # fixtures

CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 6, "temperature": 0}


def post(server: Running, path: str, body: Any, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **more)


# ------------------------------------------------------------------------------------------------------- voices


def test_openais_names_are_the_models_voices_in_turn() -> None:
    names = VoiceNames(["Ethan", "alloy"], {"echo": "Ethan", "boss": "Ethan"})
    assert names.resolve("ETHAN") == names.resolve("boss") == names.resolve("echo") == "Ethan"
    assert names.resolve("alloy") == "alloy"  # its own
    assert {names.resolve(name) for name in OPENAI_VOICES} == {"Ethan", "alloy"}
    assert VoiceNames([]).resolve("nova") is None
    with pytest.raises(InvalidRequestError, match="there is no voice 'nobody'"):
        names.resolve("nobody")
    with pytest.raises(InvalidRequestError, match="leave it out"):
        VoiceNames([], speaks=False).resolve("alloy")
    with pytest.raises(ConfigError, match="there is no voice 'Nobody'") as error:
        VoiceNames(["Ethan"], {"alloy": "Nobody"})
    assert error.value.param == "deployment.voices.alloy"


# -------------------------------------------------------------------------------------------------------- chats


def test_the_model_may_be_left_out_and_an_id_is_sent_back(server: Running) -> None:
    answer = post(server, "/v1/chat/completions", CHAT, headers={"X-Request-Id": "mine-1"})
    assert answer.json()["model"] == "starter"
    assert answer.headers["x-request-id"] == "mine-1"
    assert httpx.get(f"{server.url}/v1/requests/mine-1").json()["request_id"].startswith("req-")
    odd = post(server, "/v1/chat/completions", CHAT, headers={"X-Request-Id": "a b/c"})
    assert odd.headers["x-request-id"].startswith("req-")


def test_every_event_has_the_usage_so_far(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    for chunks in (
        list(client.chat.completions.create(**CHAT, model="starter", stream=True, stream_options=options)),
        list(
            client.completions.create(model="starter", prompt="Once", max_tokens=6, stream=True, stream_options=options)
        ),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert len(counts) >= len(chunks) - 1
        assert counts == sorted(counts)
        assert counts[-1] == 6
        assert len({chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None}) == 1


def test_what_stopped_a_text_is_said(client: openai.OpenAI) -> None:
    text = client.completions.create(model="starter", prompt="Once", max_tokens=6, temperature=0).choices[0].text
    stop = text[len(text) // 2]
    given: dict[str, Any] = {"model": "starter", "prompt": "Once", "max_tokens": 6, "temperature": 0, "stop": [stop]}
    (whole,) = client.completions.create(**given).choices
    assert (whole.finish_reason, whole.model_dump()["stop_reason"]) == ("stop", stop)
    last = list(client.completions.create(**given, stream=True))[-1].choices[0]
    assert last.model_dump()["stop_reason"] == stop
    assert client.chat.completions.create(**CHAT, model="starter").choices[0].model_dump()["stop_reason"] is None


def test_a_completion_may_begin_with_its_prompt(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "starter", "prompt": ["Once", "There"], "max_tokens": 4, "temperature": 0}
    plain = [choice.text for choice in client.completions.create(**given).choices]
    echoed = [choice.text for choice in client.completions.create(**given, echo=True).choices]
    assert echoed == [f"Once{plain[0]}", f"There{plain[1]}"]
    texts = ["", ""]
    for chunk in client.completions.create(**given, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == echoed


def test_a_text_is_one_of_the_choices(client: openai.OpenAI) -> None:
    choices = ["yes, of course", 'no "way"']
    for kind in ({"choice": choices}, {"regex": '(yes, of course|no "way")'}):
        answer = client.chat.completions.create(
            model="starter", messages=HELLO, max_tokens=40, extra_body={"structured_outputs": kind}
        )
        assert answer.choices[0].message.content in choices


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "yes|no"},
        {"ebnf": 'root ::= "yes" | "no"'},
        {"json_schema": '{"enum": ["yes", "no"]}'},
    ],
)
def test_constraints_in_sglangs_fields_hold(server: Running, fields: dict[str, str]) -> None:
    chat = post(server, "/v1/chat/completions", {**CHAT, "max_tokens": 20, **fields}).json()
    text = post(server, "/v1/completions", {"prompt": "Is it?", "max_tokens": 20, **fields}).json()
    for answer in (chat["choices"][0]["message"]["content"], text["choices"][0]["text"]):
        assert answer.strip('"') in ("yes", "no")


def test_a_field_of_the_default_changes_nothing(server: Running) -> None:
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
    plain = post(server, "/v1/completions", body).json()["choices"][0]["text"]
    assert post(server, "/v1/completions", {**body, "add_special_tokens": True}).json()["choices"][0]["text"] == plain


def test_the_paths_that_others_probe(server: Running) -> None:
    assert httpx.get(f"{server.url}/ping").status_code == httpx.post(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert httpx.get(f"{server.url}/v1/audio/voices").json() == {"voices": card["voices"]}
    assert card["voices"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {**CHAT, "messages": [{**HELLO[0], "nmae": "x"}]}, "messages[0].nmae"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]}]},
            "messages[0].content[0].txt",
        ),
        ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {**CHAT, "seed": 2**64}, "seed"),
        ("images/generations", {"prompt": "a", "n": 11}, "n"),
        ("images/generations", {"prompt": "a", "partial_images": 1}, "partial_images"),
        ("images/generations", {"prompt": "a", "progress": True}, "progress"),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ("completions", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("chat/completions", {**CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("chat/completions", {**CHAT, "regex": "("}, "regex"),
        ("chat/completions", {**CHAT, "ebnf": "root ::= ("}, "ebnf"),
        ("completions", {"prompt": "a", "json_schema": '{"type": 5}'}, "json_schema"),
        ("completions", {"prompt": "a", "regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ("completions", {"prompt": "a", "structured_outputs": {"regex": "a"}, "json_schema": "{}"}, "json_schema"),
        ("chat/completions", {**CHAT, "regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ],
)
def test_what_is_no_field_or_too_much_is_refused(server: Running, path: str, body: Any, param: str) -> None:
    answer = post(server, f"/v1/{path}", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_unknown_path_has_the_form_of_an_error(server: Running) -> None:
    answer = httpx.get(f"{server.url}/v1/engines")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"
    assert "GET /v1/engines" in answer.json()["error"]["message"]
    answer = httpx.put(f"{server.url}/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] in answer.json()["error"]["message"]


def test_a_model_that_is_not_served_has_openais_code(server: Running) -> None:
    for answer in (
        post(server, "/v1/chat/completions", {**CHAT, "model": "gpt-5"}),
        post(server, "/v1/audio/speech", {"input": "a", "model": "gpt-5"}),
        httpx.get(f"{server.url}/v1/models/gpt-5"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_minus_one_keeps_all_tokens_as_zero_does(server: Running) -> None:
    def text(**more: Any) -> str:
        answer = post(server, "/v1/chat/completions", {**CHAT, "temperature": 1, "seed": 3, "max_tokens": 12, **more})
        return str(answer.json()["choices"][0]["message"]["content"])

    assert text(top_k=-1) == text(top_k=0) == text()
    for path, body in (("chat/completions", CHAT), ("responses", {"input": "Hi"})):
        answer = post(server, f"/v1/{path}", {**body, "top_k": -2})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_k")


def test_a_completions_format_is_vllms(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = post(server, "/v1/completions", {"prompt": "Once", "max_tokens": 40, "response_format": form})
    assert json.loads(answer.json()["choices"][0]["text"]).keys() == {"a"}
    broken = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    refused = post(server, "/v1/completions", {"prompt": "Once", "response_format": broken})
    assert refused.json()["error"]["param"] == "response_format.json_schema.schema"
    both = post(
        server, "/v1/completions", {"prompt": "a", "response_format": form, "structured_outputs": {"regex": "a"}}
    )
    assert both.json()["error"]["param"] == "structured_outputs"


# ------------------------------------------------------------------------------------------------------- tokens


def test_the_assistants_turn_may_stay_closed(server: Running) -> None:
    opened = post(server, "/tokenize", {"messages": HELLO}).json()["tokens"]
    closed = post(server, "/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    assert closed == opened[: len(closed)]
    assert len(closed) < len(opened)
    answer = post(server, "/v1/chat/completions", {**CHAT, "add_generation_prompt": False}).json()
    assert answer["usage"]["prompt_tokens"] == len(closed)


def test_the_last_message_is_continued(server: Running, client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hello, dear"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    tokens = post(server, "/tokenize", {"messages": messages, **flags}).json()["tokens"]
    assert post(server, "/detokenize", {"tokens": tokens}).json()["prompt"].endswith("Hello, dear")
    plain = client.completions.create(model="starter", prompt=tokens, max_tokens=8, temperature=0).choices[0].text
    answer = client.chat.completions.create(
        model="starter",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=8,
        temperature=0,
        extra_body=flags,
    )
    assert answer.choices[0].message.content == plain
    refused = post(server, "/v1/chat/completions", {**CHAT, "messages": HELLO, **flags})
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_texts_become_tokens_and_texts_again(server: Running, client: openai.OpenAI) -> None:
    text = "Once upon a time"
    tokens = post(server, "/tokenize", {"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == client.models.retrieve("starter").model_dump()["max_model_len"]
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = post(server, "/tokenize", {"messages": HELLO}).json()
    answer = client.chat.completions.create(**CHAT, model="starter")
    assert answer.usage is not None
    assert chat["count"] == answer.usage.prompt_tokens
    counted = post(server, "/v1/responses/input_tokens", {"input": HELLO}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": chat["count"]}
    spelled = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert spelled["tokens"] == tokens["tokens"]
    assert len(spelled["token_strs"]) == tokens["count"]
    assert "".join(spelled["token_strs"]).replace("\u0120", " ") == text
    assert post(server, "/detokenize", {"tokens": [10**9]}).json()["error"]["param"] == "tokens"
    assert httpx.get(f"{server.url}/version").json()["version"]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_log_probabilities_go_by_their_ids(server: Running, stream: bool) -> None:
    flags = {"return_tokens_as_token_ids": True, "return_token_ids": True, "stream": stream}
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, **flags}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 6, "temperature": 0, "logprobs": 2, **flags}),
    ):
        answer = post(server, path, body)
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.text]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        if "content" in logprobs[0]:
            entries = [entry for one in logprobs for entry in one["content"]]
            names, tops = (
                [entry["token"] for entry in entries],
                [entry["top_logprobs"][0]["token"] for entry in entries],
            )
        else:
            names = [name for one in logprobs for name in one["tokens"]]
            tops = [next(iter(top)) for one in logprobs for top in one["top_logprobs"]]
        assert names == [f"token_id:{token}" for token in ids]
        assert all(re.fullmatch(r"token_id:\d+", name) for name in tops)
        assert len(ids) == 6


def test_a_prompt_keeps_its_last_tokens(server: Running) -> None:
    text = "Once upon a time"
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "echo": True}
    tokens = post(server, "/tokenize", {"prompt": text}).json()["tokens"]
    wanted = post(server, "/v1/completions", {**asked, "prompt": tokens[-2:]}).json()
    for prompt in (text, tokens):
        body = {**asked, "prompt": prompt, "truncate_prompt_tokens": 2}
        cut = post(server, "/v1/completions", body).json()
        assert cut["choices"] == wanted["choices"]
        assert cut["usage"]["prompt_tokens"] == 2
    whole = post(server, "/v1/completions", {**asked, "prompt": text, "truncate_prompt_tokens": -1}).json()
    assert whole["usage"]["prompt_tokens"] == len(tokens)
    asked |= {"max_tokens": 4, "echo": False}
    limit = post(server, "/tokenize", {"prompt": text}).json()["max_model_len"]
    for prompt in ("a " * (limit + 100), [*range(5, 15)] * limit):  # longer than the model holds
        for count, kept in ((-1, limit - 4), (3, 3)):
            body = {**asked, "prompt": prompt, "truncate_prompt_tokens": count}
            usage = post(server, "/v1/completions", body).json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (kept, 4)
    body = {**asked, "prompt": text, "truncate_prompt_tokens": -1, "max_tokens": limit}
    error = post(server, "/v1/completions", body)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "max_tokens")
    for count in (0, -2, 10**7):
        error = post(server, "/v1/completions", {**asked, "prompt": text, "truncate_prompt_tokens": count})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_the_spellings_of_a_long_text_do_not_hold_up_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = type(server.service.model(None).omni.processor)
    spellings, in_loop = processor.spellings, []

    def noted(self: object, token_ids: Sequence[int]) -> list[str]:
        in_loop.append(asyncio._get_running_loop() is not None)
        return spellings(self, token_ids)

    monkeypatch.setattr(processor, "spellings", noted)
    post(server, "/tokenize", {"prompt": "one two", "return_token_strs": True})
    assert in_loop == [False]


# ---------------------------------------------------------------------------------------------------- responses


def test_a_response_is_continued_fetched_and_forgotten(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "starter", "max_output_tokens": 6, "temperature": 0}
    first = client.responses.create(**given, input="Hello!")
    second = client.responses.create(**given, input="And now?", previous_response_id=first.id)
    conversation: Any = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    assert second.output_text == client.responses.create(**given, input=conversation).output_text
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = [item.model_dump() for item in client.responses.input_items.list(second.id)]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**given, input="And now?", previous_response_id=second.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    hidden = client.responses.create(**given, input="Hello!", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)


def test_input_items_come_in_pages(server: Running, client: openai.OpenAI) -> None:
    conversation: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    made = client.responses.create(model="starter", max_output_tokens=4, input=conversation)
    pages = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert [len(page.data) for page in pages.iter_pages()] == [2, 2, 1]
    items: list[Any] = list(client.responses.input_items.list(made.id, limit=2))
    assert [item.content[0].text for item in items] == ["4", "3", "2", "1", "0"]
    for query, param in ({"after": "item_9"}, "after"), ({"limit": 0}, "limit"), ({"order": "up"}, "order"):
        answer = httpx.get(f"{server.url}/v1/responses/{made.id}/input_items", params=query)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    streamed = httpx.get(f"{server.url}/v1/responses/{made.id}", params={"stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")


def test_a_response_has_log_probabilities(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "starter", "max_output_tokens": 6, "temperature": 0, "input": "Hello!"}
    given |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part: Any = client.responses.create(**given).output[0].content[0]  # type: ignore[union-attr, index]
    assert "".join(token.token for token in part.logprobs) == part.text
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in part.logprobs)
    events: list[Any] = list(client.responses.create(**given, stream=True))
    streamed = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert [token.token for token in streamed] == [token.token for token in part.logprobs]


def test_responses_are_kept_within_bounds_and_for_their_holder() -> None:
    now = [0.0]
    store = ResponseStore(clock=lambda: now[0])
    for number in range(6):
        store.keep("ann", {"id": f"r{number}"}, (), 0, MAX_BYTES // 16, shared=True)
    store.keep("bob", {"id": "b"}, (), 0, MAX_BYTES // 4, shared=True)
    store.keep("bob", {"id": "large"}, (), 0, MAX_BYTES // 4 + 1, shared=True)
    assert store.get("ann", "r5").response == {"id": "r5"}
    assert store.size == MAX_BYTES // 2  # a quarter for each
    for holder, name in (("ann", "r1"), ("bob", "r5"), ("bob", "large")):
        with pytest.raises(NotFoundError):
            store.get(holder, name)
    now[0] = 10.0**6
    with pytest.raises(NotFoundError):
        store.get("ann", "r5")


# ----------------------------------------------------------------------------------------- speech and pictures


def test_vllms_fields_give_vllms_events(server: Running) -> None:
    speech = post(server, "/v1/audio/speech", {"input": "Hello there.", "response_format": "wav"}).content
    form = {"stream": "true", "stream_include_usage": "true"}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files={"file": speech}, timeout=60)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "the cat sees a bird"
    assert {chunk["model"] for chunk in chunks} == {"starter"}
    plain = httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": speech}, timeout=60).json()
    assert isinstance(plain["usage"]["seconds"], int)
    for form in ({"stream_include_usage": "true"}, {"stream_continuous_usage_stats": "true"}):
        refused = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files={"file": speech}, timeout=60)
        assert [refused.json()["error"]["param"]] == list(form)


def test_the_form_of_vllms_bench_is_served(server: Running) -> None:
    speech = post(server, "/v1/audio/speech", {"input": "Hello there.", "response_format": "wav"}).content
    form = {"model": "starter", "max_completion_tokens": "20", "stream": "True", "language": "en"}
    form |= {"stream_include_usage": "True", "stream_continuous_usage_stats": "True"}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files={"file": speech}, timeout=60)
    assert answer.status_code == 200
    ignored = {"max_completion_tokens", "stream_include_usage", "stream_continuous_usage_stats"}
    assert set(answer.headers["x-omnistage-ignored"].split(", ")) == ignored


def test_a_size_that_is_a_preference_gives_the_nearest(client: openai.OpenAI) -> None:
    for _ in range(2):
        assert client.images.generate(model="starter", prompt="A fox.", size="1024x1024", extra_body={"steps": 1}).size
    picture = client.images.generate(model="starter", prompt="A fox.", size="1536x1024", extra_body={"steps": 1})
    assert picture.size == "96x96"  # type: ignore[comparison-overlap]
    for more, size in (({"strict_size": True}, "1024x1024"), ({}, "100x96")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.images.generate(model="starter", prompt="A fox.", size=size, extra_body=more)  # type: ignore[call-overload]
        assert refused.value.param == "size"


# -------------------------------------------------------------------------------------------------------- https


def test_a_certificate_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    with pytest.raises(InvalidRequestError, match="is not a file"):
        ServiceOptions(ssl_certfile=certificate).certificate()
    with pytest.raises(InvalidRequestError, match="requires --ssl-certfile"):
        ServiceOptions(ssl_keyfile=key).certificate()
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(InvalidRequestError, match="no certificate with its key"):
        ServiceOptions(ssl_certfile=certificate).certificate()
    assert ServiceOptions(ssl_certfile=certificate, ssl_keyfile=key).certificate() == (certificate, key)
    assert ServiceOptions().certificate() is None
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
