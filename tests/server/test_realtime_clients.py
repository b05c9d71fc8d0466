"""What agents' libraries send over `/v1/realtime`: settings in one event, transcription, speech with tools."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from omnistage.server.realtime.settings_update import without
from tests.server.harness import Running
from tests.server.realtime_client import audio_of, base64_of, said, text_of, types, until_event
from tests.server.starter_harness import HEARD, server, starter

__all__ = ["server", "starter"]  # fixtures

TRANSCRIPT = "conversation.item.input_audio_transcription"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"sun": {"type": "boolean"}}, "required": ["sun"]},
}
AGENTS: dict[str, Any] = {
    "type": "realtime",
    "instructions": "Be brief.",
    "tools": [TOOL],
    "audio": {
        "input": {
            "transcription": {"model": "gpt-live-transcribe"},
            "turn_detection": {"type": "semantic_vad", "eagerness": "high"},
            "format": {"type": "audio/pcm", "rate": 16_000},
        },
        "output": {"voice": "alloy", "speed": 1.2},
    },
    "truncation": {"type": "retention_ratio", "retention_ratio": 0.5},
}


def test_an_update_is_applied_but_for_what_is_refused(server: Running) -> None:
    with server.client().realtime.connect(model="starter") as connection:
        assert connection.recv().type == "session.created"
        connection.send({"type": "session.update", "event_id": "mine", "session": AGENTS})
        session = connection.recv().session
        assert (session.instructions, [tool.name for tool in session.tools]) == ("Be brief.", ["weather"])
        assert session.audio.input.turn_detection.to_dict() == {
            "type": "semantic_vad",
            "eagerness": "high",
            "create_response": True,
            "interrupt_response": True,
        }
        assert session.audio.input.transcription.model == "gpt-live-transcribe"
        assert (session.audio.output.voice, session.audio.output.speed) == ("alloy", 1.2)
        errors = [connection.recv().error for _ in range(2)]
        assert {error.param for error in errors} == {
            "session.audio.input.format.rate",
            "session.truncation",
        }
        assert {error.event_id for error in errors} == {"mine"}


def test_an_update_with_nothing_that_can_be_applied_is_an_error_alone(server: Running) -> None:
    with server.client().realtime.connect(model="starter") as connection:
        connection.recv()
        connection.session.update(session={"type": "realtime", "audio": {"output": {"voice": "nobody"}}})
        assert connection.recv().error.param == "session.audio.output.voice"
        connection.response.create(response={"output_modalities": ["text"], "max_output_tokens": 1})
        assert connection.recv().type == "response.created"


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("session.a", {"audio": {"input": {"format": {"rate": 1}, "x": 1}}}),
        ("session.audio.input.format.rate", {"a": [1], "audio": {"input": {"x": 1}}}),
        ("session.a[0].name", {"audio": {"input": {"format": {"rate": 1}, "x": 1}}}),
        ("session.audio", {"a": [1]}),
        ("session.x", None),
        ("session", None),
    ],
)
def test_a_setting_that_is_refused_is_left_out_as_a_whole(path: str, left: object) -> None:
    assert without({"a": [1], "audio": {"input": {"format": {"rate": 1}, "x": 1}}}, path) == left


def test_what_the_user_says_is_written_down(server: Running) -> None:
    quiet = {"input": {"turn_detection": None, "transcription": {"model": "whisper-1", "language": "en"}}}
    with server.client().realtime.connect(model="starter") as connection:
        connection.recv()
        connection.session.update(session={"type": "realtime", "output_modalities": ["text"], "audio": quiet})
        until_event(connection, "session.updated")
        tone = np.sin(np.arange(24_000) / 20, dtype=np.float32) * 0.3
        connection.input_audio_buffer.append(audio=base64_of(tone))
        connection.input_audio_buffer.commit()
        events = until_event(connection, f"{TRANSCRIPT}.completed")
        assert events[-1].transcript == HEARD
        assert text_of(events, f"{TRANSCRIPT}.delta") == HEARD
        assert events[-1].usage.to_dict() == {"type": "duration", "seconds": 1}
        connection.conversation.item.retrieve(item_id=events[-1].item_id)
        assert connection.recv().item.content[0].transcript == HEARD


@pytest.mark.parametrize("forced", [True, False])
def test_speech_goes_together_with_tools(server: Running, forced: bool) -> None:
    """A call is not spoken, and what is no call is spoken as it stands."""
    with server.client().realtime.connect(model="starter") as connection:
        connection.recv()
        settings = {**AGENTS, "tool_choice": "required" if forced else "auto", "truncation": "auto"}
        settings["parallel_tool_calls"] = False
        settings["audio"] = {"input": {"turn_detection": None}, "output": {"voice": "alloy"}}
        connection.session.update(session=settings)
        assert connection.recv().type == "session.updated"
        connection.conversation.item.create(item=said("How is the weather?"))
        connection.response.create(response={"max_output_tokens": 200 if forced else 12})
        events = until_event(connection, "response.done")
    (item,) = events[-1].response.output
    if forced:
        assert (item.type, item.name) == ("function_call", "weather")
        assert text_of(events, "response.function_call_arguments.delta") == item.arguments
        assert not audio_of(events)
    else:
        assert item.content[0].transcript == text_of(events, "response.output_audio_transcript.delta") != ""
        assert len(audio_of(events)) > 4_800
        assert "response.output_audio.done" in types(events)


def test_openais_names_are_voices_and_others_are_not(client: openai.OpenAI) -> None:
    card = client.models.retrieve("starter").model_dump()
    assert card["voice_aliases"]["alloy"] in card["voices"]
    given: dict[str, Any] = {"model": "starter", "input": "Hello there.", "response_format": "pcm"}
    own = client.audio.speech.create(**given, voice=card["voices"][0]).content
    assert client.audio.speech.create(**given, voice="alloy").content == own
    slow = client.audio.speech.create(**given, voice="alloy", speed=0.5).content
    assert 1.8 < len(slow) / len(own) < 2.2
    with pytest.raises(openai.BadRequestError, match="there is no voice 'nobody'"):
        client.audio.speech.create(**given, voice="nobody")
