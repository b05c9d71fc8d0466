"""What the starter's measurements count: words, errors, answers, medians."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

from omnistage.core.errors import StageError
from omnistage.media.audio_output import AudioOutput
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, StageTrace, Trace

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_are_importable() -> Iterator[None]:
    """As when a script of theirs is run: beside each other."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def words() -> ModuleType:
    import starter_words

    return starter_words


@pytest.fixture(scope="module")
def trips() -> ModuleType:
    import starter_round_trips

    return starter_round_trips


@pytest.fixture(scope="module")
def language_model() -> ModuleType:
    import starter_language_model

    return starter_language_model


# ---------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Hello, World!", "hello world"),
        ("It's John's dog - really", "its johns dog really"),
        ("It\u2019s a well-known caf\u00e9", "its a well known cafe"),
        ("0 and 13 and 42", "zero and thirteen and forty two"),
        ("342 people", "three hundred forty two people"),
        ("250,000 people", "two hundred fifty thousand people"),
        ("1,000,001", "one million one"),
        ("in 1969", "in nineteen sixty nine"),
        ("in 1900 and 1905", "in nineteen hundred and nineteen o five"),
        ("in 2005 and 2025", "in two thousand five and twenty twenty five"),
        ("1,969 sheep", "one thousand nine hundred sixty nine sheep"),
        ("3.5 miles", "three point five miles"),
        ("the 1st, 2nd, 3rd, 12th, 20th and 21st", "the first second third twelfth twentieth and twenty first"),
        ("at 7:30, 7:05 or 7:00", "at seven thirty seven o five or seven oclock"),
        ("$15 & 80%", "fifteen dollars and eighty percent"),
        ("80 per cent", "eighty percent"),
        ("...", ""),
    ],
)
def test_a_text_is_read_as_words(words: ModuleType, written: str, read: str) -> None:
    assert words.normalise(written) == read.split()


def test_what_is_written_and_what_is_read_are_the_same_to_it(words: ModuleType) -> None:
    once = words.normalise("On the 21st of June 1969 it was 7:30, $3.50 & 80% of 250,000.")
    assert words.normalise(" ".join(once)) == once


def test_a_number_that_is_too_large_to_be_read_is_refused(words: ModuleType) -> None:
    with pytest.raises(ValueError, match="not between"):
        words.number_words(10**12)


@pytest.mark.parametrize(
    ("reference", "heard", "errors"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a x c", 1),
        ("a b c", "a c", 1),
        ("a b c", "a b b c", 1),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c d", "b c d e", 2),
        ("light house", "lighthouse", 2),
    ],
)
def test_errors_are_the_fewest_changes(words: ModuleType, reference: str, heard: str, errors: int) -> None:
    assert words.word_errors(reference.split(), heard.split()) == errors


def test_the_error_rate_is_over_all_words(words: ModuleType) -> None:
    assert words.word_error_rate([("One.", "two"), ("one two three", "1 2 3")]) == 0.25


def test_an_error_rate_of_no_words_is_refused(words: ModuleType) -> None:
    with pytest.raises(ValueError, match="no word"):
        words.word_error_rate([("...", "a")])


def test_an_answer_mentions_a_whole_word_only(words: ModuleType) -> None:
    assert words.mentions("There are 7 days.", ("seven",))
    assert words.mentions("It is PARIS!", ("Rome", "paris"))
    assert words.mentions("It is Shakespeare\u2019s play.", ("Shakespeare",))
    assert not words.mentions("The category is closed.", ("cat",))


# ------------------------------------------------------------------------------------------------- answers


def output(first_sound: float, thought: float, *, pieces: int = 2, text: str = "Paris.") -> OmniRequestOutput:
    stages = {
        "think": StageTrace("think", last_chunk=thought),
        "speak": StageTrace("speak", first_chunk=first_sound, chunks=pieces),
    }
    return OmniRequestOutput(
        "r",
        outputs=[CompletionOutput(text=text)],
        audio=AudioOutput(np.zeros(24_000 * 4, np.float32), 24_000),
        trace=Trace("r", 0.0, finished=1.0, stages=stages),
    )


def test_an_answer_is_read_off_the_trace(trips: ModuleType) -> None:
    answer = trips.answer_of("Which city?", ("Paris",), output(0.2, 0.9))
    assert (answer.right, answer.early, answer.seconds, answer.speech) == (True, True, 1.0, 4.0)


def test_a_sound_behind_the_thinkers_end_is_not_early(trips: ModuleType) -> None:
    assert not trips.answer_of("Which city?", ("Paris",), output(0.95, 0.9)).early


def test_a_failed_request_raises_its_error(trips: ModuleType) -> None:
    failed = output(0.2, 0.9)
    failed.error = StageError("broken")
    with pytest.raises(StageError, match="broken"):
        trips.answer_of("Which city?", ("Paris",), failed)


def test_the_summary_counts_answers_and_divides_time_by_speech(trips: ModuleType) -> None:
    asked = [output(0.2, 0.9), output(0.8, 0.7, pieces=1, text="I do not know."), output(0.8, 0.7)]
    summary = trips.summary([trips.answer_of("Which city?", ("Paris",), one, 2.0) for one in asked])
    assert summary["with the expected word"] == 2
    assert summary["real-time factor"] == pytest.approx(3 / 12)
    assert summary["processor's seconds a second of speech"] == pytest.approx(6 / 12)
    assert summary["first sound before the thinker had finished"] == 1
    assert summary["answers of more than one piece"] == 2
    assert summary["  of those, first sound before the thinker had finished"] == 1


def test_there_are_enough_sentences_and_questions(trips: ModuleType, words: ModuleType) -> None:
    sentences = trips.SENTENCES.read_text(encoding="utf-8").splitlines()
    assert len(set(sentences)) == len(sentences) >= 50
    assert all(len(words.normalise(sentence)) >= 5 for sentence in sentences)
    assert len(trips.QUESTIONS) == 20


def test_no_question_has_its_answer_in_it(trips: ModuleType, words: ModuleType) -> None:
    leaked = {question for question, expected in trips.QUESTIONS if words.mentions(question, expected)}
    assert leaked == set()


# --------------------------------------------------------------------------------------------- language model


def test_ratios_are_taken_within_a_round(language_model: ModuleType) -> None:
    def took(*seconds: float) -> list[object]:
        return [language_model.Done(own, 2 * own * own, []) for own in seconds]

    done = {(language_model.OURS, 1): took(1.0, 10.0, 2.0), (language_model.SINGLE, 1): took(2.0, 30.0, 4.0)}
    ours, theirs = language_model.medians(done, 48, dict.fromkeys(done, 1))
    assert (ours.seconds, ours.tokens_per_second, ours.ratio) == (2.0, 24.0, 1.0)
    assert (theirs.seconds, theirs.ratio, theirs.processor) == (4.0, 2.0, 4.0)


def test_every_side_takes_its_turn_and_is_compared_with_transformers(language_model: ModuleType) -> None:
    asked: list[tuple[str, int]] = []

    def side(name: str, token: int) -> object:
        def run(prompts: list[list[int]]) -> object:
            asked.append((name, len(prompts)))
            return language_model.Done(1.0, 1.0, [[token, token] for _ in prompts])

        return run

    names = (language_model.OURS, language_model.SINGLE, language_model.BATCH)
    sides = {name: side(name, 6 if name == language_model.BATCH else 5) for name in names}
    lines = language_model.measure(sides, [[1]] * 16, 2, 2, Console(quiet=True))
    assert {(line.side, line.requests) for line in lines} == set(asked)
    assert (language_model.BATCH, 1) not in asked
    assert [asked.count((name, 16)) for name in names] == [3, 3, 3]  # a warm-up and two rounds
    assert {line.same for line in lines if line.side == language_model.BATCH} == {0}
    assert {line.same for line in lines if line.side == language_model.OURS} == {1, 4, 16}


def test_an_answer_that_is_too_short_spoils_the_measurement(language_model: ModuleType) -> None:
    sides = {
        language_model.OURS: lambda prompts: language_model.Done(1.0, 1.0, [[5]] * len(prompts)),
        language_model.SINGLE: lambda prompts: language_model.Done(1.0, 1.0, [[5, 5]] * len(prompts)),
    }
    with pytest.raises(SystemExit, match="not every output of ours has 2 tokens"):
        language_model.measure(sides, [[1]] * 16, 2, 1, Console(quiet=True))
