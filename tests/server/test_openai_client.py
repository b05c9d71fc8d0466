"""OpenAI's Python client on every endpoint: plain and async, whole and streamed, always with the same answer."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from PIL import Image

from tests.server.harness import Running

TALK: Any = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "lm", "messages": TALK, "max_tokens": 8, "temperature": 0}
TEXT: dict[str, Any] = {"model": "lm", "prompt": "Once", "max_tokens": 8, "temperature": 0}
RESPONSE: dict[str, Any] = {"model": "lm", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
SPEECH: dict[str, Any] = {"model": "omni", "input": "Good day", "voice": "Chelsie", "extra_body": {"seed": 1}}
DRAWN: dict[str, Any] = {"model": "draw", "prompt": "a hat", "size": "64x48", "extra_body": {"steps": 2, "seed": 1}}


def sound() -> bytes:
    encoded = io.BytesIO()
    soundfile.write(encoded, np.zeros(4000, dtype=np.float32), 16_000, format="WAV")
    return encoded.getvalue()


def picture() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (64, 48), "navy").save(encoded, "PNG")
    return encoded.getvalue()


HEARD: dict[str, Any] = {"model": "omni", "file": ("said.wav", sound())}
CHANGED: dict[str, Any] = {**DRAWN, "image": ("a.png", picture())}

# -------------------------------------------------------------------- one reader for each way of asking


def completion_of(events: list[Any]) -> str:
    return "".join(event.choices[0].text for event in events if event.choices)


def chat_of(events: list[Any]) -> str:
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def response_of(events: list[Any]) -> str:
    assert events[-1].type in ("response.completed", "response.incomplete")
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def transcription_of(events: list[Any]) -> str:
    return str(events[-1].text)


def picture_of(events: list[Any]) -> str:
    return str(events[-1].b64_json)


Call = Callable[[Any], Callable[..., Any]]
CASES: dict[str, tuple[Call, dict[str, Any], Callable[[Any], str], Callable[[list[Any]], str]]] = {
    "completions": (lambda c: c.completions.create, TEXT, lambda a: a.choices[0].text, completion_of),
    "chat": (lambda c: c.chat.completions.create, CHAT, lambda a: a.choices[0].message.content, chat_of),
    "responses": (lambda c: c.responses.create, RESPONSE, lambda a: a.output_text, response_of),
    "transcriptions": (lambda c: c.audio.transcriptions.create, HEARD, lambda a: a.text, transcription_of),
    "images": (lambda c: c.images.generate, DRAWN, lambda a: a.data[0].b64_json, picture_of),
    "edits": (lambda c: c.images.edit, CHANGED, lambda a: a.data[0].b64_json, picture_of),
}


def pixels(text: str) -> list[int]:
    """A picture's pixels: the file of a whole answer also says what made it."""
    import base64

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))).ravel().tolist()


@pytest.mark.parametrize("name", CASES)
def test_plain_and_async_whole_and_streamed_are_one_answer(
    server: Running, client: openai.OpenAI, name: str, request: pytest.FixtureRequest
) -> None:
    if name == "transcriptions":  # one that is cut is an error
        request.getfixturevalue("ending")
    call, given, whole, streamed = CASES[name]
    same: Callable[[str], object] = pixels if name in ("images", "edits") else str
    first = whole(call(client)(**given))
    assert first
    events: Iterator[Any] = call(client)(**given, stream=True)
    assert same(streamed(list(events))) == same(first)

    async def both() -> tuple[str, str]:
        async with server.async_client() as other:
            create: Callable[..., Awaitable[Any]] = call(other)
            answer = await create(**given)
            stream: AsyncIterator[Any] = await create(**given, stream=True)
            return whole(answer), streamed([event async for event in stream])

    for got in asyncio.run(both()):
        assert same(got) == same(first)


def test_speech_whole_and_streamed_by_both_clients(server: Running, client: openai.OpenAI) -> None:
    first = client.audio.speech.create(**SPEECH, response_format="pcm").content
    assert len(first) > 1000
    with client.audio.speech.with_streaming_response.create(**SPEECH, response_format="pcm") as answer:
        assert b"".join(answer.iter_bytes()) == first  # the same seed, the same sound

    async def same() -> bytes:
        async with (
            server.async_client() as other,
            other.audio.speech.with_streaming_response.create(**SPEECH, response_format="pcm") as streamed,
        ):
            return b"".join([piece async for piece in streamed.iter_bytes()])

    assert asyncio.run(same()) == first

    async def another() -> bytes:
        async with server.async_client() as other:
            given: dict[str, Any] = {**SPEECH, "extra_body": {"seed": 2}, "response_format": "wav"}
            return (await other.audio.speech.create(**given)).content

    samples, _ = soundfile.read(io.BytesIO(asyncio.run(another())), dtype="int16")
    assert samples.astype("<i2").tobytes() != first


def test_models_by_both_clients(server: Running, client: openai.OpenAI) -> None:
    listed = [model.id for model in client.models.list()]
    assert sorted(listed) == ["draw", "lm", "omni"]
    assert client.models.retrieve("omni").owned_by == "omnistage"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")

    async def same() -> list[str]:
        async with server.async_client() as other:
            assert (await other.models.retrieve("lm")).id == "lm"
            return [model.id async for model in other.models.list()]

    assert asyncio.run(same()) == listed


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own_by_both(server: Running, client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as plain:
        client.chat.completions.create(**{**CHAT, "temperature": -1}, stream=stream)
    assert (plain.value.param, plain.value.code) == ("temperature", "invalid_request")

    async def same() -> None:
        async with server.async_client() as other:
            await other.chat.completions.create(**{**CHAT, "temperature": -1}, stream=stream)

    with pytest.raises(openai.BadRequestError) as caught:
        asyncio.run(same())
    assert caught.value.param == "temperature"


def test_leaving_an_async_stream_ends_its_request(server: Running) -> None:
    async def leave() -> None:
        async with server.async_client() as client:
            endless = {**CHAT, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
            async with await client.chat.completions.create(**endless, stream=True) as stream:
                async for _ in stream:
                    break

    asyncio.run(leave())  # the fixture `server` finds the engine idle
