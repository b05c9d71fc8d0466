"""Speech in one shot equals that of transformers with the same seed, on the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnistage.core.errors import CheckpointError, LimitExceededError, OmniError
from omnistage.core.params import CodecParams
from omnistage.hf import transformers
from omnistage.models.text_to_speech import speakers, synthesiser
from omnistage.omni import Omni
from tests.parity.conftest import Checkpoints

TEXTS = ("Hello there, my dog is cute", "Yes", "the weather is bright and the river is quiet")


def reference(folder: Path, text: str, seed: int, voice: str) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        if (folder / "vocoder").is_dir():
            model: Any = transformers.SpeechT5ForTextToSpeech.from_pretrained(folder).eval()
            vocoder = transformers.SpeechT5HifiGan.from_pretrained(folder / "vocoder").eval()
            speaker = load_file(folder / "speakers.safetensors")[voice][None]
            transformers.set_seed(seed)
            return model.generate_speech(inputs.input_ids, speaker, vocoder=vocoder).numpy()
        model = transformers.VitsModel.from_pretrained(folder).eval()
        transformers.set_seed(seed)
        return model(inputs.input_ids, speaker_id=int(voice)).waveform[0].numpy()


@pytest.mark.parametrize(("variant", "voices"), [("vits", ("0", "2", "1")), ("speecht5", ("alto", "bass", "alto"))])
def test_texts_at_once_are_spoken_as_each_alone_in_transformers(
    checkpoint_of: Checkpoints, variant: str, voices: tuple[str, ...]
) -> None:
    folder = checkpoint_of("text_to_speech", variant)
    with Omni(folder, progress=False) as omni:
        state = torch.random.get_rng_state()
        for voice in sorted(set(voices)):
            for output, text in zip(
                omni.generate(list(TEXTS), CodecParams(seed=7), voice=voice, progress=False), TEXTS, strict=True
            ):
                expected = reference(folder, text, 7, voice)
                assert output.audio is not None
                assert np.abs(expected).max() > 1e-3
                np.testing.assert_allclose(output.audio.samples, expected, atol=1e-6)
        other = omni.generate(TEXTS[0], CodecParams(seed=8), voice=voices[0])[0].audio
        assert other is not None
        expected = reference(folder, TEXTS[0], 7, voices[0])
        assert len(other.samples) != len(expected) or np.abs(other.samples - expected).max() > 1e-5
        torch.random.set_rng_state(state)
        before = torch.rand(1)
        torch.random.set_rng_state(state)
        omni.generate(TEXTS[1], CodecParams(seed=9))
        assert torch.rand(1) == before  # other work has the random numbers that it would have had
        omni.orchestrator.check_idle()


@pytest.mark.parametrize(
    ("text", "words"), [("x" * 5000, "characters"), ("word " * 60, "tokens"), ("", "nothing in this text")]
)
def test_what_cannot_be_spoken_is_refused(checkpoint_of: Checkpoints, text: str, words: str) -> None:
    with (
        Omni(checkpoint_of("text_to_speech", "speecht5"), progress=False) as omni,
        pytest.raises(OmniError, match=words),
    ):
        omni.generate(text)


def test_a_text_that_takes_too_much_memory_is_refused_and_the_others_take_turns(
    checkpoint_of: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_of("text_to_speech", "vits")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = TEXTS[2]
    tokens = len(tokenizer(text).input_ids)
    active, most = [0], [0]
    speak = speakers.Vits.speak

    def counted(self: speakers.Vits, inputs: dict[str, torch.Tensor], voice: str | None) -> torch.Tensor:
        active[0] += 1
        most[0] = max(most[0], active[0])
        try:
            return speak(self, inputs, voice)
        finally:
            active[0] -= 1

    monkeypatch.setattr(speakers.Vits, "speak", counted)
    monkeypatch.setattr(synthesiser, "_SLICE_SECONDS", 0.0)  # every layer gives way
    heads = 2
    monkeypatch.setattr(synthesiser, "host_memory", lambda: 8 * 40 * heads * tokens**2)
    with Omni(folder, progress=False) as omni:
        outputs = omni.generate([text] * 3, CodecParams(seed=7), voice="0", progress=False)
        assert most == [1]
        for output in outputs:
            assert output.audio is not None
            np.testing.assert_allclose(output.audio.samples, reference(folder, text, 7, "0"), atol=1e-6)
        with pytest.raises(LimitExceededError, match="GiB of memory") as refused:
            omni.generate("word " * 60)
        assert refused.value.param == "prompt"
        omni.orchestrator.check_idle()


@pytest.mark.parametrize(("part", "words"), [("vocoder", "needs its vocoder"), ("speakers.safetensors", "vectors")])
def test_a_speecht5_without_its_parts_says_what_to_add(
    checkpoint_of: Checkpoints, tmp_path: Path, part: str, words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("text_to_speech", "speecht5"), folder)
    path = folder / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match=words):
        Omni(folder, progress=False)
