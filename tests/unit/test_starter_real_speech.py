"""The starter's speech recognition with its real weights, where they were pulled."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnxruntime", reason="speech recognition runs on ONNX Runtime")

from omnistage_starter.parts.manifest import STARTER
from omnistage_starter.parts.store import Store
from omnistage_starter.speech_to_text import SAMPLE_RATE, SpeechToText

from omnistage.core.errors import UnclearSpeechError
from tests.voice import noise, silence


@pytest.fixture(scope="module")
def real() -> SpeechToText:
    folder = Store.of(STARTER).root / "hear"
    if not SpeechToText.present(folder):
        pytest.skip("speech recognition is not here: `omnistage pull starter` fetches it")
    return SpeechToText(folder)


@pytest.mark.parametrize(
    "sound",
    [noise(2.0, SAMPLE_RATE), 20 * noise(2.0, SAMPLE_RATE), silence(2.0, SAMPLE_RATE)],
    ids=["noise", "loud", "silence"],
)
def test_the_real_model_gives_no_words_without_speech(real: SpeechToText, sound: NDArray[np.float32]) -> None:
    assert real.transcribe(sound) == ""


@pytest.mark.parametrize(("before", "after"), [(2.0, 0.0), (2.0, 4.0), (6.0, 1.0)])
def test_the_real_model_hears_a_sentence_after_a_pause(real: SpeechToText, before: float, after: float) -> None:
    pytest.importorskip("hibari", reason="the voice is the package hibari-tts")
    import soxr
    from omnistage_starter.text_to_speech import Voice

    said = soxr.resample(Voice().synthesise("What is the capital of France?"), 24_000, SAMPLE_RATE)
    sound = np.concatenate([silence(before, SAMPLE_RATE), said, silence(after, SAMPLE_RATE)])
    assert real.transcribe(sound) == "What is the capital of France?"


@pytest.mark.parametrize(
    "text", ["no " * 12, "One two three. " + "no " * 20 + ". Four five."], ids=["alone", "between"]
)
def test_the_real_model_writes_a_word_down_as_often_as_it_is_said_or_says_that_it_cannot(
    real: SpeechToText, text: str
) -> None:
    pytest.importorskip("hibari", reason="the voice is the package hibari-tts")
    import soxr
    from omnistage_starter.text_to_speech import Voice

    with contextlib.suppress(UnclearSpeechError):
        written = real.transcribe(soxr.resample(Voice().synthesise(text), 24_000, SAMPLE_RATE))
        assert written.lower().count("no") == text.count("no")


def test_the_real_model_transcribes_the_real_voice(real: SpeechToText) -> None:
    pytest.importorskip("hibari", reason="the voice is the package hibari-tts")
    import soxr
    from omnistage_starter.text_to_speech import Voice

    sound = Voice().synthesise("The quick brown fox jumps over the lazy dog. My brother plays the piano.")
    text = real.transcribe(soxr.resample(sound, 24_000, SAMPLE_RATE))
    assert text.lower().replace(",", ".") == "the quick brown fox jumps over the lazy dog. my brother plays the piano."
