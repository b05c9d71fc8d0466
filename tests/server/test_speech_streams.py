"""Speech that goes out while it is made: in every format, as bytes and as events."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from omnistage.core.errors import DeadlineExceededError, StageError
from omnistage.core.types import AudioChunk, FinishReason, Modality
from omnistage.media.audio import decode_audio
from omnistage.media.audio_output import AudioOutput
from omnistage.media.limits import MediaLimits
from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.server.openai.audio.encode import audio_writer, encode_audio, pcm16
from omnistage.server.openai.audio.speech import _events, _file
from tests.server.harness import Held, Running, awaited, until

FORMATS = ("wav", "flac", "mp3", "opus", "aac", "pcm")
LOSSLESS = ("wav", "flac", "pcm")
RATE = 24_000
SAID: dict[str, Any] = {"model": "omni", "input": "Hello", "voice": "Chelsie"}
SEEDED: dict[str, Any] = {**SAID, "extra_body": {"seed": 1}}


def sound(seconds: float = 2.3) -> np.ndarray[Any, np.dtype[np.float32]]:
    times = np.arange(int(seconds * RATE) + 7) / RATE
    return (0.4 * np.sin(2 * np.pi * 330 * times)).astype(np.float32)


def decoded(data: bytes, format: str) -> tuple[np.ndarray[Any, Any], int]:
    clip = decode_audio(data, MediaLimits(), format="pcm16" if format == "pcm" else None)
    return clip.samples, clip.sample_rate


# ------------------------------------------------------------------------------------------------- encoders


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [177, 4801])
def test_pieces_make_the_sound_that_the_whole_is(format: str, size: int) -> None:
    samples = sound()
    writer = audio_writer(format, RATE)
    pieces = [writer.write(samples[start : start + size]) for start in range(0, len(samples), size)]
    half = sum(map(len, pieces[: len(pieces) // 2]))
    data = b"".join(pieces) + writer.finish()
    assert half > len(data) // 4  # it does not wait for the end
    got, rate = decoded(data, format)
    whole, _ = decoded(encode_audio(AudioOutput(samples, RATE), format), format)
    assert rate == RATE
    if format in LOSSLESS:
        assert len(got) == len(whole)
        assert (got * 32768 == np.frombuffer(pcm16(samples), "<i2")).all()
    elif format == "mp3":
        # Only a file whose end is known can say which of its samples are the encoder's own silence.
        assert 0 <= len(got) - len(whole) < 3 * 1152
    else:
        assert len(got) == len(whole)
    # The same tone, wherever the encoder's silence ends.
    middle = np.abs(np.fft.rfft(got[RATE // 2 : RATE // 2 + RATE]))
    assert int(middle.argmax()) == 330


def test_a_rate_that_an_encoder_does_not_take_is_changed() -> None:
    writer = audio_writer("opus", 22_050)
    data = writer.write(np.zeros(22_050, np.float32)) + writer.write(np.zeros(0, np.float32)) + writer.finish()
    got, rate = decoded(data, "opus")
    assert len(got) / rate == pytest.approx(1.0, abs=0.01)


# ------------------------------------------------------------------------------------------------ the route


class Fed:
    """A request that gives what a test feeds it."""

    def __init__(self, *items: OutputChunk) -> None:
        self.items = list(items)
        self.closed = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Any]:
        try:
            yield self._all()
        finally:
            self.closed = True

    async def _all(self) -> AsyncIterator[OutputChunk]:
        while self.items:
            yield self.items.pop(0)


def spoken(samples: np.ndarray[Any, Any]) -> OutputChunk:
    return OutputChunk("r", Modality.AUDIO, audio=AudioChunk(samples, RATE))


def end(reason: FinishReason, error: StageError | None = None) -> OutputChunk:
    return OutputChunk("r", Modality.AUDIO, final=OmniRequestOutput("r", finish_reason=reason, error=error))


@pytest.mark.parametrize("format", FORMATS)
@awaited
async def test_the_first_sound_goes_out_before_the_second_is_made(format: str) -> None:
    fed = Fed(spoken(sound(0.5)), spoken(sound(0.5)), end(FinishReason.STOP))
    pieces = _file(fed.running(), format)
    data = await anext(pieces)
    assert len(data) > 1000  # more than a header
    assert len(fed.items) == 2
    data += b"".join([piece async for piece in pieces])
    got, rate = decoded(data, format)
    assert len(got) / rate == pytest.approx(1.0, abs=0.1)
    assert fed.closed


@awaited
async def test_a_reader_that_leaves_ends_the_request() -> None:
    for make in (_file, _events):
        fed = Fed(spoken(sound(0.5)), spoken(sound(0.5)), end(FinishReason.STOP))
        pieces = make(fed.running(), "mp3")
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
        assert fed.closed


@pytest.mark.parametrize(
    ("cut", "kind"),
    [
        (lambda: end(FinishReason.DEADLINE), DeadlineExceededError),
        (lambda: end(FinishReason.ERROR, StageError("it broke")), StageError),
    ],
    ids=["deadline", "error"],
)
@awaited
async def test_speech_that_is_cut_is_never_a_whole_file(cut: Callable[[], OutputChunk], kind: type[Exception]) -> None:
    last = cut()
    pieces = _file(Fed(spoken(sound(0.5)), last).running(), "wav")
    assert await anext(pieces)
    with pytest.raises(kind):
        await anext(pieces)
    told = [json.loads(line[6:]) async for line in _events(Fed(spoken(sound(0.5)), last).running(), "wav")]
    assert [one.get("type") for one in told[:-1]] == ["speech.audio.delta"]
    assert told[-1]["error"]["code"] == kind.code  # type: ignore[attr-defined]
    # With nothing sent it can still have its status.
    for make in (_file, _events):
        with pytest.raises(kind):
            await anext(make(Fed(last).running(), "wav"))


@pytest.fixture
def held(ending: AsyncOmni, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(ending.orchestrator.stages["talker"], monkeypatch, free=90)
    yield made
    made.go.set()
    until(lambda: ending.stats().inflight == 0, "the end of held requests")


def test_the_client_hears_the_beginning_while_the_rest_is_made(
    server: Running, client: openai.OpenAI, ending: AsyncOmni, held: Held
) -> None:
    with client.audio.speech.with_streaming_response.create(**SEEDED) as answer:  # mp3, as with OpenAI
        assert "content-length" not in answer.headers
        pieces = answer.iter_bytes()
        first = next(pieces)
        assert not held.go.is_set()
        assert ending.stats().inflight == 1
        held.go.set()
        data = first + b"".join(pieces)
    assert len(decoded(data, "mp3")[0]) > len(decoded(first, "mp3")[0])


def client_sound(server: Running, format: Any, **more: Any) -> np.ndarray[Any, Any]:
    with server.client() as client:
        answer = client.audio.speech.create(**{**SEEDED, **more}, response_format=format)
    return decoded(answer.content, format)[0]


@pytest.mark.usefixtures("ending")
def test_every_format_is_the_same_sound(server: Running) -> None:
    plain = client_sound(server, "pcm")
    assert (client_sound(server, "wav", voice={"id": "Chelsie"}) == plain).all()
    assert (client_sound(server, "flac", stream_format="audio", speed=1.0) == plain).all()


@pytest.mark.usefixtures("ending")
def test_events_carry_the_file_and_the_usage(server: Running) -> None:
    body = {**SAID, "seed": 1, "response_format": "pcm", "stream_format": "sse"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert [one["type"] for one in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
    data = b"".join(base64.b64decode(one["audio"]) for one in events[:-1])
    assert (decoded(data, "pcm")[0] == client_sound(server, "pcm")).all()
    usage = events[-1]["usage"]
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["finish_reason"] == "length"  # the talker is cut at the codes that it may give
    assert usage["output_tokens"] >= 96  # the talker's too
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize(
    ("change", "param", "named"),
    [
        ({"speed": 5}, "speed", "less than or equal to 4"),
        ({"stream_format": "chunks"}, "stream_format", "sse"),
        ({"voice": {"id": "nobody"}}, "voice", "there is no voice"),
        ({"voice": {"name": "Chelsie"}}, "voice", ""),
        ({"response_format": "ogg"}, "response_format", "opus"),
    ],
)
def test_what_is_wrong_is_named(server: Running, change: dict[str, Any], param: str, named: str) -> None:
    for form in ("audio", "sse"):
        body = {**SAID, "stream_format": form, **change}
        answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"].startswith(param), error
        assert named in error["message"]
