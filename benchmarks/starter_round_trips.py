"""The starter spoken to and listened to, with its real weights, on this machine.

    omnistage pull starter
    python benchmarks/starter_round_trips.py [--rounds 3] [--out results.json] [--quick]

- speak → hear: every sentence of starter_sentences.txt is spoken, heard and compared word by word (starter_words.py
  says what counts as the same word); and how long both took against the seconds of speech.
- twenty simple questions, written and then spoken by the starter's own voice, answered in text and speech, one after
  the other, greedy: whether the answer has the expected word, the whole pipeline's time against the seconds of speech,
  the time to the first sound, and whether it came before the thinker had finished (from the requests' traces).
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import torch
from machine_load import load
from omnistage_starter.speech_to_text import SAMPLE_RATE, SpeechToText
from omnistage_starter.text_to_speech import Voice
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from starter_words import mentions, normalise, word_error_rate, word_errors

from omnistage import Omni
from omnistage.core.params import SamplingParams
from omnistage.core.user_cache import weights_home
from omnistage.hf import transformers
from omnistage.pipeline.outputs import OmniRequestOutput

SENTENCES = Path(__file__).with_name("starter_sentences.txt")
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What is the capital of France?", ("Paris",)),
    ("What color is grass?", ("green",)),
    ("How many days are in a week?", ("seven",)),
    ("What is the opposite of hot?", ("cold",)),
    ("On which planet do we live?", ("Earth",)),
    ("What is two plus two?", ("four",)),
    ("What is the capital of Italy?", ("Rome",)),
    ("Which animal says meow?", ("cat", "cats")),
    ("What color is the sky on a clear day?", ("blue",)),
    ("What do we call frozen water?", ("ice",)),
    ("Which star is at the center of our solar system?", ("sun",)),
    ("Who wrote Romeo and Juliet?", ("Shakespeare",)),
    ("How many legs does a spider have?", ("eight",)),
    ("What do bees make?", ("honey",)),
    ("What is the largest ocean on Earth?", ("Pacific",)),
    ("What do cows give us to drink?", ("milk",)),
    ("What is the first month of the year?", ("January",)),
    ("What is the capital of Japan?", ("Tokyo",)),
    ("What color is a ripe banana?", ("yellow",)),
    ("What do we call a baby dog?", ("puppy", "pup", "puppies")),
)
"""Each with the words of which one has to be in the answer; digits count as words."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One sentence, spoken and heard."""

    said: str
    heard: str
    words: int
    errors: int
    speech: float
    """Seconds of sound."""
    speaking: float
    """Seconds that it took to make it, the median of the rounds; and to hear it:"""
    hearing: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One question, answered in text and speech."""

    question: str
    text: str
    right: bool
    seconds: float
    """From the request's arrival to the end of its last stage."""
    processor: float
    """Seconds of the processor, all threads together."""
    speech: float
    first_sound: float
    thought: float
    """When the thinker had finished."""
    pieces: int
    """Pieces of speech."""

    @property
    def early(self) -> bool:
        """The first sound came while the thinker was still writing."""
        return self.first_sound < self.thought


def answer_of(question: str, expected: Iterable[str], output: OmniRequestOutput, processor: float = 0.0) -> Answer:
    """What a finished request says about itself; `processor` is what it cost."""
    if output.error is not None:
        raise output.error
    if output.trace is None or output.audio is None or output.trace.finished is None:
        raise SystemExit(f"the request {question!r} gave no speech")
    think, speak = output.trace.stages["think"], output.trace.stages["speak"]
    if think.last_chunk is None or speak.first_chunk is None:
        raise SystemExit(f"the trace of {question!r} is incomplete")
    return Answer(
        question,
        output.text,
        mentions(output.text, expected),
        output.trace.finished,
        processor,
        len(output.audio.samples) / output.audio.sample_rate,
        speak.first_chunk,
        think.last_chunk,
        speak.chunks,
    )


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """The figures of some answers. Real-time factors: all time over all speech, and the median of the requests'."""
    several = [answer for answer in answers if answer.pieces > 1]
    speech = sum(answer.speech for answer in answers)
    return {
        "questions": len(answers),
        "with the expected word": sum(answer.right for answer in answers),
        "real-time factor": sum(answer.seconds for answer in answers) / speech,
        "real-time factor, median": statistics.median(answer.seconds / answer.speech for answer in answers),
        "processor's seconds a second of speech": sum(answer.processor for answer in answers) / speech,
        "first sound, s, median": statistics.median(answer.first_sound for answer in answers),
        "first sound, s, worst": max(answer.first_sound for answer in answers),
        "whole answer, s, median": statistics.median(answer.seconds for answer in answers),
        "speech, s, median": statistics.median(answer.speech for answer in answers),
        "first sound before the thinker had finished": sum(answer.early for answer in answers),
        "answers of more than one piece": len(several),
        "  of those, first sound before the thinker had finished": sum(answer.early for answer in several),
    }


# --------------------------------------------------------------------------------------------------- measuring


def timed(function: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Median seconds, and what came of it."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """The voice's sound at the rate that is heard."""
    return np.asarray(soxr.resample(samples, rate, SAMPLE_RATE), np.float32)


def round_trips(
    sentences: Sequence[str], voice: Voice, recogniser: SpeechToText, rounds: int, tick: Callable[[], None]
) -> list[RoundTrip]:
    recogniser.transcribe(resampled(voice.synthesise(sentences[0]), voice.sample_rate))  # both warm
    made = []
    for sentence in sentences:
        speaking, sound = timed(lambda text=sentence: voice.synthesise(text), rounds)
        clip = resampled(sound, voice.sample_rate)
        hearing, heard = timed(lambda clip=clip: recogniser.transcribe(clip), rounds)
        words = normalise(sentence)
        errors = word_errors(words, normalise(heard))
        speech = len(sound) / voice.sample_rate
        made.append(RoundTrip(sentence, heard, len(words), errors, speech, speaking, hearing))
        tick()
    return made


def written(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def spoken(question: str, voice: Voice) -> list[dict[str, Any]]:
    """The question as a recording, as a client would send it."""
    file = io.BytesIO()
    soundfile.write(file, voice.synthesise(question), voice.sample_rate, format="WAV", subtype="PCM_16")
    sound = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    return [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}]


def ask(
    omni: Omni,
    conversations: Sequence[list[dict[str, Any]]],
    questions: Sequence[tuple[str, tuple[str, ...]]],
    params: SamplingParams,
    rounds: int,
    tick: Callable[[], None],
) -> list[Answer]:
    """One conversation after the other, all of them `rounds` times; of each, the round with the median time."""
    kept: list[list[Answer]] = [[] for _ in conversations]
    for _ in range(rounds):
        for own, messages, (question, expected) in zip(kept, conversations, questions, strict=True):
            busy = time.process_time()
            output = omni.chat(messages, {"think": params}, modalities=["text", "audio"], progress=False)
            own.append(answer_of(question, expected, output, time.process_time() - busy))
            tick()
    return [sorted(own, key=lambda answer: answer.seconds)[(len(own) - 1) // 2] for own in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter", help="the bundle's name, or a starter's folder")
    parser.add_argument("--parts", type=Path, default=weights_home() / "starter", help="the folder with hear/")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--no-pipeline", action="store_true", help="speak and hear alone")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="eight sentences, four questions, one round")
    options = parser.parse_args()
    console = Console()
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    questions, rounds = QUESTIONS, options.rounds
    if options.quick:
        sentences, questions, rounds = sentences[:8], questions[:4], 1
    threads = min(os.cpu_count() or 1, 2)
    voice, recogniser = Voice(threads), SpeechToText(options.parts / "hear", threads)
    report: dict[str, Any] = {"load before": load()}
    asked = 0 if options.no_pipeline else 2 * len(questions) * rounds
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(sentences) + asked)

        def tick() -> None:
            bar.advance(task)

        trips = round_trips(sentences, voice, recogniser, rounds, tick)
        if not options.no_pipeline:
            params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
            off = ("think.budget.prefix_caching=false",)  # a question that comes again must be read again
            with Omni(options.model, device="cpu", overrides=off, progress=False) as omni:
                omni.chat(written("Hello!"), {"think": params}, modalities=["text", "audio"], progress=False)
                by_hand = [written(question) for question, _ in questions]
                by_voice = [spoken(question, voice) for question, _ in questions]
                report["written"] = ask(omni, by_hand, questions, params, rounds, tick)
                report["spoken"] = ask(omni, by_voice, questions, params, rounds, tick)
    report["load after"] = load()
    report["machine"] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    report["sentences"] = trips
    report["speak and hear"] = spoken_summary(trips)
    for way in ("written", "spoken"):
        if way in report:
            report[f"{way} questions"] = summary(report[way])
    show(report, console)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1, default=asdict), encoding="utf-8")


def spoken_summary(trips: Sequence[RoundTrip]) -> dict[str, float]:
    speech = sum(trip.speech for trip in trips)
    return {
        "sentences": len(trips),
        "words": sum(trip.words for trip in trips),
        "word error rate": word_error_rate((trip.said, trip.heard) for trip in trips),
        "sentences without an error": sum(trip.errors == 0 for trip in trips),
        "speech, s": speech,
        "speak, real-time factor": sum(trip.speaking for trip in trips) / speech,
        "hear, real-time factor": sum(trip.hearing for trip in trips) / speech,
    }


def show(report: dict[str, Any], console: Console) -> None:
    machine = " · ".join(f"{name} {value}" for name, value in report["machine"].items())
    console.print(f"{machine} · load before {report['load before']}, after {report['load after']}")
    for title in ("speak and hear", "written questions", "spoken questions"):
        if title in report:
            table = Table("", "value", title=title)
            for name, value in report[title].items():
                table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
            console.print(table)
    wrong = Table("said", "heard", title="heard otherwise")
    for trip in report["sentences"]:
        if trip.errors:
            wrong.add_row(trip.said, trip.heard)
    console.print(wrong)
    for way in ("written", "spoken"):
        missed = [answer for answer in report.get(way, ()) if not answer.right]
        if missed:
            table = Table("question", "answer", title=f"{way} questions without the expected word")
            for answer in missed:
                table.add_row(answer.question, answer.text)
            console.print(table)


if __name__ == "__main__":
    main()
