"""Speech to text and the hear stage: on tiny networks with fixed words, and on the real one where it was pulled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

pytest.importorskip("onnx", reason="the tiny networks are written with the package onnx")
pytest.importorskip("onnxruntime", reason="speech recognition runs on ONNX Runtime")

from omnistage_starter import tiny_speech_to_text
from omnistage_starter.bridges import VERBATIM
from omnistage_starter.hear import MAX_IMAGES, MAX_READ_ALOUD_CHARACTERS, READ_ALOUD
from omnistage_starter.speech_to_text import MAX_SECONDS, SAMPLE_RATE, SpeechToText, loop_start, split
from omnistage_starter.tiny_speech_to_text import WORDS, write_speech_to_text

from omnistage.core.clips import AudioClip
from omnistage.core.errors import (
    CheckpointError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    MissingDependencyError,
    PromptTooLongError,
    UnclearSpeechError,
)
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, TextPart
from omnistage.core.params import CodecParams
from omnistage.core.types import (
    ChatInput,
    FinishReason,
    Modality,
    RequestInfo,
    StageInput,
)
from tests.unit.starter_harness import HearStageHarness, prompts, think
from tests.voice import noise, silence, voice

__all__ = ["think"]  # a fixture

Script = Callable[..., SpeechToText]


@pytest.fixture
def scripted(tmp_path: Path) -> Script:
    """Makes a model that gives these tokens for every clip."""

    def make(*tokens: str) -> SpeechToText:
        write_speech_to_text(tmp_path, script=tokens)
        return SpeechToText(tmp_path)

    return make


# ------------------------------------------------------------------------------------------------------ words


def test_words_end_at_the_end_token(scripted: Script) -> None:
    assert scripted("the", "cat", "sees", "</s>", "dog").transcribe(voice(2.0, SAMPLE_RATE)) == "the cat sees"


def test_tokens_are_limited_by_the_length_of_the_clip(scripted: Script) -> None:
    words = scripted(*(WORDS[n * n % 7 + n % 13] for n in range(64))).transcribe(voice(2.0, SAMPLE_RATE)).split()
    assert len(words) == int(2.0 * 6.5) + 4


def test_what_is_said_many_times_is_written_down_as_often(scripted: Script) -> None:
    assert scripted(*("the", "cat") * 6, "</s>").transcribe(voice(2.5, SAMPLE_RATE)) == " ".join(["the cat"] * 6)


def test_a_loop_that_never_ends_is_no_speech_and_stands_once_in_each_part(scripted: Script) -> None:
    assert scripted("the", "cat", "runs", "and").transcribe(voice(2.0, SAMPLE_RATE)) == "the cat runs and"
    assert (
        scripted("the", "cat", "runs", "and").transcribe(voice(4.0, SAMPLE_RATE)) == "the cat runs and the cat runs and"
    )


def test_transcription_is_deterministic(tmp_path: Path) -> None:
    write_speech_to_text(tmp_path, seed=3)
    model, sounds = (
        SpeechToText(tmp_path),
        [voice(1.0, SAMPLE_RATE, seed) for seed in range(3)] + [noise(1.5, SAMPLE_RATE)],
    )
    first = [model.transcribe(sound) for sound in sounds]
    again = SpeechToText(tmp_path)
    assert first == [model.transcribe(sound) for sound in sounds] == [again.transcribe(sound) for sound in sounds]
    assert len(set(first)) > 1


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.099])
def test_a_clip_below_the_minimum_length_gives_no_words(scripted: Script, seconds: float) -> None:
    assert scripted("cat", "</s>").transcribe(noise(seconds, SAMPLE_RATE)) == ""


def test_silence_gives_no_words(scripted: Script) -> None:
    model = scripted("cat", "</s>")
    assert model.transcribe(silence(3.0, SAMPLE_RATE)) == ""
    assert model.transcribe(noise(0.1, SAMPLE_RATE)) == "cat"


def test_a_long_clip_is_transcribed_in_pieces(scripted: Script) -> None:
    model = scripted(*("the", "cat") * 10, "</s>")
    sound = np.concatenate([voice(10.0, SAMPLE_RATE), silence(1.0, SAMPLE_RATE), voice(10.0, SAMPLE_RATE)])
    assert model.transcribe(sound) == " ".join(["the cat"] * 20)


Hearing = Callable[[NDArray[np.float32]], bool]


@dataclass
class Recognised:
    """A model that gives "the cat" for what `hears` is true of, and nothing for the rest; `encoded` is its input."""

    model: SpeechToText
    encoded: list[NDArray[np.float32]]


@pytest.fixture
def hearing(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> Callable[[Hearing], Recognised]:
    def make(hears: Hearing) -> Recognised:
        model = scripted("the", "cat", "</s>")
        encoder, decoder = model._encoder, model._decoder
        encoded: list[NDArray[np.float32]] = []

        def encode(samples: NDArray[np.float32]) -> NDArray[np.float32]:
            encoded.append(samples)
            return encoder(samples)

        def greedy(*arguments: Any) -> list[int] | None:
            return decoder.greedy(*arguments) if hears(encoded[-1]) else []

        monkeypatch.setattr(model, "_encoder", encode)
        monkeypatch.setattr(model, "_decoder", SimpleNamespace(greedy=greedy))
        return Recognised(model, encoded)

    return make


def test_speech_after_a_long_pause_is_not_lost(hearing: Callable[[Hearing], Recognised]) -> None:
    # As Moonshine: where a clip begins with quiet it hears nothing at all.
    recognised = hearing(lambda samples: float(np.abs(samples[:SAMPLE_RATE]).max()) >= 0.1)
    for quiet in (silence(2.0, SAMPLE_RATE), 0.1 * noise(3.0, SAMPLE_RATE)):
        sound = np.concatenate([quiet, voice(1.2, SAMPLE_RATE), silence(1.0, SAMPLE_RATE)])
        recognised.encoded.clear()
        assert recognised.model.transcribe(sound) == "the cat"
        assert len(recognised.encoded) == 2
        assert 0 < len(sound) - len(recognised.encoded[-1]) < len(quiet)  # what is left out lies before the first word


def test_what_a_piece_leaves_out_is_sought_between_its_pauses(hearing: Callable[[Hearing], Recognised]) -> None:
    # As Moonshine: of a word that is said again and again it hears nothing, nor of what is said beside it.
    recognised = hearing(lambda samples: len(samples) <= 2.5 * SAMPLE_RATE)
    said = voice(1.2, SAMPLE_RATE)
    sound = np.concatenate([said, silence(0.8, SAMPLE_RATE), said])
    assert recognised.model.transcribe(sound) == "the cat the cat"
    assert [round(len(samples) / SAMPLE_RATE, 1) for samples in recognised.encoded] == [3.2, 1.6, 1.6]


def test_words_that_are_too_few_for_the_speech_are_sought_in_its_parts(
    hearing: Callable[[Hearing], Recognised],
) -> None:
    recognised = hearing(lambda samples: True)
    said = [voice(1.0, SAMPLE_RATE), silence(0.8, SAMPLE_RATE)]
    assert recognised.model.transcribe(np.concatenate(said * 3)) == "the cat the cat the cat"


@pytest.mark.parametrize("seconds", [0.6, 2.0, 6.0])
def test_speech_without_a_word_is_an_error(hearing: Callable[[Hearing], Recognised], seconds: float) -> None:
    with pytest.raises(UnclearSpeechError, match=r"s of speech were detected .* no words"):
        hearing(lambda samples: False).model.transcribe(voice(seconds, SAMPLE_RATE))


def test_sounds_without_speech_cost_one_run(hearing: Callable[[Hearing], Recognised]) -> None:
    recognised = hearing(lambda samples: False)
    beep = 0.3 * np.sin(np.arange(SAMPLE_RATE // 4) * 0.2).astype(np.float32)
    for sound in (noise(12.0, SAMPLE_RATE), np.concatenate([beep, silence(0.5, SAMPLE_RATE)] * 16)):
        recognised.encoded.clear()
        assert recognised.model.transcribe(sound) == ""
        assert len(recognised.encoded) == 1


# ------------------------------------------------------------------------------------------------------ limits


def test_a_clip_beyond_the_limit_is_refused_with_both_numbers(scripted: Script) -> None:
    with pytest.raises(LimitExceededError, match=r"601\.0 s .* 600 s"):
        scripted("</s>").transcribe(np.zeros(int((MAX_SECONDS + 1) * SAMPLE_RATE), np.float32))


@pytest.mark.parametrize(
    "samples", [np.zeros((2, SAMPLE_RATE), np.float32), np.full(SAMPLE_RATE, np.nan, np.float32)], ids=["stereo", "nan"]
)
def test_an_array_that_is_no_mono_clip_is_refused(scripted: Script, samples: NDArray[np.float32]) -> None:
    with pytest.raises(MediaError):
        scripted("</s>").transcribe(samples)


# ------------------------------------------------------------------------------------------------------ files


def test_the_model_is_present_only_with_all_of_its_files(tmp_path: Path) -> None:
    assert not SpeechToText.present(tmp_path)
    write_speech_to_text(tmp_path)
    assert SpeechToText.present(tmp_path)
    (tmp_path / "decoder.onnx").unlink()
    assert not SpeechToText.present(tmp_path)


def test_without_the_package_onnx_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match="pip install onnx"):
        write_speech_to_text(tmp_path / "hear")
    assert not (tmp_path / "hear").exists()


@pytest.mark.parametrize("name", ["encoder.onnx", "decoder.onnx", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, damage: str) -> None:
    write_speech_to_text(tmp_path)
    path = tmp_path / name
    other = {"encoder.onnx": "decoder.onnx", "decoder.onnx": "encoder.onnx", "tokenizer.json": "encoder.onnx"}[name]
    content = {
        "missing": b"",
        "cut": path.read_bytes()[: path.stat().st_size // 2],
        "other": (tmp_path / other).read_bytes(),
    }
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[damage])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        SpeechToText(tmp_path)


def test_a_network_of_unknown_operators_is_named(tmp_path: Path) -> None:
    write_speech_to_text(tmp_path)
    path = tmp_path / "decoder.onnx"
    path.write_bytes(path.read_bytes().replace(b"Gather", b"Garble"))
    with pytest.raises(CheckpointError, match=r"cannot load .*decoder\.onnx"):
        SpeechToText(tmp_path)


def test_an_encoder_and_a_decoder_of_two_releases_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_speech_to_text(tmp_path / "one")
    monkeypatch.setattr(tiny_speech_to_text, "_WIDTH", 32)
    monkeypatch.setattr(tiny_speech_to_text, "_SIZE", 16)
    write_speech_to_text(tmp_path / "two")
    SpeechToText(tmp_path / "two")
    (tmp_path / "two" / "encoder.onnx").replace(tmp_path / "one" / "encoder.onnx")
    with pytest.raises(CheckpointError, match=r"decoder\.onnx does not match encoder\.onnx"):
        SpeechToText(tmp_path / "one")


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    write_speech_to_text(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("</s>", "<end>"))
    with pytest.raises(CheckpointError, match="no token </s>"):
        SpeechToText(tmp_path)


# ------------------------------------------------------------------------------------------------------ cutting


def test_a_short_clip_is_not_cut() -> None:
    sound = voice(15.0, SAMPLE_RATE)
    assert [len(piece) for piece in split(sound)] == [len(sound)]


def test_a_cut_falls_into_the_pause() -> None:
    sound = np.concatenate([voice(11.0, SAMPLE_RATE), silence(0.4, SAMPLE_RATE), voice(8.0, SAMPLE_RATE)])
    first, second = split(sound)
    assert 11.0 < len(first) / SAMPLE_RATE < 11.4
    assert np.array_equal(np.concatenate([first, second]), sound)


@given(st.floats(0.1, 80.0), st.integers(0, 3))
def test_pieces_are_short_enough_and_together_the_whole(seconds: float, seed: int) -> None:
    sound = np.random.default_rng(seed).normal(size=int(seconds * SAMPLE_RATE)).astype(np.float32)
    pieces = list(split(sound))
    assert all(0 < len(piece) <= 15 * SAMPLE_RATE for piece in pieces)
    assert np.array_equal(np.concatenate(pieces), sound)


# ------------------------------------------------------------------------------------------------------ loops


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_repeated_block_is_kept_once(before: list[int], block: list[int]) -> None:
    tokens = before + block * 10
    lengths = (loop_start(tokens[:length]) for length in range(len(tokens) + 1))  # as the decoder calls it
    kept = next((keep for keep in lengths if keep is not None), None)
    assert kept is not None
    assert kept <= len(before) + len(block)


@pytest.mark.parametrize(
    "tokens",
    [(), (1,) * 9, (1, 2) * 5, tuple(range(13)) * 10, (1, 2, 3, 1, 2, 3, 4)],
    ids=lambda tokens: str(len(tokens)),
)
def test_ordinary_repetition_is_no_loop(tokens: Sequence[int]) -> None:
    assert loop_start(tokens) is None


# ------------------------------------------------------------------------------------------------------ the stage


@pytest.fixture
def harness(think: Path) -> HearStageHarness:
    return HearStageHarness(think)


def clip(seconds: float, seed: int = 0) -> AudioPart:
    return AudioPart(AudioClip(voice(seconds, SAMPLE_RATE, seed), SAMPLE_RATE))


def picture(shade: int) -> ImagePart:
    return ImagePart(Image.new("RGB", (4, 4), (shade, 0, 0)))


def test_a_step_transcribes_one_piece_or_describes_one_image(harness: HearStageHarness) -> None:
    harness.submit("r", TextPart("Look:"), clip(20.0), picture(7), picture(8), clip(5.0))
    work, chunks = [], []
    while harness.stage.has_work():
        chunks += harness.stage.step()
        work.append((harness.speech_to_text.pieces, harness.describer.images))
    assert work == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 2)]
    first, second = (f"{len(piece) / SAMPLE_RATE:.0f} seconds" for piece in split(clip(20.0).clip.samples))
    said = f"Look:\n{first} {second}\n(A picture of 7.)\n(A picture of 8.)\n5 seconds"
    assert prompts(chunks)["r"].token_ids == harness.tokens(said)


def test_a_text_request_does_not_wait_for_long_audio(harness: HearStageHarness) -> None:
    harness.submit("long", clip(60.0))
    harness.stage.step()
    harness.submit("text", TextPart("Hello!"))
    assert set(prompts(harness.stage.step())) == {"text"}
    assert harness.speech_to_text.pieces == 1
    assert set(prompts(harness.stage.drain())) == {"long"}


def test_an_aborted_request_is_not_transcribed_further(harness: HearStageHarness) -> None:
    harness.submit("long", clip(60.0))
    harness.stage.step()
    harness.stage.abort("long")
    assert not harness.stage.has_work()
    assert not harness.stage.component._running  # type: ignore[attr-defined]
    harness.submit("long", clip(5.0, seed=1))  # the name is free, and nothing of the old one is left
    assert prompts(harness.stage.drain())["long"].token_ids == harness.tokens("5 seconds")


def test_a_piece_that_fails_ends_its_own_request(harness: HearStageHarness) -> None:
    bad = voice(40.0, SAMPLE_RATE)
    bad[-1] = 0.95
    harness.submit("bad", AudioPart(AudioClip(bad, SAMPLE_RATE)))
    harness.submit("good", clip(40.0, seed=1))
    chunks = harness.stage.drain()
    ends = {c.request_id: c.finish for c in chunks if c.finish}
    assert ends == {"bad": FinishReason.ERROR, "good": FinishReason.STOP}
    assert harness.speech_to_text.pieces > 4  # it was the last piece that failed
    assert not harness.stage.component._running  # type: ignore[attr-defined]


def test_unclear_speech_fails_its_message_and_is_inaudible_in_a_conversation_that_goes_on(
    harness: HearStageHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unclear(samples: NDArray[np.float32]) -> str:
        raise UnclearSpeechError("1.0 s of speech were detected")

    monkeypatch.setattr(harness.speech_to_text, "transcribe_piece", unclear)
    harness.submit("r", clip(2.0))
    [failed] = [chunk.error for chunk in harness.stage.drain() if chunk.finish is FinishReason.ERROR]
    assert isinstance(failed, UnclearSpeechError)
    assert failed.param == "messages"
    earlier = ChatInput((ChatMessage("user", (clip(2.0),)), ChatMessage("user", (TextPart("Hello!"),))))
    harness.stage.submit(StageInput(RequestInfo("s"), CodecParams(), earlier))
    assert prompts(harness.stage.drain())["s"].token_ids


def test_a_prompt_that_is_too_long_fails_alone_in_its_batch(
    harness: HearStageHarness,
) -> None:
    for name, text in (("a", "Hello!"), ("long", "fox " * 5000), ("b", "Goodbye!")):
        harness.submit(name, TextPart(text))
    chunks = harness.stage.drain()
    assert {name: prompt.token_ids for name, prompt in prompts(chunks).items()} == {
        "a": harness.tokens("Hello!"),
        "b": harness.tokens("Goodbye!"),
    }
    [failed] = [c.error for c in chunks if c.finish is FinishReason.ERROR]
    assert isinstance(failed, PromptTooLongError)


def test_audio_seconds_and_images_of_a_request_are_limited(harness: HearStageHarness) -> None:
    half, more = (AudioPart(AudioClip(silence(seconds, SAMPLE_RATE), SAMPLE_RATE)) for seconds in (300.0, 300.5))
    harness.stage.check(harness.input("r", half, half, *(picture(n) for n in range(MAX_IMAGES))))
    with pytest.raises(LimitExceededError, match=r"600\.5 s of audio and at most 600 s") as refused:
        harness.stage.check(harness.input("r", half, more))
    assert refused.value.param == "messages"
    with pytest.raises(LimitExceededError, match="9 images and at most 8"):
        harness.stage.check(harness.input("r", *(picture(n) for n in range(MAX_IMAGES + 1))))


def test_an_image_alone_needs_no_answer_of_the_language_model(harness: HearStageHarness) -> None:
    harness.submit("drawn", clip(3.0), modality=Modality.IMAGE)
    harness.submit("text", clip(3.0))
    result = prompts(harness.stage.drain())
    assert (result["drawn"].num_tokens, result["text"].num_tokens) == (1, None)


@pytest.mark.parametrize(
    ("modalities", "length", "error"),
    [
        ({Modality.AUDIO}, MAX_READ_ALOUD_CHARACTERS, None),
        ({Modality.AUDIO}, MAX_READ_ALOUD_CHARACTERS + 1, LimitExceededError),
        ({Modality.TEXT}, 1, InvalidRequestError),
        ({Modality.TEXT, Modality.AUDIO}, 1, InvalidRequestError),
        ({Modality.TEXT, Modality.AUDIO, Modality.IMAGE}, 1, InvalidRequestError),
    ],
)
def test_text_to_read_aloud_is_limited_and_gives_audio_only(
    harness: HearStageHarness, modalities: set[Modality], length: int, error: type[Exception] | None
) -> None:
    aloud = ChatInput((ChatMessage("assistant", (TextPart("x" * length),), name=READ_ALOUD),))
    request = StageInput(RequestInfo("r", modalities=frozenset(modalities)), CodecParams(), aloud)
    if error is not None:
        with pytest.raises(error):
            harness.stage.check(request)
        return
    harness.stage.submit(request)
    [prompt] = prompts(harness.stage.drain()).values()
    assert bytes(prompt.context[VERBATIM].tolist()).decode() == "x" * length
