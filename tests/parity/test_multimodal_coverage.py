"""Small random checkpoints of some multimodal types, with their own processors: exact or refused, never wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from omnistage.core.errors import UnsupportedModelError
from omnistage.core.types import Modality

PATH = Path(__file__).parents[2] / "tools" / "coverage_multimodal.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_multimodal", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["coverage_multimodal"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
EXACT = {
    "qwen3_vl": "image, video",  # features for deeper layers
    "llava_onevision": "image, video",  # several pictures are cut otherwise than one
    "idefics3": "image",  # rows and columns of crops
    "kimi_k25": "image",  # a placeholder that is sampled is embedded as padding
    "granite_docling": "image",  # scaled logits
    "cosmos3_edge": "image",
    "mistral3": "image",
    "glmasr": "audio",  # one clip in a chat
    "glm4v": "image, video",  # the kinds of a video's tokens come from the marks around them
    "hunyuan_vl": "image",  # a processor that takes no placeholder without its marks
    "gemma3": "image",  # pictures attend both ways
    "idefics2": "image",  # a space behind the last picture of a chat: rows of whole prompts
    "paligemma": "image, in groups",  # pictures and the prompt attend both ways
    "mllama": "image, in groups",  # attends to pictures beside the text
    "blip-2": "image, never text alone, in groups",  # no chat template, another model inside generates
    "t5gemma2": "image, in groups",  # a decoder behind an encoder
    "chameleon": "image, in groups",  # forbids itself some tokens
    "phi4_multimodal": "audio, in groups",  # merges media within its decoder
    "qwen3_5": "image, video",  # recurrent layers; each sequence has offsets of positions that the model keeps
}
FALLBACK = {
    "git": "image",  # its cache holds more tokens than its prompt has
    "mistral_large4": "image",  # its cache holds more than keys and values
}
REFUSED = {"pi0": "does not generate text", "pix2struct": "image: the processor makes no tokens of a text"}


@pytest.fixture(autouse=True, scope="module")
def torchvision() -> None:
    tool.prepare_torchvision()


@pytest.mark.parametrize("model_type", EXACT)
def test_a_type_is_served_exactly(model_type: str) -> None:
    outcome = tool.cover(model_type)
    assert outcome.state == "exact", outcome
    assert outcome.reason.startswith(EXACT[model_type])
    assert outcome.in_groups is ("in groups" in outcome.reason) is ("in groups" in EXACT[model_type])


def test_a_placeholder_that_is_sampled_is_embedded_as_by_the_model() -> None:
    """With this seed it is that of a video, which the small checkpoint does not take."""
    outcome = tool.cover("muse_glimmer", seed=1)
    assert outcome.state == "exact", outcome


def test_parts_beside_the_decoder_attend_as_before() -> None:
    """Layers of this projector read a config that no model inside the model has."""
    checkpoints = tool.checkpoints
    config = checkpoints.small_config("fun_asr_nano", checkpoints.CONFIGS["fun_asr_nano"])
    model = tool.transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    component = tool.MultimodalLM(model)
    assert component.decoder.config._attn_implementation != "eager"
    assert model.config.adaptor_config._attn_implementation == "eager"
    assert model.config.audio_config._attn_implementation == "eager"


@pytest.mark.parametrize("model_type", FALLBACK)
def test_a_type_is_served_exactly_one_by_one(model_type: str) -> None:
    outcome = tool.cover(model_type)
    assert outcome.state == "fallback", outcome
    assert outcome.reason == FALLBACK[model_type]


def test_a_recurrent_type_with_a_kind_that_the_engine_does_not_take_keeps_it_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_videos(*_args: object) -> dict[Modality, UnsupportedModelError]:
        return {Modality.VIDEO: UnsupportedModelError("other logits for a video")}

    monkeypatch.setattr("omnistage.models.multimodal_lm.probe.check_media", refuse_videos)
    outcome = tool.cover("qwen3_5")
    assert (outcome.state, outcome.reason) == ("fallback", "image, video")


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_is_refused_with_its_reason(model_type: str) -> None:
    outcome = tool.cover(model_type)
    assert outcome.state == "refused", outcome
    assert REFUSED[model_type] in outcome.reason


def test_the_page_counts_types_by_task() -> None:
    outcomes = [tool.causal.Outcome("llava", "exact", "image"), tool.causal.Outcome("qwen2_audio", "refused", "no")]
    page = tool.as_markdown(outcomes)
    images, sounds = page.split("## audio-language")
    assert "1 exact" in images
    assert "0 exact" in sounds
    assert "1 refused" in sounds
    assert "| qwen2_audio | refused | no |" in page


def test_the_page_counts_types_in_groups_apart_also_when_their_rows_stay(tmp_path: Path) -> None:
    page, new = tmp_path / "page.md", tool.causal.Outcome("mllama", "exact", "image, in groups", in_groups=True)
    for outcome in (new, tool.causal.Outcome("llava", "exact", "image; video refused: not in groups, in groups")):
        page.write_text(tool.as_markdown(tool._with_rows_of(page, [outcome])))
    assert "2 exact (1 of them in groups)" in page.read_text()
