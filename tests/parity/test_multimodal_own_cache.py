"""Multimodal LMs that the engine's pool cannot hold: transformers' own forward and cache, behind the same stage."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import InternalError, InvalidRequestError, OmniError, StageError, UnsupportedModalityError
from omnistage.core.family import LoadContext
from omnistage.core.messages import ChatMessage, ImagePart, TextPart
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, Modality, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.engines.ar.memory import OWN_RUNNING, ar_needs
from omnistage.engines.ar.stage import ARStage
from omnistage.models.causal_lm.component import read_model
from omnistage.models.multimodal_lm.component import load
from omnistage.models.multimodal_lm.items import sample_media
from omnistage.models.multimodal_lm.own_cache import OwnCacheMultimodalLM
from omnistage.models.multimodal_lm.processor import MultimodalProcessor, auto_model
from omnistage.models.multimodal_lm.verify import as_sent, make_chats, reference_answers
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from tests.small_multimodal import write

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
SMALL_STEPS = (
    "thinker.budget.prefill_chunk=16",
    "thinker.budget.max_batch_tokens=48",
    "thinker.budget.block_size=8",
)
PROCESSES = ("deployment.placement.head.stages=[thinker]", "deployment.placement.head.hang_seconds=60")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a window longer than its prompts: each token takes memory."""
    return write("gemma3", tmp_path_factory.mktemp("gemma3"), text_config={"sliding_window": 64})


@pytest.fixture(scope="module")
def git(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GIT, whose cache has more tokens than its prompt."""
    return write("git", tmp_path_factory.mktemp("git"))


@pytest.fixture(scope="module")
def processor(gemma: Path) -> MultimodalProcessor:
    processor = MultimodalProcessor.load(gemma)
    processor.use_whole_prompts()
    return processor


def context_of(folder: Path, device: str = "cpu") -> LoadContext:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages["thinker"]
    return LoadContext(resolved.model, "thinker", stage, torch.device(device), torch.float32)


@pytest.fixture(scope="module")
def component(gemma: Path) -> OwnCacheMultimodalLM:
    context, processor = context_of(gemma), MultimodalProcessor.load(gemma)
    processor.use_whole_prompts()
    return OwnCacheMultimodalLM(*read_model(context, auto_model("gemma3")), processor)


def picture(number: int = 0) -> ImagePart:
    return ImagePart(sample_media(Modality.IMAGE, number, 16_000)[1])


def prompt(processor: MultimodalProcessor, number: int = 0) -> ARInput:
    return processor.chat([ChatMessage("user", (TextPart("what is"), picture(number), TextPart("here")))])


def tokens_of(chunks: Sequence[StageChunk], name: str) -> list[int]:
    payloads = [c.payload for c in chunks if c.request_id == name and isinstance(c.payload, TokenChunk)]
    return [token for payload in payloads for token in payload.token_ids]


def answers(omni: Omni, chats: Sequence[Any]) -> list[Any]:
    outputs = omni.chat(chats, GREEDY, progress=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def test_chats_at_once_in_processes_and_preempted_are_answered_as_by_transformers(git: Path) -> None:
    processor = MultimodalProcessor.load(git)
    processor.use_whole_prompts()
    chats = make_chats(processor, 4, seed=1)
    expected = reference_answers(git, processor, chats, GREEDY.max_tokens)
    assert len({tuple(answer.token_ids) for answer in expected}) == len(chats)
    sent = [[as_sent(message) for message in chat] for chat in chats]
    longest = max(len(processor.chat(chat).token_ids) for chat in chats)
    few = f"thinker.budget.kv_blocks={(longest + GREEDY.max_tokens) // 8 + 1}"
    for overrides in ((*SMALL_STEPS, few), PROCESSES):
        with Omni(git, device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
            for output, answer in zip(answers(omni, sent), expected, strict=True):
                assert output.token_ids == answer.token_ids
                logprobs = [item.chosen.logprob for item in output.outputs[0].logprobs or []]
                assert logprobs == pytest.approx(answer.logprobs, abs=2e-4)
            stats = omni.stats().stages["thinker"]
            assert stats.preemptions > 0 or overrides is PROCESSES
            assert stats.extra["one_by_one"] == 1.0
            omni.orchestrator.check_idle()


def test_a_prompt_that_the_model_cannot_run_ends_alone(
    component: OwnCacheMultimodalLM, processor: MultimodalProcessor
) -> None:
    stage, payload = ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8)), prompt(processor)
    stage.submit(StageInput(RequestInfo("alone"), GREEDY, payload))
    alone = tokens_of(stage.drain(), "alone")
    span = replace(payload.media[0], inputs={"pixel_values": torch.zeros(1, 3, 2, 2)})
    broken = ARInput(payload.token_ids, media=(span,))
    stage.submit(StageInput(RequestInfo("good"), GREEDY, payload))
    stage.submit(StageInput(RequestInfo("broken"), GREEDY, broken))
    chunks = stage.drain()
    assert tokens_of(chunks, "good") == alone
    errors = {chunk.request_id: chunk.error for chunk in chunks if chunk.error is not None}
    assert list(errors) == ["broken"]
    assert isinstance(errors["broken"], StageError)
    stage.check_integrity()


def test_an_abort_gives_the_state_back(component: OwnCacheMultimodalLM, processor: MultimodalProcessor) -> None:
    stage = ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8))
    for number in range(2):
        stage.submit(StageInput(RequestInfo(str(number)), GREEDY, prompt(processor, number)))
    stage.step()
    assert len(stage.runner._states) == 2  # type: ignore[attr-defined]
    stage.abort("0")
    assert len(stage.runner._states) == 1  # type: ignore[attr-defined]
    assert len(tokens_of(stage.drain(), "1")) > 0
    assert not stage.runner._states  # type: ignore[attr-defined]


def test_it_says_that_it_is_slow_and_why(git: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(context_of(git))
    assert "one sequence at a time" in caplog.text
    assert "attention in its own code" in caplog.text
    assert "caches [25] tokens for a prompt of 8" in caplog.text


def test_sequences_are_few_and_the_memory_plan_has_their_states(component: OwnCacheMultimodalLM) -> None:
    stage = ARStage("thinker", component, ARBudget(block_size=8))
    assert stage.stats().capacity == OWN_RUNNING
    assert not stage.scheduler.pool.prefix_caching
    assert component.spec.own_state is not None
    assert component.spec.own_state.token_bytes > 0
    planned = OwnCacheMultimodalLM(component.model.__class__(component.model.config).to("meta"), None, None)
    needs = ar_needs(planned, ARBudget(block_size=8), cuda=False)
    assert needs.max_running == OWN_RUNNING
    assert needs.block_bytes > 0


def test_what_a_prompt_has_to_be(component: OwnCacheMultimodalLM, processor: MultimodalProcessor) -> None:
    assert processor.input_modalities == {Modality.TEXT, Modality.IMAGE}
    text = processor.chat([ChatMessage("user", (TextPart("hello"),))])
    assert not text.media
    component.check(RequestInfo("0"), text)
    payload = prompt(processor)
    assert len(payload.media) == 1
    assert payload.media[0].inputs["token_type_ids"].shape == (1, len(payload.token_ids))
    assert prompt(processor, 2).media[0].key != payload.media[0].key
    apart = ARInput(payload.token_ids, media=(replace(payload.media[0], positions=torch.arange(2)),))
    with pytest.raises(InternalError, match="whole prompts"):
        component.check(RequestInfo("0"), apart)
    with pytest.raises(InvalidRequestError, match="special token beside media"):
        processor.chat([ChatMessage("user", (picture(), TextPart("<|im_end|>")))])


def test_kinds_and_texts_that_a_model_does_not_answer_are_refused(
    component: OwnCacheMultimodalLM, processor: MultimodalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component, "unsupported", {Modality.IMAGE: "no pictures"})
    with pytest.raises(UnsupportedModalityError, match="no pictures"):
        component.check(RequestInfo("0"), prompt(processor))
    monkeypatch.setattr(component, "takes_text_alone", False)
    with pytest.raises(InvalidRequestError, match="text without media"):
        component.check(RequestInfo("0"), ARInput((1, 2, 3)))


def test_a_model_whose_answers_do_not_depend_on_its_pictures_is_refused(
    git: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = OwnCacheMultimodalLM._on_device

    def blind(self: OwnCacheMultimodalLM, inputs: Any) -> dict[str, torch.Tensor]:
        return {name: value * (name != "pixel_values") for name, value in plain(self, inputs).items()}

    monkeypatch.setattr(OwnCacheMultimodalLM, "_on_device", blind)
    with pytest.raises(OmniError, match="same answer whatever the image is"):
        load(context_of(git))


def test_a_model_that_takes_sound_with_every_token_is_refused(tmp_path: Path) -> None:
    write("kyutai_speech_to_text", tmp_path)
    with pytest.raises(OmniError, match="takes sound while it answers"):
        load(context_of(tmp_path))


def test_end_tokens_of_the_checkpoint_are_known_after_another_way_was_tried(git: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(git, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}', encoding="utf-8")
    assert load(context_of(folder)).eos_token_ids == (2, 7)


def test_a_model_without_a_chat_template_gets_the_texts_and_one_picture(git: Path) -> None:
    with Omni(git, device="cpu", dtype="float32", progress=False) as omni:
        one, two = ([as_sent(ChatMessage("user", (TextPart("a b"), picture(n))))] for n in (0, 2))
        first, second = answers(omni, [one, two])
        assert first.token_ids != second.token_ids
        both = [as_sent(ChatMessage("user", (picture(), picture(1), TextPart("a"))))]
        with pytest.raises(InvalidRequestError, match="one image in a chat"):
            omni.chat([both], GREEDY, progress=False)
