"""What one client of `/v1/realtime` must not be able to do to others, or to its own session."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from omnistage.core.errors import InvalidRequestError
from omnistage.core.family import AudioLimits
from omnistage.core.validation import Problem
from omnistage.omni import AsyncOmni
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.access.keys import Holder
from omnistage.server.http.limits import HeldBytes, Hold
from omnistage.server.realtime import base, events, input_audio, items, preview, session, settings_update
from omnistage.server.realtime import config as settings
from omnistage.server.realtime.config import AudioInputLimits, ServerVad, SessionConfig, for_response, updated
from omnistage.server.realtime.events import MAX_CHARS, MAX_VALUES, EventError
from omnistage.server.realtime.input_audio import InputAudio, Turn
from omnistage.server.realtime.session import Limits, Session
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.realtime_client import RATE, TEXT, said

HEARING = AudioInputLimits("audio/pcm", 0.03, 30.0)
MANY = 20_000


class Loud:
    """A network to which everything loud is speech."""

    def __init__(self) -> None:
        self._rest = np.zeros(0, np.float32)

    def push(self, samples: NDArray[np.float32]) -> list[float]:
        heard = np.concatenate([self._rest, samples])
        whole = len(heard) // input_audio.FRAME * input_audio.FRAME
        self._rest = heard[whole:]
        return [float(np.abs(frame).mean() > 0.1) for frame in heard[:whole].reshape(-1, input_audio.FRAME)]


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_audio, "Silero", Loud)
    monkeypatch.setattr(settings, "require_vad", lambda: None)


def sound(seconds: float, level: int = 16_000) -> NDArray[np.int16]:
    return np.full(round(seconds * RATE), level, np.int16)


def encoded(samples: NDArray[np.int16]) -> str:
    return base64.b64encode(samples.astype("<i2").tobytes()).decode()


def spoken(samples: NDArray[np.int16]) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": encoded(samples)}]}


def message(kind: str, **fields: object) -> str:
    return json.dumps({"type": kind, **fields}, separators=(",", ":"))


class Talk:
    """A session without a socket: what it is told, and what it tells."""

    def __init__(self, service: Service, model: str | None, limits: Limits | None = None) -> None:
        self.told: list[dict[str, Any]] = []
        served = None if model is None else service.model(model)
        hold = Hold(HeldBytes(2**30))
        self.session = Session(service, Holder("ann", b""), served, self._send, hold, limits=limits)

    async def _send(self, event: dict[str, Any]) -> None:
        self.told.append(event)

    def say(self, *messages: str) -> list[dict[str, Any]]:
        """What is told about these messages."""
        self.told.clear()

        async def one_after_another() -> None:
            for text in messages:
                await self.session.handle(text)

        asyncio.run(one_after_another())
        return self.told

    def error(self, kind: str, **fields: object) -> dict[str, Any]:
        (event,) = self.say(message(kind, **fields))
        assert event["type"] == "error", event
        error: dict[str, Any] = event["error"]
        return error


@pytest.fixture
def talk(service: Service) -> Talk:
    made = Talk(service, "omni")
    made.say(message("session.update", session=TEXT))
    return made


# ------------------------------------------------------------------------------- one message must not stop the service


def nothings(kind: str, field: str) -> str:
    """An event with a list of very many empty values."""
    head, _, tail = message(kind, **{field: "HERE"}).partition('"HERE"')
    return f'{head}{{"x":[{",".join(["[]"] * MAX_VALUES)}]}}{tail}'


@pytest.mark.parametrize(
    ("kind", "field"),
    [("session.update", "session"), ("conversation.item.create", "item"), ("response.create", "response")],
)
def test_a_message_of_very_many_values_is_not_even_read(kind: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = nothings(kind, field)
    monkeypatch.setattr(events.json, "loads", lambda _: pytest.fail("it was read"))
    with pytest.raises(EventError) as caught:
        events.parse(text)
    assert caught.value.error.code == "limit_exceeded"
    assert str(MAX_VALUES) in caught.value.error.message


def test_only_events_that_bring_media_may_be_long() -> None:
    long = "A" * MAX_CHARS
    with pytest.raises(EventError) as caught:
        events.parse(message("session.update", session={"instructions": long}, event_id="mine"))
    assert (caught.value.error.code, caught.value.event_id) == ("limit_exceeded", "mine")
    assert isinstance(events.parse(message("input_audio_buffer.append", audio=long)), events.AudioAppend)
    assert isinstance(events.parse(message("conversation.item.create", item=said(long))), events.ItemCreate)
    assert isinstance(events.parse(message("response.create", response={"input": [said(long)]})), events.ResponseCreate)


def unknown(count: int = MANY) -> dict[str, int]:
    return {f"x{i}": i for i in range(count)}


CHECKS: dict[str, Callable[[], object]] = {
    "content": lambda: items.parse_item({**said("x"), "content": [{}] * MANY}, HEARING, "item"),
    "content's fields": lambda: items.parse_item({**said("x"), "content": [{**unknown()}] * 2}, HEARING, "item"),
    "an item's fields": lambda: items.parse_item({**said("x"), **unknown()}, HEARING, "item"),
    "tools": lambda: updated(SessionConfig(), {"tools": [{"name": 1}] * MANY}, "session"),
    "a tool's fields": lambda: updated(SessionConfig(), {"tools": [{"name": "f", **unknown()}]}, "session"),
    "modalities": lambda: updated(SessionConfig(), {"output_modalities": [1] * MANY}, "session"),
    "settings": lambda: updated(SessionConfig(), unknown(), "session"),
    "settings of sound": lambda: updated(SessionConfig(), {"audio": {"input": unknown()}}, "session"),
    "metadata": lambda: for_response(SessionConfig(), {"metadata": unknown()}),
    "a response's fields": lambda: for_response(SessionConfig(), unknown()),
    "an event's fields": lambda: events.parse(message("response.cancel", **unknown())),
}


@pytest.mark.parametrize("what", CHECKS)
def test_the_first_problem_is_enough(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counted(error: ValidationError, *rest: Any, **more: Any) -> Problem:
        counts.append(error.error_count())
        return original(error, *rest, **more)

    original = base.first_problem
    monkeypatch.setattr(base, "first_problem", counted)
    with pytest.raises((InvalidRequestError, EventError)):
        CHECKS[what]()
    assert len(counts) == 1
    assert counts[0] <= 3  # a field may also be missing, and its list too short


def test_settings_are_moved_without_copying_them_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    merged = preview.merge_settings
    monkeypatch.setattr(preview, "merge_settings", lambda *args: calls.append(1) or merged(*args))
    assert len(preview.from_preview({**unknown(500), "voice": "A"})) == 501
    assert len(calls) < 10


class Meeting:
    """A call in a worker thread that ends only when the event loop has done something else meanwhile."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.begun, self.go = threading.Event(), threading.Event()
        self.met: list[bool] = []

    def __call__(self, *args: Any) -> Any:
        self.begun.set()
        self.met.append(self.go.wait(HANG_SECONDS))
        return self._real(*args)

    async def come(self) -> None:
        await asyncio.to_thread(self.begun.wait, HANG_SECONDS)
        self.go.set()


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (events, "parse", message("conversation.item.create", item=said("x" * (events.LARGE_CHARS + 1)))),
        (session, "decode", message("input_audio_buffer.append", audio=encoded(sound(2.0)))),
        (items, "decode", message("conversation.item.create", item=spoken(sound(2.0)))),
        (settings_update, "updated", message("session.update", session={"tools": [{"type": "function", "name": "f"}]})),
    ],
)
def test_others_go_on_while_a_large_message_is_read(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, text: str
) -> None:
    meeting = Meeting(getattr(module, name))
    monkeypatch.setattr(module, name, meeting)

    async def both() -> None:
        await asyncio.gather(talk.session.handle(text), meeting.come())

    asyncio.run(both())
    assert meeting.met == [True]


def test_more_sound_than_there_is_room_for_is_not_decoded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(service, "omni", Limits(buffer_seconds=1.0))
    for module in (session, items):
        monkeypatch.setattr(module, "from_base64", lambda *_: pytest.fail("it was decoded"))
    error = talk.error("input_audio_buffer.append", audio=encoded(sound(1.1)))
    assert (error["code"], error["param"]) == ("limit_exceeded", "audio")
    error = talk.error("conversation.item.create", item=spoken(sound(31)))
    assert (error["code"], error["param"]) == ("limit_exceeded", "item.content[0].audio")


def test_what_has_no_effect_is_neither_kept_nor_shown() -> None:
    given = {
        "tracing": [["secret"]],
        "include": ["secret"],
        "reasoning": {"effort": "secret"},
        "audio": {"input": {"noise_reduction": {"type": "secret"}}},
    }
    made = updated(SessionConfig(), given, "session")
    assert "secret" not in repr(made)
    assert "secret" not in json.dumps(made.to_json("sess_1"))


def test_more_items_than_a_conversation_holds_are_refused(service: Service) -> None:
    talk = Talk(service, "lm", Limits(items=3))
    error = talk.error("response.create", response={"input": [said("x")] * 4})
    assert (error["code"], error["param"]) == ("limit_exceeded", "response.input")


# ------------------------------------------------------------------------------------------ speech that does not end


@pytest.mark.parametrize("piece", [0.1, 0.7, 7.0])
@pytest.mark.usefixtures("loud")
def test_a_turn_that_is_too_long_ends_and_the_next_begins(piece: float) -> None:
    audio = InputAudio("audio/pcm", ServerVad(type="server_vad", silence_duration_ms=200), 2.0)
    heard = np.concatenate([sound(7.0), sound(1.0, 0)])
    heard[:] = np.where(heard == 0, 0, 16_000 + np.arange(len(heard)) % 1000)  # each place is its own
    seen: list[Turn] = []
    taken = []
    for start in range(0, len(heard), round(piece * RATE)):
        for turn in audio.append(heard[start : start + round(piece * RATE)]):
            seen.append(turn)
            if turn.kind == "stopped":
                taken.append(audio.take(turn.start, turn.end))
        assert piece > 1 or audio.seconds < 2.0 + 2 * piece
    assert [turn.kind for turn in seen] == ["started", "stopped"] * 4
    turns = seen[1::2]
    assert all(turn.end - turn.start <= 2.0 * RATE for turn in turns)
    for turn, next_one in itertools.pairwise(turns):
        assert turn.end <= next_one.start <= turn.end + RATE // 20  # a frame at most is lost
    assert 7.0 <= turns[-1].end / RATE <= 7.5
    for turn, samples in zip(turns, taken, strict=True):
        assert np.array_equal(samples, heard[turn.start : turn.end])


@pytest.mark.usefixtures("loud")
def test_a_turn_that_goes_on_may_be_committed() -> None:
    audio = InputAudio("audio/pcm", ServerVad(type="server_vad", prefix_padding_ms=5000), 2.0)
    turns = audio.append(np.concatenate([sound(3.0, 0), sound(0.9)]))
    assert [turn.kind for turn in turns] == ["started"]
    assert 0.8 <= len(audio.take_all()) / RATE <= 2.0


@pytest.mark.usefixtures("loud")
def test_a_session_in_which_somebody_never_stops_goes_on(service: Service) -> None:
    talk = Talk(service, "omni", Limits(buffer_seconds=1.0))
    turns = {"type": "server_vad", "create_response": False, "silence_duration_ms": 200}
    talk.say(message("session.update", session={**TEXT, "audio": {"input": {"turn_detection": turns}}}))
    appends = [message("input_audio_buffer.append", audio=encoded(sound(0.5))) for _ in range(6)]
    told = talk.say(*appends, message("input_audio_buffer.append", audio=encoded(sound(0.5, 0))))
    kinds = [event["type"].rpartition(".")[2] for event in told]
    assert "error" not in kinds
    assert kinds == ["speech_started", "speech_stopped", "committed", "added", "done"] * (len(kinds) // 5)
    assert len(talk.session.conversation) >= 3


# --------------------------------------------------------------------------------- sounds that the model cannot hear


def test_a_sound_that_the_model_cannot_hear_is_refused_at_once(talk: Talk) -> None:
    for samples, code in ((sound(0.001), "invalid_media"), (sound(0), "invalid_media"), (sound(31), "limit_exceeded")):
        error = talk.error("conversation.item.create", item=spoken(samples))
        assert (error["param"], error["code"]) == ("item.content[0].audio", code)
        error = talk.error("response.create", response={"input": [said("x"), spoken(samples)]})
        assert (error["param"], error["code"]) == ("response.input[1].content[0].audio", code)
    assert len(talk.session.conversation) == 0
    told = talk.say(message("conversation.item.create", item=spoken(sound(0.03))))
    assert [event["type"] for event in told] == ["conversation.item.added", "conversation.item.done"]


def test_the_model_hears_what_it_says_that_it_hears(models: dict[str, AsyncOmni]) -> None:
    processor = models["omni"].processor
    assert isinstance(processor, AudioLimits)
    assert not isinstance(models["lm"].processor, AudioLimits)

    def plan(seconds: float) -> None:
        content = [{"type": "audio", "audio": (sound(seconds), RATE)}]
        models["omni"]._plan([{"role": "user", "content": content}], None, RequestOptions(["text"]))

    least, most = processor.clip_seconds()
    plan(least)
    plan(most)
    with pytest.raises(InvalidRequestError, match="shorter"):
        plan(least / 2)
    with pytest.raises(InvalidRequestError, match="over the limit"):
        plan(most + 0.1)


@pytest.mark.usefixtures("loud")
def test_no_turn_is_longer_than_the_model_can_hear(service: Service) -> None:
    talk = Talk(service, "omni")
    turns = {"type": "server_vad", "create_response": False}
    talk.say(message("session.update", session={**TEXT, "audio": {"input": {"turn_detection": turns}}}))
    heard = np.concatenate([sound(40), sound(1, 0)])
    told = talk.say(message("input_audio_buffer.append", audio=encoded(heard)))
    assert "error" not in [event["type"] for event in told]
    lengths = [item.size / RATE / 2 for item in talk.session.conversation]
    assert len(lengths) == 2
    assert 29 < max(lengths) <= 30.1  # an item's own thousand bytes are counted with it
    made = talk.session.conversation.context()[0]
    assert isinstance(made, items.Message)
    assert isinstance(made.parts[0], items.Audio)
    assert len(made.parts[0].samples) <= 30 * RATE


def test_the_buffer_holds_no_more_than_the_model_can_hear(talk: Talk) -> None:
    twenty = message("input_audio_buffer.append", audio=encoded(sound(20)))
    (error,) = talk.say(twenty, twenty)
    assert error["error"]["code"] == "limit_exceeded"
    assert talk.say(message("input_audio_buffer.commit"))[0]["type"] == "input_audio_buffer.committed"


# -------------------------------------------------------------------------------------------------- what errors say


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        made = {"properties": made}
    return made


def test_a_tool_may_not_be_nested_without_end(service: Service) -> None:
    talk = Talk(service, "lm")

    def tools(depth: int) -> dict[str, Any]:
        return {"type": "realtime", "tools": [{"type": "function", "name": "f", "parameters": nested(depth)}]}

    for kind, field in (("session.update", "session"), ("response.create", "response")):
        error = talk.error(kind, **{field: tools(400)})
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(f"{field}.tools")
    (told,) = talk.say(message("session.update", session=tools(80)))
    assert told["type"] == "session.updated"


TURNS = "session.audio.input.turn_detection"


@pytest.mark.parametrize(
    ("update", "param", "words"),
    [
        ({"max_output_tokens": 0}, "session.max_output_tokens", "greater"),
        ({"max_output_tokens": "all"}, "session.max_output_tokens", "got 'all'"),
        ({"tools": [{"name": "f"}, {"name": "no good"}]}, "session.tools[1].name", "pattern"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "session.tools[0].type", "function"),
        ({"tools": {}}, "session.tools", "must be a list"),
        ({"tool_choice": "maybe"}, "session.tool_choice", "got 'maybe'"),
        ({"audio": []}, "session.audio", "must be an object"),
        ({"audio": {"input": {"transcription": []}}}, "session.audio.input.transcription", "must be an object"),
        ({"audio": {"input": {"turn_detection": {"type": "psychic_vad"}}}}, TURNS, "semantic_vad"),
        ({"audio": {"input": {"turn_detection": {}}}}, TURNS, "type"),
        ({"audio": {"input": {"format": {"rate": 8000}}}}, "session.audio.input.format.rate", "24000 Hz"),
        ({"audio": {"output": {"voice": {"name": "x"}}}}, "session.audio.output.voice", "must be a name"),
        ({"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5}}, f"{TURNS}.idle_timeout_ms", "not supported"),
        ({"prompt": {"id": "x"}}, "session.prompt", "not supported"),
        ({"truncation": {"type": "retention_ratio"}}, "session.truncation", "'auto' or 'disabled'"),
        ({"temprature": 1}, "session.temprature", "unknown field"),
    ],
)
def test_errors_name_the_clients_field_and_none_of_our_classes(update: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        updated(SessionConfig(), update, "session")
    assert caught.value.param == param
    assert words in caught.value.message
    assert not any(name in caught.value.message for name in ("Config", "class", "instance", "tuple"))


def test_a_cancel_that_names_no_response_is_not_told_of_one(talk: Talk) -> None:
    assert talk.error("response.cancel")["param"] is None
    assert talk.error("response.cancel", response_id="resp_x")["param"] == "response_id"


def test_clients_that_ask_for_less_noise_are_taken(talk: Talk) -> None:
    for update in (
        {"audio": {"input": {"noise_reduction": {"type": "near_field"}}}},
        {"input_audio_noise_reduction": {"type": "far_field"}},
    ):
        (told,) = talk.say(message("session.update", session={"instructions": "Be brief.", **update}))
        assert told["type"] == "session.updated"
        assert told["session"]["instructions"] == "Be brief."
