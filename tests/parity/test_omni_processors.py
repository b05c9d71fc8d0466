"""Chats through the Qwen-Omni processors item by item give what the stock processors make of them as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omnistage.core.clips import AudioClip, VideoClip
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, Part, TextPart, VideoPart
from omnistage.core.types import ARInput, Modality
from omnistage.models._qwen_omni.processor import load_processor
from omnistage.models._qwen_omni.reference import stock_inputs
from omnistage.models.qwen2_5_omni import tiny as tiny25
from omnistage.models.qwen2_5_omni.processor import Qwen25OmniProcessor
from omnistage.models.qwen3_omni_moe import tiny as tiny3
from omnistage.models.qwen3_omni_moe.processor import Qwen3OmniProcessor

FAMILIES: dict[str, tuple[Any, Any, str]] = {
    "qwen2_5_omni": (tiny25, Qwen25OmniProcessor, "Qwen2_5OmniProcessor"),
    "qwen3_omni_moe": (tiny3, Qwen3OmniProcessor, "Qwen3OmniMoeProcessor"),
}
PIXELS = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Our processor and the stock one."""
    tiny, processor, name = FAMILIES[request.param]
    folder: Path = tmp_path_factory.mktemp(request.param) / "model"
    tiny.write(folder, seed=0)
    return processor.load(folder), load_processor(name, folder)


def picture(seed: int, width: int, height: int) -> ImagePart:
    return ImagePart(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


def clip(seed: int, seconds: float) -> AudioClip:
    noise = np.random.default_rng(seed).standard_normal(int(16_000 * seconds))
    return AudioClip((0.1 * noise).astype(np.float32), 16_000)


def film(seed: int, frames: int, sound: float | None = None) -> VideoPart:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 56, 84, 3), dtype=np.uint8)
    audio = None if sound is None else clip(seed, sound)
    return VideoPart(VideoClip(pixels, 2.0, frames / 2, audio), use_audio=audio is not None)


CHATS: dict[str, list[Part]] = {
    "pictures": [picture(0, 56, 84), TextPart("a"), picture(1, 140, 57)],
    "clips": [AudioPart(clip(0, 0.4)), TextPart("a"), AudioPart(clip(1, 2.7)), AudioPart(clip(2, 0.05))],
    "videos": [film(0, 4), TextPart("a"), film(1, 7)],
    "a clip beside longer sounds of videos": [film(0, 4, 2.1), AudioPart(clip(3, 0.5)), film(1, 8, 7.3)],
    "all kinds": [AudioPart(clip(0, 1.3)), picture(0, 90, 60), film(2, 4), picture(1, 60, 60)],
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_becomes_what_the_stock_processor_makes_of_it(family: tuple[Any, Any], name: str) -> None:
    processor, stock = family
    messages = [ChatMessage("user", (*CHATS[name], TextPart("What is it?")))]
    expected, with_sound = stock_inputs(stock, messages)
    payload: ARInput = processor.chat(messages)
    assert payload.token_ids == tuple(expected["input_ids"][0].tolist())
    assert bool(payload.context["use_audio_in_video"]) is with_sound
    for kind, pixels in PIXELS.items():
        spans = [span for span in payload.media if span.kind is kind]
        if spans:
            assert torch.equal(torch.cat([span.inputs[pixels] for span in spans]), expected[pixels])
            assert torch.equal(payload.context[f"{kind}_grid_thw"], expected[f"{kind}_grid_thw"])
    sounds = [span for span in payload.media if span.kind is Modality.AUDIO]
    if not sounds:
        return
    masks = expected["feature_attention_mask"]
    assert payload.context["audio_seqlens"].tolist() == masks.sum(-1).tolist()
    for span, mel, mask in zip(sounds, expected["input_features"], masks, strict=True):
        assert torch.equal(span.inputs["input_features"][0], mel[:, : int(mask.sum())])
