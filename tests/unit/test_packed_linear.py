"""Packed weights of linear layers: the same numbers, and products that do not depend on the batch."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from omnistage.config import OmniEngineArgs, resolve
from omnistage.core.params import SamplingParams
from omnistage.engines.ar import packed_linear
from omnistage.engines.ar.cpu_kernels import WeightFirstLinear, apply_cpu_kernels
from omnistage.engines.ar.merged import MergedLinear
from omnistage.engines.ar.packed_linear import (
    BlockedLinear,
    HalfLinear,
    PackedLinear,
    half_scale,
    has_packed_float,
    pack_layer,
    pack_layers,
)
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.quantisation.transform import full_weights, is_quantised, network_bytes, quantised_layers
from omnistage.hf import transformers
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.causal_lm.tiny import write
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline.build import build_parts, plan_memory

pytestmark = pytest.mark.skipif(not has_packed_float(), reason="packed float weights need x86")


def made_of(
    dtype: torch.dtype, inputs: int = 577, outputs: int = 70, *, bias: bool = False, seed: int = 0
) -> nn.Linear:
    """A float32 layer whose weights have the precision of `dtype`, from large to tiny."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    sizes = torch.rand(outputs, inputs, generator=generator) * -3
    weight = torch.randn(outputs, inputs, generator=generator) * 10.0**sizes
    layer.weight.copy_(weight.to(dtype))
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float16, HalfLinear), (torch.bfloat16, HalfLinear), (torch.float32, BlockedLinear)]
)
@torch.inference_mode()
def test_the_product_is_that_of_the_plain_layer_for_any_number_of_rows(
    dtype: torch.dtype, kind: type[PackedLinear], bias: bool
) -> None:
    layer = made_of(dtype, bias=bias)
    weight = layer.weight.clone()
    pack_layer(layer)
    assert type(layer) is kind
    assert "weight" not in layer._parameters
    assert torch.equal(layer.weight, weight)
    for rows in (0, 1, 2, 4, 7, 14, 16, 33, 130):
        x = torch.randn(1, rows, 577, generator=torch.Generator().manual_seed(rows))
        expected = nn.functional.linear(
            x.double(), weight.double(), None if layer.bias is None else layer.bias.double()
        )
        out = layer(x)
        assert out.shape == (1, rows, 70)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


@torch.inference_mode()
def test_inputs_of_any_layout_will_do() -> None:
    for dtype in (torch.float16, torch.float32):
        layer = made_of(dtype, 5, 4)
        weight = layer.weight.clone()
        pack_layer(layer)
        x = torch.randn(6, 5, 3).permute(2, 0, 1)
        for each in (x, x[0, 0]):
            torch.testing.assert_close(layer(each), nn.functional.linear(each, weight))


@torch.inference_mode()
def test_a_row_in_half_precision_weights_is_the_same_in_every_batch() -> None:
    layer = made_of(torch.float16, 640, 96)
    pack_layer(layer)
    x = torch.randn(60, 640, generator=torch.Generator().manual_seed(0))
    together = layer(x)
    for start, end in ((0, 1), (1, 3), (3, 7), (7, 21), (21, 37), (0, 59)):
        assert torch.equal(layer(x[start:end]), together[start:end])


def test_numbers_of_bfloat16_fit_after_a_power_of_two_and_those_of_float32_do_not() -> None:
    half, brain, full = (made_of(kind).weight for kind in (torch.float16, torch.bfloat16, torch.float32))
    assert half_scale(half) == 1.0
    scale = half_scale(brain)
    assert scale is not None
    assert scale != 1.0
    assert float(brain.abs().amax()) / scale < 2**15
    assert half_scale(full) is None
    assert half_scale(torch.tensor([[1e30, 1e-30]])) is None
    assert half_scale(torch.tensor([[1e30, 2e29]]).bfloat16().float()) is not None
    for bad in (float("nan"), float("inf")):
        assert half_scale(torch.tensor([[bad, 0.1]])) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, made_of(torch.float16, 16, 16))
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.elsewhere = nn.Linear(4, 4, device="meta")


@torch.inference_mode()
def test_plain_layers_of_the_cpu_are_packed_once_and_merged_where_asked() -> None:
    x = torch.randn(3, 16)
    for merge in (False, True):
        block, head = Block(), made_of(torch.float16, 16, 40)
        apply_cpu_kernels(block)
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        expected = [getattr(block, name)(x) for name in names]
        weights = {name: getattr(block, name).weight.clone() for name in names}
        assert pack_layers([block], [head], merge=merge) == (3 if merge else 5)
        assert pack_layers([block], [head], merge=merge) == 0
        kinds = Counter(type(getattr(block, name)) for name in names)
        assert kinds == ({MergedLinear: 3, HalfLinear: 1} if merge else {HalfLinear: 4})
        assert type(head) is HalfLinear
        assert type(block.narrow) is nn.Linear
        for name, value in zip(names, expected, strict=True):
            torch.testing.assert_close(getattr(block, name)(x), value)
        seen = {name: weight for name, weight in full_weights(block) if name in weights}
        assert seen.keys() == weights.keys()
        assert all(torch.equal(seen[name], weight) for name, weight in weights.items())


def test_packed_layers_are_in_full_precision_and_their_bytes_are_counted() -> None:
    for dtype, size in ((torch.float16, 2 * 512 * 1024), (torch.float32, 4 * 512 * 513)):
        layer = made_of(dtype, 513, 512)
        pack_layer(layer)
        assert not is_quantised(layer)
        assert quantised_layers(nn.ModuleList([layer])) == {}
        assert network_bytes(layer) == size


def test_the_plain_weights_are_let_go() -> None:
    layer = made_of(torch.float16)
    weight = weakref.ref(layer.weight)
    pack_layer(layer)
    gc.collect()
    assert weight() is None


def test_nothing_is_packed_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "has_packed_float", lambda: False)
    layer = made_of(torch.float16)
    assert pack_layers([layer], [], merge=True) == 0
    assert type(layer) is nn.Linear


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "lm"
    write(folder, seed=0)
    return folder


def kinds_of(folder: Path, *overrides: str) -> set[type]:
    args = OmniEngineArgs(model=str(folder), device="cpu", dtype="float32", overrides=overrides)
    stage = build_parts(args, progress=False).stages["thinker"]
    assert isinstance(stage, ARStage)
    assert isinstance(stage.component, CausalLM)
    kinds = {type(module) for module in stage.component.model.modules() if isinstance(module, nn.Linear)}
    stage.close()
    return kinds


def test_a_language_model_is_served_with_packed_weights_unless_they_are_off(folder: Path) -> None:
    assert kinds_of(folder) == {BlockedLinear}
    assert kinds_of(folder, "thinker.budget.pack_weights=false") == {WeightFirstLinear}


def test_answers_are_those_of_plain_weights_alone_and_in_company(folder: Path) -> None:
    prompts = [f"question {'again ' * number}" for number in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for packed in ("true", "false"):
        overrides = (f"thinker.budget.pack_weights={packed}",)
        with Omni(str(folder), device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
            together = omni.generate(prompts, params, progress=False)
            alone = [omni.generate(prompt, params, progress=False)[0] for prompt in prompts]
            answers += [[one.outputs[0].token_ids for one in outputs] for outputs in (together, alone)]
    assert all(one == answers[0] for one in answers)


@pytest.mark.parametrize("tied", [True, False])
def test_the_memory_plan_counts_a_packed_head_beside_the_embedding_that_it_is(tmp_path: Path, tied: bool) -> None:
    write(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    model.config.tie_word_embeddings = tied
    (tmp_path / "model.safetensors.index.json").unlink()
    type(model)(model.config).half().save_pretrained(tmp_path)

    def planned_and_loaded(pack: str) -> tuple[int, int]:
        overrides = (f"thinker.budget.pack_weights={pack}",)
        given = {"model": str(tmp_path), "device": "cpu", "overrides": overrides}
        planned = plan_memory(resolve(OmniEngineArgs.parse(given), registry=REGISTRY), anywhere=True)
        with Omni(str(tmp_path), device="cpu", overrides=overrides, progress=False) as omni:
            loaded = network_bytes(omni.orchestrator.stages["thinker"].component.model)  # type: ignore[attr-defined]
        return planned.stages["thinker"].memory.weights, loaded

    plan, plain = planned_and_loaded("false")
    assert plan == plain
    packed_plan, _packed = planned_and_loaded("true")
    head = model.config.vocab_size * model.config.hidden_size
    assert packed_plan - plan == (max(4 * head, packed_linear._half_bytes(model.lm_head.weight)) if tied else 0)


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
@torch.inference_mode()
def test_a_weight_that_is_no_number_does_not_become_one(broken: float) -> None:
    layer = made_of(torch.float16, 8, 4)
    layer.weight[0, 0] = broken
    pack_layer(layer)
    out = layer(torch.ones(1, 3, 8))
    assert not out[..., 0].isfinite().any()
    assert out[..., 1:].isfinite().all()
