"""Models that are told a language write what they write in transformers, with each language, cut and streamed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.core.clips import AudioClip
from omnistage.core.errors import OmniError
from omnistage.core.transcripts import TranscriptionOptions
from omnistage.core.types import SpeechPrompt
from omnistage.hf import transformers
from omnistage.omni import AsyncOmni, Omni

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from listener_checkpoints import LISTENERS, transcribe

WRITERS = LISTENERS
RATE = 16_000
Options = TranscriptionOptions


def sound(seconds: float, seed: int = 0) -> AudioClip:
    rng = np.random.default_rng(round(seconds * 1000) + seed)
    times = np.arange(round(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * times * (200 + 900 * rng.random()) * (1 + times))
    return AudioClip((tone * 0.5 + rng.standard_normal(len(times)) * 0.2 * rng.random()).astype(np.float32), RATE)


def reference(folder: Path, clip: AudioClip, language: str = "en", target: str = "en") -> str:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    with torch.inference_mode():
        return transcribe(model, processor, clip.samples, language, target).strip()


@pytest.mark.parametrize(
    ("model_type", "options", "language", "target"),
    [
        ("canary", Options(language="German"), "de", "de"),
        ("canary", Options(language="de", translate=True), "de", "en"),
        ("cohere_asr", Options(language="de"), "de", "de"),
        ("seamless_m4t", Options(language="de"), "de", "de"),
        ("seamless_m4t_v2", Options(translate=True), "de", "en"),
    ],
)
def test_languages_and_translation_are_those_of_generate(
    folder_of: Any, model_type: str, options: Options, language: str, target: str
) -> None:
    folder = folder_of(model_type)
    clips = [sound(1.0), sound(1.3), sound(1.0, 1)]
    with Omni(folder, progress=False) as omni:
        outputs = omni.generate([SpeechPrompt(clip, options) for clip in clips], progress=False)
        omni.orchestrator.check_idle()
    for clip, output in zip(clips, outputs, strict=True):
        assert output.text == reference(folder, clip, language, target) != ""
        assert output.transcript is not None
        assert output.transcript.language[:2] == target


def test_long_clips_are_cut_as_the_processor_cuts_them(folder_of: Any) -> None:
    folder = folder_of("cohere_asr")
    clips = [sound(5.0), sound(5.0, 1), sound(1.0)]
    with Omni(folder, progress=False) as omni:
        outputs = omni.generate([SpeechPrompt(clip) for clip in clips], progress=False)
    texts = [reference(folder, clip) for clip in clips]
    assert [output.text for output in outputs] == texts
    assert len(texts[0]) > 2 * len(texts[2])


@pytest.mark.parametrize("model_type", ["canary", "cohere_asr", "moonshine_streaming", "seamless_m4t"])
def test_streamed_pieces_make_up_the_whole_text(folder_of: Any, model_type: str) -> None:
    async def run() -> tuple[list[str], str]:
        async with AsyncOmni(folder_of(model_type), progress=False) as omni:
            stream = omni.generate(SpeechPrompt(sound(1.2), Options(stream=True)))
            items = [item async for item in stream]
            assert items[-1].final is not None
            assert items[-1].final.transcript is not None
            return [item.text for item in items if item.text], items[-1].final.transcript.whole or ""

    pieces, whole = asyncio.run(run())
    assert len(pieces) > 1
    assert "".join(pieces).strip() == whole == reference(folder_of(model_type), sound(1.2))


@pytest.mark.parametrize(
    ("model_type", "options", "words"),
    [
        ("canary", Options(language="xx"), "not a language of this model"),
        ("cohere_asr", Options(translate=True), "does not translate"),
        ("moonshine_streaming", Options(language="en"), "one language"),
        ("seamless_m4t", Options(timestamps=True), "timestamps are not supported"),
    ],
)
def test_options_that_a_model_does_not_have_are_refused(
    folder_of: Any, model_type: str, options: Options, words: str
) -> None:
    with Omni(folder_of(model_type), progress=False) as omni, pytest.raises(OmniError, match=words):
        omni.generate(SpeechPrompt(sound(1.0), options))
