"""Multimodal LMs against transformers: tokens of chats with media, in any company, chunking and cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.config.checkpoint import detect_family
from omnistage.core.clips import AudioClip
from omnistage.core.errors import (
    InvalidRequestError,
    LimitExceededError,
    PromptTooLongError,
    UnsupportedModelError,
)
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from omnistage.core.params import SamplingParams
from omnistage.core.types import Modality, OmniTokensPrompt
from omnistage.engines.ar.stage import ARStage
from omnistage.models.multimodal_lm import tiny
from omnistage.models.multimodal_lm.items import sample_media
from omnistage.models.multimodal_lm.processor import MultimodalProcessor
from omnistage.models.multimodal_lm.verify import as_sent, make_chats, reference_answers
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni

VARIANTS = tiny.VARIANTS
SMALL_STEPS = (
    "thinker.budget.prefill_chunk=16",
    "thinker.budget.max_batch_tokens=48",
    "thinker.budget.block_size=8",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)


@pytest.fixture(params=VARIANTS)
def folder(request: pytest.FixtureRequest, checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("multimodal_lm", request.param)


@pytest.fixture
def qwen(checkpoint_of: Callable[..., Path]) -> MultimodalProcessor:
    return MultimodalProcessor.load(checkpoint_of("multimodal_lm", "qwen2_5_vl"))


def stage_of(omni: Omni) -> ARStage:
    stage = omni.orchestrator.stages["thinker"]
    assert isinstance(stage, ARStage)
    return stage


@pytest.mark.parametrize("room", ["few blocks", "many blocks"])
def test_chats_in_one_batch_are_answered_as_by_transformers_one_by_one(folder: Path, room: str) -> None:
    """Prompts in chunks, twice: with preemption, or the second time from the prefix cache."""
    processor = MultimodalProcessor.load(folder)
    chats = make_chats(processor, 6, seed=1)
    expected = reference_answers(folder, processor, chats, GREEDY.max_tokens)
    longest = max(len(processor.chat(chat).token_ids) for chat in chats)
    blocks = 400 if room == "many blocks" else (longest + GREEDY.max_tokens) // 8 + 4
    budget = (*SMALL_STEPS, f"thinker.budget.kv_blocks={blocks}")
    sent = [[as_sent(message) for message in chat] for chat in chats]
    with Omni(folder, device="cpu", overrides=budget, progress=False) as omni:
        for _ in range(2):
            outputs = omni.chat(sent, GREEDY, progress=False)
            for output, answer in zip(outputs, expected, strict=True):
                assert output.error is None
                assert output.token_ids == answer.token_ids
                logprobs = [item.chosen.logprob for item in output.outputs[0].logprobs or []]
                assert logprobs == pytest.approx(answer.logprobs, abs=2e-4)
        stats = stage_of(omni).stats()
        assert stats.extra["prefix_hits"] > 0 if room == "many blocks" else stats.preemptions > 0
        omni.orchestrator.check_idle()


def test_an_answer_depends_on_the_media(folder: Path) -> None:
    processor = MultimodalProcessor.load(folder)
    kind = min(processor.input_modalities - {Modality.TEXT})
    with Omni(folder, device="cpu", progress=False) as omni:
        chats = []
        for number in (0, 2):
            value = sample_media(kind, number, 16_000)[1]
            content = AudioClip(value, 16_000) if kind is Modality.AUDIO else value
            chats.append([{"role": "user", "content": [{"type": str(kind), str(kind): content}]}])
        first, second = omni.chat(chats, GREEDY, progress=False)
    assert first.token_ids != second.token_ids


def test_an_item_is_encoded_once_and_its_prefix_reused_in_a_longer_chat(checkpoint_of: Callable[..., Path]) -> None:
    folder = checkpoint_of("multimodal_lm", "qwen2_5_vl")
    images = [{"type": "image", "image": sample_media(Modality.IMAGE, number, 16_000)[1]} for number in (0, 1)]
    with Omni(folder, device="cpu", overrides=("thinker.budget.block_size=8",), progress=False) as omni:
        chats = [[{"role": "user", "content": images[:count]}] for count in (1, 2)]
        for chat in chats:
            omni.chat([chat], GREEDY, progress=False)
        stats = stage_of(omni).stats().extra
        # The second picture alone is new; the first is found with all before it.
        assert (stats["encoder_cache_misses"], stats["encoder_cache_hits"]) == (2, 1)
        assert stats["prefix_hits"] > 0


def test_verify_agrees(checkpoint_of: Callable[..., Path]) -> None:
    family = REGISTRY.family("multimodal_lm")
    assert family.verify is not None
    rows = family.verify(OmniRunner(checkpoint_of("multimodal_lm", "llava")), cases=3, seed=0, progress=None)
    assert len(rows) == 3  # type: ignore[arg-type]
    assert all(row.ok for row in rows)  # type: ignore[attr-defined]


def test_the_generic_family_claims_what_no_other_does() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    assert detect_family(config, REGISTRY).name == "multimodal_lm"
    assert detect_family({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, REGISTRY).name == "causal_lm"
    text = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    assert detect_family(text, REGISTRY).name == "causal_lm"
    omni = {"architectures": ["Qwen2_5OmniForConditionalGeneration"], "model_type": "qwen2_5_omni"}
    assert detect_family(omni, REGISTRY).name == "qwen2_5_omni"


def test_a_checkpoint_whose_template_has_no_place_for_media_is_refused(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("multimodal_lm", "llava"), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="no place for media that its processor takes"):
        Omni(folder, device="cpu", progress=False)


def test_weights_that_merge_media_otherwise_are_not_served_in_a_flattened_batch(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The comparison at load can fail: here the rows of every item are changed."""
    from omnistage.models.multimodal_lm.component import MultimodalLM

    plain = MultimodalLM.encode
    monkeypatch.setattr(MultimodalLM, "encode", lambda self, span: plain(self, span) * 1.01)
    with Omni(checkpoint_of("multimodal_lm", "llava"), device="cpu", progress=False) as omni:
        assert stage_of(omni).stats().extra["in_groups"] == 1.0
    assert "depend on the rest of the prompt" in caplog.text


# ------------------------------------------------------------------------------------------------ processor


def picture(width: int = 56, height: int = 56) -> ImagePart:
    return ImagePart(sample_media(Modality.IMAGE, 0, 16_000)[1].resize((width, height)))


def test_each_item_has_a_key_of_its_content_alone(qwen: MultimodalProcessor) -> None:
    alone = qwen.chat([ChatMessage("user", (picture(),))])
    both = qwen.chat([ChatMessage("user", (TextPart("a"), picture(84, 28), picture(), TextPart("b")))])
    assert [span.key for span in both.media][1] == alone.media[0].key
    assert both.media[0].key != both.media[1].key
    assert both.media[0].positions.max() < both.media[1].positions.min()


def test_special_tokens_in_a_users_text_stay_text(qwen: MultimodalProcessor) -> None:
    payload = qwen.chat([ChatMessage("user", (TextPart("see <|image_pad|>"), picture()))])
    token = tiny.special_ids("qwen2_5_vl")["<|image_pad|>"]
    assert payload.token_ids.count(token) == len(payload.media[0].positions)


def test_placeholders_without_media_are_refused(qwen: MultimodalProcessor) -> None:
    token = tiny.special_ids("qwen2_5_vl")["<|image_pad|>"]
    with pytest.raises(InvalidRequestError, match="placeholders without media"):
        qwen.tokens(OmniTokensPrompt((1, token, 2)))


def test_pictures_that_cannot_fit_are_refused_before_they_are_processed(
    qwen: MultimodalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen.items, "call", lambda *_: pytest.fail("processed"))
    with pytest.raises(PromptTooLongError, match="tokens of media"):
        qwen.chat([ChatMessage("user", (picture(1000, 1000),) * 40)])


def test_clips_that_are_too_long_are_refused(checkpoint_of: Callable[..., Path]) -> None:
    processor = MultimodalProcessor.load(checkpoint_of("multimodal_lm", "qwen2_audio"))
    assert processor.clip_seconds()[1] == 30
    samples = torch.zeros(31 * 16_000).numpy()
    with pytest.raises(LimitExceededError, match="at most 30 s"):
        processor.chat([ChatMessage("user", (AudioPart(AudioClip(samples, 16_000)),))])


def test_clips_come_at_the_rate_that_the_model_hears(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("multimodal_lm", "qwen2_audio"), folder)
    for path in folder.glob("*process*.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings.get("feature_extractor", settings).update(sampling_rate=24_000, chunk_length=20, n_samples=480_000)
        path.write_text(json.dumps(settings), encoding="utf-8")
    assert MultimodalProcessor.load(folder).clip_rate == 24_000
    clip = AudioClip(sample_media(Modality.AUDIO, 0, 44_100)[1], 44_100)
    with Omni(folder, device="cpu", progress=False) as omni:
        [output] = omni.chat(
            [[{"role": "user", "content": [{"type": "audio", "audio": clip}]}]], GREEDY, progress=False
        )
    assert output.error is None


def test_the_sound_of_a_video_is_refused(qwen: MultimodalProcessor) -> None:
    clip = sample_media(Modality.VIDEO, 0, 16_000)[1]
    with pytest.raises(InvalidRequestError, match="audio of videos"):
        qwen.chat([ChatMessage("user", (VideoPart(clip, use_audio=True),))])


def test_the_tokenizers_first_token_is_added_where_the_template_has_not(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("multimodal_lm", "llava"), folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    start = tiny.special_ids("llava")["<|endoftext|>"]
    pieces = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [start], "tokens": ["<|endoftext|>"]}}
    data["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}
    path.write_text(json.dumps(data), encoding="utf-8")
    processor = MultimodalProcessor.load(folder)
    messages = [ChatMessage("user", (picture(), TextPart("a")))]
    rendered, media, _ = processor.rendered(messages)
    whole = processor.items.call(rendered, media)[1]["input_ids"][0].tolist()
    assert whole[0] == start
    assert list(processor.chat(messages).token_ids) == whole
