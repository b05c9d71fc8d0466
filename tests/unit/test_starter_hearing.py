"""The starter's ears on stand-ins whose words are known, and on the real network where it was pulled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

pytest.importorskip("onnx", reason="the stand-ins are made with the package onnx")
pytest.importorskip("onnxruntime", reason="the ears run on ONNX Runtime")

from omnistage_starter import stand_ins
from omnistage_starter.bridges import SPOKEN
from omnistage_starter.hear import MOST_PICTURES, MOST_READ, READ_ALOUD
from omnistage_starter.hearing import LONGEST, RATE, Transcriber, loop_start, split
from omnistage_starter.parts.manifest import STARTER
from omnistage_starter.parts.store import Store
from omnistage_starter.stand_ins import WORDS, write_ears

from omnistage.core.clips import AudioClip
from omnistage.core.errors import (
    CheckpointError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    MissingDependencyError,
    PromptTooLongError,
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

Script = Callable[..., Transcriber]


@pytest.fixture
def hearing(tmp_path: Path) -> Script:
    """Makes ears that hear the given tokens in every sound."""

    def make(*tokens: str) -> Transcriber:
        write_ears(tmp_path, script=tokens)
        return Transcriber(tmp_path)

    return make


# ------------------------------------------------------------------------------------------------------ words


def test_words_come_up_to_the_end_token_and_no_further(hearing: Script) -> None:
    assert hearing("the", "cat", "sees", "</s>", "dog").transcribe(voice(2.0, RATE)) == "the cat sees"


def test_a_network_that_never_ends_gives_no_more_tokens_than_the_sound_can_hold(hearing: Script) -> None:
    words = hearing(*(WORDS[n * n % 7 + n % 13] for n in range(64))).transcribe(voice(2.0, RATE)).split()
    assert len(words) == int(2.0 * 6.5) + 4


def test_a_network_that_runs_in_circles_is_stopped_and_its_circle_said_once(hearing: Script) -> None:
    assert hearing("the", "cat", "runs", "and").transcribe(voice(6.0, RATE)) == "the cat runs and"


def test_what_is_heard_depends_on_the_sound_and_on_nothing_else(tmp_path: Path) -> None:
    write_ears(tmp_path, seed=3)
    ears, sounds = Transcriber(tmp_path), [voice(1.0, RATE, seed) for seed in range(3)] + [noise(1.5, RATE)]
    first = [ears.transcribe(sound) for sound in sounds]
    again = Transcriber(tmp_path)
    assert first == [ears.transcribe(sound) for sound in sounds] == [again.transcribe(sound) for sound in sounds]
    assert len(set(first)) > 1


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.099])
def test_what_is_too_short_for_a_word_gives_none(hearing: Script, seconds: float) -> None:
    assert hearing("cat", "</s>").transcribe(noise(seconds, RATE)) == ""


def test_silence_is_not_even_listened_to(hearing: Script) -> None:
    ears = hearing("cat", "</s>")
    assert ears.transcribe(silence(3.0, RATE)) == ""
    assert ears.transcribe(noise(0.1, RATE)) == "cat"


def test_a_long_clip_is_heard_piece_by_piece(hearing: Script) -> None:
    ears = hearing("the", "cat", "</s>")
    sound = np.concatenate([voice(10.0, RATE), silence(1.0, RATE), voice(10.0, RATE)])
    assert ears.transcribe(sound) == "the cat the cat"


# ------------------------------------------------------------------------------------------------------ limits


def test_a_clip_beyond_the_limit_is_refused_with_both_numbers(hearing: Script) -> None:
    with pytest.raises(LimitExceededError, match=r"601\.0 s .* 600 s"):
        hearing("</s>").transcribe(np.zeros(int((LONGEST + 1) * RATE), np.float32))


@pytest.mark.parametrize(
    "samples", [np.zeros((2, RATE), np.float32), np.full(RATE, np.nan, np.float32)], ids=["stereo", "nan"]
)
def test_what_is_no_mono_sound_is_refused(hearing: Script, samples: NDArray[np.float32]) -> None:
    with pytest.raises(MediaError):
        hearing("</s>").transcribe(samples)


# ------------------------------------------------------------------------------------------------------ files


def test_its_files_are_all_there_or_it_is_not(tmp_path: Path) -> None:
    assert not Transcriber.present(tmp_path)
    write_ears(tmp_path)
    assert Transcriber.present(tmp_path)
    (tmp_path / "decoder.onnx").unlink()
    assert not Transcriber.present(tmp_path)


def test_without_the_package_onnx_no_stand_ins_are_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match="pip install onnx"):
        write_ears(tmp_path / "hear")
    assert not (tmp_path / "hear").exists()


@pytest.mark.parametrize("name", ["encoder.onnx", "decoder.onnx", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, damage: str) -> None:
    write_ears(tmp_path)
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
        Transcriber(tmp_path)


def test_a_network_of_unknown_operators_is_named(tmp_path: Path) -> None:
    write_ears(tmp_path)
    path = tmp_path / "decoder.onnx"
    path.write_bytes(path.read_bytes().replace(b"Gather", b"Garble"))
    with pytest.raises(CheckpointError, match=r"decoder\.onnx is no network"):
        Transcriber(tmp_path)


def test_an_encoder_and_a_decoder_of_two_releases_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ears(tmp_path / "one")
    monkeypatch.setattr(stand_ins, "_WIDTH", 32)
    monkeypatch.setattr(stand_ins, "_SIZE", 16)
    write_ears(tmp_path / "two")
    Transcriber(tmp_path / "two")
    (tmp_path / "two" / "encoder.onnx").replace(tmp_path / "one" / "encoder.onnx")
    with pytest.raises(CheckpointError, match=r"decoder\.onnx does not go with encoder\.onnx"):
        Transcriber(tmp_path / "one")


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    write_ears(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("</s>", "<end>"))
    with pytest.raises(CheckpointError, match="no token </s>"):
        Transcriber(tmp_path)


# ------------------------------------------------------------------------------------------------------ cutting


def test_a_short_clip_is_not_cut() -> None:
    sound = voice(15.0, RATE)
    assert [len(piece) for piece in split(sound)] == [len(sound)]


def test_a_cut_falls_into_the_pause() -> None:
    sound = np.concatenate([voice(11.0, RATE), silence(0.4, RATE), voice(8.0, RATE)])
    first, second = split(sound)
    assert 11.0 < len(first) / RATE < 11.4
    assert np.array_equal(np.concatenate([first, second]), sound)


@given(st.floats(0.1, 80.0), st.integers(0, 3))
def test_pieces_are_short_enough_and_together_the_whole(seconds: float, seed: int) -> None:
    sound = np.random.default_rng(seed).normal(size=int(seconds * RATE)).astype(np.float32)
    pieces = list(split(sound))
    assert all(0 < len(piece) <= 15 * RATE for piece in pieces)
    assert np.array_equal(np.concatenate(pieces), sound)


# ------------------------------------------------------------------------------------------------------ circles


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_block_said_over_and_over_is_kept_once(before: list[int], block: list[int]) -> None:
    tokens = before + block * 10
    found = (loop_start(tokens[:length]) for length in range(len(tokens) + 1))  # as the decoder writes them
    kept = next((keep for keep in found if keep is not None), None)
    assert kept is not None
    assert kept <= len(before) + len(block)


@pytest.mark.parametrize(
    "tokens",
    [(), (1,) * 9, (1, 2) * 5, tuple(range(13)) * 10, (1, 2, 3, 1, 2, 3, 4)],
    ids=lambda tokens: str(len(tokens)),
)
def test_what_people_say_twice_is_no_circle(tokens: Sequence[int]) -> None:
    assert loop_start(tokens) is None


# ------------------------------------------------------------------------------------------------------ the stage


@pytest.fixture
def harness(think: Path) -> HearStageHarness:
    return HearStageHarness(think)


def clip(seconds: float, seed: int = 0) -> AudioPart:
    return AudioPart(AudioClip(voice(seconds, RATE, seed), RATE))


def picture(shade: int) -> ImagePart:
    return ImagePart(Image.new("RGB", (4, 4), (shade, 0, 0)))


def test_a_step_hears_one_piece_or_looks_at_one_picture(harness: HearStageHarness) -> None:
    harness.submit("r", TextPart("Look:"), clip(20.0), picture(7), picture(8), clip(5.0))
    work, chunks = [], []
    while harness.stage.has_work():
        chunks += harness.stage.step()
        work.append((harness.ears.pieces, harness.eyes.pictures))
    assert work == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 2)]
    first, second = (f"{len(piece) / RATE:.0f} seconds" for piece in split(clip(20.0).clip.samples))
    said = f"Look:\n{first} {second}\n(A picture of 7.)\n(A picture of 8.)\n5 seconds"
    assert prompts(chunks)["r"].token_ids == harness.tokens(said)


def test_who_writes_does_not_wait_for_who_speaks_long(harness: HearStageHarness) -> None:
    harness.submit("long", clip(60.0))
    harness.stage.step()
    harness.submit("text", TextPart("Hello!"))
    assert set(prompts(harness.stage.step())) == {"text"}
    assert harness.ears.pieces == 1
    assert set(prompts(harness.stage.drain())) == {"long"}


def test_nothing_more_is_heard_for_a_request_that_was_aborted(harness: HearStageHarness) -> None:
    harness.submit("long", clip(60.0))
    harness.stage.step()
    harness.stage.abort("long")
    assert not harness.stage.has_work()
    assert not harness.stage.component._underway  # type: ignore[attr-defined]
    harness.submit("long", clip(5.0, seed=1))  # the name is free, and nothing of the old one is left
    assert prompts(harness.stage.drain())["long"].token_ids == harness.tokens("5 seconds")


def test_a_piece_that_fails_ends_its_own_request(harness: HearStageHarness) -> None:
    bad = voice(40.0, RATE)
    bad[-1] = 0.95
    harness.submit("bad", AudioPart(AudioClip(bad, RATE)))
    harness.submit("good", clip(40.0, seed=1))
    chunks = harness.stage.drain()
    ends = {c.request_id: c.finish for c in chunks if c.finish}
    assert ends == {"bad": FinishReason.ERROR, "good": FinishReason.STOP}
    assert harness.ears.pieces > 4  # it was the last piece that failed
    assert not harness.stage.component._underway  # type: ignore[attr-defined]


def test_one_prompt_of_a_batch_that_cannot_be_made_is_told_why_and_the_others_are_made(
    harness: HearStageHarness,
) -> None:
    for name, text in (("a", "Hello!"), ("long", "fox " * 5000), ("b", "Goodbye!")):
        harness.submit(name, TextPart(text))
    chunks = harness.stage.drain()
    made = prompts(chunks)
    assert {name: prompt.token_ids for name, prompt in made.items()} == {
        "a": harness.tokens("Hello!"),
        "b": harness.tokens("Goodbye!"),
    }
    [failed] = [c.error for c in chunks if c.finish is FinishReason.ERROR]
    assert isinstance(failed, PromptTooLongError)


def test_only_so_much_is_heard_and_seen_for_one_request(harness: HearStageHarness) -> None:
    half, more = (AudioPart(AudioClip(silence(seconds, RATE), RATE)) for seconds in (300.0, 300.5))
    harness.stage.check(harness.input("r", half, half, *(picture(n) for n in range(MOST_PICTURES))))
    with pytest.raises(LimitExceededError, match=r"600\.5 s in all and at most 600 s") as refused:
        harness.stage.check(harness.input("r", half, more))
    assert refused.value.param == "messages"
    with pytest.raises(LimitExceededError, match="9 pictures and at most 8"):
        harness.stage.check(harness.input("r", *(picture(n) for n in range(MOST_PICTURES + 1))))


def test_for_a_picture_alone_the_language_model_only_reads(harness: HearStageHarness) -> None:
    harness.submit("drawn", clip(3.0), modality=Modality.IMAGE)
    harness.submit("told", clip(3.0))
    made = prompts(harness.stage.drain())
    assert (made["drawn"].num_tokens, made["told"].num_tokens) == (1, None)


@pytest.mark.parametrize(
    ("asked", "length", "error"),
    [
        ({Modality.AUDIO}, MOST_READ, None),
        ({Modality.AUDIO}, MOST_READ + 1, LimitExceededError),
        ({Modality.TEXT}, 1, InvalidRequestError),
        ({Modality.TEXT, Modality.AUDIO}, 1, InvalidRequestError),
        ({Modality.TEXT, Modality.AUDIO, Modality.IMAGE}, 1, InvalidRequestError),
    ],
)
def test_what_is_read_aloud_is_bounded_and_only_spoken(
    harness: HearStageHarness, asked: set[Modality], length: int, error: type[Exception] | None
) -> None:
    aloud = ChatInput((ChatMessage("assistant", (TextPart("x" * length),), name=READ_ALOUD),))
    given = StageInput(RequestInfo("r", modalities=frozenset(asked)), CodecParams(), aloud)
    if error is not None:
        with pytest.raises(error):
            harness.stage.check(given)
        return
    harness.stage.submit(given)
    [prompt] = prompts(harness.stage.drain()).values()
    assert bytes(prompt.context[SPOKEN].tolist()).decode() == "x" * length


# ------------------------------------------------------------------------------------------------------ the real one


@pytest.fixture(scope="module")
def real() -> Transcriber:
    folder = Store.of(STARTER).root / "hear"
    if not Transcriber.present(folder):
        pytest.skip("the starter's ears are not here: `omnistage pull starter` gets them")
    return Transcriber(folder)


@pytest.mark.parametrize(
    "sound", [noise(2.0, RATE), 20 * noise(2.0, RATE), silence(2.0, RATE)], ids=["noise", "loud", "silence"]
)
def test_the_real_ears_hear_nothing_where_nobody_speaks(real: Transcriber, sound: NDArray[np.float32]) -> None:
    assert real.transcribe(sound) == ""


def test_the_real_ears_and_the_real_voice_understand_each_other(real: Transcriber) -> None:
    pytest.importorskip("hibari", reason="the voice is the package hibari-tts")
    import soxr
    from omnistage_starter.speaking import Speaker

    sound = Speaker().say("The quick brown fox jumps over the lazy dog. My brother plays the piano.")
    heard = real.transcribe(soxr.resample(sound, 24_000, RATE))
    assert heard.lower().replace(",", ".") == "the quick brown fox jumps over the lazy dog. my brother plays the piano."
