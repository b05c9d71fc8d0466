"""Adapters give what `peft` gives, for each request of a mixed batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.family import LoadContext
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageInput, TokenChunk
from omnistage.engines.adapters.library import AdapterLibrary, AdapterLimits, AdapterSource
from omnistage.engines.ar import adapters as ar_adapters
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.registry import REGISTRY
from tests.parity.adapter_checkpoints import CONFIGS, with_adapters
from tests.parity.conftest import Checkpoints

PROMPTS = [tuple((37 * i + 11 * start) % 870 for i in range(9 + 7 * start)) for start in range(6)]
Wanted = str | Sequence[Mapping[str, object]] | None


@dataclass
class Base:
    folder: Path
    adapters: Path
    reference: Any


@pytest.fixture(scope="module")
def base(checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder, adapters = checkpoint_of("causal_lm"), tmp_path_factory.mktemp("adapters")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Base(folder, adapters, with_adapters(model, folder=adapters))


def component_of(folder: Path) -> ARComponent:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages["thinker"]
    context = LoadContext(resolved.model, "thinker", stage, torch.device("cpu"), torch.float32)
    component = REGISTRY.component(stage.component)(context)
    assert isinstance(component, ARComponent)
    return component


def library_of(folder: Path, names: Sequence[str], slots: int = 5, **limits: Any) -> AdapterLibrary:
    options = {"slots": slots, "rank": None, "memory": 1 << 24, "at_run_time": False, **limits}
    return AdapterLibrary("thinker", {name: AdapterSource(folder / name) for name in names}, AdapterLimits(**options))


def stage_of(base: Base, slots: int = 5, library: AdapterLibrary | None = None, **budget: Any) -> ARStage:
    options = {"kv_blocks": 64, "block_size": 8, "run_ahead": False, **budget}
    library = library or library_of(base.adapters, list(CONFIGS), slots)
    return ARStage("thinker", component_of(base.folder), ARBudget(**options), library)


def run(
    stage: ARStage, requests: Sequence[tuple[Sequence[int], Wanted]], **params: Any
) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log probabilities, of requests that run together."""
    options = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True, **params}
    found: dict[str, tuple[list[int], list[float]]] = {}
    for index, (prompt, wanted) in enumerate(requests):
        parsed = SamplingParams.parse(options if wanted is None else {**options, "lora": wanted})
        stage.check_params(parsed)
        stage.submit(StageInput(RequestInfo(f"r{index}"), parsed, ARInput(tuple(prompt))))
        found[f"r{index}"] = [], []
    while stage.has_work():
        for chunk in stage.step():
            assert chunk.error is None, chunk.error
            if isinstance(chunk.payload, TokenChunk):
                tokens, logprobs = found[chunk.request_id]
                tokens += chunk.payload.token_ids
                logprobs += [each.chosen.logprob for each in chunk.payload.logprobs]
        stage.check_integrity()
    return list(found.values())


@torch.inference_mode()
def check(base: Base, prompt: Sequence[int], wanted: Wanted, answer: tuple[list[int], list[float]]) -> None:
    """The tokens are the likeliest ones of PEFT's model, with its log probabilities."""
    tokens, logprobs = answer
    ids = torch.tensor([[*prompt, *tokens]])
    if wanted is None:
        with base.reference.disable_adapter():
            logits = base.reference(ids).logits
    else:
        base.reference.set_adapter(wanted if isinstance(wanted, str) else "mix")
        logits = base.reference(ids).logits
    expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert tokens == expected.argmax(-1).tolist()
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), chosen, atol=1e-5, rtol=1e-5)


EVERYTHING: list[Wanted] = [None, *CONFIGS]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "merged layers": {"merge_linears": True},
    "chunked prompts": {"prefill_chunk": 5, "max_batch_tokens": 16},
    "preemption": {"kv_blocks": 12, "block_size": 8},
    "run ahead": {"run_ahead": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_each_request_of_a_mixed_batch_gets_what_peft_gives_it(base: Base, way: str) -> None:
    stage = stage_of(base, **WAYS[way])
    requests = list(zip(PROMPTS, EVERYTHING, strict=True))
    answers = run(stage, requests)
    for (prompt, wanted), answer in zip(requests, answers, strict=True):
        check(base, prompt, wanted, answer)
    assert len({tuple(tokens) for tokens, _ in answers}) == len(answers)
    assert way != "preemption" or stage.stats().preemptions > 0


def test_layers_that_compute_with_the_adapters_rows_give_the_same(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does."""
    monkeypatch.setattr(ar_adapters, "folds", lambda device: True)
    monkeypatch.setattr("omnistage.models.decoder.apply_cpu_kernels", lambda model: None)
    stage = stage_of(base, merge_linears=True)
    requests = list(zip(PROMPTS, EVERYTHING, strict=True))
    folded = [type(module).__name__ for module in stage.component.decoder.modules()]
    assert folded.count("FoldedLinear") == 4 * stage.component.spec.num_layers
    for (prompt, wanted), answer in zip(requests, run(stage, requests), strict=True):
        check(base, prompt, wanted, answer)


def test_more_adapters_than_slots_wait_for_each_other(base: Base) -> None:
    stage = stage_of(base, slots=2)
    requests = [(prompt, wanted) for prompt, wanted in zip(PROMPTS, EVERYTHING, strict=True)] * 2
    for (prompt, wanted), answer in zip(requests, run(stage, requests), strict=True):
        check(base, prompt, wanted, answer)


def test_a_prefix_is_reused_by_the_same_content_and_never_by_another(base: Base) -> None:
    library = library_of(base.adapters, ["all", "feed"])
    library._configured["copy"] = AdapterSource(base.adapters / "all")
    stage, prompt = stage_of(base, library=library), PROMPTS[5]
    hits = []
    for wanted, known in (
        ("all", "all"),
        ("feed", "feed"),
        (None, None),
        ("copy", "all"),
        ("feed", "feed"),
        (None, None),
    ):
        before = stage.stats().extra["prefix_hits"]
        (answer,) = run(stage, [(prompt, wanted)])
        check(base, prompt, known, answer)
        hits.append(stage.stats().extra["prefix_hits"] > before)
    assert hits == [False, False, False, True, True, True]


def test_several_adapters_are_added_up_by_their_weights(base: Base) -> None:
    mix = [{"name": "attention", "weight": 0.7}, {"name": "feed", "weight": -0.5}]
    base.reference.add_weighted_adapter(["attention", "feed"], [0.7, -0.5], "mix", combination_type="cat")
    try:
        requests: list[tuple[Sequence[int], Wanted]] = [(PROMPTS[3], mix), (PROMPTS[2], "all"), (PROMPTS[1], None)]
        for (prompt, wanted), answer in zip(requests, run(stage_of(base), requests), strict=True):
            check(base, prompt, wanted, answer)
    finally:
        base.reference.delete_adapter("mix")


def test_the_same_seed_gives_the_same_tokens_in_any_company(base: Base) -> None:
    stage = stage_of(base)
    (alone,) = run(stage, [(PROMPTS[3], "all")], temperature=1.0, seed=5)
    together = run(stage, [(PROMPTS[3], "feed"), (PROMPTS[3], "all"), (PROMPTS[3], None)], temperature=1.0, seed=5)
    assert together[1][0] == alone[0]
