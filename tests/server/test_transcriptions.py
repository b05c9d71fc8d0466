"""Transcriptions with OpenAI's own client."""

from __future__ import annotations

import io
import json
import typing
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from openai.types.audio import transcription_create_params

from omnistage.core.types import FinishReason, Modality
from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk
from omnistage.server.openai.audio.transcript_events import TranscriptEvents
from omnistage.server.openai.audio.transcriptions import TranscriptionForm
from tests.server.harness import Running

pytestmark = pytest.mark.usefixtures("ending")

SECONDS = 0.5


def wav(format: str = "WAV") -> bytes:
    times = np.arange(int(SECONDS * 16_000)) / 16_000
    encoded = io.BytesIO()
    soundfile.write(encoded, 0.3 * np.sin(2 * np.pi * 440 * times).astype(np.float32), 16_000, format=format)
    return encoded.getvalue()


REASONS = {
    "chunking_strategy": "audio is not split into chunks",
    "include": "log probabilities are not supported",
    "known_speaker_names": "speakers are not distinguished",
    "known_speaker_references": "speakers are not distinguished",
    "timestamp_granularities": "timestamps are not supported",
}
GIVEN: dict[str, Any] = {"model": "omni", "file": ("said.wav", wav()), "timeout": 120}


def test_a_sound_is_written_down_in_every_form(client: openai.OpenAI) -> None:
    plain = client.audio.transcriptions.create(**GIVEN)
    assert isinstance(plain.text, str)
    assert plain.usage is not None
    text = client.audio.transcriptions.create(**GIVEN, response_format="text")
    assert text == f"{plain.text}\n"
    verbose = client.audio.transcriptions.create(**GIVEN, response_format="verbose_json")
    assert verbose.text == plain.text
    assert float(verbose.duration) == pytest.approx(SECONDS)
    assert verbose.segments == []


def test_a_stream_has_the_usage_so_far(client: openai.OpenAI) -> None:
    form = {"model": "omni", "stream": "true", "stream_include_usage": "true", "stream_continuous_usage_stats": "true"}
    address = f"{client.base_url}audio/transcriptions"
    answer = httpx.post(address, data=form, files={"file": ("said.wav", wav())}, timeout=120)
    *chunks, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert all(chunk["model"] == "omni" for chunk in (*chunks, last))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_a_stream_gives_the_same_text(client: openai.OpenAI) -> None:
    plain = client.audio.transcriptions.create(**GIVEN)
    events = list(client.audio.transcriptions.create(**GIVEN, stream=True))
    last: Any = events[-1]
    assert last.type == "transcript.text.done"
    assert last.text == "".join(e.delta for e in events if e.type == "transcript.text.delta")
    assert last.text == plain.text


def test_a_stream_has_no_white_space_around_its_text() -> None:
    events = TranscriptEvents()
    said = [" ", " Hel", "lo ", "", " you", "\n", " "]
    deltas = [events.write(OutputChunk("req-1", Modality.TEXT, text=text)) for text in said]
    assert [one["delta"] for some in deltas for one in some] == ["Hel", "lo", "  you"]  # type: ignore[typeddict-item]
    output = CompletionOutput(text="".join(said))
    final = OmniRequestOutput("req-1", [output], finish_reason=FinishReason.STOP)
    (last,) = events.write(OutputChunk("req-1", Modality.TEXT, final=final))
    assert last["text"] == "Hello  you"  # type: ignore[typeddict-item]


def test_language_and_prompt_are_told_to_the_model(client: openai.OpenAI) -> None:
    plain = client.audio.transcriptions.create(**GIVEN)
    flac = {**GIVEN, "file": ("said.flac", wav("FLAC"))}
    told = client.audio.transcriptions.create(**flac, language="en", prompt="Omnistage", temperature=0.5)
    assert told.usage.input_tokens > plain.usage.input_tokens  # type: ignore[union-attr]


def test_languages_and_keywords_are_told_to_the_model(client: openai.OpenAI) -> None:
    plain, one, two = (
        client.audio.transcriptions.create(**GIVEN, **more)
        for more in ({}, {"languages": ["en"]}, {"languages": ["en", "de"], "keywords": ["Omnistage", "bridge"]})
    )
    counts = [told.usage.input_tokens for told in (plain, one, two)]  # type: ignore[union-attr]
    assert counts == sorted(set(counts))


def test_a_chat_model_samples_by_the_seed(client: openai.OpenAI) -> None:
    hot: dict[str, Any] = {**GIVEN, "temperature": 1}
    same, again, other = (
        client.audio.transcriptions.create(**hot, extra_body={"seed": seed}).text for seed in (-7, -7, 8)
    )
    assert same == again != other


# ---------------------------------------------------------------------------------------------------- not whole


def cut(server: Running, **form: str) -> tuple[int, dict[str, Any]]:
    """How a transcription is refused: its status, 200 where a stream had begun, and the error."""
    files = {"file": ("said.wav", wav())}
    answer = httpx.post(
        f"{server.url}/v1/audio/transcriptions", data={"model": "omni", **form}, files=files, timeout=60
    )
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.status_code, answer.json()["error"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert {one["type"] for one in events[:-1]} == {"transcript.text.delta"}
    return answer.status_code, events[-1]["error"]


def test_longer_answers_than_the_model_gives_by_default_are_whole(
    server: Running, ending: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a conversation may have by default is no bound for what is said in a recording."""
    defaults = ending.orchestrator._planner.defaults
    monkeypatch.setitem(defaults, "thinker", defaults["thinker"].model_copy(update={"max_tokens": 4}))
    with server.client() as client:
        assert client.audio.transcriptions.create(**GIVEN).usage.output_tokens == 9  # type: ignore[union-attr]


@pytest.mark.parametrize("format", ["json", "text", "verbose_json"])
def test_what_does_not_fit_is_an_error(
    server: Running, ending: AsyncOmni, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    with server.client() as client:
        used: int = client.audio.transcriptions.create(**GIVEN).usage.input_tokens  # type: ignore[union-attr,assignment]
    # With the 8 tokens before the end that it would say, its room is full.
    stage = ending.orchestrator.stages["thinker"]
    monkeypatch.setattr(stage, "max_length", used + 8)
    status, error = cut(server, response_format=format)
    assert (status, error["param"], error["code"]) == (413, "file", "limit_exceeded")
    assert "shorter" in error["message"]
    status, error = cut(server, stream="true")
    assert (status, error["code"]) == (200, "limit_exceeded")
    monkeypatch.setattr(stage, "max_length", used)
    status, error = cut(server, response_format=format)
    assert (status, error["param"], error["code"]) == (400, "file", "context_length_exceeded")


def test_what_is_not_done_in_time_is_an_error(
    server: Running, ending: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = ending.orchestrator._planner.defaults
    monkeypatch.setitem(defaults, "thinker", defaults["thinker"].model_copy(update={"min_tokens": 30_000}))
    status, error = cut(server, timeout="0.6")
    assert (status, error["param"], error["code"]) == (408, "timeout", "deadline_exceeded")
    status, error = cut(server, timeout="0.6", stream="true")
    assert status in (200, 408)  # a slow machine may not have written anything yet
    assert error["code"] == "deadline_exceeded"


# -------------------------------------------------------------------------------------------------------- wrong


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("foo", 1, "foo"),
        ("include", ["logprobs"], "include[]"),
        ("chunking_strategy", "auto", "chunking_strategy"),
        ("chunking_strategy", {"type": "server_vad"}, "chunking_strategy[type]"),
        ("timestamp_granularities", ["word", "segment"], "timestamp_granularities[]"),
        ("known_speaker_names", ["agent"], "known_speaker_names[]"),
        ("known_speaker_references", ["data:audio/wav;base64,AAAA"], "known_speaker_references[]"),
        ("languages", ["en", "<|x|>"], "languages[]"),
        ("keywords", ["x" * 4001], "keywords[]"),
    ],
)
def test_no_field_is_ignored(client: openai.OpenAI, field: str, value: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.transcriptions.create(**GIVEN, extra_body={field: value})
    assert (refused.value.param or "").startswith(param)
    if field in REASONS and param in (field, f"{field}[]"):
        assert REASONS[field] in refused.value.message


def test_every_field_of_the_client_is_known() -> None:
    asked = typing.get_type_hints(transcription_create_params.TranscriptionCreateParamsNonStreaming)
    assert set(asked) - set(TranscriptionForm.model_fields) == set()


def test_values_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    unset: dict[str, Any] = {"include": [], "timestamp_granularities": [], "chunking_strategy": None, "stream": False}
    assert client.audio.transcriptions.create(**GIVEN, **unset).text


@pytest.mark.parametrize(
    ("change", "data", "status", "named"),
    [
        ({"model": "nobody"}, wav(), 404, "model"),
        ({"model": "lm"}, wav(), 400, "has no audio input"),
        ({"model": "draw"}, wav(), 400, "has no audio input"),
        ({}, b"", 400, "file: is empty"),
        ({}, b"this is no sound at all", 400, "file: "),
        ({"response_format": "srt"}, wav(), 400, "response_format: srt needs timestamps"),
        ({"response_format": "vtt"}, wav(), 400, "response_format: vtt needs timestamps"),
        ({"response_format": "diarized_json"}, wav(), 400, "response_format: diarized_json needs timestamps"),
        ({"response_format": "xml"}, wav(), 400, "response_format"),
        ({"temperature": "nan"}, wav(), 400, "temperature"),
        ({"language": "<|x|>"}, wav(), 400, "language"),
        ({"timeout": "-1"}, wav(), 400, "timeout"),
    ],
)
@pytest.mark.parametrize("stream", ["false", "true"])
def test_what_is_wrong_is_named(
    server: Running, change: dict[str, str], data: bytes, status: int, named: str, stream: str
) -> None:
    form = {"model": "omni", "stream": stream, **change}
    files = {"file": ("said.wav", data)}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files=files)
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]["message"]


def test_a_file_that_is_missing_is_named(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data={"model": "omni"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"
