"""AudioInputLimits turns: silero's own network on made-up voices, and what its numbers mean."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnxruntime")

from omnistage.core.errors import LimitExceededError, MissingDependencyError
from omnistage.media import vad
from omnistage.media.audio import StreamResampler
from omnistage.media.vad import FRAME, FRAME_MS, RATE, Silero, TurnDetector
from omnistage.server.realtime.config import ServerVad
from omnistage.server.realtime.input_audio import InputAudio
from tests.voice import as_int16, noise, silence, voice

# -------------------------------------------------------------------------------------------------- the network


def test_a_voice_is_heard_and_silence_and_noise_are_not() -> None:
    assert np.mean(Silero().push(voice(1.5, RATE))[3:]) > 0.8
    assert max(Silero().push(silence(1.0, RATE))) < 0.1
    assert max(Silero().push(noise(1.0, RATE))) < 0.3
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert max(Silero().push(tone.astype(np.float32))) < 0.3


def test_however_a_stream_is_cut_the_same_is_heard() -> None:
    sound = np.concatenate([silence(0.3, RATE), voice(0.6, RATE), silence(0.3, RATE)])
    whole = Silero().push(sound)
    pieces = Silero()
    cut = [p for start in range(0, len(sound), 333) for p in pieces.push(sound[start : start + 333])]
    assert cut == pytest.approx(whole)
    assert len(whole) == len(sound) // FRAME


def test_two_streams_do_not_hear_each_other() -> None:
    sound = voice(0.5, RATE)
    alone = Silero().push(sound)
    first, second = Silero(), Silero()
    heard = []
    for start in range(0, len(sound), FRAME):
        heard += first.push(sound[start : start + FRAME])
        second.push(noise(FRAME / RATE, RATE))
    assert heard == pytest.approx(alone)
    first.reset()
    assert first.push(sound) == pytest.approx(alone)


def test_none_of_the_packages_python_is_imported() -> None:
    code = (
        "import sys; from omnistage.media.vad import Silero; import numpy as np;"
        "Silero().push(np.zeros(512, np.float32)); sys.exit('silero_vad' in sys.modules or 'torchaudio' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vad, "_model_path", lambda: None)
    vad._network.cache_clear()
    assert not vad.vad_available()
    for call in (vad.require_vad, Silero):
        with pytest.raises(MissingDependencyError, match=r"omnistage\[realtime\]"):
            call()
    vad._network.cache_clear()


# ------------------------------------------------------------------------------------------------------- turns


def turns(probabilities: list[float], **settings: Any) -> list[tuple[int, str]]:
    detector = TurnDetector(**settings)
    return [(i, kind) for i, p in enumerate(probabilities) if (kind := detector.push(p)) is not None]


def test_a_turn_begins_at_the_threshold_and_ends_after_the_silence() -> None:
    assert turns([0.1, 0.49, 0.5, 0.9, 0.1, 0.1, 0.1], silence_ms=2 * FRAME_MS) == [(2, "started"), (5, "stopped")]


def test_a_pause_that_is_shorter_than_the_silence_ends_nothing() -> None:
    speech = [0.9, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1]
    assert turns(speech, silence_ms=3 * FRAME_MS) == [(0, "started"), (6, "stopped")]


def test_speech_that_goes_on_may_be_less_certain() -> None:
    assert turns([0.6, *[0.4] * 50], silence_ms=100) == [(0, "started")]
    assert turns([0.6, *[0.34] * 50], silence_ms=100)[-1][1] == "stopped"


@given(st.lists(st.floats(0, 1), max_size=200), st.floats(0.2, 0.9), st.integers(0, 500))
def test_turns_never_overlap(probabilities: list[float], threshold: float, silence_ms: int) -> None:
    kinds = [kind for _, kind in turns(probabilities, threshold=threshold, silence_ms=silence_ms)]
    assert kinds == (["started", "stopped"] * len(kinds))[: len(kinds)]


# ------------------------------------------------------------------------------------------------------ the buffer


class Scripted(Silero):
    """The network's place taken by loudness: tests of positions must not depend on what it thinks of a frame."""

    def __init__(self) -> None:
        self.reset()

    def _frame(self, frame: np.ndarray) -> float:
        return float(np.abs(frame).mean() > 0.1)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.server.realtime.input_audio.Silero", Scripted)


def loud(seconds: float) -> np.ndarray:
    return np.full(int(seconds * 24_000), 16_000, np.int16)


def quiet(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * 24_000), np.int16)


def feed(audio: InputAudio, sound: np.ndarray, step: int = 480) -> list[Any]:
    return [turn for start in range(0, len(sound), step) for turn in audio.append(sound[start : start + step])]


def detection(**values: Any) -> ServerVad:
    return ServerVad(type="server_vad", **values)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("step", [480, 10_000, 1_000_000])
def test_positions_are_those_of_the_sound_whatever_its_pieces(step: int) -> None:
    audio = InputAudio("audio/pcm", detection(prefix_padding_ms=200, silence_duration_ms=300), 60)
    sound = np.concatenate([quiet(1.0), loud(0.8), quiet(1.0), loud(0.5), quiet(1.0)])
    heard = feed(audio, sound, step)
    assert [turn.kind for turn in heard] == ["started", "stopped"] * 2
    first, end, second, _ = heard
    assert audio.ms(first.start) == pytest.approx(1000 - 200, abs=2 * FRAME_MS)
    assert audio.ms(end.end) == pytest.approx(1800 + 300, abs=2 * FRAME_MS)
    assert audio.ms(second.start) == pytest.approx(2800 - 200, abs=2 * FRAME_MS)


@pytest.mark.usefixtures("scripted")
def test_a_turn_is_taken_with_its_padding_and_nothing_of_the_one_before() -> None:
    audio = InputAudio("audio/pcm", detection(prefix_padding_ms=1000, silence_duration_ms=100), 60)
    heard = feed(audio, np.concatenate([loud(0.5), quiet(0.2), loud(0.5), quiet(0.2)]), 100_000)
    _, first, begun, second = heard
    assert begun.start == first.end  # the padding would reach further back
    assert len(audio.take(first.start, first.end)) == first.end - first.start
    taken = audio.take(second.start, second.end)
    assert np.abs(taken).max() == 16_000
    assert audio.seconds < 0.2


@pytest.mark.usefixtures("scripted")
def test_silence_is_not_kept_while_turns_are_heard() -> None:
    audio = InputAudio("audio/pcm", detection(prefix_padding_ms=300), 1.0)
    feed(audio, quiet(5.0))  # more than fits
    assert audio.seconds < 0.4
    assert audio.ms(audio.end) == 5000
    audio.set_detection(None)
    with pytest.raises(LimitExceededError):
        feed(audio, quiet(5.0))


@pytest.mark.usefixtures("scripted")
def test_a_cleared_buffer_has_heard_nothing() -> None:
    audio = InputAudio("audio/pcm", detection(silence_duration_ms=100), 60)
    assert [turn.kind for turn in feed(audio, loud(0.5))] == ["started"]
    audio.clear()
    assert len(audio) == 0
    assert feed(audio, quiet(1.0)) == []
    assert audio.ms(audio.end) == 1500


@pytest.mark.usefixtures("scripted")
def test_what_is_taken_by_hand_ends_the_turn() -> None:
    audio = InputAudio("audio/pcm", detection(), 60)
    feed(audio, loud(0.5))
    assert len(audio.take_all()) == 12_000
    again = feed(audio, loud(0.5))
    assert [turn.kind for turn in again] == ["started"]
    assert again[0].start >= 12_000


@pytest.mark.usefixtures("scripted")
def test_settings_may_change_in_the_middle_of_a_turn() -> None:
    audio = InputAudio("audio/pcm", detection(silence_duration_ms=5000), 60)
    feed(audio, loud(0.5))
    audio.set_detection(detection(silence_duration_ms=100))
    stopped = feed(audio, quiet(0.5))
    assert [turn.kind for turn in stopped] == ["stopped"]
    assert stopped[0].start == 0


def test_telephone_sound_is_heard_too() -> None:
    audio = InputAudio("audio/pcmu", detection(silence_duration_ms=200), 60)
    sound = np.concatenate([silence(0.5, 24_000), voice(1.0, 24_000), silence(0.6, 24_000)])
    narrow = as_int16(StreamResampler(24_000, 8_000).push(sound, last=True))
    heard = [turn.kind for start in range(0, len(narrow), 160) for turn in audio.append(narrow[start : start + 160])]
    assert heard == ["started", "stopped"]
