"""The pieces of a realtime session, without a server: settings, items, events in their order, sound."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai.types.realtime as official
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from omnistage.core.errors import InvalidRequestError, StageError
from omnistage.media.audio import StreamResampler
from omnistage.pipeline.outputs import Usage
from omnistage.server.realtime import preview
from omnistage.server.realtime.audio import RATES, FormatName, decode, encode
from omnistage.server.realtime.config import ServerVad, SessionConfig, for_response, updated
from omnistage.server.realtime.conversation import Conversation, later_half, to_messages
from omnistage.server.realtime.events import EventError, parse
from omnistage.server.realtime.items import CHARS_PER_SECOND, Audio, FunctionOutput, Message, Speech, Text
from omnistage.server.realtime.response_events import ResponseBuilder

SPEAKS = SessionConfig(output_modalities=("audio",))
WRITES = SessionConfig()
EVENTS: TypeAdapter[Any] = TypeAdapter(official.RealtimeServerEvent)


def conversation(**limits: Any) -> Conversation:
    return Conversation(**{"max_items": 100, "max_bytes": 10**6, **limits})


def names(events: list[dict[str, Any]]) -> list[str]:
    for event in events:  # each is what OpenAI's client has a type for
        parsed = EVENTS.validate_python({"event_id": "event_1", **event})
        assert parsed.type == event["type"]
    return [event["type"] for event in events]


# ----------------------------------------------------------------------------------------------------- settings


def test_an_update_changes_what_it_names_and_nothing_else() -> None:
    first = updated(WRITES, {"instructions": "Be brief.", "audio": {"output": {"voice": "A"}}}, "session")
    turns = {"type": "server_vad", "threshold": 0.8}
    second = updated(first, {"audio": {"input": {"turn_detection": turns}}}, "session")
    assert second.instructions == "Be brief."
    assert second.audio.output.voice == "A"
    assert second.audio.input.turn_detection == ServerVad(type="server_vad", threshold=0.8)
    third = updated(second, {"audio": {"input": {"turn_detection": None}}, "instructions": ""}, "session")
    assert (third.audio.input.turn_detection, third.instructions, third.audio.output.voice) == (None, "", "A")
    # What a client was shown it may send back.
    assert updated(third, third.to_json("sess_1"), "session").audio == third.audio


def test_turn_detection_is_replaced_as_a_whole() -> None:
    loud = updated(
        WRITES, {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 0.9}}}}, "session"
    )
    again = updated(
        loud, {"audio": {"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 9}}}}, "session"
    )
    assert again.audio.input.turn_detection == ServerVad(type="server_vad", silence_duration_ms=9)


@pytest.mark.parametrize(
    ("update", "param"),
    [
        ({"tools": [{"type": "mcp", "server_label": "f"}]}, "session.tools[0].type"),
        ({"audio": {"output": {"speed": 2.5}}}, "session.audio.output.speed"),
        ({"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 2}}}}, None),
        ({"audio": {"input": {"noise": 1}}}, "session.audio.input.noise"),
        ({"audio": {"input": {"transcription": {"language": "?"}}}}, "session.audio.input.transcription.language"),
        ({"input_audio_transcription": {"model": 1}}, "session.audio.input.transcription.model"),
        ({"output_modalities": []}, "session.output_modalities"),
    ],
)
def test_what_cannot_be_had_is_named(update: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        updated(WRITES, update, "session")
    assert caught.value.param == param or param is None


def test_the_previews_settings_find_their_places() -> None:
    flat = {
        "modalities": ["text", "audio"],
        "voice": "A",
        "input_audio_format": "g711_ulaw",
        "turn_detection": None,
        "max_response_output_tokens": 7,
    }
    assert preview.from_preview(flat) == {
        "output_modalities": ["audio"],
        "audio": {
            "output": {"voice": "A"},
            "input": {"format": {"type": "audio/pcmu"}, "turn_detection": None},
        },
        "max_output_tokens": 7,
    }


def test_a_response_has_settings_of_its_own() -> None:
    session = updated(WRITES, {"instructions": "Always.", "max_output_tokens": 5}, "session")
    config, options = for_response(
        session, {"max_output_tokens": "inf", "conversation": "none", "metadata": {"a": "b"}}
    )
    assert (config.instructions, config.max_output_tokens) == ("Always.", "inf")
    assert (options.conversation, options.metadata) == ("none", {"a": "b"})
    with pytest.raises(InvalidRequestError, match="unknown field"):
        for_response(session, {"maximum": 1})


# -------------------------------------------------------------------------------------------------------- items


def test_items_go_where_they_are_put() -> None:
    talk = conversation()
    for name in ("a", "b"):
        talk.add(Message("user", [Text(name)], id=name))
    assert talk.add(Message("user", [Text("c")], id="c"), "a") == "a"
    assert talk.add(Message("user", [Text("d")], id="d"), "root") is None
    assert [item.id for item in talk] == ["d", "a", "c", "b"]
    with pytest.raises(InvalidRequestError, match="already"):
        talk.add(Message("user", [Text("x")], id="a"))


def test_the_model_sees_what_was_said_and_nothing_that_is_empty() -> None:
    sound = np.zeros(10, np.int16)
    items = [
        Message("system", [Text("Rules.")]),
        Message("user", [Audio(sound, 24_000), Text("What is it?")]),
        Message("assistant", [Speech("A bell.")]),
        Message("assistant", [Speech("")]),  # nothing of it was heard
        Message("assistant", [Text("On its w")], status="in_progress"),
    ]
    messages = to_messages(items, "Be brief.")
    assert [message["role"] for message in messages] == ["system", "system", "user", "assistant"]
    assert messages[2]["content"][0] == {"type": "audio", "audio": (sound, 24_000)}
    assert messages[3]["content"] == [{"type": "text", "text": "A bell."}]


@pytest.mark.parametrize(
    ("part", "ms", "kept"),
    [
        (Speech("one two three four", 4000, True), 4000, "one two three four"),
        (Speech("one two three four", 4000, True), 2000, "one two"),
        (Speech("one two three four", 4000, True), 0, ""),
        (Speech("abcdefgh", 1000, True), 500, "abcd"),  # a script without spaces
        (Speech("word " * 50, 1000, False), 500, "word word"),  # broken off: the text is far ahead of the sound
        (Speech("short", 1000, False), 1000, "short"),
        (Speech("", 0, True), 0, ""),
        (Speech("Hello " + "世界" * 30, 3000, True), 2500, "Hello " + "世界" * 24 + "世"),  # spaces end too soon
        (Speech("Hello " + "x" * 20 + " end", 3000, True), 2500, "Hello"),  # a long word
    ],
)
def test_a_transcript_is_cut_to_what_was_heard(part: Speech, ms: int, kept: str) -> None:
    part.truncate(ms)
    assert part.transcript == kept
    assert part.ms <= ms


@given(st.text("ab ", max_size=60), st.integers(0, 5000), st.integers(0, 5000), st.booleans())
def test_cutting_only_ever_shortens(text: str, length: int, ms: int, whole: bool) -> None:
    part = Speech(text, length, whole)
    part.truncate(min(ms, length))
    assert text.startswith(part.transcript)
    again = Speech(part.transcript, part.ms, whole)
    again.truncate(part.ms)
    assert part.transcript.startswith(again.transcript)


def test_only_what_was_spoken_is_cut() -> None:
    talk = conversation()
    talk.add(Message("user", [Text("x")], id="user"))
    talk.add(Message("assistant", [Text("x")], id="written"))
    talk.add(Message("assistant", [Speech("x", 10)], id="now", status="in_progress"))
    talk.add(Message("assistant", [Speech("x", 10, True)], id="spoken"))
    for name, index, ms, param in (
        ("user", 0, 1, "content_index"),
        ("written", 0, 1, "content_index"),
        ("spoken", 1, 1, "content_index"),
        ("spoken", -1, 1, "content_index"),
        ("now", 0, 1, "item_id"),
        ("spoken", 0, 11, "audio_end_ms"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            talk.truncate(name, index, ms)
        assert caught.value.param == param


def test_the_older_half_goes_first_and_rules_stay() -> None:
    items = [Message("system", [Text("r")], id="r"), *(Message("user", [Text("x")], id=str(i)) for i in range(5))]
    assert [item.id for item in later_half(items)] == ["r", "2", "3", "4"]
    assert later_half(items[:2]) == items[:2]
    talk = conversation()
    for item in items:
        talk.add(item)
    talk.start_context_at(later_half(items))
    talk.add(Message("user", [Text("x")], id="new"))
    assert [item.id for item in talk.context()] == ["r", "2", "3", "4", "new"]
    assert len(talk) == 7
    talk.delete("2")  # the mark is gone: everything is shown again
    assert [item.id for item in talk.context()] == ["r", "0", "1", "3", "4", "new"]


# ------------------------------------------------------------------------------------------------------- answers


def test_a_spoken_answer_says_everything_in_order() -> None:
    talk = conversation()
    answer = ResponseBuilder("1", SPEAKS, talk)
    events = [
        *answer.created(),
        *answer.text("Hello "),
        *answer.audio(np.full(36_000, 0.5, np.float32), 24_000),
        *answer.text("there"),
        *answer.finish("completed", Usage(prompt_tokens=3, completion_tokens=2, audio_seconds=1.5)),
    ]
    assert names(events) == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio.delta",
        "response.output_audio.delta",  # a second at most in each
        "response.output_audio_transcript.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    (item,) = talk
    assert isinstance(item, Message)
    assert item.status == "completed"
    assert isinstance(item.parts[0], Speech)
    assert (item.parts[0].ms, item.parts[0].complete, item.parts[0].transcript) == (1500, True, "Hello there")
    assert events[-1]["response"]["usage"]["total_tokens"] == 5


def test_an_interrupted_answer_is_kept_as_far_as_it_can_have_been_heard() -> None:
    talk = conversation()
    answer = ResponseBuilder("1", SPEAKS, talk)
    answer.text("word " * 100)
    answer.audio(np.zeros(24_000, np.float32), 24_000)
    events = answer.finish("cancelled", None, reason="turn_detected")
    assert names(events)[-1] == "response.done"
    done = events[-1]["response"]
    assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert done["output"][0]["status"] == "incomplete"
    (item,) = talk
    assert isinstance(item, Message)
    assert isinstance(item.parts[0], Speech)
    assert 0 < len(item.parts[0].transcript) <= CHARS_PER_SECOND


@pytest.mark.parametrize("status", ["cancelled", "failed"])
def test_an_answer_that_gave_nothing_leaves_nothing(status: Any) -> None:
    talk = conversation()
    answer = ResponseBuilder("1", WRITES, talk)
    events = answer.finish(status, None, error=StageError("it broke") if status == "failed" else None)
    assert names(events) == ["response.done"]
    assert events[0]["response"]["output"] == []
    assert len(talk) == 0
    if status == "failed":
        assert events[0]["response"]["status_details"]["error"]["code"] == "stage_failed"


def test_an_empty_answer_is_still_an_item() -> None:
    answer = ResponseBuilder("1", WRITES, None)
    made = names([*answer.created(), *answer.finish("completed", None)])
    assert made == [
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.done",
    ]


def test_calls_are_items_of_their_own() -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    config = updated(WRITES, {"tools": [tool]}, "session")
    talk = conversation()
    answer = ResponseBuilder("1", config, talk)
    written = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    events = [*answer.created()]
    for start in range(0, len(written), 7):
        events += answer.text(written[start : start + 7])
    events += answer.finish("completed", None)
    told = [name for i, name in enumerate(names(events)) if not i or name != events[i - 1]["type"]]
    assert told == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.output_item.added",
        "conversation.item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    call = events[-1]["response"]["output"][1]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Bern"}')
    assert [event["output_index"] for event in events if event["type"].startswith("response.output_item")] == [
        0,
        0,
        1,
        1,
    ]
    talk.add(FunctionOutput(call["call_id"], "rain"))
    first, second = to_messages(list(talk), "")
    assert first["content"] == [{"type": "text", "text": "Let me see. "}]
    assert first["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert second == {"role": "tool", "tool_call_id": call["call_id"], "content": "rain"}


def test_sound_is_brought_to_the_sessions_rate() -> None:
    config = updated(SPEAKS, {"audio": {"output": {"format": {"type": "audio/pcmu"}}}}, "session")
    answer = ResponseBuilder("1", config, None)
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100)).astype(np.float32)
    events = [e for start in range(0, 44_100, 4410) for e in answer.audio(tone[start : start + 4410], 44_100)]
    events += answer.finish("completed", None)
    data = b"".join(base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta")
    samples = decode(data, "audio/pcmu", "audio").astype(np.float64) / 32768
    assert len(samples) == pytest.approx(8000, abs=2)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / 8000)
    assert np.abs(samples - expected)[100:-100].max() < 0.03


# --------------------------------------------------------------------------------------------------------- sound


@pytest.mark.parametrize("format", list(RATES))
def test_formats_give_back_what_they_were_given(format: FormatName) -> None:
    tone = (0.8 * np.sin(np.arange(1000) / 7)).astype(np.float32)
    back = decode(encode(tone, format), format, "audio").astype(np.float64) / 32768
    assert len(back) == 1000
    assert np.abs(back - tone).max() < (0.001 if format == "audio/pcm" else 0.03)
    assert len(decode(b"", format, "audio")) == 0


def test_telephone_formats_are_those_of_the_standard() -> None:
    assert list(decode(bytes([0xFF, 0x00, 0x80]), "audio/pcmu", "audio")) == [0, -32124, 32124]
    assert list(decode(bytes([0xD5, 0x2A, 0xAA]), "audio/pcma", "audio")) == [8, -32256, 32256]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_a_stream_is_resampled_as_the_whole_would_be(cuts: list[int]) -> None:
    sound = np.sin(np.arange(sum(cuts)) / 9).astype(np.float32)
    whole = StreamResampler(24_000, 8_000).push(sound, last=True)
    changer, made, start = StreamResampler(24_000, 8_000), [], 0
    for cut in cuts:
        made.append(changer.push(sound[start : start + cut]))
        start += cut
    made.append(changer.push(np.zeros(0, np.float32), last=True))
    assert np.allclose(np.concatenate(made), whole, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- preview


def test_the_preview_has_names_of_its_own() -> None:
    answer = ResponseBuilder("1", WRITES, conversation())
    events = [*answer.created(), *answer.text("x"), *answer.finish("completed", None)]
    told = [shown for event in events if (shown := preview.to_preview(event)) is not None]
    assert [event["type"] for event in told] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.created",
        "response.content_part.added",
        "response.text.delta",
        "response.text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.done",
    ]
    assert told[-1]["response"]["modalities"] == ["text"]
    assert preview.wants_preview("realtime=v1", ())
    assert preview.wants_preview(None, ("realtime", "openai-beta.realtime-v1"))
    assert not preview.wants_preview(None, ("realtime",))


def test_long_numbers_are_refused_before_they_are_read() -> None:
    numbers = ",".join(["9" * 4299] * 3)
    with pytest.raises(EventError, match="digits"):
        parse(f'{{"type": "session.update", "session": [{numbers}]}}')
