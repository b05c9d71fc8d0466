"""Recurrent and hybrid models on the paged engine: states in slots, batched, cut, preempted, exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from omnistage.config.schema import ARBudget
from omnistage.core.errors import UnsupportedModelError
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.engines.ar.attention import BatchLayout
from omnistage.engines.ar.memory import ar_needs
from omnistage.engines.ar.recurrent import StateStep, states_of
from omnistage.engines.ar.recurrent_runner import RecurrentRunner
from omnistage.engines.ar.scheduler import ScheduledSequence, SchedulerOutput
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.causal_lm.probe import in_float32

PROMPTS = [tuple(range(3, 3 + length)) for length in (4, 19, 9, 30, 1, 17)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
TIGHT = ARBudget(kv_blocks=12, block_size=8, max_batch_tokens=24, prefill_chunk=8)


def make_model(kind: str, **changes: object) -> transformers.PreTrainedModel:
    shape = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, kind)(**{**shape, "pad_token_id": 0, "initializer_range": 0.3, **changes})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def hybrid() -> transformers.PreTrainedModel:
    """Qwen3.5: gated delta rule and attention."""
    return make_model(
        "Qwen3_5TextConfig",
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    )


def mamba() -> transformers.PreTrainedModel:
    return make_model("MambaConfig", state_size=8, time_step_rank=4)


def nemotron() -> transformers.PreTrainedModel:
    """Its layers bound time steps in prompts alone."""
    model = make_model(
        "NemotronHConfig",
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        time_step_min=0.5,
    )
    return model


def reference(model: transformers.PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY.max_tokens)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def submit(stage: ARStage, prompts: Sequence[tuple[int, ...]], params: SamplingParams = GREEDY) -> None:
    for number, prompt in enumerate(prompts):
        stage.submit(StageInput(RequestInfo(str(number)), params, ARInput(prompt)))


def tokens_of(chunks: Sequence[StageChunk], count: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(count)]
    for chunk in chunks:
        assert chunk.error is None
        if isinstance(chunk.payload, TokenChunk):
            answers[int(chunk.request_id)].extend(chunk.payload.token_ids)
    return answers


@pytest.mark.parametrize("make", [hybrid, mamba, nemotron])
def test_requests_at_once_in_chunks_and_preempted_get_the_answers_of_generate(make: object) -> None:
    model = make()  # type: ignore[operator]
    expected = [reference(model, prompt) for prompt in PROMPTS]
    stage = ARStage("thinker", CausalLM(model), TIGHT)
    submit(stage, PROMPTS)
    assert tokens_of(stage.drain(), len(PROMPTS)) == expected
    assert len({tuple(tokens) for tokens in expected}) > 3, "answers this alike would hide a difference"
    stats = stage.stats()
    assert stats.preemptions > 0
    assert (stats.extra["one_by_one"], stats.extra["recurrent"]) == (0.0, 1.0)
    assert stats.extra["prefix_lookups"] == 0
    stage.check_integrity()


def test_layers_that_compute_single_tokens_otherwise_are_known_as_such() -> None:
    uneven = CausalLM(nemotron())
    assert uneven.spec.uneven_states
    stepwise = CausalLM(mamba())
    assert not stepwise.spec.uneven_states
    assert all(states_of(module).stepwise for module in stepwise.recurrent_modules)
    plain = CausalLM(hybrid())
    assert not plain.spec.uneven_states
    assert [states_of(module).stepwise for module in plain.recurrent_modules] == [False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_another_module_reads_are_float32_too_and_all_are_as_before_afterwards(dtype: torch.dtype) -> None:
    model = mamba().to(dtype)
    before = dict(model.named_parameters())
    layer = model.backbone.layers[0]
    with in_float32(model):
        assert layer.mixer.dt_proj.weight.dtype == torch.float32
        assert layer.norm.weight.dtype == torch.float32
        assert torch.equal(layer.norm.weight, before["backbone.layers.0.norm.weight"].float())
    assert all(weight is before[name] for name, weight in model.named_parameters())
    assert layer.mixer.dt_proj.weight is before["backbone.layers.0.mixer.dt_proj.weight"]
    assert {type(module._parameters) for module in model.modules()} == {dict}


def test_a_model_that_fails_in_its_own_dtype_alone_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.models.causal_lm.component.model_head", lambda _model, _decoder, head: head)
    with pytest.raises(UnsupportedModelError, match="RuntimeError in its forward"):
        CausalLM(mamba().half())  # hidden states are float32, which a head in float16 does not take


def test_states_that_lie_together_are_used_in_place_whatever_the_order_of_the_batch() -> None:
    layout = BatchLayout(np.array([1, 1, 1], dtype=np.int32), np.array([5, 9, 3], dtype=np.int32), [], [])
    together = StateStep.of(layout, (3, 1, 2), torch.device("cpu"))
    assert together.slots == slice(1, 4)
    assert together.rows is not None
    assert together.rows.tolist() == [1, 2, 0]
    apart = StateStep.of(layout, (0, 4, 2), torch.device("cpu"))
    assert isinstance(apart.slots, torch.Tensor)
    assert apart.slots.tolist() == [0, 2, 4]


def test_a_slot_is_given_back_at_the_end_and_by_an_abort() -> None:
    stage = ARStage("thinker", CausalLM(hybrid()), ARBudget(kv_blocks=64, block_size=8, max_running=2))
    submit(stage, PROMPTS[:4])
    chunks = stage.step()
    runner = stage.runner
    assert isinstance(runner, RecurrentRunner)
    assert len(runner._states) == 2
    stage.abort("1")
    assert len(runner._states) == 1
    answers = tokens_of([*chunks, *stage.drain()], 4)
    assert answers[3] == reference(hybrid(), PROMPTS[3])
    assert not runner._states
    assert sorted(runner._free) == [0, 1]


def test_a_token_that_has_to_run_again_does_not_change_the_state() -> None:
    stage = ARStage("thinker", CausalLM(hybrid()), ARBudget(kv_blocks=16, block_size=8))
    runner, prompt = stage.runner, PROMPTS[1]
    runner.add("a", ARInput(prompt), GREEDY, capacity=40, emit=False)
    runner.sampler.constrained["a"] = None  # type: ignore[assignment]
    with torch.inference_mode():
        runner._rows["a"].sync_blocks([0, 1, 2], 8)
        whole = runner._forward([ScheduledSequence("a", 0, len(prompt), True, [0, 1, 2])]).logits
        before = [tensor.clone() for tensor in states_of(stage.component.recurrent_modules[0]).tensors]
        # As after a mask that came late: the last token of the prompt is scheduled by itself.
        again = runner._forward([ScheduledSequence("a", len(prompt) - 1, 1, True, [0, 1, 2])]).logits
    assert whole is not None
    assert again is not None
    assert torch.equal(whole, again)
    after = states_of(stage.component.recurrent_modules[0]).tensors
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_preempted_sequence_begins_anew() -> None:
    stage = ARStage("thinker", CausalLM(hybrid()), ARBudget(kv_blocks=16, block_size=8))
    runner, prompt = stage.runner, PROMPTS[1]
    runner.add("a", ARInput(prompt), GREEDY, capacity=40, emit=False)
    first = SchedulerOutput((ScheduledSequence("a", 0, len(prompt), True, [0, 1, 2]),))
    expected = runner.read(runner.launch(first)).sampled["a"].token_id
    runner.launch(SchedulerOutput((), preempted=("a",)))
    assert isinstance(runner, RecurrentRunner)
    assert not runner._states
    with torch.inference_mode():
        runner._rows["a"].sync_blocks([3, 4, 5], 8)
        logits = runner._forward([ScheduledSequence("a", 0, len(prompt), True, [3, 4, 5])]).logits
    assert logits is not None
    assert int(logits[0].argmax()) == expected


def test_the_memory_plan_counts_the_states_of_all_slots() -> None:
    component = CausalLM(hybrid().to("meta"))
    # One layer: 4 heads of 8 x 8, and 4 places of 64 channels of its convolution.
    assert component.spec.state_bytes == (4 * 8 * 8 + 64 * 4) * 4
    needs = ar_needs(component, ARBudget(block_size=8, max_running=5), cuda=False)
    assert needs.memory.caches == 5 * component.spec.state_bytes
    assert len(component.spec.kv_shapes) == 1


def test_without_attention_blocks_only_count_tokens() -> None:
    component = CausalLM(mamba())
    assert component.spec.kv_shapes == ()
    assert ARStage("thinker", component, ARBudget(block_size=8)).stats().extra["blocks"] > 0


def test_a_state_that_goes_wrong_is_found_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnistage.engines.ar.recurrent import LayerStates

    plain = LayerStates.go_on

    def forgetful(self: LayerStates, forward: object, rows: torch.Tensor, slots: object) -> torch.Tensor:
        for tensor in self.tensors:
            tensor.zero_()
        return plain(self, forward, rows, slots)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerStates, "go_on", forgetful)
    with pytest.raises(UnsupportedModelError, match="other logits on the paged engine"):
        CausalLM(hybrid())
