"""Decode steps as TorchScript: the plain path's numbers in every batch, and the plain path where that cannot be."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from omnistage.config.quantize import QuantizeConfig
from omnistage.config.schema import ARBudget
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageInput, TokenChunk
from omnistage.engines.ar import torchscript
from omnistage.engines.ar.attention import PagedContext
from omnistage.engines.ar.cpu_kernels import MIN_ROWS
from omnistage.engines.ar.packed_linear import BlockedLinear, HalfLinear, PackedLinear, has_packed_float
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.quantisation.transform import Quantiser
from omnistage.models.causal_lm.component import CausalLM
from omnistage.quantisation.packed import PackedInt8Linear, has_packed_int8
from tests.parity.test_causal_lm import ARCHITECTURES, make_model, prompts

DENSE = [
    "llama, grouped heads",
    "llama, scaled positions",
    "qwen2, biases",
    "qwen3, normed heads",
    "mistral, sliding window",
    "gemma3, window in some layers",
    "gpt2, learned positions",
    "granite, scaled logits",
    "cohere, scaled logits",
]
Answers = list[tuple[list[int], list[float]]]


def component_of(name: str) -> CausalLM:
    kind, changes = ARCHITECTURES[name]
    return CausalLM(make_model(kind, **changes))


def stage_of(component: CausalLM, **budget: object) -> ARStage:
    given = {"kv_blocks": 96, "block_size": 8, "max_batch_tokens": 64, "prefill_chunk": 16, **budget}
    return ARStage("thinker", component, ARBudget.model_validate(given))


def answers(stage: ARStage, count: int) -> Answers:
    """Of so many requests at once: prompts of different lengths, whose last tokens come at different steps."""
    found: Answers = [([], []) for _ in range(count)]
    for number, prompt in enumerate(prompts(count, 160)):
        params = SamplingParams(temperature=0.0, max_tokens=9 + number % 5, logprobs=0, ignore_eos=True)
        stage.submit(StageInput(RequestInfo(str(number)), params, ARInput(prompt)))
    for chunk in stage.drain():
        assert chunk.error is None
        if isinstance(chunk.payload, TokenChunk):
            tokens, logprobs = found[int(chunk.request_id)]
            tokens.extend(chunk.payload.token_ids)
            logprobs.extend(item.chosen.logprob for item in chunk.payload.logprobs)
    stage.check_integrity()
    return found


def count_runs(stage: ARStage, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the sequences of each step that runs as TorchScript."""
    scripts = stage.runner.scripts
    assert scripts is not None
    rows: list[int] = []
    run = scripts.run

    def counted(embeds: torch.Tensor, *rest: object) -> torch.Tensor | None:
        hidden = run(embeds, *rest)  # type: ignore[arg-type]
        if hidden is not None:
            rows.append(len(embeds))
        return hidden

    monkeypatch.setattr(scripts, "run", counted)
    return rows


def assert_same(one: Answers, other: Answers) -> None:
    assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
    for (_, ours), (_, plain) in zip(one, other, strict=True):
        assert ours == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("name", DENSE)
def test_answers_are_those_of_the_plain_path_in_every_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    component = component_of(name)
    for count in (1, 3, 7):
        expected = answers(stage_of(component, torchscript=False), count)
        stage = stage_of(component)
        rows = count_runs(stage, monkeypatch)
        assert_same(answers(stage, count), expected)
        assert len(set(rows)) >= min(count, 2), "steps with other numbers of sequences went elsewhere"


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_is_left_of_a_stage_that_is_gone(packed: bool) -> None:
    component = component_of("llama, grouped heads")
    final_norm = next(iter(component.decoders)).norm.weight
    memory = np.ones(len(final_norm), dtype=np.float32)
    final_norm.data = torch.from_numpy(memory)  # the array dies with the last tensor of its memory
    held = weakref.ref(memory)
    del memory, final_norm
    stage = stage_of(component, pack_weights=packed)
    answers(stage, 3)
    assert stage.runner.scripts is not None
    assert stage.runner.scripts.count == 2
    assert held() is not None
    del component, stage
    gc.collect()
    assert held() is None


def test_a_sequence_whose_blocks_lie_apart_takes_the_program_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    component = component_of("mistral, sliding window")
    expected = answers(stage_of(component, torchscript=False), 6)
    stage = stage_of(component)
    rows = count_runs(stage, monkeypatch)
    for _ in range(3):  # later requests get blocks in the order in which those before gave them back
        assert_same(answers(stage, 6), expected)
    assert 1 in rows


def test_no_step_computes_the_width_of_a_head_again() -> None:
    scripts = stage_of(component_of("llama, grouped heads")).runner.scripts
    assert scripts is not None
    for several in (False, True):
        graph = str(scripts._programs[several].graph)  # type: ignore[attr-defined]
        assert "aten::slice" in graph, "the rotary embedding cuts a head in halves"
        assert "aten::floor_divide" not in graph


@pytest.mark.skipif(not has_packed_float(), reason="packed float weights need x86")
@pytest.mark.parametrize(
    ("kind", "dtype"), [(HalfLinear, torch.float16), (BlockedLinear, torch.float32)], ids=["half", "blocked"]
)
def test_packed_weights_are_parts_of_the_program(
    kind: type[PackedLinear], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> CausalLM:
        return CausalLM(make_model("LlamaConfig").to(dtype).float())

    expected = answers(stage_of(build(), torchscript=False, pack_weights=False), 5)
    stage = stage_of(build())
    rows = count_runs(stage, monkeypatch)
    assert any(isinstance(module, kind) for module in stage.component.decoder.modules())
    got = answers(stage, 5)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert max(rows) == 5


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="layers take the weight first with MKL alone")
def test_more_rows_of_weights_that_are_not_packed_take_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    component = component_of("llama, grouped heads")
    expected = answers(stage_of(component, pack_weights=False, torchscript=False), MIN_ROWS + 2)
    stage = stage_of(component, pack_weights=False)
    rows = count_runs(stage, monkeypatch)
    assert_same(answers(stage, MIN_ROWS + 2), expected)
    assert 0 < max(rows) < MIN_ROWS


@pytest.mark.skipif(not has_packed_int8(), reason="packed int8 weights need x86")
def test_quantised_layers_run_as_torchscript_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    component = component_of("qwen2, biases")
    Quantiser(QuantizeConfig(scheme="int8_dynamic"), diffusion=False).apply_to(component, torch.device("cpu"))
    assert any(isinstance(module, PackedInt8Linear) for module in component.decoder.modules())
    for count in (1, 6):
        expected = answers(stage_of(component, torchscript=False), count)
        stage = stage_of(component)
        rows = count_runs(stage, monkeypatch)
        assert_same(answers(stage, count), expected)
        assert max(rows) == count


def test_experts_are_chosen_anew_for_every_row_so_they_are_not_traced(caplog: pytest.LogCaptureFixture) -> None:
    component = component_of("mixtral, experts")
    expected = answers(stage_of(component, torchscript=False), 4)
    with caplog.at_level(logging.INFO, logger=torchscript.__name__):
        stage = stage_of(component)
    assert stage.runner.scripts is not None
    assert stage.runner.scripts.count == 0
    assert "do not run as TorchScript: its forward reads numbers" in caplog.text
    assert_same(answers(stage, 4), expected)


@pytest.mark.parametrize(
    "largest",
    [lambda x: float(x.max()), lambda x: max(x[0].tolist()), lambda x: x.numpy().max(), lambda x: bool(x.max() > 1e9)],
    ids=["a number", "a list", "an array", "a condition"],
)
def test_a_forward_whose_python_looks_at_numbers_is_not_traced(
    largest: Callable[[torch.Tensor], float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    component = component_of("llama, grouped heads")
    plain = CausalLM.forward

    def forward(self: CausalLM, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        hidden = plain(self, embeds, positions, paged)
        return hidden * 2 if largest(hidden) > 1e9 else hidden

    monkeypatch.setattr(CausalLM, "forward", forward)
    with caplog.at_level(logging.INFO, logger=torchscript.__name__):
        stage = stage_of(component)
    assert stage.runner.scripts is not None
    assert stage.runner.scripts.count == 0
    assert "its forward reads numbers" in caplog.text


@pytest.mark.parametrize("wrong", ["one", "several"])
def test_a_program_with_other_numbers_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    component = component_of("llama, grouped heads")
    plain_one, plain_bias = torchscript._attend_one, torchscript._Several.bias
    if wrong == "one":
        monkeypatch.setattr(torchscript, "_attend_one", lambda *args: plain_one(*args) * 1.001)
    else:
        monkeypatch.setattr(torchscript._Several, "bias", lambda self, window: plain_bias(self, window) * 0)
    with caplog.at_level(logging.INFO, logger=torchscript.__name__):
        stage = stage_of(component)
    assert stage.runner.scripts is not None
    assert stage.runner.scripts.count == 0
    assert "it computes other numbers as TorchScript" in caplog.text


def test_what_cannot_be_a_program_has_none() -> None:
    component = component_of("llama, grouped heads")
    assert stage_of(component).runner.scripts is not None
    for budget in ({"torchscript": False}, {"kv_dtype": "float8"}):
        assert stage_of(component, **budget).runner.scripts is None
    component.pure_forward = False
    assert stage_of(component).runner.scripts is None

    class WithState(CausalLM):
        def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
            self.last = embeds  # a program would not
            return super().forward(embeds, positions, paged)

    assert stage_of(WithState(make_model("LlamaConfig"))).runner.scripts is None
    for name in ("gemma2, soft caps", "gpt-oss, sinks"):
        assert stage_of(component_of(name)).runner.scripts is None


def test_a_program_that_fails_ends_no_request_and_does_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    component = component_of("llama, grouped heads")
    expected = answers(stage_of(component, torchscript=False), 4)
    stage = stage_of(component)
    scripts = stage.runner.scripts
    assert scripts is not None
    failures: list[int] = []

    def fail(embeds: torch.Tensor, *rest: object) -> torch.Tensor:
        for cache in scripts._caches:
            cache[rest[1]] = torch.nan  # half written
        failures.append(len(embeds))
        raise RuntimeError("a text that a user sent")

    scripts._programs[True] = fail
    with caplog.at_level(logging.WARNING, logger=torchscript.__name__):
        assert_same(answers(stage, 4), expected)
    assert len(failures) == 1
    assert scripts.count == 0
    assert "run as TorchScript no more: one failed with RuntimeError" in caplog.text
    assert "user" not in caplog.text


def test_caches_and_modules_are_those_of_the_runner_after_tracing() -> None:
    component = component_of("llama, grouped heads")
    stage = stage_of(component)
    scripts = stage.runner.scripts
    assert scripts is not None
    bound = [cache for module in component.attention_modules for cache in module.kv_cache]  # type: ignore[union-attr]
    assert [cache.data_ptr() for cache in bound] == [cache.data_ptr() for cache in scripts._caches]
    assert all(not cache.any() for cache in bound), "tracing wrote into the pool"
