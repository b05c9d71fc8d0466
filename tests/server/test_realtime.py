"""Conversations over `/v1/realtime`, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from omnistage.omni import AsyncOmni
from tests.server.harness import Held, Running, aborted, until
from tests.server.realtime_client import QUIET, RATE, TEXT, audio_of, base64_of, said, text_of, types, until_event
from tests.voice import silence, voice

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")

ITEM = ["conversation.item.added", "conversation.item.done"]
BEGIN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
]
END = [
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
]
WRITTEN = [*BEGIN, "response.output_text.delta", "response.output_text.done", *END]


@pytest.fixture
def omni(models: dict[str, AsyncOmni]) -> AsyncOmni:
    return models["omni"]


@pytest.fixture
def prompts(omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model is shown, response by response."""
    seen: list[Any] = []
    build = omni._requests.build

    def watched(prompt: Any, *rest: Any) -> object:
        seen.append(prompt)
        return build(prompt, *rest)

    monkeypatch.setattr(omni._requests, "build", watched)
    return seen


@pytest.fixture
def held(omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """The thinker goes four steps and then waits."""
    made = Held(omni.orchestrator.stages[omni.orchestrator.graph.entry], monkeypatch, 4)
    yield made
    made.go.set()
    until(lambda: omni.stats().inflight == 0, "the end of held requests")


@pytest.fixture
def connection(client: openai.OpenAI) -> Iterator[Any]:
    with client.realtime.connect(model="omni") as made:
        assert made.recv().type == "session.created"
        yield made


# ------------------------------------------------------------------------------------------------- text and speech


def test_text_is_answered_with_text(connection: Any, prompts: list[Any]) -> None:
    connection.session.update(session={**TEXT, "instructions": "Be brief."})
    until_event(connection, "session.updated")
    connection.conversation.item.create(item=said("Hello"))
    connection.response.create()
    events = until_event(connection, "response.done")
    assert types(events) == [*ITEM, *WRITTEN]
    assert len({event.event_id for event in events}) == len(events)
    response = events[-1].response
    written = text_of(events, "response.output_text.delta")
    assert response.output[0].content[0].text == written
    assert next(e.text for e in events if e.type == "response.output_text.done") == written
    # A random model seldom stops by itself.
    assert (response.status, response.status_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 6
    assert response.usage.total_tokens == response.usage.input_tokens + 6
    assert [message["role"] for message in prompts[0]] == ["system", "user"]

    connection.conversation.item.create(item=said("Go on"))
    connection.response.create()
    again = until_event(connection, "response.done")
    roles = [message["role"] for message in prompts[1]]
    assert roles == ["system", "user", "assistant", "user"]
    assert prompts[1][2]["content"] == [{"type": "text", "text": written}]
    assert again[0].previous_item_id == response.output[0].id


def test_text_is_answered_with_speech_and_its_transcript(server: Running, prompts: list[Any]) -> None:
    """And what was not heard of it is forgotten."""

    async def talk() -> None:
        async with server.async_client() as client, client.realtime.connect(model="omni") as connection:
            events = []

            async def expect(kind: str) -> Any:
                async for event in connection:
                    events.append(event)
                    assert event.type != "error", event.to_json()
                    if event.type == kind:
                        return event

            created = await expect("session.created")
            assert created.session.output_modalities == ["audio"]
            await connection.session.update(session={**QUIET, "temperature": 0, "max_output_tokens": 12})
            await expect("session.updated")
            await connection.conversation.item.create(item=said("Speak"))
            events.clear()
            await connection.response.create()
            done = await expect("response.done")
            middle = set(types(events)[2 + len(BEGIN) : -2 - len(END)])
            assert types(events)[: 2 + len(BEGIN)] == [*ITEM, *BEGIN]
            assert middle == {"response.output_audio.delta", "response.output_audio_transcript.delta"}
            last = ["response.output_audio.done", "response.output_audio_transcript.done", *END]
            assert types(events)[-2 - len(END) :] == last
            sound = b"".join(base64.b64decode(e.delta) for e in events if e.type == "response.output_audio.delta")
            item = done.response.output[0]
            assert item.content[0].type == "output_audio"
            assert item.content[0].transcript == text_of(events, "response.output_audio_transcript.delta")
            seconds = done.response.usage.output_token_details.audio_seconds
            assert len(sound) == 2 * round(seconds * RATE)
            assert np.abs(np.frombuffer(sound, "<i2")).max() > 0

            ms = int(seconds * 1000)
            await connection.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=ms // 2)
            cut = await expect("conversation.item.truncated")
            assert (cut.item_id, cut.audio_end_ms) == (item.id, ms // 2)
            await connection.conversation.item.retrieve(item_id=item.id)
            kept = (await expect("conversation.item.retrieved")).item.content[0].transcript
            assert item.content[0].transcript.startswith(kept)
            assert 0 < len(kept) <= len(item.content[0].transcript) / 2
            await connection.response.create(response={"output_modalities": ["text"], "max_output_tokens": 2})
            await expect("response.done")
            assert prompts[-1][-1] == {"role": "assistant", "content": [{"type": "text", "text": kept}]}

    asyncio.run(talk())


def test_sound_is_heard_when_it_is_committed(connection: Any, prompts: list[Any]) -> None:
    connection.session.update(session=TEXT)
    until_event(connection, "session.updated")
    for start in range(3):
        connection.input_audio_buffer.append(audio=base64_of(voice(0.2, RATE, start)))
    connection.input_audio_buffer.commit()
    committed = until_event(connection, "conversation.item.done")
    assert types(committed) == ["input_audio_buffer.committed", *ITEM]
    assert committed[0].item_id == committed[1].item.id
    assert committed[1].item.content[0].type == "input_audio"
    connection.response.create()
    done = until_event(connection, "response.done")[-1].response
    assert done.usage.input_token_details.audio_tokens > 0
    samples, rate = prompts[0][0]["content"][0]["audio"]
    assert (len(samples), rate) == (3 * int(0.2 * RATE), RATE)

    connection.conversation.item.retrieve(item_id=committed[0].item_id)
    heard = until_event(connection, "conversation.item.retrieved")[-1].item.content[0].audio
    assert np.array_equal(np.frombuffer(base64.b64decode(heard), "<i2"), samples)


def test_items_hold_sound_and_pictures_too(connection: Any, prompts: list[Any]) -> None:
    from omnistage.media.image_output import ImageOutput

    png = base64.b64encode(ImageOutput(np.full((32, 32, 3), 90, np.uint8)).to_bytes("png")).decode()
    connection.session.update(session=TEXT)
    connection.conversation.item.create(
        item={
            "type": "message",
            "role": "user",
            "id": "mine",
            "content": [
                {"type": "input_image", "image_url": f"data:image/png;base64,{png}"},
                {"type": "input_audio", "audio": base64_of(voice(0.3, RATE))},
                {"type": "input_text", "text": "What is this?"},
            ],
        }
    )
    connection.response.create()
    done = until_event(connection, "response.done")[-1].response
    details = done.usage.input_token_details
    assert min(details.audio_tokens, details.image_tokens, details.text_tokens) > 0
    connection.conversation.item.delete(item_id="mine")
    assert until_event(connection, "conversation.item.deleted")[-1].item_id == "mine"
    connection.response.create()
    until_event(connection, "response.done")
    assert [message["role"] for message in prompts[1]] == ["assistant"]


def test_the_previews_client_is_understood(server: Running) -> None:
    address = f"{server.url.replace('http', 'ws')}/v1"  # it would use wss
    with (
        server.client(websocket_base_url=address) as client,
        client.beta.realtime.connect(model="omni") as connection,
    ):
        assert connection.recv().session.input_audio_format == "pcm16"
        connection.session.update(
            session={"modalities": ["text"], "turn_detection": None, "max_response_output_tokens": 4}
        )
        session = until_event(connection, "session.updated")[-1].session
        assert (session.modalities, session.turn_detection) == (["text"], None)
        connection.conversation.item.create(item=said("Hello"))
        assert until_event(connection, "conversation.item.created")[-1].item.role == "user"
        connection.response.create()
        events = until_event(connection, "response.done")
        assert "response.text.delta" in types(events)
        assert events[-1].response.output[0].content[0].type == "text"


# ------------------------------------------------------------------------------------------------ turns, heard


def speak(connection: Any, *sounds: np.ndarray) -> None:
    sound = np.concatenate(sounds)
    for start in range(0, len(sound), RATE // 10):
        connection.input_audio_buffer.append(audio=base64_of(sound[start : start + RATE // 10]))


def listening(**detection: Any) -> dict[str, Any]:
    turns = {"type": "server_vad", "silence_duration_ms": 300, **detection}
    return {**TEXT, "audio": {"input": {"turn_detection": turns}}}


def test_a_turn_that_is_heard_is_answered(connection: Any) -> None:
    connection.session.update(session=listening(prefix_padding_ms=200))
    until_event(connection, "session.updated")
    speak(connection, silence(0.6, RATE), voice(1.0, RATE), silence(0.8, RATE))
    events = until_event(connection, "response.done")
    turn = ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed"]
    assert types(events) == [*turn, *ITEM, *WRITTEN]
    started, stopped, committed = events[:3]
    assert 250 <= started.audio_start_ms <= 700
    assert 1700 <= stopped.audio_end_ms <= 2300
    assert started.item_id == stopped.item_id == committed.item_id == events[3].item.id


def test_whoever_speaks_interrupts(connection: Any, omni: AsyncOmni, held: Held, prompts: list[Any]) -> None:
    before = aborted(omni)
    connection.session.update(session={**listening(), "max_output_tokens": 50})
    until_event(connection, "session.updated")
    connection.conversation.item.create(item=said("Tell a long story"))
    connection.response.create()
    said_so_far = until_event(connection, "response.output_text.delta")
    assert omni.stats().inflight == 1
    speak(connection, voice(0.8, RATE))
    events = until_event(connection, "response.done")
    assert not held.go.is_set()  # it did not wait for the step that runs
    assert "input_audio_buffer.speech_started" in types(events)
    response = events[-1].response
    assert (response.status, response.status_details.reason) == ("cancelled", "turn_detected")
    assert response.output[0].status == "incomplete"
    assert response.usage.input_tokens > 0
    assert aborted(omni) == before + 1
    held.go.set()
    speak(connection, silence(0.8, RATE))
    answer = until_event(connection, "response.done")[-1].response
    assert answer.status in ("completed", "incomplete")
    kept = text_of([*said_so_far, *events], "response.output_text.delta")
    assert [message["role"] for message in prompts[-1]] == ["user", "assistant", "user"]
    assert prompts[-1][1]["content"][0]["text"] == kept


def test_whoever_speaks_interrupts_speech(
    connection: Any, omni: AsyncOmni, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an answer that is being spoken, only what was sent is kept."""
    stages = omni.orchestrator.stages
    held = Held(stages["talker"], monkeypatch, 80 if "token2wav" in stages else 12)
    turns = {"type": "server_vad", "silence_duration_ms": 300}
    settings = {"type": "realtime", "temperature": 0, "max_output_tokens": 40}
    connection.session.update(session={**settings, "audio": {"input": {"turn_detection": turns}}})
    until_event(connection, "session.updated")
    connection.conversation.item.create(item=said("Tell a long story"))
    connection.response.create()
    events = until_event(connection, "response.output_audio.delta")
    while len(audio_of(events)) < 0.5 * RATE * 2:  # enough for a first word
        events += until_event(connection, "response.output_audio.delta")
    speak(connection, voice(0.8, RATE))
    events += until_event(connection, "response.done")
    assert not held.go.is_set()
    response = events[-1].response
    assert (response.status, response.status_details.reason) == ("cancelled", "turn_detected")
    held.go.set()
    speak(connection, silence(0.8, RATE))
    until_event(connection, "response.output_audio.delta")
    connection.response.cancel()
    until_event(connection, "response.done")
    before, kept, _ = prompts[-1]
    assert (before["role"], kept["role"]) == ("user", "assistant")
    written = text_of(events, "response.output_audio_transcript.delta")
    assert written.startswith(kept["content"][0]["text"])
    assert len(kept["content"][0]["text"]) < len(written)
    until(lambda: omni.stats().inflight == 0, "the end of cancelled requests")


def test_turns_need_not_be_answered_nor_interrupt(connection: Any, held: Held) -> None:
    connection.session.update(session=listening(create_response=False, interrupt_response=False))
    until_event(connection, "session.updated")
    connection.conversation.item.create(item=said("Hello"))
    connection.response.create()
    until_event(connection, "response.output_text.delta")
    speak(connection, voice(0.8, RATE), silence(0.8, RATE))
    until_event(connection, "input_audio_buffer.committed")
    held.go.set()
    assert until_event(connection, "response.done")[-1].response.status != "cancelled"
    connection.input_audio_buffer.clear()
    assert types(until_event(connection, "input_audio_buffer.cleared")) == ["input_audio_buffer.cleared"]


# ---------------------------------------------------------------------------------------------------- responses


def test_a_response_is_cancelled_within_a_step(connection: Any, omni: AsyncOmni, held: Held) -> None:
    before = aborted(omni)
    connection.session.update(session={**TEXT, "max_output_tokens": 50})
    connection.conversation.item.create(item=said("Hello"))
    connection.response.create()
    until_event(connection, "response.output_text.delta")
    connection.response.create()
    while (event := connection.recv()).type != "error":
        assert event.type == "response.output_text.delta"
    assert event.error.code == "conversation_already_has_active_response"
    connection.response.cancel()
    done = until_event(connection, "response.done")[-1].response
    assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
    assert not held.go.is_set()
    assert (aborted(omni), omni.stats().inflight) == (before + 1, 0)
    connection.response.cancel(event_id="late")
    error = connection.recv().error
    assert (error.code, error.event_id) == ("response_cancel_not_active", "late")


def test_a_response_is_cancelled_before_it_begins(connection: Any, omni: AsyncOmni, held: Held) -> None:
    connection.session.update(session=TEXT)
    connection.conversation.item.create(item=said("Hello"))
    connection.response.create()
    connection.response.cancel()
    connection.response.create()  # waits for the other to have ended
    events = until_event(connection, "response.done")
    assert types(events)[-2:] == ["response.created", "response.done"]
    assert (events[-1].response.status, events[-1].response.output) == ("cancelled", [])
    assert until_event(connection, "response.output_text.delta")
    assert omni.stats().inflight == 1
    assert not held.go.is_set()


def test_a_response_beside_the_conversation(connection: Any, prompts: list[Any]) -> None:
    connection.session.update(session=TEXT)
    connection.conversation.item.create(item={**said("Remember this"), "id": "first"})
    connection.response.create(
        response={
            "conversation": "none",
            "instructions": "Classify.",
            "metadata": {"topic": "class"},
            "max_output_tokens": 2,
            "input": [{"type": "item_reference", "id": "first"}, said("Only this")],
        }
    )
    events = until_event(connection, "response.done")
    response = events[-1].response
    assert response.metadata == {"topic": "class"}
    assert response.conversation_id is None
    assert response.usage.output_tokens == 2
    assert types(events).count("conversation.item.added") == 1  # the user's
    assert [m["role"] for m in prompts[0]] == ["system", "user", "user"]
    connection.response.create()
    until_event(connection, "response.done")
    assert [m["role"] for m in prompts[1]] == ["user"]


def test_what_the_model_has_no_room_for_is_left_out(
    connection: Any, omni: AsyncOmni, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from omnistage.core.errors import PromptTooLongError

    build = omni._requests.build

    def small(prompt: Any, *rest: Any) -> object:
        if len(prompt) > 3:
            raise PromptTooLongError("too long", param="prompt")
        return build(prompt, *rest)

    monkeypatch.setattr(omni._requests, "build", small)
    connection.session.update(session=TEXT)
    for number in range(6):
        connection.conversation.item.create(item=said(f"Number {number}"))
    connection.response.create()
    assert until_event(connection, "response.done")[-1].response.output
    assert [m["content"][0]["text"] for m in prompts[-1]] == ["Number 3", "Number 4", "Number 5"]
    connection.session.update(session={"type": "realtime", "truncation": "disabled"})
    connection.response.create()
    failed = until_event(connection, "response.done")[-1].response
    assert (failed.status, failed.status_details.error.code) == ("failed", "context_length_exceeded")


@pytest.fixture(params=["lm", "omni"])
def name(request: pytest.FixtureRequest) -> str:
    """Of a model that calls functions."""
    return str(request.param)


def test_a_function_is_called_and_its_result_goes_on(
    client: openai.OpenAI, models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("xgrammar")
    seen: list[tuple[Any, Any]] = []
    build = models[name]._requests.build

    def watched(prompt: Any, params: Any, options: Any, *rest: Any) -> object:
        seen.append((prompt, options))
        return build(prompt, params, options, *rest)

    monkeypatch.setattr(models[name]._requests, "build", watched)
    tool = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"sun": {"type": "boolean"}}, "required": ["sun"]},
    }
    with client.realtime.connect(model=name) as connection:
        connection.recv()
        connection.session.update(session={**TEXT, "tools": [tool]})
        connection.conversation.item.create(item=said("What is the weather?"))
        connection.response.create(response={"tool_choice": "required", "max_output_tokens": 200})
        events = until_event(connection, "response.done")
        call = events[-1].response.output[0]
        assert (call.type, call.name) == ("function_call", "weather")
        assert isinstance(json.loads(call.arguments)["sun"], bool)
        assert text_of(events, "response.function_call_arguments.delta") == call.arguments
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        connection.conversation.item.create(item=result)
        connection.response.create(response={"tool_choice": "none", "max_output_tokens": 4})
        until_event(connection, "response.done")
        connection.session.update(session={"type": "realtime", "tool_choice": {"type": "function", "name": "other"}})
        assert connection.recv().error.param == "session.tool_choice"
    (_, first), (messages, second) = seen
    assert [spec["function"]["name"] for spec in first.tools] == ["weather"]
    assert not second.tools
    assert [message["role"] for message in messages[-2:]] == ["assistant", "tool"]
    assert messages[-1]["content"] == "It rains."


def test_a_strict_tool_that_cannot_be_enforced_is_refused_when_it_is_set(connection: Any) -> None:
    schema = {"type": "object", "properties": {"ids": {"type": "array", "items": {}, "uniqueItems": True}}}
    tool = {"type": "function", "name": "pick", "parameters": schema, "strict": True}
    connection.session.update(session={"type": "realtime", "output_modalities": ["text"], "tools": [tool]})
    assert not connection.recv().session.tools
    error = connection.recv().error
    assert (error.param, "#/properties/ids: uniqueItems" in error.message) == ("session.tools", True)


def test_two_sessions_do_not_mix(server: Running) -> None:
    async def one(text: str) -> tuple[str, str]:
        async with server.async_client() as client, client.realtime.connect(model="omni") as connection:
            await connection.session.update(session=TEXT)
            await connection.conversation.item.create(item=said(text))
            await connection.response.create()
            async for event in connection:
                assert event.type != "error"
                if event.type == "response.done":
                    return event.response.id, event.response.output[0].content[0].text
            raise AssertionError("the connection ended")

    async def both() -> tuple[Any, Any, Any]:
        first, second = await asyncio.gather(one("Apples and pears"), one("The sea at night"))
        return first, second, await one("Apples and pears")

    first, second, alone = asyncio.run(both())
    assert first[0] != second[0]
    assert first[1] == alone[1]
    assert first[1] != second[1]
