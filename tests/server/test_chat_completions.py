"""Chat completions with OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import av
import httpx
import openai
import pytest
import soundfile

from tests.server.harness import Running, data_url

USER = [{"role": "user", "content": "Hello there"}]


def test_a_conversation_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="lm", messages=USER, max_tokens=8, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_gives_the_same_text_and_its_usage(client: openai.OpenAI) -> None:
    given = {"model": "lm", "messages": USER, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**given)
    events = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == whole.choices[0].finish_reason
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({e.id for e in events}) == 1


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    given = {"model": "lm", "messages": USER, "max_tokens": 12, "temperature": 1.0, "seed": 5}
    first, second = (client.chat.completions.create(**given).choices[0].message.content for _ in range(2))
    assert first == second


def test_several_answers_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="lm", messages=USER, max_tokens=4, n=3, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)


def test_json_is_json(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="lm",
        messages=USER,
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        extra_body={"logit_bias": {}},
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or "")["n"], int)


def test_text_and_speech_from_a_picture(client: openai.OpenAI) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url()}}, {"type": "text", "text": "What is it?"}]
    answer = client.chat.completions.create(
        model="omni",
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": "Chelsie", "format": "wav"},
        max_tokens=8,
        temperature=0,
    )
    audio = answer.choices[0].message.audio
    assert audio is not None
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio.data)))
    assert rate == 24_000
    assert len(samples) > 1000
    assert audio.transcript


def test_speech_streams_as_pcm(client: openai.OpenAI) -> None:
    events = list(
        client.chat.completions.create(
            model="omni",
            messages=USER,
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "pcm16"},
            max_tokens=8,
            temperature=0,
            stream=True,
        )
    )
    spoken = [e.choices[0].delta.audio for e in events if e.choices and e.choices[0].delta.audio is not None]
    pieces = [piece if isinstance(piece, dict) else piece.model_dump() for piece in spoken]
    sound = b"".join(base64.b64decode(piece["data"]) for piece in pieces if piece.get("data"))
    assert len(sound) > 2000
    assert "".join(piece.get("transcript") or "" for piece in pieces)


def test_the_async_client_runs_side_by_side(server: Running) -> None:
    async def many() -> list[str | None]:
        async with server.async_client() as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model="lm", messages=USER, max_tokens=6, temperature=0)
                    for _ in range(8)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    assert len(set(asyncio.run(many()))) == 1


def test_plain_completions(client: openai.OpenAI) -> None:
    one = client.completions.create(model="lm", prompt="Once upon", max_tokens=6, temperature=0)
    two = client.completions.create(model="lm", prompt=["Once upon", "a time"], max_tokens=6, temperature=0)
    assert len(two.choices) == 2
    assert two.choices[0].text == one.choices[0].text
    streamed = client.completions.create(model="lm", prompt="Once upon", max_tokens=6, temperature=0, stream=True)
    assert "".join(e.choices[0].text for e in streamed if e.choices) == one.choices[0].text
    tokens = client.completions.create(model="lm", prompt=[5, 6, 7], max_tokens=3, temperature=0, logprobs=1)
    assert tokens.choices[0].logprobs is not None
    assert len(tokens.choices[0].logprobs.tokens or ()) == 3


@pytest.mark.parametrize("format", ["wav", "pcm", "flac", "mp3", "opus", "aac"])
def test_a_text_is_spoken(client: openai.OpenAI, format: str) -> None:
    answer = client.audio.speech.create(model="omni", voice="Chelsie", input="Hi", response_format=format)
    data = answer.read()
    assert len(data) > 500
    if format in ("wav", "mp3"):
        samples, _ = soundfile.read(io.BytesIO(data))
        assert len(samples) > 500
    elif format != "pcm":  # a flac that is sent as it is made does not say its length, without which this gives up
        with av.open(io.BytesIO(data)) as container:
            assert sum(frame.samples for frame in container.decode(audio=0)) > 500


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"unknown_field": 1}, 400, "unknown_field"),
        ({"modalities": ["smell"]}, 400, "modalities[0]"),
        ({"modalities": ["text", "audio"]}, 400, "modalities"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
            400,
            None,
        ),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"stop": [""]}, 400, "stop"),
        ({"messages": [{"role": "user", "content": "word " * 30_000}]}, 400, "messages"),
    ],
)
def test_what_is_wrong_is_named(server: Running, change: dict[str, object], status: int, param: str | None) -> None:
    body = {"model": "lm", "messages": USER, "max_tokens": 4, **change}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert "Traceback" not in answer.text
    if param is not None:
        assert (error["param"] or "").startswith(param), error


def test_a_body_that_is_no_json(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]
