"""`WS /v1/audio/speech/stream`: a text that is still being written, spoken a sentence at a time."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import soundfile
import websockets.sync.client as sockets

from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.http.limits import HeldBytes, Hold
from omnistage.server.realtime.spoken_text import SpokenText
from omnistage.server.service import Service
from tests.server.harness import Running, awaited, serving, until
from tests.server.test_read_aloud import FRAMES, csm, post, recording, samples, speaking

__all__ = ["csm", "speaking"]  # fixtures
KEY = "a-key-for-tests"
CONFIG: dict[str, Any] = {"type": "session.config", "voice": "0", "response_format": "wav", "seed": 1}
FIRST, SECOND = "Hello, how are you?", "And now this."


class Socket:
    def __init__(self, connection: sockets.ClientConnection) -> None:
        self.connection = connection

    def send(self, **message: object) -> None:
        self.connection.send(json.dumps(message))

    def say(self, *pieces: str) -> None:
        for piece in pieces:
            self.send(type="input.text", text=piece)
        self.send(type="input.done")

    def recv(self) -> dict[str, Any] | bytes:
        message = self.connection.recv(timeout=60)
        return message if isinstance(message, bytes) else json.loads(message)

    def until(self, kind: str) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Events up to the first of this kind, and the sound between them."""
        events, sound = list[dict[str, Any]](), list[bytes]()
        while not events or events[-1]["type"] != kind:
            message = self.recv()
            if isinstance(message, bytes):
                sound.append(message)
            else:
                events.append(message)
        return events, sound


@contextmanager
def opened(running: Running, query: str = "", **options: Any) -> Iterator[Socket]:
    url = running.url.replace("http://", "ws://")
    with sockets.connect(f"{url}/v1/audio/speech/stream{query}", compression=None, **options) as connection:
        yield Socket(connection)


def heard(data: bytes) -> np.ndarray:
    wave, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == 24_000
    return np.asarray(wave)


def test_sentences_are_spoken_as_they_are_complete_and_with_one_voice(speaking: Running) -> None:
    with opened(speaking, "?model=csm") as socket:
        socket.send(**CONFIG)
        socket.send(type="input.text", text=f"{FIRST[:9]}")
        socket.send(type="input.text", text=f"{FIRST[9:]} A")  # the second has begun: the first is spoken
        events, sound = socket.until("audio.done")
        first = heard(sound[0])
        assert [event["type"] for event in events] == ["audio.start", "audio.done"]
        assert (events[0]["sentence_text"], events[0]["sentence_index"]) == (FIRST, 0)
        assert (events[0]["format"], events[0]["sample_rate"]) == ("wav", 24_000)
        assert events[1]["total_bytes"] == len(sound[0])
        socket.say("nd now ", "this.")
        events, sound = socket.until("session.done")
    assert [event["type"] for event in events] == ["audio.start", "audio.done", "session.done"]
    assert events[0]["sentence_text"] == SECOND
    assert events[-1]["total_sentences"] == 2
    assert np.array_equal(first, samples(post(speaking, voice="0")))
    second, alone = heard(sound[0]), samples(post(speaking, voice="0", input=SECOND))
    assert len(second) == len(alone) == FRAMES * 1920
    assert not np.array_equal(second, alone)  # it has the first one's voice


def test_sound_may_be_streamed_and_the_voice_be_a_clip(speaking: Running) -> None:
    cloning = {"ref_audio": f"data:audio/wav;base64,{recording()}", "ref_text": "I said this."}
    with opened(speaking) as socket:
        socket.send(**{**CONFIG, **cloning, "response_format": "pcm", "stream_audio": True})
        socket.say(f"{FIRST} {SECOND}")
        events, sound = socket.until("session.done")
        sizes = [event["total_bytes"] for event in events if event["type"] == "audio.done"]
        assert len(sound) > 4
        pcm = np.frombuffer(b"".join(sound), dtype="<i2") / 32768
        socket.say(FIRST)  # another text on the same connection
        assert socket.until("session.done")[0][-1]["total_sentences"] == 1
    assert sum(sizes) == 2 * len(pcm)
    for place, text in enumerate((FIRST, SECOND)):
        whole = samples(post(speaking, voice="0", input=text, **cloning))
        assert np.abs(pcm[place * len(whole) :][: len(whole)] - whole).max() < 1e-4


@pytest.mark.parametrize(
    ("message", "param", "named"),
    [
        ({"type": "input.text", "text": "Hello."}, "type", "session.config"),
        ({"type": "input.done"}, "type", "session.config"),
        ({"type": "response.create"}, "type", "session.config"),
        ({**CONFIG, "voice": 3}, "voice", ""),
        ({**CONFIG, "model": "nobody"}, "model", "no model"),
        ({**CONFIG, "split_granularity": "word"}, "split_granularity", "sentence"),
        ({**CONFIG, "ref_text": "What it says."}, "ref_text", "ref_audio"),
        ({**CONFIG, "ref_audio": "data:audio/wav;base64,UklGRg=="}, "ref_text", "words that are said"),
        ({**CONFIG, "steps": 3}, "steps", "not supported"),
        ({**CONFIG, "mood": "gay"}, "mood", ""),
    ],
)
def test_what_is_wrong_is_named_and_the_session_goes_on(
    speaking: Running, message: dict[str, Any], param: str, named: str
) -> None:
    with opened(speaking) as socket:
        socket.send(**message)
        error = socket.until("error")[0][-1]
        assert error["error"]["param"] == param, error
        assert named in error["message"]
        socket.connection.send("[]")
        assert "object" in socket.until("error")[0][-1]["message"]
        socket.send(**CONFIG)
        socket.send(type="input.text", text="x" * 100_001)
        assert socket.until("error")[0][-1]["error"]["param"] == "text"
        socket.say(FIRST)
        assert socket.until("session.done")[0][-1]["total_sentences"] == 1
        socket.send(**CONFIG)
        assert "already" in socket.until("error")[0][-1]["message"]


def test_a_sentence_that_cannot_be_spoken_is_named_and_the_next_one_is_spoken(speaking: Running) -> None:
    with opened(speaking) as socket:
        socket.send(**{**CONFIG, "voice": "nobody"})
        socket.say(FIRST)
        events, sound = socket.until("session.done")
    assert [event["type"] for event in events] == ["error", "audio.done", "session.done"]
    assert events[0]["error"]["param"] == "voice"
    assert (events[0]["sentence_index"], events[1]["error"], sound) == (0, True, [])


def test_who_leaves_ends_the_sentence_that_is_spoken(speaking: Running, csm: AsyncOmni) -> None:
    with opened(speaking) as socket:
        socket.send(**{**CONFIG, "stream_audio": True})
        socket.say(*[f"{FIRST} "] * 20)
        socket.until("audio.start")
    until(lambda: csm.stats().inflight == 0, "the end of the request")
    csm.orchestrator.check_idle()


def test_a_key_may_use_its_own_models_only(csm: AsyncOmni) -> None:
    service = Service(keyring=Keyring([Holder("ann", digest_of(KEY), models=frozenset({"other"}))]))
    service.add("csm", csm)
    service.loading = False
    with serving(service) as running, opened(running, additional_headers={"Authorization": f"Bearer {KEY}"}) as socket:
        socket.send(**CONFIG)
        assert socket.until("error")[0][-1]["error"]["code"] == "permission_denied"


@awaited
async def test_no_more_waits_to_be_spoken_than_may(csm: AsyncOmni) -> None:
    service = Service()
    service.add("csm", csm)
    service.loading = False
    told = list[dict[str, Any]]()

    async def send(event: dict[str, Any]) -> None:
        told.append(event)

    async def send_bytes(data: bytes) -> None:
        await asyncio.Event().wait()  # who does not read

    holder = service.keyring.authenticate(None, None)
    session = SpokenText(service, holder, "csm", send, send_bytes, Hold(HeldBytes(2**30), holder.use))
    await session.handle(json.dumps(CONFIG))
    for message in [{"type": "input.text", "text": "Ah. " * 12_000}, {"type": "input.done"}] * 3:
        await session.handle(json.dumps(message))
    assert [event["error"]["param"] for event in told if event["type"] == "error"] == ["text"]
    for _ in range(40_000):
        await session.handle(json.dumps({"type": "input.done"}))
        if told[-1]["type"] == "error" and len(told) > 3:
            break
    assert "over the limit of 100000" in told[-1]["message"]
    await session.close()
    until(lambda: csm.stats().inflight == 0, "the end of the request")
