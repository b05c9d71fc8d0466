"""Every field and form of OpenAI's chat completions, by its own clients: honoured, taken where harmless, or refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from openai.types.chat import completion_create_params
from PIL import Image

from omnistage.core.errors import InvalidRequestError
from omnistage.server.openai.chat.request import ChatRequest
from omnistage.server.openai.chat.spoken import SpokenAnswers
from tests.server.harness import Running

USER: list[Any] = [{"role": "user", "content": "Hello there"}]
GIVEN: dict[str, Any] = {"model": "lm", "messages": USER, "max_tokens": 6, "temperature": 0}


def picture(width: int = 56, height: int = 84) -> str:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def sound(format: str) -> str:
    encoded = io.BytesIO()
    soundfile.write(encoded, 0.1 * np.random.default_rng(0).standard_normal(16_000), 16_000, format=format.upper())
    return base64.b64encode(encoded.getvalue()).decode()


def refused(server: Running, **change: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**GIVEN, **change})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


# ----------------------------------------------------------------------------------------------- every field


def test_every_field_of_the_client_is_known() -> None:
    sent = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert sent - set(ChatRequest.model_fields) == set()


HARMLESS: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "flex",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "prediction": {"type": "content", "content": "Hello"},
    "reasoning_effort": "medium",
    "verbosity": "medium",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "n": 1,
    "logit_bias": {},
    "functions": None,
    "web_search_options": None,
    "stream_options": None,
    "audio": None,
    "tools": [],
}


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**GIVEN)
    answer = client.chat.completions.create(**GIVEN, extra_body=HARMLESS)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.service_tier == "default"
    assert plain.service_tier is None
    assert (plain.system_fingerprint or "").startswith("omnistage_")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("functions", [{"name": "f"}], "send tools"),
        ("function_call", "auto", "send tool_choice"),
        ("moderation", {"model": "m"}, "leave it out"),
        ("web_search_options", {}, "leave it out"),
        ("store", True, "not stored"),
        ("service_tier", "gold", "auto"),
        ("top_logprobs", 3, "logprobs"),
        ("audio", {"voice": "Ethan", "format": "wav"}, "modalities"),
        ("max_completion_tokens", 0, "greater"),
        ("messages[0].audio", {"messages": [{"role": "assistant", "audio": {"id": "audio-x"}}]}, "not|no spoken"),
        ("messages[0].content[0].type", {"type": "file", "file": {"file_id": "f"}}, "files are not read"),
        ("messages[0].content[0].image_url.detail", {"type": "image_url", "image_url": {"detail": "x"}}, "auto, low"),
        ("messages[0].function_call", {"messages": [{"role": "assistant", "function_call": {}}]}, "tool_calls"),
        ("messages[0].name", {"messages": [{"role": "user", "content": "a", "name": 5}]}, "text"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(server: Running, field: str, value: Any, says: str) -> None:
    if not field.startswith("messages"):
        change = {field: value}
    elif "messages" in value:
        change = value
    else:
        change = {"messages": [{"role": "user", "content": [value]}]}
    error = refused(server, **change)
    assert error["param"] == field
    assert any(word in error["message"] for word in says.split("|")), error


def test_fields_of_text_are_refused_by_a_model_that_draws(server: Running) -> None:
    body = {"model": "draw", "messages": USER}
    for field, value in (("temperature", 0.5), ("max_completion_tokens", 5), ("stop", "x"), ("seed", 1)):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    tool = {"type": "function", "function": {"name": "f"}}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "tools": [tool]})
    assert answer.json()["error"]["param"] == "tools"


# -------------------------------------------------------------------------------------------------- sampling


def test_several_answers_stream_with_their_indices(client: openai.OpenAI) -> None:
    given = {**GIVEN, "n": 3, "temperature": 1, "seed": -5}
    whole = client.chat.completions.create(**given)
    texts, ended, roles = ["", "", ""], [], []
    for event in client.chat.completions.create(**given, stream=True):
        (choice,) = event.choices
        texts[choice.index] += choice.delta.content or ""
        ended += [choice.index] if choice.finish_reason else []
        roles += [choice.index] if choice.delta.role else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ended) == sorted(roles) == [0, 1, 2]
    assert len(set(texts)) > 1


def test_a_stop_list_cuts_a_stream_as_it_cuts_the_whole(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**{**GIVEN, "max_tokens": 24}).choices[0].message.content or ""
    stop = ["never in here", text[5:8]]
    given = {**GIVEN, "max_tokens": 24, "stop": stop}
    cut = client.chat.completions.create(**given).choices[0]
    assert cut.message.content == text[: text.index(stop[1])]
    assert cut.finish_reason == "stop"
    events = list(client.chat.completions.create(**given, stream=True))
    assert "".join(e.choices[0].delta.content or "" for e in events) == cut.message.content


def test_bias_and_both_names_of_the_length(client: openai.OpenAI, server: Running) -> None:
    token = server.service.models["lm"].omni.processor._prompts.tokenizer.convert_tokens_to_ids("A")
    given = {**GIVEN, "max_tokens": 50, "max_completion_tokens": 3, "logit_bias": {str(token): 100}}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content == "AAA"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_bytes_of_logprobs_are_those_of_the_text_even_within_a_character(
    client: openai.OpenAI, server: Running
) -> None:
    tokenizer = server.service.models["lm"].omni.processor._prompts.tokenizer
    half = tokenizer.convert_tokens_to_ids("Ã")  # the byte 0xC3, which begins a character
    given = {**GIVEN, "logprobs": True, "top_logprobs": 2, "logit_bias": {str(half): 100}}
    choice = client.chat.completions.create(**given).choices[0]
    assert [entry.bytes for entry in choice.logprobs.content] == [[0xC3]] * 6
    given = {**GIVEN, "logprobs": True, "top_logprobs": 2, "temperature": 1, "seed": 3, "max_tokens": 40}
    choice = client.chat.completions.create(**given).choices[0]
    ended = choice.finish_reason == "stop"
    spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content[: -1 if ended else None])
    assert spelled.decode(errors="replace") == choice.message.content
    streamed = [e.choices[0] for e in client.chat.completions.create(**given, stream=True)]
    entries = [entry for part in streamed if part.logprobs for entry in part.logprobs.content]
    assert [entry.model_dump() for entry in entries] == [entry.model_dump() for entry in choice.logprobs.content]


def test_json_that_streams_is_json(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    formats: tuple[Any, ...] = (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    )
    for asked in formats:
        for seed in range(12):
            given = {**GIVEN, "temperature": 1, "seed": seed, "max_tokens": 60, "response_format": asked}
            events = [e.choices[0] for e in client.chat.completions.create(**given, stream=True)]
            if events[-1].finish_reason == "stop":
                json.loads("".join(part.delta.content or "" for part in events))
                break
        else:
            raise AssertionError("no seed gives a whole text")


# ---------------------------------------------------------------------------------------------- stream options


def test_usage_is_null_until_the_end_and_obfuscation_evens_lengths(server: Running) -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    body = {**GIVEN, "stream": True, "stream_options": options}
    lines = httpx.post(f"{server.url}/v1/chat/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert {len(line.removeprefix("data: ")) % 64 for line in lines[:-3]} == {0}
    assert len({event["obfuscation"] for event in events}) > 1
    plain = httpx.post(f"{server.url}/v1/chat/completions", json={**GIVEN, "stream": True}).text
    assert "obfuscation" not in plain
    assert "usage" not in plain


# ------------------------------------------------------------------------------------------------------ usage


def test_usage_tells_modalities_apart_and_what_was_cached(client: openai.OpenAI) -> None:
    content = [
        {"type": "image_url", "image_url": {"url": picture()}},
        {"type": "input_audio", "input_audio": {"data": sound("wav"), "format": "wav"}},
        {"type": "text", "text": "What is it? " * 20},
    ]
    given = {**GIVEN, "model": "omni", "messages": [{"role": "user", "content": content}]}
    first, second = (client.chat.completions.create(**given).usage for _ in range(2))
    details = first.prompt_tokens_details.model_dump()
    assert details["image_tokens"] == 6  # 56 x 84 in squares of 28
    assert details["audio_tokens"] == 25  # a second
    assert details["video_tokens"] == 0
    parts = sum(details[f"{kind}_tokens"] for kind in ("text", "image", "audio", "video"))
    assert parts == first.prompt_tokens
    assert second.prompt_tokens_details.cached_tokens > first.prompt_tokens // 2
    assert second.prompt_tokens_details.cached_tokens < second.prompt_tokens
    made = first.completion_tokens_details.model_dump()
    assert (made["text_tokens"], made["audio_tokens"]) == (first.completion_tokens, 0)


# ------------------------------------------------------------------------------------------------------ speech


def test_speech_streams_in_the_clients_form_and_is_recalled_by_its_id(server: Running) -> None:
    given = {**GIVEN, "model": "omni", "modalities": ["audio"], "audio": {"voice": {"id": "Ethan"}, "format": "pcm16"}}

    async def speak() -> list[Any]:
        async with server.async_client() as client:
            stream = await client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
            return [event async for event in stream]

    events = asyncio.run(speak())
    pieces = [e.choices[0].delta.audio for e in events if e.choices and e.choices[0].delta.audio is not None]
    pieces = [piece if isinstance(piece, dict) else piece.model_dump(exclude_none=True) for piece in pieces]
    (audio_id,) = {piece["id"] for piece in pieces}
    assert {piece["sample_rate"] for piece in pieces if "data" in piece} == {24_000}
    samples = sum(len(base64.b64decode(piece["data"])) for piece in pieces if "data" in piece) // 2
    transcript = "".join(piece.get("transcript", "") for piece in pieces)
    assert transcript
    assert pieces[-1].keys() == {"id", "expires_at"}
    details = events[-1].usage.completion_tokens_details
    assert details.audio_tokens > 0
    assert events[-1].usage.completion_tokens == details.audio_tokens + details.text_tokens
    assert details.model_dump()["audio_seconds"] == pytest.approx(samples / 24_000)

    with server.client() as client:
        rest = [{"role": "user", "content": "Go on"}]
        by_id = [*USER, {"role": "assistant", "audio": {"id": audio_id}}, *rest]
        by_text = [*USER, {"role": "assistant", "content": transcript}, *rest]
        first, second = (
            client.chat.completions.create(**{**GIVEN, "model": "omni", "messages": m}) for m in (by_id, by_text)
        )
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert first.choices[0].message.content == second.choices[0].message.content


def test_a_stream_of_sound_is_pcm_and_says_so(server: Running) -> None:
    spoken = {"model": "omni", "stream": True, "modalities": ["text", "audio"]}
    assert refused(server, **spoken, audio={"voice": "Ethan", "format": "wav"})["param"] == "audio.format"
    assert refused(server, **spoken, audio={"voice": "nobody", "format": "pcm16"})["param"] == "audio.voice"


def test_spoken_answers_are_kept_for_their_holder_for_a_while() -> None:
    now = [0.0]
    kept = SpokenAnswers(clock=lambda: now[0])
    expires = kept.keep("ann", "audio-1", "Hello")
    message = {"role": "assistant", "audio": {"id": "audio-1"}}
    assert kept.recalled("ann", [message]) == [{"role": "assistant", "content": "Hello"}]
    assert kept.recalled("bob", [message]) == [message]
    now[0] = expires + 1.0
    assert kept.recalled("ann", [message]) == [message]
    for number in range(1001):
        kept.keep("ann", f"new-{number}", "x")
    assert kept.recalled("ann", [{"role": "assistant", "audio": {"id": "new-0"}}])[0].get("content") is None


# ---------------------------------------------------------------------------------------------------- messages


def test_roles_and_parts_of_a_replayed_conversation(client: openai.OpenAI) -> None:
    replayed = client.chat.completions.create(**GIVEN).choices[0].message.model_dump()
    parts = [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "I will not."}]
    said: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        *USER,
        replayed,
        {"role": "user", "content": "And?", "name": "ann"},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "Why?"},
    ]
    in_words = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": replayed["content"]},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "No. I will not."},
        {"role": "user", "content": "Why?"},
    ]
    first, second = (client.chat.completions.create(**{**GIVEN, "messages": messages}) for messages in (said, in_words))
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert first.choices[0].message.content == second.choices[0].message.content
    field = [*USER, {"role": "assistant", "content": None, "refusal": "I will not."}, *USER]
    assert client.chat.completions.create(**{**GIVEN, "messages": field}).usage.prompt_tokens > 0


@pytest.mark.parametrize("format", ["wav", "mp3"])
def test_sounds_of_the_clients_formats_are_heard(client: openai.OpenAI, format: str) -> None:
    part = {"type": "input_audio", "input_audio": {"data": sound(format), "format": format}}
    given = {**GIVEN, "model": "omni", "messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    usage = client.chat.completions.create(**given).usage
    assert usage.prompt_tokens_details.audio_tokens >= 25


def test_low_detail_makes_a_large_picture_small(client: openai.OpenAI) -> None:
    def tokens(detail: str) -> int:
        part = {"type": "image_url", "image_url": {"url": picture(1120, 28), "detail": detail}}
        given = {**GIVEN, "model": "omni", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        found = client.chat.completions.create(**given).usage.prompt_tokens_details.model_dump()["image_tokens"]
        return int(found)

    assert tokens("low") < tokens("high") == tokens("auto")


def test_a_model_that_draws_takes_text_and_image(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="draw",
        messages=USER,
        extra_body={"modalities": ["text", "image"], "drawing": {"width": 64, "height": 64, "steps": 2, "seed": 1}},
    )
    message = answer.choices[0].message.model_dump()
    assert message["content"] is None
    (shown,) = message["images"]
    drawn = Image.open(io.BytesIO(base64.b64decode(shown["image_url"]["url"].partition(",")[2])))
    assert drawn.size == (64, 64)
    with pytest.raises(openai.BadRequestError, match="has no output"):
        client.chat.completions.create(model="draw", messages=USER, modalities=["text"])


def test_fields_that_do_not_go_together_name_themselves() -> None:
    body = ChatRequest(model="lm", messages=tuple(USER), top_logprobs=2)
    with pytest.raises(InvalidRequestError) as caught:
        body.check()
    assert caught.value.param == "top_logprobs"


def test_a_seed_seeds_the_speech_too(client: openai.OpenAI) -> None:
    def spoken(seed: int) -> str:
        answer = client.chat.completions.create(
            model="omni",
            messages=[{"role": "user", "content": "Hello"}],
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "wav"},
            max_tokens=4,
            seed=seed,
        )
        assert answer.choices[0].message.audio is not None
        return answer.choices[0].message.audio.data

    first = spoken(-7)  # OpenAI's may be negative
    assert spoken(-7) == first
    assert spoken(8) != first


def test_more_log_probabilities_than_an_answer_may_hold_are_refused(server: Running) -> None:
    body = {"model": "lm", "messages": [{"role": "user", "content": "hi"}], "n": 128, "max_tokens": 300}
    refused = httpx.post(
        f"{server.url}/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 20}, timeout=60
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "logprobs")
    assert "38400 tokens with 21 log probabilities each" in refused.json()["error"]["message"]


def test_a_large_answer_is_built_outside_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from omnistage.server.openai.chat import route

    threads: list[str] = []
    build = route.completion

    def completion(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return build(*arguments)

    monkeypatch.setattr(route, "completion", completion)
    body = {"model": "lm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    for more in ({}, {"logprobs": True, "top_logprobs": 2}):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **more}, timeout=60)
        assert answer.status_code == 200
    assert [name.startswith("omnistage-long") for name in threads] == [False, True]
