"""A model that speaks a text as it is, CSM, behind `/v1/audio/speech`."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch

from omnistage.core.types import MediaSpan
from omnistage.models.csm.backbone import Backbone
from omnistage.omni import AsyncOmni
from omnistage.server.service import Service
from tests.server.harness import SERVE_LIMITS, Running, make, serving
from tests.server.test_realtime_edges import error_of

FRAMES = 20
"""A random model never ends by itself."""
SAID: dict[str, Any] = {"model": "csm", "input": "Hello, how are you?", "seed": 1, "response_format": "wav"}


@pytest.fixture(scope="module")
def csm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    folder = make("csm", tmp_path_factory.mktemp("served") / "csm")
    limits = (*SERVE_LIMITS, f"backbone.max_tokens={FRAMES}", "codec.max_hold_seconds=0")
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=limits, progress=False)
    yield omni
    omni.orchestrator.check_idle()
    asyncio.run(omni.shutdown(drain=False))


@pytest.fixture(scope="module")
def speaking(csm: AsyncOmni) -> Iterator[Running]:
    service = Service()
    service.add("csm", csm)
    service.loading = False
    with serving(service) as running:
        yield running


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
        ({"input": " "}, "input", "has no text"),
        ({"ref_text": "What it says."}, "ref_text", "needs ref_audio"),
        ({"ref_audio": "data:audio/wav;base64,UklGRg=="}, "ref_text", "words that are said in the clip"),
        ({"ref_audio": "data:audio/wav;base64,UklGRg==", "ref_text": " "}, "ref_text", "words that are said"),
        ({"ref_audio": "data:audio/wav;base64,UklGRg==", "ref_text": "This."}, "ref_audio", "decode"),
        ({"ref_audio": "https://example.com/a.wav", "ref_text": "This."}, "ref_audio", ""),
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


def recording(seconds: float = 1.0, pitch: float = 20.0) -> str:
    """A clip as base64 of a WAV file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, 0.1 * np.sin(np.arange(int(seconds * 16_000)) / pitch), 16_000, format="WAV")
    return base64.b64encode(buffer.getvalue()).decode()


def chat(running: Running, said: dict[str, Any]) -> np.ndarray:
    """The speech of a chat after what was said."""
    body = {
        "model": "csm",
        "messages": [said, {"role": "assistant", "content": SAID["input"]}],
        "modalities": ["audio"],
        "audio": {"voice": "0", "format": "wav"},
        "seed": 1,
    }
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    sound = base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"])
    return np.asarray(soundfile.read(io.BytesIO(sound), dtype="float32")[0])


def test_a_text_is_spoken_with_the_voice_of_a_clip(speaking: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = list[bytes]()
    encode = Backbone.encode

    def counted(self: Backbone, span: MediaSpan) -> torch.Tensor:
        encoded.append(span.key)
        return encode(self, span)

    monkeypatch.setattr(Backbone, "encode", counted)
    clip = recording()
    cloning = {"ref_audio": f"data:audio/wav;base64,{clip}", "ref_text": "I said this.", "voice": "0"}
    plain, cloned = samples(post(speaking, voice="0")), samples(post(speaking, **cloning))
    assert not np.array_equal(plain, cloned)
    said = {"type": "input_audio", "input_audio": {"data": clip, "format": "wav"}}
    text = {"type": "text", "text": "I said this."}
    assert np.abs(chat(speaking, {"role": "assistant", "content": [text, said]}) - cloned).max() < 1e-4
    assert len(encoded) == 1  # by content: the chat's clip is the same
    other = {**cloning, "ref_audio": f"data:audio/wav;base64,{recording(pitch=13)}"}
    assert not np.array_equal(samples(post(speaking, **other)), cloned)
    assert len(encoded) == 2
    assert httpx.get(f"{speaking.url}/v1/models/csm").json()["clones_voices"] is True


def test_a_clip_that_fills_the_context_is_refused_before_it_is_encoded(
    speaking: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Backbone, "encode")
    answer = post(speaking, ref_audio=f"data:audio/wav;base64,{recording(170)}", ref_text="Long.")
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["param"] in ("ref_audio", "input")


def test_a_clip_of_another_speaker_may_come_before_the_text(speaking: Running) -> None:
    said = {"type": "input_audio", "input_audio": {"data": recording(), "format": "wav"}}
    text = {"type": "text", "text": "I said this."}
    user, same = (chat(speaking, {"role": role, "content": [text, said]}) for role in ("user", "assistant"))
    assert len(user) == len(same) == FRAMES * 1920
    assert not np.array_equal(user, same)


def test_speech_in_company_is_that_of_each_text_alone(speaking: Running) -> None:
    clips = [{"ref_audio": f"data:audio/wav;base64,{recording(pitch=pitch)}", "ref_text": "So."} for pitch in (9, 30)]
    texts = ("Hello, how are you?", "A much longer text, with more words than the others have.", "Yes.")
    asked: list[dict[str, Any]] = [
        {"voice": voice, "seed": seed, "input": text, **clip}
        for seed, (text, voice) in enumerate(zip(texts, ("0", "7", "3"), strict=True))
        for clip in ({}, *clips)
    ]
    alone = [samples(post(speaking, **one)) for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = [samples(answer) for answer in pool.map(lambda one: post(speaking, **one), asked)]
    for one, other in zip(alone, together, strict=True):
        assert len(one) == len(other)
        assert np.abs(one - other).max() < 1e-4
