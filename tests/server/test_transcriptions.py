"""Transcriptions with OpenAI's own client."""

from __future__ import annotations

import io
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.server.conftest import Running

SECONDS = 0.5


def wav(format: str = "WAV") -> bytes:
    times = np.arange(int(SECONDS * 16_000)) / 16_000
    encoded = io.BytesIO()
    soundfile.write(encoded, 0.3 * np.sin(2 * np.pi * 440 * times).astype(np.float32), 16_000, format=format)
    return encoded.getvalue()


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


def test_a_stream_gives_the_same_text(client: openai.OpenAI) -> None:
    plain = client.audio.transcriptions.create(**GIVEN)
    events = list(client.audio.transcriptions.create(**GIVEN, stream=True))
    last: Any = events[-1]
    assert last.type == "transcript.text.done"
    assert last.text == "".join(e.delta for e in events if e.type == "transcript.text.delta")
    assert last.text.strip() == plain.text


def test_language_and_prompt_are_told_to_the_model(client: openai.OpenAI) -> None:
    plain = client.audio.transcriptions.create(**GIVEN)
    flac = {**GIVEN, "file": ("said.flac", wav("FLAC"))}
    told = client.audio.transcriptions.create(**flac, language="en", prompt="Omnistage", temperature=0.5)
    assert told.usage.input_tokens > plain.usage.input_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "data", "status", "named"),
    [
        ({"model": "nobody"}, wav(), 404, "model"),
        ({"model": "lm"}, wav(), 400, "does not hear"),
        ({"model": "draw"}, wav(), 400, "does not hear"),
        ({}, b"", 400, "file: is empty"),
        ({}, b"this is no sound at all", 400, "file: "),
        ({"response_format": "srt"}, wav(), 400, "response_format"),
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
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files=files, timeout=30)
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]["message"]


def test_a_file_that_is_missing_is_named(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data={"model": "omni"}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"
