"""Quantised weights: which layers are chosen, what they compute, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from omnistage import Omni
from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.quantize import QuantizeConfig
from omnistage.core.errors import ConfigError, UnsupportedModelError
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.engines.ar.merged import MergedLinear
from omnistage.engines.quantisation.rules import layers_to_quantise
from omnistage.engines.quantisation.transform import Quantiser
from omnistage.models.causal_lm.tiny import write
from omnistage.models.qwen_image import FAMILY as QWEN_IMAGE
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import plan_memory
from omnistage.quantisation.packed import PackedInt8Linear, has_packed_int8, int8_rows, pack_linear
from omnistage.quantisation.schemes import Int8Dynamic

needs_packed = pytest.mark.skipif(not has_packed_int8(), reason="this torch has no int8 kernels")
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write(path)
    return path


def _packed(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain, packed = nn.Linear(96, 40, bias=bias), nn.Linear(96, 40, bias=bias)
    packed.load_state_dict(plain.state_dict())
    pack_linear(packed)
    return plain, packed


@needs_packed
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_layer_is_the_product_of_rounded_rows(bias: bool) -> None:
    plain, packed = _packed(bias)
    x = torch.randn(7, 96) * torch.logspace(-3, 3, 7)[:, None]
    weight = plain.weight.double()
    w_scale = weight.abs().amax(1) / 127
    x_scale = x.double().abs().amax(1, keepdim=True) / 127
    product = (x.double() / x_scale).round() @ (weight / w_scale[:, None]).round().T
    expected = product * x_scale * w_scale + (plain.bias.double() if bias else 0)
    got = packed(x)
    assert isinstance(packed, PackedInt8Linear)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert (got - plain(x)).norm() < 0.03 * plain(x).norm()
    assert not torch.allclose(got, plain(x), rtol=1e-5), "nothing was rounded"


@needs_packed
@torch.inference_mode()
def test_a_row_of_a_packed_layer_does_not_depend_on_the_others() -> None:
    _, packed = _packed()
    rows = torch.randn(33, 96)
    large = rows.clone()
    large[5:] *= 1000
    together = packed(large[None])[0]
    for count in (1, 2, 5):
        assert torch.equal(packed(rows[:count]), together[:count])
    assert packed(rows[:0]).shape == (0, 40)
    assert torch.equal(packed(rows[0]), together[0])  # without the batch's dimension


def test_weights_that_were_quantised_before_come_out_the_same() -> None:
    values, scale = int8_rows(torch.randn(64, 48).bfloat16())
    again, same = int8_rows((values * scale[:, None]).bfloat16())
    assert torch.equal(values, again)
    assert torch.equal(scale, same)


def _decoder() -> nn.Module:
    block = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "gate": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    tower = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4)})])})
    return nn.ModuleDict({"layers": nn.ModuleList([block]), "visual": tower, "lm_head": nn.Linear(4, 9)})


def _names(network: nn.Module, *, dit: bool = False, kept: tuple[str, ...] = (), **settings: object) -> list[str]:
    config = QuantizeConfig.model_validate({"scheme": "int8", **settings})
    return sorted(layers_to_quantise(network, config, dit=dit, full_precision=kept))


def test_heads_routers_and_media_encoders_stay_unless_they_are_named() -> None:
    assert _names(_decoder()) == ["layers.0.q_proj"]
    assert _names(_decoder(), include=["^lm_head$"]) == ["layers.0.q_proj", "lm_head"]
    assert _names(_decoder(), exclude=["q_proj"]) == []


def test_dits_keep_their_modulation_their_first_and_last_block_and_what_the_family_names() -> None:
    def block() -> nn.Module:
        names = ("to_q", "img_mod", "norm1", "img_mlp", "txt_mlp")
        return nn.ModuleDict({name: nn.ModuleList([nn.Linear(4, 4)]) for name in names})

    dit = nn.ModuleDict({"x_embedder": nn.Linear(4, 4), "blocks": nn.ModuleList([block() for _ in range(3)])})
    assert _names(dit, dit=True) == ["blocks.1.img_mlp.0", "blocks.1.to_q.0", "blocks.1.txt_mlp.0"]
    assert _names(dit, dit=True, kept=QWEN_IMAGE.full_precision) == ["blocks.1.to_q.0", "blocks.1.txt_mlp.0"]


def test_experts_in_one_tensor_are_refused_by_name_unless_they_are_excluded() -> None:
    model = _decoder()
    model["layers"][0]["experts"] = nn.ParameterDict({"gate_up_proj": nn.Parameter(torch.zeros(2, 4, 4))})  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.experts\.gate_up_proj"):
        _names(model)
    assert _names(model, exclude=["experts"]) == ["layers.0.q_proj"]


@pytest.mark.parametrize(("scheme", "advice"), [("float8", "CUDA"), ("int4", "CUDA")])
def test_a_scheme_of_gpus_is_refused_on_the_cpu_before_loading(folder: Path, scheme: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        Omni(str(folder), device="cpu", quantize=scheme, progress=False)


def test_int8_dynamic_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="for the CPU"):
        Int8Dynamic(128).check(torch.device("cuda"), torch.bfloat16, "thinker.quantize")


def test_a_scheme_that_touches_nothing_is_an_error(folder: Path) -> None:
    overrides = ("thinker.quantize.scheme=int8", "thinker.quantize.exclude=[layers]")
    with pytest.raises(ConfigError, match="would quantise nothing"):
        Omni(str(folder), device="cpu", overrides=overrides, progress=False)


@pytest.mark.parametrize("bad", ["thinker.quantize=int3", "thinker.quantize={scheme: int8, exclude: ['(']}"])
def test_bad_settings_are_refused(folder: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match="quantize"):
        resolve(OmniEngineArgs(model=str(folder), overrides=(bad,)), registry=REGISTRY)


def _tokens(omni: Omni, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    outputs = omni.generate([OmniTokensPrompt(ids) for ids in prompts], GREEDY, progress=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@needs_packed
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
def test_a_quantised_model_gives_the_same_tokens_alone_and_in_a_batch(folder: Path, scheme: str) -> None:
    pytest.importorskip("torchao")
    prompts = [tuple(range(3, 3 + length)) for length in (4, 9, 17, 6, 12)]
    with Omni(str(folder), device="cpu", quantize=scheme, progress=False) as omni:
        component = omni.orchestrator.stages["thinker"].component  # type: ignore[attr-defined]
        merged = [m for m in component.model.modules() if isinstance(m, MergedLinear)]
        assert bool(merged) == (scheme == "int8_dynamic")
        alone = [_tokens(omni, [prompt])[0] for prompt in prompts]
        assert _tokens(omni, prompts) == alone


def test_the_memory_plan_knows_the_quantised_size(folder: Path) -> None:
    def weights(**values: object) -> int:
        resolved = resolve(OmniEngineArgs.parse({"model": str(folder), "device": "cpu", **values}), registry=REGISTRY)
        return plan_memory(resolved, anywhere=True).stages["thinker"].memory.weights

    plain = ["thinker.budget.pack_weights=false"]
    with Omni(str(folder), device="cpu", overrides=plain, progress=False) as omni:
        model = omni.orchestrator.stages["thinker"].component.model  # type: ignore[attr-defined]
    chosen = layers_to_quantise(model, QuantizeConfig(scheme="int8"), dit=False)
    saved = sum(layer.weight.numel() * 3 - 4 * layer.out_features for layer in chosen.values())
    assert saved > 0
    assert weights() - weights(quantize="int8") == saved


def test_layers_change_in_place_so_that_tied_and_shared_references_stay() -> None:
    network = _decoder()
    layer = network["layers"][0]["q_proj"]  # type: ignore[index]
    Quantiser(QuantizeConfig(scheme="int8_dynamic"), diffusion=False, merge=False).apply(network, CPU)
    assert network["layers"][0]["q_proj"] is layer  # type: ignore[index]
    assert type(layer) is PackedInt8Linear
