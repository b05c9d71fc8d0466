"""Models by their own forward over a cache in the engine's pool: groups of sequences, cut, preempted, shared, exact."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from omnistage.bench.fidelity import whole_logits
from omnistage.config.schema import ARBudget
from omnistage.core.errors import InvalidRequestError, UnsupportedModelError
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.engines.ar.group import Group
from omnistage.engines.ar.memory import ar_needs
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm.own_forward import OwnForwardLM

SHARED = tuple(range(40, 60))
PROMPTS = [(3, 4, 5, 6), (*SHARED, 7, 8), (9,), (*SHARED, 11, 12, 13), tuple(range(20, 37))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
TIGHT = ARBudget(kv_blocks=10, block_size=8, max_batch_tokens=24, prefill_chunk=8)
CPU = torch.device("cpu")


def make_model(kind: str, **changes: object) -> transformers.PreTrainedModel:
    shape = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, kind)(**{**shape, "pad_token_id": 0, "initializer_range": 0.3, **changes})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def gptj() -> transformers.PreTrainedModel:
    return make_model("GPTJConfig", num_attention_heads=4, rotary_dim=4, n_positions=512)


def bloom() -> transformers.PreTrainedModel:
    """Its attention adds a bias for how far a key is."""
    return make_model("BloomConfig", n_head=4)


def bart() -> transformers.PreTrainedModel:
    """Its positions are the length of its cache."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "init_std": 0.3}
    return make_model("BartConfig", max_position_embeddings=256, **sizes)


def reference(model: transformers.PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY.max_tokens)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def run(stage: ARStage, prompts: Sequence[tuple[int, ...]], params: SamplingParams = GREEDY) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        stage.submit(StageInput(RequestInfo(str(number)), params, ARInput(prompt)))
    return tokens_of(stage.drain(), len(prompts))


def tokens_of(chunks: Sequence[StageChunk], count: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(count)]
    for chunk in chunks:
        assert chunk.error is None
        if isinstance(chunk.payload, TokenChunk):
            answers[int(chunk.request_id)].extend(chunk.payload.token_ids)
    return answers


def test_it_answers_as_before_after_its_logits_were_compared() -> None:
    """Its attention is its own: there is nothing to exchange for the comparison."""
    component = OwnForwardLM(bart(), None)
    before = component.decoder.config._attn_implementation
    assert whole_logits(component, PROMPTS[0]).shape == (len(PROMPTS[0]), component.spec.vocab_size)
    assert component.decoder.config._attn_implementation == before


@pytest.mark.parametrize(("make", "padded"), [(gptj, True), (bloom, True), (bart, False)])
def test_requests_at_once_get_the_answers_of_generate(make: object, padded: bool) -> None:
    model = make()  # type: ignore[operator]
    expected = [reference(model, prompt) for prompt in PROMPTS]
    component = OwnForwardLM(model)
    assert component.spec.padded_groups is padded
    stage = ARStage("thinker", component, TIGHT)
    assert run(stage, PROMPTS) == expected
    assert len({tuple(tokens) for tokens in expected}) > 3, "answers this alike would hide a difference"
    assert stage.stats().preemptions > 0
    roomy = ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8))
    for _ in range(2):
        assert run(roomy, PROMPTS) == expected
    stats = roomy.stats()
    assert stats.extra["prefix_hits"] > 0
    assert (stats.extra["one_by_one"], stats.extra["in_groups"]) == (0.0, 1.0)
    roomy.check_integrity()


def test_generated_tokens_of_all_sequences_are_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    component = OwnForwardLM(gptj())
    groups: list[Group] = []
    plain = component.forward_group

    def counted(token_ids: torch.Tensor, group: Group) -> torch.Tensor:
        groups.append(group)
        return plain(token_ids, group)

    monkeypatch.setattr(component, "forward_group", counted)
    run(ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8)), PROMPTS[:4])
    assert [len(group.lengths) for group in groups] == [1] * 4 + [4] * 9


def test_padding_stands_first_and_is_masked() -> None:
    group = Group.of(1, (3, 1), (np.array([5, 6, 7]), np.array([9])), CPU)
    assert group.slots.tolist() == [[5, 6, 7], [9, 9, 9]]
    assert group.mask().tolist() == [[1, 1, 1], [0, 0, 1]]
    assert group.positions().tolist() == [[2], [0]]
    assert group.new_slots().tolist() == [7, 9]


def test_a_seed_gives_the_same_answer_in_any_company() -> None:
    component = OwnForwardLM(gptj())
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=5)
    budget = ARBudget(kv_blocks=64, block_size=8)
    alone = run(ARStage("thinker", component, budget), [PROMPTS[1]], params)[0]
    assert run(ARStage("thinker", component, budget), [*PROMPTS[2:], PROMPTS[1]], params)[-1] == alone


def test_a_cache_that_drops_what_the_mask_shows_is_refused() -> None:
    sizes = {"num_attention_heads": 4, "head_dim": 8, "ffn_dim": 32, "num_codebooks": 2, "max_position_embeddings": 64}
    model = make_model("MoshiConfig", sliding_window=8, **sizes)
    with pytest.raises(UnsupportedModelError, match="keeps 8 tokens in its cache"):
        OwnForwardLM(model)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("RwkvConfig", {"attention_hidden_size": 32}),
        ("RemBertConfig", {"num_attention_heads": 4, "intermediate_size": 32, "is_decoder": False}),
        ("LlamaConfig", {"intermediate_size": 32, "num_attention_heads": 4}),
    ],
)
def test_what_gives_other_logits_is_refused(
    kind: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(kind, **changes)
    if kind == "LlamaConfig":  # whose cache in the pool forgets
        monkeypatch.setattr(Group, "new_slots", lambda self: torch.zeros_like(self.slots[:, -self.count :]).view(-1))
    with pytest.raises(UnsupportedModelError):
        OwnForwardLM(model)


def test_it_is_said_that_and_why_it_is_slower(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        OwnForwardLM(gptj(), reason="attention in its own code")
    assert "slower than in a flattened batch: attention in its own code" in caplog.text


def test_prompt_embeddings_are_refused_before_anything_runs() -> None:
    stage = ARStage("thinker", OwnForwardLM(gptj()), ARBudget(kv_blocks=64, block_size=8))
    with pytest.raises(InvalidRequestError, match="token ids, not embeddings"):
        stage.submit(StageInput(RequestInfo("0"), GREEDY, ARInput((0, 0), embeds=torch.zeros(2, 32))))


def test_the_memory_plan_counts_scores_over_a_whole_sequence() -> None:
    planned = OwnForwardLM(gptj().to("meta"))
    few = ar_needs(planned, ARBudget(block_size=8, max_batch_tokens=64), cuda=False)
    many = ar_needs(planned, ARBudget(block_size=8, max_batch_tokens=256), cuda=False)
    assert many.memory.activations > 3 * few.memory.activations > 0
    assert few.block_bytes == 8 * 2 * 2 * 32 * 4
    assert few.max_length == 512
