"""Speech recognition equals transformers' `generate`, one clip at a time, on the same weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.core.clips import AudioClip
from omnistage.core.errors import OmniError, UnclearSpeechError
from omnistage.core.transcripts import TranscriptionOptions
from omnistage.core.types import SpeechPrompt
from omnistage.hf import transformers
from omnistage.models.speech_to_text import losses
from omnistage.models.speech_to_text.tiny import WINDOW_SECONDS
from omnistage.models.speech_to_text.words import split_words
from omnistage.omni import AsyncOmni, Omni
from tests.parity.conftest import Checkpoints

RATE = 16_000
SHORT, LONG = (0.4, 1.0, 2.5, 3.9, 1.7), (9.3, 5.1, 13.0)
Options = TranscriptionOptions


def sound(seconds: float) -> AudioClip:
    """Noise whose loudness and pitch change, so that clips differ."""
    rng = np.random.default_rng(round(seconds * 1000))
    times = np.arange(round(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * times * (200 + 900 * rng.random()) * (1 + times))
    return AudioClip((tone * 0.5 + rng.standard_normal(len(times)) * 0.2 * rng.random()).astype(np.float32), RATE)


@pytest.fixture(scope="module")
def whisper(checkpoint_of: Checkpoints) -> Iterator[Omni]:
    with Omni(checkpoint_of("speech_to_text", "whisper"), progress=False) as omni:
        yield omni
        omni.orchestrator.check_idle()


@pytest.fixture(scope="module")
def reference(checkpoint_of: Checkpoints) -> tuple[Any, Any]:
    folder = checkpoint_of("speech_to_text", "whisper")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    return transformers.AutoProcessor.from_pretrained(folder), model


def generate(reference: tuple[Any, Any], clip: AudioClip, **settings: Any) -> tuple[str, list[Any]]:
    """As transformers' documentation has it."""
    processor, model = reference
    options: dict[str, Any] = {}
    if clip.seconds > WINDOW_SECONDS:
        options = {"truncation": False, "padding": "longest", "return_attention_mask": True}
        settings["return_timestamps"] = True
    features = processor.feature_extractor(clip.samples, sampling_rate=RATE, return_tensors="pt", **options)
    if clip.seconds > WINDOW_SECONDS:
        settings["attention_mask"] = features.attention_mask
    settings.setdefault("task", "transcribe")
    output = model.generate(features.input_features, return_segments=True, **settings)
    text = processor.tokenizer.decode(output["sequences"][0], skip_special_tokens=True)
    return text.strip(), output["segments"][0]


@pytest.mark.parametrize("lengths", [SHORT, LONG, (*SHORT, *LONG)], ids=["short", "long", "both"])
def test_clips_at_once_have_the_text_and_the_times_of_each_alone_in_transformers(
    whisper: Omni, reference: tuple[Any, Any], lengths: tuple[float, ...]
) -> None:
    clips = [sound(seconds) for seconds in lengths]
    outputs = whisper.generate([SpeechPrompt(clip, Options(timestamps=True)) for clip in clips], progress=False)
    texts = []
    for clip, output in zip(clips, outputs, strict=True):
        text, segments = generate(reference, clip, return_timestamps=True)
        assert output.transcript is not None
        assert output.text == output.transcript.whole == text
        found = [(one.start, one.end, one.token_ids) for one in output.transcript.segments]
        expected = [
            (round(float(one["start"]), 2), round(float(one["end"]), 2), tuple(one["tokens"].tolist()))
            for one in segments
        ]
        assert found == expected
        assert output.transcript.seconds == pytest.approx(clip.seconds)
        texts.append(text)
    assert len(set(texts)) > 1  # or all of this would compare nothing


@pytest.mark.parametrize("seconds", [1.8, 9.3])
def test_times_of_words_are_those_of_their_tokens_in_generate(
    whisper: Omni, checkpoint_of: Checkpoints, seconds: float
) -> None:
    clip, folder = sound(seconds), checkpoint_of("speech_to_text", "whisper")
    prompts = [SpeechPrompt(clip, Options(words=True)), SpeechPrompt(clip, Options(timestamps=True))]
    timed, plain = whisper.generate(prompts, progress=False)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()  # whose attention it changes
    processor = transformers.AutoProcessor.from_pretrained(folder)
    options: dict[str, Any] = {"truncation": False, "padding": "longest"} if seconds > WINDOW_SECONDS else {}
    options |= {"sampling_rate": RATE, "return_tensors": "pt", "return_attention_mask": True}
    features = processor.feature_extractor(clip.samples, **options)
    expected = model.generate(
        features.input_features,
        attention_mask=features.attention_mask,
        return_timestamps=True,
        return_token_timestamps=True,
        return_segments=True,
        task="transcribe",
    )
    assert timed.transcript is not None
    words = timed.transcript.words
    assert len(words) > 3
    times = [round(float(time), 2) for one in expected["segments"][0] for time in one["token_timestamps"]]
    assert {time for word in words for time in (word.start, word.end)} <= set(times)
    assert "".join(word.word for word in words) == timed.text.replace(" ", "")
    assert timed.text == plain.text  # and the model attends as before


def test_clips_with_and_without_times_of_words_all_end(whisper: Omni) -> None:
    prompts = [SpeechPrompt(sound(1.0 + place / 10), Options(words=place % 3 == 0)) for place in range(12)]
    alone = [whisper.generate(prompt)[0].text for prompt in prompts]
    assert [output.text for output in whisper.generate(prompts, progress=False)] == alone


def test_tokens_become_words_at_spaces_and_characters_are_not_torn() -> None:
    spelled = {1: b" Hel", 2: b"lo", 3: b",", 4: b" w", 5: "ö".encode()[:1], 6: "ö".encode()[1:], 7: b"", 8: b" x"}

    def decode(ids: Any) -> str:
        return b"".join(spelled[token] for token in ids).decode(errors="replace")

    found = split_words([7, 1, 2, 3, 4, 5, 6, 8, 7], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], decode, "en")
    assert [(one.word, one.start, one.end) for one in found] == [
        ("Hello,", 0.1, 0.4),
        ("wö", 0.4, 0.7),
        ("x", 0.7, 0.8),
    ]
    unspaced = split_words([1, 2, 3], [0.0, 0.1, 0.2], decode, "zh")
    assert [one.word for one in unspaced] == ["Hel", "lo,"]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (Options(), {}),
        (Options(language="de"), {"language": "de"}),
        (Options(language="German"), {"language": "de"}),
        (Options(translate=True), {"task": "translate"}),
    ],
)
def test_languages_and_translation_are_those_of_generate(
    whisper: Omni, reference: tuple[Any, Any], options: Options, settings: dict[str, Any]
) -> None:
    output = whisper.generate(SpeechPrompt(sound(2.0), options))[0]
    assert output.text == generate(reference, sound(2.0), **settings)[0]
    assert output.transcript is not None
    assert output.transcript.language == "de" if options.language else output.transcript.language in ("en", "de", "fr")


def test_a_prompt_changes_the_text_as_in_generate(whisper: Omni, reference: tuple[Any, Any]) -> None:
    ids = reference[0].get_prompt_ids("a word", return_tensors="pt")
    output = whisper.generate(SpeechPrompt(sound(2.0), Options(prompt="a word")))[0]
    assert output.text == generate(reference, sound(2.0), prompt_ids=ids)[0]
    assert output.text != generate(reference, sound(2.0))[0]


def checkpoint_with(folder: Path, copy: Path, **settings: Any) -> Path:
    """The same weights with other settings of `generate`."""
    shutil.copytree(folder, copy)
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return copy


def test_a_text_without_an_end_is_an_error_of_its_clip_alone(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    """As where a model repeats itself: the tokens that a window holds are used up."""
    folder = checkpoint_with(
        checkpoint_of("speech_to_text", "whisper"), tmp_path / "m", exponential_decay_length_penalty=None
    )
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    processor, clips = transformers.AutoProcessor.from_pretrained(folder), [sound(seconds) for seconds in SHORT]
    end, ended = model.generation_config.eos_token_id, []
    for clip in clips:
        features = processor.feature_extractor(clip.samples, sampling_rate=RATE, return_tensors="pt")
        segments = model.generate(features.input_features, task="transcribe", return_segments=True)["segments"][0]
        ended.append(all(int(one["result"][-1]) == end for one in segments))
    with Omni(folder, progress=False) as omni:
        outputs = omni.generate([SpeechPrompt(clip) for clip in clips], progress=False)
        omni.orchestrator.check_idle()
    assert [output.error is None for output in outputs] == ended
    assert not all(ended)
    for output in outputs:
        assert output.error is None or re.search(r"finds no end within the \d+ tokens", str(output.error))


def test_a_window_without_words_is_an_error_unless_nobody_speaks(
    checkpoint_of: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_of("speech_to_text", "whisper")
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    folder = checkpoint_with(folder, tmp_path / "m", begin_suppress_tokens=None, sequence_bias=[[[end], 1000.0]])
    spoken, silent = sound(9.3), AudioClip(np.zeros(9 * RATE, dtype=np.float32), RATE)
    monkeypatch.setattr(losses, "vad_available", lambda: False)
    with Omni(folder, progress=False) as omni:
        outputs = omni.generate([SpeechPrompt(spoken), SpeechPrompt(silent)], progress=False)
        assert isinstance(outputs[0].error, UnclearSpeechError)
        assert "from 0.0 s on the model gives no words" in str(outputs[0].error)
        assert outputs[1].error is None
        assert outputs[1].text == ""
        monkeypatch.setattr(losses, "_SPEECH_BELOW", 0.0)  # as a model that takes all of it for silence
        assert omni.generate(SpeechPrompt(spoken))[0].text == ""


def test_music_without_words_is_no_error_where_a_detector_hears_nobody(
    checkpoint_of: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whisper takes the music for speech, by its first token, and gives no words for it."""
    pytest.importorskip("onnxruntime")
    folder = checkpoint_of("speech_to_text", "whisper")
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    folder = checkpoint_with(folder, tmp_path / "m", begin_suppress_tokens=None, sequence_bias=[[[end], 1000.0]])
    times = np.arange(9 * RATE) / RATE
    chord = sum(np.sin(2 * np.pi * pitch * times) for pitch in (262, 330, 392)) * (0.2 + 0.1 * np.sin(9 * times))
    music = AudioClip(np.asarray(chord, np.float32), RATE)
    with Omni(folder, progress=False) as omni:
        assert omni.generate(SpeechPrompt(music), progress=False)[0].text == ""
        monkeypatch.setattr(losses, "speech_spans", lambda samples: [(0, RATE)])
        with pytest.raises(UnclearSpeechError, match="gives no words"):
            omni.generate(SpeechPrompt(music), progress=False)


@pytest.mark.parametrize("seconds", [3.0, 13.0])
def test_streamed_pieces_make_up_the_whole_text(checkpoint_of: Checkpoints, seconds: float) -> None:
    import asyncio

    async def run() -> tuple[list[str], str]:
        async with AsyncOmni(checkpoint_of("speech_to_text", "whisper"), progress=False) as omni:
            prompt = SpeechPrompt(sound(seconds), Options(stream=True))
            items = [item async for item in omni.generate(prompt)]
            final = items[-1].final
            assert final is not None
            assert final.transcript is not None
            return [item.text for item in items if item.text], final.transcript.whole or ""

    pieces, whole = asyncio.run(run())
    assert len(pieces) > 1
    assert "".join(pieces).strip() == whole


def test_an_aborted_clip_leaves_the_others_and_nothing_behind(checkpoint_of: Checkpoints) -> None:
    import asyncio

    async def run() -> str:
        async with AsyncOmni(checkpoint_of("speech_to_text", "whisper"), progress=False) as omni:
            leaving = omni.generate(SpeechPrompt(sound(13.0), Options(stream=True)))
            staying = asyncio.ensure_future(anext(omni.generate(SpeechPrompt(sound(2.0)))))
            await anext(leaving)
            await leaving.aclose()
            text = (await staying).text
            stage: Any = omni.orchestrator.stages["recognize"]
            while stage.component._batches:
                await asyncio.sleep(0)
            return text

    assert asyncio.run(run())


def test_ctc_clips_have_the_text_of_each_alone_in_transformers(checkpoint_of: Checkpoints) -> None:
    folder = checkpoint_of("speech_to_text", "wav2vec2")
    clips = [sound(seconds) for seconds in (1.0, 2.5, 1.0)]
    with Omni(folder, progress=False) as omni:
        texts = [output.text for output in omni.generate([SpeechPrompt(clip) for clip in clips], progress=False)]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.Wav2Vec2ForCTC.from_pretrained(folder).eval()
    for clip, text in zip(clips, texts, strict=True):
        inputs = processor(clip.samples, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            ids = model(**inputs).logits.argmax(dim=-1)
        assert text == processor.batch_decode(ids)[0].strip()
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(
    ("variant", "options", "words"),
    [
        ("whisper", Options(language="xx"), "not a language of this model; languages: de, en, fr"),
        ("wav2vec2", Options(language="en"), "one language"),
        ("wav2vec2", Options(translate=True), "does not translate"),
        ("wav2vec2", Options(timestamps=True), "timestamps are not supported"),
        ("wav2vec2", Options(prompt="a"), "`prompt` is not supported"),
    ],
)
def test_options_that_a_model_does_not_have_are_refused(
    checkpoint_of: Checkpoints, variant: str, options: Options, words: str
) -> None:
    with (
        Omni(checkpoint_of("speech_to_text", variant), progress=False) as omni,
        pytest.raises(OmniError, match=words),
    ):
        omni.generate(SpeechPrompt(sound(1.0), options))


def test_clips_that_are_too_long_or_too_short_are_refused(checkpoint_of: Checkpoints) -> None:
    with Omni(checkpoint_of("speech_to_text", "wav2vec2"), progress=False) as omni:
        for seconds in (0.01, 121.0):
            with pytest.raises(OmniError):
                omni.generate(SpeechPrompt(AudioClip(np.zeros(int(seconds * RATE), np.float32), RATE)))


def test_a_conversation_of_one_clip_is_transcribed(whisper: Omni) -> None:
    clip = sound(2.0)
    message = {"role": "user", "content": [{"type": "audio", "audio": (clip.samples, RATE)}]}
    assert whisper.chat([message]).text == whisper.generate(SpeechPrompt(clip))[0].text
    with pytest.raises(OmniError, match="send one clip"):
        whisper.chat([{"role": "user", "content": "Hello"}])
