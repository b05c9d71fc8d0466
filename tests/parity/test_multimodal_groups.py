"""Multimodal LMs that do not run in a flattened batch: whole prompts, and generated tokens of sequences at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omnistage.config.schema import ARBudget
from omnistage.core.errors import StageError, UnsupportedModelError
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.engines.ar import own_state
from omnistage.engines.ar.memory import ar_needs
from omnistage.engines.ar.stage import ARStage
from omnistage.models.causal_lm import pooled_sequence
from omnistage.models.causal_lm.own_model import difference
from omnistage.models.multimodal_lm import grouped
from omnistage.models.multimodal_lm.component import load
from omnistage.models.multimodal_lm.grouped import GroupedMultimodalLM
from omnistage.models.multimodal_lm.own_cache import OwnCacheMultimodalLM
from omnistage.models.multimodal_lm.processor import MultimodalProcessor
from omnistage.models.multimodal_lm.verify import as_sent, make_chats, reference_answers
from omnistage.omni import Omni
from tests.parity.test_multimodal_own_cache import PROCESSES, SMALL_STEPS, answers, context_of, picture, tokens_of
from tests.small_multimodal import write

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
TYPES = {
    "paligemma": True,  # the whole prompt attends both ways
    "mllama": True,  # layers that attend to a picture, which a sequence keeps
    "t5gemma2": False,  # a decoder behind an encoder, which counts positions in its cache
}
"""Whether sequences of several lengths are one batch."""


@pytest.fixture(scope="module", params=TYPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param) / request.param)


@pytest.fixture(scope="module")
def processor(folder: Path) -> MultimodalProcessor:
    processor = MultimodalProcessor.load(folder)
    processor.use_whole_prompts()
    return processor


@pytest.fixture(scope="module")
def component(folder: Path) -> GroupedMultimodalLM:
    component = load(context_of(folder))
    assert isinstance(component, GroupedMultimodalLM)
    return component


def prompt(processor: MultimodalProcessor, number: int = 0) -> ARInput:
    return processor.chat([ChatMessage("user", (TextPart("what is"), picture(number), TextPart("here")))])


def names(chunks: Sequence[StageChunk]) -> set[str]:
    return {chunk.request_id for chunk in chunks if isinstance(chunk.payload, TokenChunk)}


def test_chats_at_once_in_processes_and_preempted_are_answered_as_by_transformers(
    folder: Path, processor: MultimodalProcessor
) -> None:
    chats = make_chats(processor, 6, seed=1)
    expected = reference_answers(folder, processor, chats, GREEDY.max_tokens)
    sent = [[as_sent(message) for message in chat] for chat in chats]
    longest = max(len(processor.chat(chat).token_ids) for chat in chats)
    few = f"thinker.budget.kv_blocks={(longest + GREEDY.max_tokens) // 8 + 4}"
    for overrides in ((*SMALL_STEPS, few), (*SMALL_STEPS, *PROCESSES)):
        with Omni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
            for _ in range(2):
                for output, answer in zip(answers(omni, sent), expected, strict=True):
                    assert output.token_ids == answer.token_ids
                    logprobs = [item.chosen.logprob for item in output.outputs[0].logprobs or []]
                    assert logprobs == pytest.approx(answer.logprobs, abs=2e-4)
            stats = omni.stats().stages["thinker"]
            assert stats.preemptions > 0 or few not in overrides
            assert (stats.extra["one_by_one"], stats.extra["in_groups"], stats.extra["prefix_hits"]) == (0.0, 1.0, 0.0)
            omni.orchestrator.check_idle()


def test_no_attention_is_prepared_for_each_length_of_keys(
    component: GroupedMultimodalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own attention, which the model calls, would prepare itself for each new token on some GPUs."""
    devices: list[torch.device] = []
    monkeypatch.setattr(own_state, "avoid_attention_plans", devices.append)
    ARStage("thinker", component, ARBudget(kv_blocks=200, block_size=8))
    assert devices == [component.device]


def test_tokens_of_several_sequences_are_one_forward(
    component: GroupedMultimodalLM, processor: MultimodalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    merged = pooled_sequence._merged

    def watched(sequences: Sequence[pooled_sequence.PooledSequence], *args: object) -> dict[str, object]:
        sizes.append(len(sequences))
        return merged(sequences, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(pooled_sequence, "_merged", watched)
    stage = ARStage("thinker", component, ARBudget(kv_blocks=200, block_size=8))
    for number in range(4):
        stage.submit(StageInput(RequestInfo(str(number)), GREEDY, prompt(processor, 2 * number)))
    assert names(stage.drain()) == {"0", "1", "2", "3"}
    assert max(sizes) == 4
    assert component.spec.padded_groups is TYPES[component.model.config.model_type]


def test_a_prompt_that_the_model_cannot_run_ends_alone(
    component: GroupedMultimodalLM, processor: MultimodalProcessor
) -> None:
    stage, payload = ARStage("thinker", component, ARBudget(kv_blocks=200, block_size=8)), prompt(processor)
    stage.submit(StageInput(RequestInfo("alone"), GREEDY, payload))
    alone = tokens_of(stage.drain(), "alone")
    broken = replace(payload.media[0], inputs={"pixel_values": torch.zeros(1, 3, 2, 2)})
    stage.submit(StageInput(RequestInfo("good"), GREEDY, payload))
    stage.submit(StageInput(RequestInfo("broken"), GREEDY, replace(payload, media=(broken,))))
    chunks = stage.drain()
    assert tokens_of(chunks, "good") == alone
    errors = {chunk.request_id: chunk.error for chunk in chunks if chunk.error is not None}
    assert list(errors) == ["broken"]
    assert isinstance(errors["broken"], StageError)
    stage.check_integrity()
    assert not stage.runner._states  # type: ignore[attr-defined]


def test_an_abort_at_any_time_leaves_nothing_behind_and_others_as_they_are(
    component: GroupedMultimodalLM, processor: MultimodalProcessor
) -> None:
    payloads = [prompt(processor, number) for number in range(2)]
    alone = []
    for payload in payloads:
        stage = ARStage("thinker", component, ARBudget(kv_blocks=200, block_size=8))
        stage.submit(StageInput(RequestInfo("0"), GREEDY, payload))
        alone.append(tokens_of(stage.drain(), "0"))
    for steps in range(5):  # before its last chunk, while others generate, while it generates
        stage = ARStage("thinker", component, ARBudget(kv_blocks=200, block_size=8, prefill_chunk=8))
        for name, payload in zip(("stays", "goes"), payloads, strict=True):
            stage.submit(StageInput(RequestInfo(name), GREEDY, payload))
        chunks = [chunk for _ in range(steps) for chunk in stage.step()]
        stage.abort("goes")
        chunks += stage.drain()
        assert tokens_of(chunks, "stays") == alone[0]
        stage.check_integrity()
        assert not stage.runner._states  # type: ignore[attr-defined]
        assert stage.scheduler.pool.free_blocks == stage.scheduler.pool.num_blocks


def test_a_seed_gives_the_same_tokens_whatever_runs_beside(
    component: GroupedMultimodalLM, processor: MultimodalProcessor
) -> None:
    payload = prompt(processor)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=6) for seed in (3, 4, 3)]
    alone = []
    for each in params:
        stage = ARStage("thinker", component, ARBudget(kv_blocks=200, block_size=8))
        stage.submit(StageInput(RequestInfo("0"), each, payload))
        alone.append(tokens_of(stage.drain(), "0"))
    stage = ARStage("thinker", component, ARBudget(kv_blocks=200, block_size=8))
    for number, each in enumerate(params):
        stage.submit(StageInput(RequestInfo(str(number)), each, payload))
    stage.submit(StageInput(RequestInfo("other"), GREEDY, prompt(processor, 2)))
    chunks = stage.drain()
    assert [tokens_of(chunks, str(number)) for number in range(3)] == alone
    assert alone[0] == alone[2] != alone[1]


def test_the_memory_plan_has_its_keys_and_what_a_sequence_keeps(component: GroupedMultimodalLM) -> None:
    assert not ARStage("thinker", component, ARBudget(block_size=8)).scheduler.pool.prefix_caching
    budget = ARBudget(block_size=8, max_running=4)
    needs = ar_needs(component, budget, cuda=False)
    held = ar_needs(component, replace_running(budget, 5), cuda=False).memory.caches - needs.memory.caches
    assert held == component.spec.held_bytes
    assert needs.max_running == 4


def test_it_is_planned_before_it_is_read(folder: Path, component: GroupedMultimodalLM) -> None:
    planned = load(context_of(folder, "meta"))
    needs = ar_needs(planned, ARBudget(block_size=8), cuda=False)
    assert needs.block_bytes > 0
    assert needs.memory.activations > 0
    # Of media alone: an encoder's decoder also keeps masks and the like. That PaliGemma runs in groups only data show.
    held = {"mllama": component.spec.held_bytes, "t5gemma2": pytest.approx(component.spec.held_bytes, rel=0.1)}
    assert planned.spec.held_bytes == held.get(component.model.config.model_type, 0)


def replace_running(budget: ARBudget, count: int) -> ARBudget:
    return budget.model_copy(update={"max_running": count})


def test_it_says_that_it_is_slower_and_why(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(context_of(folder))
    assert "slower than in a flattened batch" in caplog.text
    assert "one sequence at a time" not in caplog.text


def test_a_batch_that_answers_otherwise_is_not_served_in_groups(
    component: GroupedMultimodalLM, processor: MultimodalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = grouped.advance
    monkeypatch.setattr(grouped, "advance", lambda *args, **options: plain(*args, **options) * 1.01)
    with pytest.raises(UnsupportedModelError, match="other logits in a batch of sequences"):
        component._check(component._samples(processor))


def test_in_a_narrow_dtype_too_a_small_fault_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding would hide it: models are compared in float32, whatever their own dtype is."""
    context = replace(context_of(folder), dtype=torch.float16)
    component = load(context)
    assert isinstance(component, GroupedMultimodalLM)
    assert (component.dtype, component.spec.padded_groups) == (torch.float16, TYPES[component.model.config.model_type])
    assert {p.dtype for p in component.model.parameters()} == {torch.float16}
    plain = grouped.advance
    monkeypatch.setattr(grouped, "advance", lambda *args, **options: plain(*args, **options) * 1.01)
    assert isinstance(load(context), OwnCacheMultimodalLM)
    assert not isinstance(load(context), GroupedMultimodalLM)


def test_forbidden_tokens_do_not_hide_a_difference() -> None:
    lowest = torch.finfo(torch.float32).min
    expected = torch.tensor([1.0, -2.0, lowest])
    assert difference(expected, expected) == 0.0
    assert difference(torch.tensor([1.0, -1.0, lowest]), expected) == pytest.approx(0.5)
    assert difference(torch.tensor([1.0, -2.0, 0.0]), expected) == float("inf")
    assert difference(torch.tensor([float("nan"), -2.0, lowest]), torch.tensor([float("nan"), -2.0, lowest])) == float(
        "inf"
    )
