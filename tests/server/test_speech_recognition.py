"""Transcriptions and translations by a speech recognition model, with OpenAI's own client."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from omnistage.omni import AsyncOmni
from omnistage.server.service import ServedModel, Service
from tests.server.harness import Running, serving

SECONDS = 7.0


def wav(seconds: float = SECONDS, rate: int = 22_050) -> bytes:
    times = np.arange(int(seconds * rate)) / rate
    encoded = io.BytesIO()
    soundfile.write(encoded, 0.3 * np.sin(2 * np.pi * 440 * times * (1 + times)), rate, format="WAV")
    return encoded.getvalue()


GIVEN: dict[str, Any] = {"model": "whisper", "file": ("said.wav", wav())}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from omnistage.models.speech_to_text import tiny

    models = {}
    for variant in ("whisper", "wav2vec2"):
        folder = tmp_path_factory.mktemp("speech") / variant
        tiny.write(folder, variant=variant)
        models[variant] = AsyncOmni(folder, progress=False)
    with serving(Service({name: ServedModel(name, omni) for name, omni in models.items()})) as running:
        yield running
    for omni in models.values():
        omni.orchestrator.check_idle()
        omni.orchestrator.shutdown(False)


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.client()


def test_a_clip_is_transcribed_in_every_form(client: openai.OpenAI) -> None:
    plain = client.audio.transcriptions.create(**GIVEN)
    assert plain.text
    assert plain.usage is not None
    assert client.audio.transcriptions.create(**GIVEN, response_format="text") == f"{plain.text}\n"
    verbose = client.audio.transcriptions.create(
        **GIVEN, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert verbose.text == plain.text
    assert verbose.language in ("en", "de", "fr")
    assert float(verbose.duration) == pytest.approx(SECONDS, abs=0.01)
    assert verbose.segments
    assert all(0 <= one.start <= one.end <= SECONDS + 4 for one in verbose.segments)
    subtitles = client.audio.transcriptions.create(**GIVEN, response_format="srt")
    blocks = str(subtitles).strip().split("\n\n")
    assert len(blocks) == len(verbose.segments)
    assert blocks[0].startswith("1\n00:00:0")
    assert " --> " in blocks[0]
    captions = str(client.audio.transcriptions.create(**GIVEN, response_format="vtt"))
    assert captions.startswith("WEBVTT\n\n00:00:0")


def test_words_have_times_where_the_model_has_alignment_heads(client: openai.OpenAI) -> None:
    timed: Any = client.audio.transcriptions.create(
        **GIVEN, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert timed.segments
    assert "".join(one.word for one in timed.words) == timed.text.replace(" ", "")
    assert all(0 <= one.start <= one.end <= SECONDS + 4 for one in timed.words)


def test_a_stream_gives_the_same_text(client: openai.OpenAI) -> None:
    plain = client.audio.transcriptions.create(**GIVEN)
    events: list[Any] = list(client.audio.transcriptions.create(**GIVEN, stream=True))
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == plain.text
    assert "".join(event.delta for event in events[:-1]) == plain.text
    assert len(events) > 2


@pytest.mark.parametrize("form", ["verbose_json", "srt", "vtt"])
def test_a_stream_with_times_is_refused(client: openai.OpenAI, form: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="use json or text, or leave stream out"):
        client.audio.transcriptions.create(**GIVEN, stream=True, response_format=form)


def test_a_language_may_be_named_and_a_clip_be_translated(client: openai.OpenAI) -> None:
    verbose: Any = client.audio.transcriptions.create(**GIVEN, language="de", response_format="verbose_json")
    assert verbose.language == "de"
    translated: Any = client.audio.translations.create(**GIVEN, response_format="verbose_json")
    assert translated.task == "translate"
    assert translated.language == "english"
    assert client.audio.translations.create(**GIVEN).text == translated.text


def test_a_ctc_model_transcribes_without_times(client: openai.OpenAI) -> None:
    given = {**GIVEN, "model": "wav2vec2"}
    plain = client.audio.transcriptions.create(**given)
    verbose = client.audio.transcriptions.create(**given, response_format="verbose_json")
    assert plain.text == verbose.text
    assert verbose.segments == []
    events: list[Any] = list(client.audio.transcriptions.create(**given, stream=True))
    assert events[-1].text == plain.text


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"model": "wav2vec2", "response_format": "srt"}, "response_format", "timestamps"),
        ({"language": "xx"}, "language", "not a language of this model"),
        ({"temperature": 0.5}, "temperature", "must be 0"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "verbose_json"),
        (
            {"model": "wav2vec2", "timestamp_granularities": ["word"], "response_format": "verbose_json"},
            "timestamp_granularities",
            "alignment_heads",
        ),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities", "verbose_json"),
        ({"response_format": "diarized_json"}, "response_format", "speakers"),
        ({"file": ("said.wav", b"no audio")}, "file", "audio"),
        ({"file": ("said.wav", wav(0.01))}, "file", "0.02 s are needed"),
        ({"file": ("said.wav", wav(0.05)), "model": "wav2vec2"}, "file", "0.1 s are needed"),
        ({"prompt": "<|startoftranscript|>"}, "prompt", "special token"),
        ({"prompt": "word " * 700}, "prompt", "over the limit of"),
        ({"prompt": "word " * 700, "stream": True}, "prompt", "over the limit of"),
        ({"file": ("said.wav", b"")}, "file", "empty"),
    ],
)
def test_what_cannot_be_transcribed_is_refused(
    client: openai.OpenAI, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.audio.transcriptions.create(**{**GIVEN, **options})
    assert str(caught.value.param).startswith(param.removesuffix("[]"))


def test_a_model_that_does_not_translate_says_so(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="does not translate"):
        client.audio.translations.create(**{**GIVEN, "model": "wav2vec2"})
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "whisper", "messages": [{"role": "user", "content": "Hello"}]},
    )
    assert response.status_code == 400
    assert "no text output" in response.json()["error"]["message"] or "one clip" in response.json()["error"]["message"]


@pytest.mark.parametrize(("model", "seconds"), [("whisper", 0.02), ("wav2vec2", 0.1)])
def test_the_shortest_clip_is_transcribed(client: openai.OpenAI, model: str, seconds: float) -> None:
    clip = ("said.wav", wav(seconds, 16_000))
    assert client.audio.transcriptions.create(model=model, file=clip).usage is not None


def test_the_longest_prompt_is_taken(client: openai.OpenAI) -> None:
    limit = 0
    try:
        client.audio.transcriptions.create(**GIVEN, prompt="a" * 4000)
    except openai.BadRequestError as error:
        limit = int(error.message.partition("over the limit of ")[2].partition(";")[0])
    assert limit > 1
    words = " a" * (limit - 1)  # a token each, behind the one that begins a prompt
    assert client.audio.transcriptions.create(**GIVEN, prompt=words).text
    with pytest.raises(openai.BadRequestError, match=f"has {limit + 1} tokens"):
        client.audio.transcriptions.create(**GIVEN, prompt=f"{words} a")
