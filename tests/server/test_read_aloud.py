"""A model that speaks a text as it is, CSM, behind `/v1/audio/speech`."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from omnistage.omni import AsyncOmni
from omnistage.server.service import Service
from tests.server.harness import SERVE_LIMITS, Running, make, serving
from tests.server.test_realtime_edges import error_of

FRAMES = 20
"""A random model never ends by itself."""
SAID: dict[str, Any] = {"model": "csm", "input": "Hello, how are you?", "seed": 1, "response_format": "wav"}


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make("csm", tmp_path_factory.mktemp("served") / "csm")
    limits = (*SERVE_LIMITS, f"backbone.max_tokens={FRAMES}", "codec.max_hold_seconds=0")
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=limits, progress=False)
    service = Service()
    service.add("csm", omni)
    service.loading = False
    with serving(service) as running:
        yield running
    omni.orchestrator.check_idle()
    asyncio.run(omni.shutdown(drain=False))


def post(running: Running, **change: object) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/audio/speech", json={**SAID, **change}, timeout=60)


def samples(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    wave, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert rate == 24_000
    return np.asarray(wave)


def test_a_text_is_spoken_with_the_voice_that_is_asked_for(speaking: Running) -> None:
    first, again, other = (samples(post(speaking, voice=voice)) for voice in ("0", "0", "5"))
    assert len(first) == len(other) == FRAMES * 1920
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_sound_comes_in_pieces_while_it_is_made(speaking: Running) -> None:
    body = {**SAID, "voice": "0", "response_format": "pcm", "stream_format": "sse"}
    with httpx.stream("POST", f"{speaking.url}/v1/audio/speech", json=body, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    pieces = [base64.b64decode(one["audio"]) for one in events if one["type"] == "speech.audio.delta"]
    assert len(pieces) > 2  # windows of 2, 2, 4, ... frames
    assert events[-1]["type"] == "speech.audio.done"
    usage = events[-1]["usage"]
    assert usage["input_tokens"] > 5
    assert usage["output_tokens"] == FRAMES
    assert usage["total_tokens"] == usage["input_tokens"] + FRAMES
    whole = np.frombuffer(b"".join(pieces), dtype="<i2") / 32768
    assert np.abs(whole - samples(post(speaking, voice="0"))).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "param", "named"),
    [
        ({"voice": "nobody"}, "voice", "there is no voice"),
        ({"input": "a" * 5000}, "input", "send it in parts"),
        ({"input": " "}, "messages", "has no text"),
    ],
)
def test_what_is_wrong_is_named(speaking: Running, change: dict[str, Any], param: str, named: str) -> None:
    answer = post(speaking, **change)
    assert answer.status_code in (400, 413), answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
    assert named in error["message"]


def test_a_conversation_with_it_is_refused_with_what_to_use(speaking: Running) -> None:
    status, error = error_of(speaking, "?model=csm")
    assert (status, error["code"], error["param"]) == (400, "unsupported_modality", "model")
    assert "/v1/audio/speech" in error["message"]


def test_a_clip_of_the_speaker_may_come_before_the_text(speaking: Running) -> None:
    """Through chat: what was said, text and clip, then what to say."""
    buffer = io.BytesIO()
    soundfile.write(buffer, 0.1 * np.sin(np.arange(16_000) / 20), 16_000, format="WAV")
    clip = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(buffer.getvalue()).decode(), "format": "wav"},
    }
    said = {"role": "user", "content": [{"type": "text", "text": "I said this."}, clip]}
    body = {
        "model": "csm",
        "messages": [said, {"role": "user", "content": "And now this."}],
        "modalities": ["audio"],
        "audio": {"voice": "0", "format": "wav"},
    }
    answer = httpx.post(f"{speaking.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    sound = base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"])
    wave, _ = soundfile.read(io.BytesIO(sound))
    assert len(wave) == FRAMES * 1920
