"""Text to speech: streamed text split into sentences, result speakable, and synthesised."""

from __future__ import annotations

import importlib
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omnistage_starter import text_to_speech
from omnistage_starter.speakable import speakable
from omnistage_starter.text_to_speech import Voice, trim

from omnistage.core.errors import ConfigError, MissingDependencyError
from omnistage.core.sentences import MAX_PIECE_CHARACTERS, Sentences

RATE = 24_000


def cut(text: str, state: Sentences | None = None) -> list[str]:
    left, pieces = (state or Sentences(first_words=None)).push(text)
    return [*pieces, *left.finish()]


# -------------------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    "sentence",
    [
        "Dr. Smith met J. K. Rowling in the U.S. at noon.",
        "It is about 3.14, e.g. the number of a circle, i.e. of all circles.",
        "See fig. 3 and No. 5 vs. Prof. Brown.",
        "We wait... I think it was 5 p.m. or later, etc. and so on.",
        "She said “Stop!” and ran away.",
        "Yahoo! is a name, and so is example.com.",
        "Well . . . that depends.",
        "1. Wash 2. Dry 3. Fold.",
        "- A line of a list",
    ],
)
def test_a_sentence_is_not_cut_in_two(sentence: str) -> None:
    assert cut(f"{sentence}\n") == [sentence]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("It rains. We stay! Do you? Yes.", ["It rains.", "We stay!", "Do you?", "Yes."]),
        (
            "“It rains.” He left. (So did I.) Then we slept.",
            ["“It rains.”", "He left.", "(So did I.)", "Then we slept."],
        ),
        ("It was 1999. Then came 2000.", ["It was 1999.", "Then came 2000."]),
        ("So am I. Then we go.", ["So am I.", "Then we go."]),
        ("Apples, pears, etc. They are good.", ["Apples, pears, etc.", "They are good."]),
        ("He left... Then it rained.", ["He left...", "Then it rained."]),
        ("Two things:\n1. Wash\n2. Dry\n\n- Fold", ["Two things:", "1. Wash", "2. Dry", "- Fold"]),
        ("Yes. 😀 No.", ["Yes.", "😀 No."]),
        ("", []),
        (" \n\n ", []),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_sentences_and_lines_end_pieces(text: str, pieces: list[str]) -> None:
    assert cut(text) == pieces


def test_a_sentence_is_emitted_when_the_next_begins_and_a_line_at_its_end() -> None:
    state, pieces = Sentences().push("It rains. ")
    assert pieces == ()
    state, pieces = state.push("W")
    assert pieces == ("It rains.",)
    state, pieces = state.push("e stay\n")
    assert pieces == ("We stay",)
    assert state.finish() == ()


def test_push_does_not_change_the_old_state() -> None:
    state, _ = Sentences().push("It rains")
    assert state.push(". We stay. ")[0].finish() == ("We stay.",)
    assert state.finish() == ("It rains",)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("If you ask me about it, I would say yes.", "If you ask me about it,"),
        ("Paris is the capital — it lies on the Seine.", "Paris is the capital —"),
        ("There is one thing left: sleep is good for you.", "There is one thing left:"),
        ("If you ask me about it, yes\nThen", "If you ask me about it, yes"),
        ("I like it a lot here, but she does not.", "I like it a lot here,"),
        ("Well, that is how it goes with us.", "Well, that is how it goes with us."),
        ("The main colours are red, blue, and green.", "The main colours are red, blue, and green."),
        ("There are 5 of them here, 1,000 in all, it seems.", "There are 5 of them here, 1,000 in all,"),
    ],
)
def test_the_first_piece_may_end_before_its_sentence_but_not_inside_a_list(text: str, first: str) -> None:
    assert cut(text, Sentences(first_words=4))[0] == first


def test_only_the_first_piece_ends_at_a_comma() -> None:
    sentence = "After the long rain had stopped, we all went out, because the sun shone."
    assert cut(f"Yes, it does. {sentence}", Sentences(first_words=4))[1:] == [sentence]


def test_a_long_sentence_is_split_after_a_clause_else_after_a_word() -> None:
    clause = "the wind blew over the hills and the sea, "
    assert all(piece.endswith(",") for piece in cut(clause * 20)[:-1])
    assert all(piece.endswith("word") for piece in cut("word " * 200))


def test_a_limit_below_two_characters_is_refused() -> None:
    with pytest.raises(ConfigError):
        Sentences(max_characters=1)


_WORDS = "Dr. e.g. U.S. 3.14 J. I yes, no. Why? Stop! ... — - 1. and 1,000 “Well.” * **Bold** `x é 😀 the cat Then etc."
_PROSE = st.builds(
    lambda words, joint: joint.join(words),
    st.lists(st.sampled_from([*_WORDS.split(), "\n", " ", "\u00a0", "long" * 30]), max_size=60),
    st.sampled_from([" ", "", "\n"]),
)
_TEXTS = st.one_of(_PROSE, st.text(max_size=200))
_STATES = st.builds(
    Sentences,
    first_words=st.none() | st.integers(0, 6),
    max_characters=st.integers(2, 60) | st.just(MAX_PIECE_CHARACTERS),
)


@given(_TEXTS, _STATES, st.data())
def test_the_chunking_of_text_does_not_matter(text: str, state: Sentences, data: st.DataObject) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    arriving, pieces = state, []
    for start, end in pairwise([0, *edges, len(text)]):
        arriving, some = arriving.push(text[start:end])
        pieces += some
    assert [*pieces, *arriving.finish()] == cut(text, state)


@given(_TEXTS, _STATES)
def test_nothing_is_lost_and_no_piece_is_too_long_or_empty(text: str, state: Sentences) -> None:
    pieces = cut(text, state)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(piece.strip() and len(piece) <= state.max_characters for piece in pieces)
    if all(len(word) <= state.max_characters // 2 and "—" not in word for word in text.split()):
        assert " ".join(pieces).split() == text.split()


# -------------------------------------------------------------------------------------------------- speakable text


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("**Bold**, *slanted* and `code`.", "Bold, slanted and code."),
        ("# A heading\n- one\n* two\n1. three\n> four", "A heading\none\ntwo\n1, three\nfour"),
        ("See [the page](https://a.example/b) now.", "See the page now."),
        ("It is at https://www.example.com/a?b=c.", "It is at example dot com."),
        ("Hello 😀 ❤️!", "Hello!"),
        ("Привет, мир", ""),
        ("你好 hello", "hello"),
        ("café, naïve, Zürich", "café, naïve, Zürich"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "a, b,\n1, 2,"),
        ("Look:\n```python\nprint(1)\n```\nDone.", "Look:\nDone."),
        ("<b>Hi</b> &amp; bye", "Hi & bye"),
        ("3 * 4 is 12, ½ is less, \u22125 too", "3 times 4 is 12, 1/2 is less, -5 too"),
        ("It\u2019s “fine”!!!", 'It\'s "fine"!'),
        ("12345678901234567", "1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7"),
        ("***", ""),
        ("...", ""),
        ("", ""),
    ],
    ids=lambda value: "",
)
def test_unspeakable_text_is_removed(text: str, spoken: str) -> None:
    assert speakable(text) == spoken


@given(st.text(max_size=300))
def test_any_text_becomes_lines_with_letters_or_digits(text: str) -> None:
    for line in speakable(text).split("\n") if speakable(text) else []:
        assert any(character.isalnum() for character in line)
        assert not set(line) & set("*`#|<>[]{}\\_~\t\x00")


# -------------------------------------------------------------------------------------------------- ends


def test_trim_sets_the_pause_and_fades_the_ends() -> None:
    sound = np.concatenate([np.zeros(7000), np.full(RATE, 0.5), np.zeros(11_000)]).astype(np.float32)
    result = trim(sound, RATE, 0.16)
    loud = np.flatnonzero(np.abs(result) > 0.49)
    assert result[0] == 0
    assert result[-1] == 0
    assert (len(result) - loud[-1]) / RATE == pytest.approx(0.16, abs=0.001)
    assert loud[0] / RATE == pytest.approx(0.02, abs=0.001)
    assert np.count_nonzero(result == 0.5) == RATE  # the level is kept


def test_an_end_without_silence_is_faded() -> None:
    result = trim(np.full(RATE, 0.5, np.float32), RATE, 0.1)
    assert np.abs(np.diff(result)).max() < 0.01
    assert result.max() == 0.5


def test_silence_gives_no_samples() -> None:
    assert len(trim(np.zeros(RATE, np.float32), RATE, 0.16)) == 0


# -------------------------------------------------------------------------------------------------- the voice


@pytest.fixture(scope="module")
def voice() -> Voice:
    pytest.importorskip("hibari", reason="the voice is the package hibari-tts")
    return Voice()


def test_the_same_text_and_seed_give_the_same_samples(voice: Voice) -> None:
    sound = voice.synthesise("Hello there.", seed=1)
    assert sound.dtype == np.float32
    assert np.array_equal(sound, voice.synthesise("Hello there.", seed=1))
    assert not np.array_equal(sound, voice.synthesise("Hello there.", seed=2))


def test_sentences_do_not_run_into_each_other(voice: Voice) -> None:
    sound = voice.synthesise("Go. Stay.")
    loud = np.flatnonzero(np.abs(sound) > 0.005)
    pauses = np.diff(loud)[np.diff(loud) > 0.1 * RATE] / RATE
    assert len(pauses) == 1
    assert 0.12 <= pauses[0] <= 0.3
    assert np.abs(sound[[0, -1]]).max() < 1e-6


def test_a_faster_voice_takes_less_time(voice: Voice) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    assert len(voice.synthesise(text, speed=1.5)) < 0.8 * len(voice.synthesise(text))


@pytest.mark.parametrize("text", ["", "😀", "Привет", "...", "***", "\x00", "- ", "```\nx = 1\n```"])
def test_text_without_words_gives_no_samples(voice: Voice, text: str) -> None:
    assert voice.synthesise(text).shape == (0,)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 60,
        "999," * 30,
        "def f(x): return x**2",
        "https://a.example/?q=1&r=2",
        "25:99 99/99/9999 1/0",
        "$1.2.3 IIII",
        "a" * 500,
    ],
    ids=["digits", "groups", "code", "address", "dates", "money", "one long word"],
)
def test_unusual_text_is_spoken(voice: Voice, text: str) -> None:
    sound = voice.synthesise(text)
    assert len(sound) > 0.3 * RATE
    assert np.isfinite(sound).all()
    assert np.abs(sound).max() <= 1


def test_numbers_become_words(voice: Voice) -> None:
    assert np.array_equal(voice.synthesise("I have 3 cats."), voice.synthesise("I have three cats."))


def test_long_phonemes_are_split(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    spoken = voice._synthesiser.ids
    monkeypatch.setattr(voice._synthesiser, "ids", lambda phonemes: lengths.append(len(phonemes)) or spoken(phonemes))
    voice.synthesise("999,999 " * 12)
    assert len(lengths) > 1
    assert max(lengths) <= 400


def test_a_number_that_the_package_cannot_parse_is_skipped(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    read = voice._to_phonemes

    def failing(text: str) -> str:
        if "7" in text:
            raise IndexError(text)
        return str(read(text))

    monkeypatch.setattr(voice, "_to_phonemes", failing)
    assert np.array_equal(voice.synthesise("Seven is 7, yes"), voice.synthesise("Seven is yes"))


# -------------------------------------------------------------------------------------------------- voices and files


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of voices, and a package that fails when it would download one."""
    pytest.importorskip("hibari", reason="the voice is the package hibari-tts")
    monkeypatch.setenv("HIBARI_HOME", str(tmp_path))
    registry = importlib.import_module("hibari.voices")

    def download(*_: object) -> None:
        pytest.fail("a voice was asked for from a hub")

    monkeypatch.setattr(registry, "download", download)
    return tmp_path


def test_a_voice_whose_file_is_not_here_is_refused_and_never_downloaded(offline: Path) -> None:
    with pytest.raises(ConfigError, match=r"'emma'.*heart"):
        Voice(name="emma")
    with pytest.raises(ConfigError, match="'nobody'"):
        Voice(name="nobody")
    assert list(offline.iterdir()) == []
    assert Voice().available == ("heart",)


def test_a_voice_whose_file_is_here_can_be_used(offline: Path) -> None:
    registry = importlib.import_module("hibari.voices")
    shutil.copy(registry.voice_path("heart"), offline / registry.VOICES["emma"]["file"])
    voice = Voice(name="emma")
    assert (voice.name, voice.available) == ("emma", ("heart", "emma"))
    assert len(voice.synthesise("Good morning.")) > 0


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(text_to_speech.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"omnistage\[starter\]"):
        Voice()


CODE = "Here it is:\n```python\nimport os\n\nprint(1). Really.\n```\nThat is all. Or inline: ```x = 1``` and on."


def test_code_blocks_are_not_spoken() -> None:
    wanted = ["Here it is:", "That is all.", "Or inline: ```x = 1``` and on."]
    assert cut(CODE) == wanted
    state, pieces = Sentences(first_words=None), []
    for character in CODE:
        state, more = state.push(character)
        pieces += more
    assert [*pieces, *state.finish()] == wanted


@pytest.mark.parametrize(
    "text", ["```", "```py\nprint(1)\n```", "```py\nprint(1)", "  ```\nx\n  ```\n", "``` never. Ends"]
)
def test_code_alone_gives_no_pieces(text: str) -> None:
    assert cut(text) == []


def test_code_after_words_is_not_spoken() -> None:
    assert [speakable(piece) for piece in cut("Run this: ```sh\nls -l\n```\nDone.")] == ["Run this:", "Done."]


def test_a_long_line_of_code_is_not_buffered() -> None:
    state, pieces = Sentences().push("```\n" + "x" * 10_000)
    assert pieces == ()
    assert len(state._rest) <= MAX_PIECE_CHARACTERS
