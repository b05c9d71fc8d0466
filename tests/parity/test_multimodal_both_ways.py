"""Pictures whose tokens attend to all of the picture, in flattened batches; and items that depend on their prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omnistage.config.schema import ARBudget
from omnistage.core.errors import CapacityError, LimitExceededError, UnsupportedModelError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, MediaSpan, Modality, RequestInfo, StageInput
from omnistage.engines.ar.stage import ARStage
from omnistage.models.multimodal_lm import probe
from omnistage.models.multimodal_lm.capture import DependentItemsError
from omnistage.models.multimodal_lm.component import MultimodalLM, load
from omnistage.models.multimodal_lm.processor import MultimodalProcessor
from omnistage.models.multimodal_lm.verify import as_sent, make_chats, reference_answers
from omnistage.omni import Omni
from tests.parity.test_multimodal_own_cache import answers, context_of, picture
from tests.small_multimodal import write

LAYERS = ["sliding_attention", "full_attention"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def processor(gemma: Path) -> MultimodalProcessor:
    return MultimodalProcessor.load(gemma)


@pytest.fixture(scope="module")
def component(gemma: Path) -> MultimodalLM:
    component = load(context_of(gemma))
    assert isinstance(component, MultimodalLM)
    return component


def prompt(processor: MultimodalProcessor) -> ARInput:
    return processor.chat([ChatMessage("user", (TextPart("a"), picture(), TextPart("b"), picture(1)))])


@pytest.mark.parametrize("room", ["few blocks", "many blocks"])
@pytest.mark.parametrize("model_type", ["gemma3", "idefics2"])
def test_chats_in_one_batch_are_answered_as_by_transformers_one_by_one(
    model_type: str, room: str, tmp_path: Path
) -> None:
    """In chunks shorter than a picture, twice: with preemption, or the second time from the prefix cache."""
    folder = write(model_type, tmp_path / "model")
    processor = MultimodalProcessor.load(folder)
    if model_type == "idefics2":
        processor.use_whole_prompts(rows=True)
    chats = make_chats(processor, 6, seed=1)
    expected = reference_answers(folder, processor, chats, GREEDY.max_tokens)
    longest = max(len(processor.chat(chat).token_ids) for chat in chats)
    blocks = 400 if room == "many blocks" else (longest + GREEDY.max_tokens) // 8 + 4
    budget = (
        "thinker.budget.prefill_chunk=3",
        "thinker.budget.max_batch_tokens=16",
        "thinker.budget.block_size=8",
        f"thinker.budget.kv_blocks={blocks}",
    )
    sent = [[as_sent(message) for message in chat] for chat in chats]
    with Omni(folder, device="cpu", dtype="float32", overrides=budget, progress=False) as omni:
        for _ in range(2):
            for output, answer in zip(answers(omni, sent), expected, strict=True):
                assert output.token_ids == answer.token_ids
                logprobs = [item.chosen.logprob for item in output.outputs[0].logprobs or []]
                assert logprobs == pytest.approx(answer.logprobs, abs=2e-4)
        stats = omni.stats().stages["thinker"]
        assert stats.extra["prefix_hits"] > 0 if room == "many blocks" else stats.preemptions > 0
        assert (stats.extra["one_by_one"], stats.extra["in_groups"]) == (0.0, 0.0)
        omni.orchestrator.check_idle()


def test_a_window_shorter_than_a_picture_limits_what_its_tokens_see_as_in_transformers(tmp_path: Path) -> None:
    folder = write("gemma3", tmp_path / "model", text_config={"sliding_window": 3, "layer_types": LAYERS})
    processor = MultimodalProcessor.load(folder)
    chats = make_chats(processor, 3, seed=1)
    expected = reference_answers(folder, processor, chats, GREEDY.max_tokens)
    with Omni(folder, device="cpu", dtype="float32", progress=False) as omni:
        for output, answer in zip(answers(omni, [[as_sent(m) for m in chat] for chat in chats]), expected, strict=True):
            assert output.token_ids == answer.token_ids
            logprobs = [item.chosen.logprob for item in output.outputs[0].logprobs or []]
            assert logprobs == pytest.approx(answer.logprobs, abs=2e-4)
        extra = omni.stats().stages["thinker"].extra
        assert (extra["one_by_one"], extra["in_groups"]) == (0.0, 0.0)


def test_a_run_longer_than_a_window_is_refused_where_the_window_was_longer_at_load(
    component: MultimodalLM, processor: MultimodalProcessor
) -> None:
    assert component.both_ways_limit == 16
    [token] = component.both_ways_ids
    for count in (16, 17):
        span = MediaSpan(Modality.IMAGE, b"", torch.arange(count), {})
        payload = ARInput((token,) * count + (5,), media=(span,))
        if count == 16:
            assert component.prepare(RequestInfo("0"), payload).both_ways == ((0, 16),)
        else:
            with pytest.raises(LimitExceededError, match="17 tokens of media in a row"):
                component.prepare(RequestInfo("0"), payload)


def test_the_reason_is_that_of_a_kind_that_the_model_takes(
    component: MultimodalLM, processor: MultimodalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without one of the towers that its processor is for: what is said of the others tells more."""
    reasons = {
        Modality.AUDIO: UnsupportedModelError(f"audio: {probe.STOCK_FAILURE}"),
        Modality.IMAGE: UnsupportedModelError("image: other logits"),
        Modality.VIDEO: DependentItemsError("video: other rows"),
    }

    def refuse(_component: object, _processor: object, kind: Modality) -> None:
        raise reasons[kind]

    monkeypatch.setattr(probe, "_check_kind", refuse)
    for kinds, match in ((("image", "audio"), "other logits"), (("image", "audio", "video"), "other rows")):
        monkeypatch.setattr(processor, "input_modalities", frozenset({Modality.TEXT, *map(Modality, kinds)}))
        with pytest.raises(UnsupportedModelError, match=match):
            probe.check_media(component, processor)


def test_in_a_narrow_dtype_too_a_small_fault_is_found(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding would hide it: models are compared in float32, whatever their own dtype is."""
    context = replace(context_of(gemma), dtype=torch.float16)
    component = load(context)
    assert isinstance(component, MultimodalLM)
    assert component.dtype == torch.float16
    plain = probe._paged_logits
    monkeypatch.setattr(probe, "_paged_logits", lambda *args: plain(*args) * 1.01)
    assert not isinstance(load(context), MultimodalLM)


def test_the_runs_of_a_pictures_tokens_are_its_ranges(component: MultimodalLM, processor: MultimodalProcessor) -> None:
    payload = component.prepare(RequestInfo("0"), prompt(processor))
    [token] = component.both_ways_ids
    inside = [place for place, each in enumerate(payload.token_ids) if each == token]
    assert [end - start for start, end in payload.both_ways] == [4, 4]
    assert [place for start, end in payload.both_ways for place in range(start, end)] == inside
    text = component.prepare(RequestInfo("0"), ARInput((1, 2, token, token)))
    assert not text.both_ways  # written by nobody but a sampler: not those of a picture


def test_a_picture_that_no_step_holds_is_refused_with_what_to_do(
    component: MultimodalLM, processor: MultimodalProcessor
) -> None:
    stage = ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8, max_batch_tokens=3))
    with pytest.raises(CapacityError, match=r"4 tokens of one media item .* raise thinker.budget.max_batch_tokens"):
        stage.submit(StageInput(RequestInfo("0"), GREEDY, prompt(processor)))
    stage.check_integrity()


def test_it_is_not_divided_among_ranks(component: MultimodalLM) -> None:
    with pytest.raises(UnsupportedModelError, match=r"attend both ways.*tensor_parallel: 1"):
        component.shard(None, component.device)  # type: ignore[arg-type]
