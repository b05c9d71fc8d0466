"""The starter behind the service: every door that it has, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import gc
import io
import json
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from omnistage_starter.text_to_speech import Voice
from PIL import Image

from omnistage.core.clips import AudioClip
from omnistage.core.errors import ShutdownError
from omnistage.core.sentences import Sentences
from omnistage.core.types import Modality
from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import Usage
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.http.executor import Workers
from omnistage.server.moderation.filters import (
    AnswerText,
    FilterContext,
    Pass,
    PassingFilter,
    PromptText,
    Redact,
    Refuse,
    Verdict,
)
from omnistage.server.moderation.wordlist import WordList
from omnistage.server.openai.audio import transcriber
from omnistage.server.openai.response_models import usage_of
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import Running, awaited, serving, until
from tests.server.realtime_client import QUIET, base64_of, said, text_of, until_event
from tests.server.starter_harness import HEARD, HELLO, SHORT, server, service_of, starter

pytest.importorskip("onnx", reason="the tiny speech recognition networks are written with it")
pytest.importorskip("hibari", reason="the voice is that package's")

__all__ = ["server", "starter"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")

QUICK = {"steps": 2, "seed": 3}
TEXT = "The quick brown fox jumps over the lazy dog. It does not say why!"


def wav(level: float = 0.3, seconds: float = 0.8) -> bytes:
    times = np.arange(int(seconds * 16_000)) / 16_000
    encoded = io.BytesIO()
    soundfile.write(encoded, (level * np.sin(times * 1400)).astype(np.float32), 16_000, format="WAV")
    return encoded.getvalue()


def spoken(text: str) -> np.ndarray:
    left, pieces = Sentences().push(text)
    voice = Voice(1)
    return np.concatenate([voice.synthesise(piece, seed=0) for piece in (*pieces, *left.finish())])


def assert_sounds(data: bytes, text: str) -> None:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    wanted = spoken(text)
    assert rate == 24_000
    assert len(samples) == len(wanted)
    assert np.abs(samples - np.clip(wanted, -1, 1)).max() < 1e-3  # 16 bits of it


# ----------------------------------------------------------------------------------------------------------- chat


def test_the_list_of_models_names_inputs_and_outputs(client: openai.OpenAI) -> None:
    card = client.models.retrieve("starter").model_dump()
    assert card["modalities"] == {"input": ["audio", "text"], "output": ["text", "audio", "image"]}
    assert card["voices"]
    assert card["transcribes"] is True
    assert card["unsupported"] == ["negative_prompt", "size"]
    assert card["stages"] == ["hear", "think", "speak", "draw", "paint"]
    assert card["defaults"]["drawing"]["steps"] == 20
    assert card["defaults"]["sampling"]["max_tokens"] == 256


def test_an_answer_in_text_speech_and_a_picture(client: openai.OpenAI) -> None:
    extra = {"modalities": ["text", "audio", "image"], "drawing": QUICK, "audio": {"format": "wav"}}
    response = client.chat.completions.create(**SHORT, messages=HELLO, extra_body=extra)
    message: Any = response.choices[0].message
    assert_sounds(base64.b64decode(message.audio.data), message.audio.transcript)
    picture = Image.open(io.BytesIO(base64.b64decode(message.images[0]["image_url"]["url"].partition(",")[2])))
    assert picture.size == (96, 96)
    details: Any = response.usage.completion_tokens_details
    assert details.audio_tokens == 0
    assert details.denoising_steps == 2
    assert response.usage.completion_tokens == 8


def test_the_steps_of_a_picture_are_no_tokens_of_speech() -> None:
    both = Usage(3, 8, audio_seconds=1.0, images=1, steps=20, stage_tokens={"think": 8, "talk": 30, "draw": 20})
    assert usage_of(both)["completion_tokens_details"]["audio_tokens"] == 30


def test_a_stream_has_text_speech_and_an_image(client: openai.OpenAI) -> None:
    extra = {"modalities": ["text", "audio", "image"], "drawing": QUICK}
    whole: Any = client.chat.completions.create(
        **SHORT, messages=HELLO, extra_body={**extra, "audio": {"format": "wav"}}
    )
    transcript, samples, pictures = "", b"", 0
    stream: Any = client.chat.completions.create(**SHORT, messages=HELLO, stream=True, extra_body=extra)
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            audio = delta.get("audio") or {}
            transcript += audio.get("transcript") or ""
            samples += base64.b64decode(audio.get("data") or "")
            pictures += len(delta.get("images") or ())
    assert transcript == whole.choices[0].message.audio.transcript
    assert len(samples) == 2 * len(spoken(transcript))
    assert pictures == 1


def test_a_question_may_be_spoken(client: openai.OpenAI) -> None:
    asked = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav()).decode(), "format": "wav"}}
    heard = client.chat.completions.create(**SHORT, messages=[{"role": "user", "content": [asked]}])
    written = client.chat.completions.create(**SHORT, messages=[{"role": "user", "content": HEARD}])
    assert heard.choices[0].message.content == written.choices[0].message.content


def test_completions_and_responses_work_too(client: openai.OpenAI) -> None:
    told = client.responses.create(model="starter", input="Hello!", temperature=0, max_output_tokens=16)
    assert told.output_text
    bare = client.completions.create(model="starter", prompt="Once upon a time", temperature=0, max_tokens=5)
    assert bare.usage is not None
    assert bare.usage.completion_tokens == 5


def test_audio_without_speech_is_the_clients_error(client: openai.OpenAI) -> None:
    silence = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(0.0)).decode(), "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="no speech was detected"):
        client.chat.completions.create(**SHORT, messages=[{"role": "user", "content": [silence]}])


# -------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_is_too_long_is_named_as_it_was_sent(client: openai.OpenAI, stream: bool) -> None:
    words = "word " * 30_000
    messages: list[Any] = [{"role": "user", "content": words}]
    with pytest.raises(openai.APIError) as chat:
        list(client.chat.completions.create(**SHORT, messages=messages, stream=stream))
    assert (chat.value.param, chat.value.code) == ("messages", "context_length_exceeded")
    if not stream:
        with pytest.raises(openai.BadRequestError) as response:
            client.responses.create(model="starter", input=words)
        assert response.value.param == "input"


def test_the_seed_of_a_request_is_also_the_images_unless_it_has_its_own(client: openai.OpenAI) -> None:
    def picture(seed: int, drawing: dict[str, int] | None = None) -> bytes:
        answer = client.chat.completions.create(
            **SHORT,
            messages=[{"role": "user", "content": "Draw a red fox."}],
            seed=seed,
            extra_body={"modalities": ["text", "image"], "drawing": {"steps": 2, **(drawing or {})}},
        )
        url = answer.choices[0].message.model_extra["images"][0]["image_url"]["url"]  # type: ignore[index]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))).tobytes()

    assert picture(7) == picture(7)
    assert picture(7) != picture(8)
    assert picture(7, {"seed": 3}) == picture(8, {"seed": 3})


def test_pictures_are_drawn_of_a_prompt(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "starter", "prompt": "Draw a red fox.", "extra_body": QUICK}
    two = client.images.generate(**request, n=2)
    assert two.size == "96x96"
    assert [entry.model_dump()["seed"] for entry in two.data or ()] == [3, 4]
    one = client.images.generate(**request, size="96x96")
    assert one.data is not None
    assert one.data[0].b64_json is not None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"size": "1024x1024", "extra_body": {"strict_size": True}}, "size"),
        ({"extra_body": {"negative_prompt": "fog"}}, "negative_prompt"),
    ],
)
def test_unsupported_image_options_are_refused_by_name(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(model="starter", prompt="Draw a red fox.", **more)
    assert refused.value.param == param


def test_image_edits_are_refused(client: openai.OpenAI) -> None:
    encoded = io.BytesIO()
    Image.new("RGB", (96, 96)).save(encoded, "PNG")
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(model="starter", prompt="At night.", image=("a.png", encoded.getvalue()))
    assert refused.value.param == "image"
    assert "this model does not edit images" in refused.value.message


# ------------------------------------------------------------------------------------------------ speech, transcription


def test_a_text_is_spoken_as_it_is(client: openai.OpenAI) -> None:
    response = client.audio.speech.create(model="starter", input=TEXT, voice="heart", response_format="wav")
    assert_sounds(response.content, TEXT)


def test_speech_names_instructions_that_it_does_not_follow(client: openai.OpenAI) -> None:
    speech = client.audio.speech.with_raw_response
    answer = speech.create(model="starter", input=TEXT, voice="heart", response_format="wav", instructions="Whisper.")
    assert answer.headers["x-omnistage-ignored"] == "instructions"
    assert_sounds(answer.content, TEXT)


def test_a_text_without_a_word_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(model="starter", input=" \n ", voice="heart")
    assert refused.value.param == "input"


def test_a_text_that_is_read_aloud_is_bounded_before_any_work(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.audio.speech.create(model="starter", input="So " * 1366, voice="heart")
    assert (refused.value.status_code, refused.value.body["param"]) == (413, "input")  # type: ignore[index]
    assert "limit of 4096" in refused.value.message


def test_a_text_that_is_read_aloud_takes_no_tokens(server: Running) -> None:
    request = {"model": "starter", "input": "Hello.", "voice": "heart", "stream_format": "sse"}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=request, timeout=60)
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    none = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    assert last == {"type": "speech.audio.done", "usage": none}


def dictate(server: Running, **form: Any) -> httpx.Response:
    files = {"file": ("said.wav", form.pop("data", None) or wav())}
    address, headers = f"{server.url}/v1/audio/transcriptions", form.pop("headers", {})
    return httpx.post(address, data={"model": "starter", **form}, files=files, headers=headers, timeout=60)


def test_transcription_uses_speech_recognition_only(server: Running) -> None:
    plain = dictate(server).json()
    assert plain == {"text": HEARD, "usage": {"type": "duration", "seconds": 1}}  # whole, as OpenAI's clients expect
    assert dictate(server, response_format="text").text == f"{HEARD}\n"
    verbose = dictate(server, response_format="verbose_json", language="en").json()
    assert verbose["duration"] == pytest.approx(0.8)
    assert verbose["language"] == "english"
    lines = dictate(server, stream="true").text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [event["type"] for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[-1] == {"type": "transcript.text.done", "text": HEARD}  # OpenAI's has no usage but tokens


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"language": "de"}, "language"),
        ({"timeout": "-1"}, "timeout"),
        ({"data": b"no sound"}, "file"),
    ],
    ids=["language", "timeout", "file"],
)
def test_unsupported_transcription_options_are_refused_by_name(
    server: Running, form: dict[str, Any], param: str
) -> None:
    refused = dictate(server, **form)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_transcription_names_options_without_effect(server: Running) -> None:
    answer = dictate(server, prompt="Names: Ann", temperature="0.5")
    assert answer.status_code == 200
    assert set(answer.headers["x-omnistage-ignored"].split(", ")) == {"prompt", "temperature"}


def test_transcription_without_speech_recognition_says_how_to_get_it(
    server: Running, starter: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter.processor, "input_modalities", frozenset({Modality.TEXT}))
    monkeypatch.setattr(transcriber, "decode_audio", None)  # nothing is decoded for nobody
    refused = dictate(server)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"
    assert "omnistage pull starter" in refused.json()["error"]["message"]


def test_audio_is_decoded_up_to_the_limit(server: Running, starter: AsyncOmni, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter.processor, "clip_seconds", lambda: (0.1, 1.0))
    monkeypatch.setattr(starter.processor, "transcribe", lambda clip: pytest.fail("it is listened to"))
    refused = dictate(server, data=wav(seconds=1.5))
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "file")
    assert "the limit of 1;" in refused.json()["error"]["message"]


# ----------------------------------------------------------------------------------------------- slow transcriptions


class SlowTranscriber:
    """Transcribes only after `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.heard = 0

    def transcribe(self, clip: AudioClip, over: Callable[[], bool] | None = None) -> str:
        self.begun.release()
        assert self.go.wait(HANG_SECONDS)
        self.heard += 1
        return HEARD

    def begun_within(self, seconds: float) -> bool:
        return self.begun.acquire(timeout=seconds)


@pytest.fixture
def slow(starter: AsyncOmni, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTranscriber]:
    transcriber = SlowTranscriber()
    monkeypatch.setattr(starter.processor, "transcribe", transcriber.transcribe)
    yield transcriber
    transcriber.go.set()


def test_a_transcription_has_a_timeout(server: Running, slow: SlowTranscriber) -> None:
    assert dictate(server, timeout="0.2").status_code == 408


def test_slow_transcriptions_do_not_block_a_chat(server: Running, slow: SlowTranscriber) -> None:
    few = concurrent.futures.ThreadPoolExecutor(2)
    server.loop.call_soon_threadsafe(server.loop.set_default_executor, few)
    with concurrent.futures.ThreadPoolExecutor(12) as many:
        first = [many.submit(dictate, server) for _ in range(2)]
        assert all(slow.begun_within(30) for _ in first)
        statuses = list(many.map(lambda _: dictate(server, timeout="0.5").status_code, range(10)))
        assert set(statuses) <= {408, 429}
        with server.client() as client:
            assert client.chat.completions.create(**SHORT, messages=HELLO).choices[0].message.content
        slow.go.set()
        assert {one.result().status_code for one in first} == {200}
    until(lambda: dictate(server).status_code == 200, "a transcription")
    # Those that waited until their time was over have left the queue, and nobody listened to them.
    assert slow.heard == 3


def test_transcriptions_beyond_the_queue_are_refused(server: Running, slow: SlowTranscriber) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as many:
        taken = [many.submit(dictate, server) for _ in range(8)]
        until(lambda: server.service.transcribe_workers._queued == 8, "the queue of transcriptions")
        refused = dictate(server, data=b"no sound")  # not even decoded
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        slow.go.set()
        assert {one.result().status_code for one in taken} == {200}
    assert dictate(server).status_code == 200


@awaited
async def test_work_that_nobody_waits_for_keeps_nothing_in_memory() -> None:
    workers, go, data = Workers(1, 2, "test"), threading.Event(), np.zeros(1)
    sent = weakref.ref(data)

    async def run(work: Callable[[threading.Event], Any]) -> Any:
        with contextlib.ExitStack() as held:
            return await workers.run(work, workers.reserve(held), held)

    first = asyncio.ensure_future(run(lambda over: go.wait(HANG_SECONDS)))
    second = asyncio.ensure_future(run(lambda over, sent=data: sent))  # type: ignore[misc]
    await asyncio.sleep(0)
    second.cancel()
    del data
    await asyncio.wait({second})
    assert second.cancelled()
    del second
    gc.collect()
    assert sent() is None
    go.set()
    assert await first
    await workers.close(0)


def sent(server: Running, path: str, headers: dict[str, str]) -> socket.socket:
    """A connection on which a sound has been sent, and which reads nothing."""
    files = {"file": ("said.wav", wav())}
    request = httpx.Request("POST", f"{server.url}{path}", data={"model": "starter"}, files=files, headers=headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    line = socket.create_connection((request.url.host, request.url.port or 80), timeout=20)
    line.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
    return line


@pytest.mark.parametrize("how", ["in time", "left"])
def test_a_key_is_in_use_until_the_transcription_ends(starter: AsyncOmni, slow: SlowTranscriber, how: str) -> None:
    keyring = Keyring([Holder("ann", digest_of("a-key-of-ann"), max_concurrent=1)])
    headers = {"Authorization": "Bearer a-key-of-ann"}
    response = service_of(starter, keyring=keyring)
    with serving(response) as server:
        if how == "left":
            line = sent(server, "/v1/audio/transcriptions", headers)
            assert slow.begun_within(30)
            line.close()
        else:
            for seconds in (0.5, 2, 8, 32):  # where the machine is so busy that time is over before they begin
                assert dictate(server, timeout=str(seconds), headers=headers).status_code == 408
                if slow.begun_within(0):
                    break
                until(lambda: response.transcribe_workers._queued == 0, "the end of the queue")
            else:
                pytest.fail("no transcription began")
        until(lambda: not response.transcribe_workers._awaited, "the end of all waiting")
        assert dictate(server, headers=headers).status_code == 429
        slow.go.set()
        until(lambda: dictate(server, headers=headers).status_code == 200, "the end of the first transcription")
        until(lambda: response.transcribe_workers._queued == 0, "the end of the queue")


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_a_stopping_service_lets_transcriptions_finish(
    starter: AsyncOmni, slow: SlowTranscriber, seconds: float
) -> None:
    response = service_of(starter)
    with serving(response) as server, concurrent.futures.ThreadPoolExecutor(4) as many:
        asked = [many.submit(dictate, server) for _ in range(3)]  # two are listened to, one waits
        until(lambda: response.transcribe_workers._queued == 3, "the queue of transcriptions")
        assert slow.begun_within(30)
        response.models = {}  # others use it yet
        stopped = asyncio.run_coroutine_threadsafe(response.drain(seconds), server.loop)
        if seconds:
            slow.go.set()
        stopped.result(HANG_SECONDS)
        assert {one.result().status_code for one in asked} == {200 if seconds else 503}
        with pytest.raises(ShutdownError):
            response.transcribe_workers.reserve(contextlib.ExitStack())


# --------------------------------------------------------------------------------------------------- content filter


class HeardWords(PassingFilter):
    """Refuses, or changes, what it is told to where it is told to."""

    def __init__(self, prompt: Verdict, output: Verdict) -> None:
        self.prompt, self.output = prompt, output
        self.prompts: list[PromptText] = []

    def open(self, context: FilterContext) -> HeardWords:
        return self

    async def check_prompt(self, texts: tuple[PromptText, ...]) -> Verdict:
        self.prompts += texts
        return self.prompt

    async def check_output(self, answer: AnswerText) -> Verdict:
        return self.output


@pytest.mark.parametrize(("prompt", "output", "where"), [(Refuse(), Pass(), "prompt"), (Pass(), Refuse(), "output")])
def test_words_that_are_heard_are_filtered_as_told_and_as_answered(
    starter: AsyncOmni, prompt: Verdict, output: Verdict, where: str
) -> None:
    own = HeardWords(prompt, output)
    with serving(service_of(starter, own)) as strict:
        refused = dictate(strict)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_filter")
        counts = [line for line in httpx.get(f"{strict.url}/metrics").text.splitlines() if "filtered_total{" in line]
    assert own.prompts == [PromptText(HEARD, "user")]
    assert counts == [f'omnistage_content_filtered_total{{model="starter",where="{where}"}} 1.0']


@pytest.mark.parametrize("output", [Refuse(), Redact("")])
def test_a_text_that_is_read_aloud_is_filtered_as_an_answer_too(starter: AsyncOmni, output: Verdict) -> None:
    with serving(service_of(starter, HeardWords(Pass(), output))) as strict, strict.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.audio.speech.create(model="starter", input="A bird.", voice="heart")
        assert refused.value.code == "content_filter"
        assert 'where="output"} 1.0' in httpx.get(f"{strict.url}/metrics").text


def test_a_filter_may_change_what_is_written_down(starter: AsyncOmni) -> None:
    with serving(service_of(starter, HeardWords(Pass(), Redact("[...]")))) as strict:
        assert dictate(strict).json()["text"] == "[...]"


def test_the_content_filter_sees_what_is_heard_and_what_is_spoken(starter: AsyncOmni) -> None:
    with serving(service_of(starter, WordList(["bird"]))) as strict:
        refused = dictate(strict)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "content_filter"
        with strict.client() as client:
            response = client.audio.speech.create(model="starter", input=TEXT, voice="heart", response_format="wav")
            assert_sounds(response.content, TEXT)
            with pytest.raises(openai.BadRequestError):
                client.audio.speech.create(model="starter", input="A bird.", voice="heart")


# -------------------------------------------------------------------------------------------------------- realtime


def test_a_conversation_is_spoken_both_ways(client: openai.OpenAI) -> None:
    with client.realtime.connect(model="starter") as connection:
        assert connection.recv().type == "session.created"
        connection.session.update(session={**QUIET, "temperature": 0, "max_output_tokens": 12})
        until_event(connection, "session.updated")
        connection.conversation.item.create(item=said(HEARD))
        connection.response.create()
        written = until_event(connection, "response.done")
        told = text_of(written, "response.output_audio_transcript.delta")
        sound = b"".join(base64.b64decode(e.delta) for e in written if e.type == "response.output_audio.delta")
        assert len(sound) == 2 * len(spoken(told))
    with client.realtime.connect(model="starter") as connection:
        connection.session.update(session={**QUIET, "temperature": 0, "max_output_tokens": 12})
        until_event(connection, "session.updated")
        samples = (0.3 * np.sin(np.arange(24_000) / 17)).astype(np.float32)
        spoken_item: Any = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_audio", "audio": base64_of(samples)}],
        }
        connection.conversation.item.create(item=spoken_item)
        connection.response.create()
        heard = until_event(connection, "response.done")
        assert text_of(heard, "response.output_audio_transcript.delta") == told
