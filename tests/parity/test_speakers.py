"""Models that speak through a processor, in several parts or piece by piece: in turns, in company and broken off."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omnistage.core.errors import CheckpointError, OmniError
from omnistage.core.params import CodecParams
from omnistage.hf import transformers
from omnistage.models.text_to_speech import synthesiser
from omnistage.omni import AsyncOmni, Omni

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import speaker_checkpoints as checkpoints
from speech_checkpoints import SPEAKERS, speak

WRITERS = SPEAKERS
TEXTS = ("hello there", "the weather is bright", "yes we can")


def reference(folder: Path, text: str) -> np.ndarray:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.set_seed(checkpoints.SEED)
    with torch.inference_mode():
        samples: np.ndarray = speak(model, tokenizer, folder, text).reshape(-1).numpy()
    return samples


@pytest.mark.parametrize("model_type", ["dia", "pocket_tts", "vibevoice", "seamless_m4t_v2", "vits", "bark"])
def test_texts_that_take_turns_layer_by_layer_sound_as_each_alone(
    folder_of: Any, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    monkeypatch.setattr(synthesiser, "_SLICE_SECONDS", 0.002)
    folder = folder_of(model_type)
    with Omni(folder, progress=False) as omni:
        outputs = omni.generate(list(TEXTS), CodecParams(seed=checkpoints.SEED), progress=False)
        omni.orchestrator.check_idle()
    for output, text in zip(outputs, TEXTS, strict=True):
        assert output.audio is not None
        np.testing.assert_allclose(output.audio.samples, reference(folder, text), atol=1e-5)


def test_an_aborted_text_ends_between_two_layers_while_another_is_spoken(
    folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesiser, "_SLICE_SECONDS", 0.0)

    async def collect(stream: Any) -> list[Any]:
        return [item async for item in stream]

    async def run() -> None:
        async with AsyncOmni(folder_of("speecht5"), progress=False) as omni:
            stage: Any = omni.orchestrator.stages["speak"]
            long = asyncio.ensure_future(collect(omni.generate("word " * 15)))
            while not stage.component._speeches:
                await asyncio.sleep(0)
            short = await collect(omni.generate("yes"))
            assert short[-1].final.error is None
            assert not long.done()  # the short one overtakes it
            assert len(stage.component._speeches) == 1
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            while stage.component._speeches:
                await asyncio.sleep(0)
            omni.orchestrator.check_idle()

    asyncio.run(run())


def test_vibevoice_streams_what_makes_up_the_whole(folder_of: Any) -> None:
    async def run() -> list[np.ndarray]:
        async with AsyncOmni(folder_of("vibevoice"), progress=False) as omni:
            stream = omni.generate(TEXTS[0], CodecParams(seed=checkpoints.SEED))
            return [item.audio.samples async for item in stream if item.audio is not None and item.final is None]

    pieces = asyncio.run(run())
    np.testing.assert_allclose(np.concatenate(pieces), reference(folder_of("vibevoice"), TEXTS[0]), atol=1e-5)


def test_voices_of_pocket_tts_are_files_of_the_checkpoint(folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of("pocket_tts")
    with Omni(folder, progress=False) as omni:
        alto, bass = (
            omni.generate(TEXTS[0], CodecParams(seed=checkpoints.SEED), voice=voice)[0].audio
            for voice in ("alto", "bass")
        )
    assert alto is not None
    assert bass is not None
    np.testing.assert_allclose(alto.samples, reference(folder, TEXTS[0]), atol=1e-5)
    assert len(alto.samples) != len(bass.samples) or np.abs(alto.samples - bass.samples).max() > 1e-3
    assert load_file(folder / "voices" / "bass.safetensors")["audio_prompt_latents"].shape[0] == 6
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    save_file({"keys": torch.zeros(2, 3, 4)}, copied / "voices" / "other.safetensors")
    with pytest.raises(CheckpointError, match="one matrix"):
        Omni(copied, progress=False)


@pytest.mark.parametrize(
    ("model_type", "text", "words"),
    [
        ("pocket_tts", "hello <|audio_prompt|>", "special token"),
        ("vibevoice", "hello <|vision_pad|>", "special token"),
        ("seamless_m4t", "hello </s> again", "special token"),
        ("dia", "x" * 1030, "tokens"),
        ("dia", "  ", "nothing in this text"),
    ],
)
def test_what_cannot_be_spoken_is_refused(folder_of: Any, model_type: str, text: str, words: str) -> None:
    with Omni(folder_of(model_type), progress=False) as omni, pytest.raises(OmniError, match=words):
        omni.generate(text)


def test_a_model_without_its_audio_tokenizer_says_where_to_put_it(folder_of: Any, tmp_path: Path) -> None:
    copied = tmp_path / "model"
    shutil.copytree(folder_of("dia"), copied)
    shutil.rmtree(copied / "audio_tokenizer")
    with pytest.raises(CheckpointError, match="somebody/audio-tokenizer"):
        Omni(copied, progress=False)
