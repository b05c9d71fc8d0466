"""Quantised experts: what they compute, in every company, and that what is written is what was measured."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from omnistage import Omni
from omnistage.cli import app
from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.quantize import QuantizeConfig
from omnistage.core.errors import ConfigError, UnsupportedModelError
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.engines.ar.experts import compute_quantised, set_experts
from omnistage.engines.quantisation.experts import (
    Expanded,
    QuantisedExperts,
    expansion_bytes,
    expert_weights,
    is_experts,
    one_by_one,
    quantise_experts,
)
from omnistage.engines.quantisation.rules import layers_to_quantise
from omnistage.hf import transformers
from omnistage.models.causal_lm.tiny import write
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import plan_memory
from omnistage.quantisation.numbers import pack, unpack
from omnistage.quantisation.packed import has_packed_int8
from omnistage.quantisation.schemes import MINIMUM, SCALE, VALUES

needs_packed = pytest.mark.skipif(not has_packed_int8(), reason="this torch has no int8 kernels")
CPU = torch.device("cpu")
WEIGHT_ONLY = ("int8", "float8", "int4")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
KINDS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3, small experts": (
        "Qwen3MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt-oss, transposed with biases": ("GptOssConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
}


def make(kind: str) -> nn.Module:
    name, changes = KINDS[kind]
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModel.from_config(getattr(transformers, name)(**{**SHAPE, **changes})).eval()
    for parameter in model.parameters():
        if not parameter.any():  # biases begin as zeros
            nn.init.normal_(parameter, std=0.2)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_experts(module)]


def routing(module: nn.Module, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 64, generator=generator)
    index = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
    return hidden, index, torch.rand(rows, 2, generator=generator)


def rounded(model: nn.Module, config: QuantizeConfig) -> nn.Module:
    """The same model with full weights that are what the quantised ones stand for."""
    model = copy.deepcopy(model)
    for layer in layers_of(model):
        for name, weight in expert_weights(layer):
            turned = weight.transpose(1, 2).contiguous() if layer.is_transposed else weight
            parts = pack(turned.detach(), config.method)
            again = unpack(parts[VALUES], parts[SCALE], parts.get(MINIMUM))
            setattr(layer, name, nn.Parameter(again.transpose(1, 2) if layer.is_transposed else again))
    return model


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@torch.inference_mode()
def test_a_model_with_quantised_experts_is_the_one_with_their_numbers_as_weights(kind: str, scheme: str) -> None:
    model = make(kind)
    config = QuantizeConfig(scheme=scheme, group_size=32)  # type: ignore[arg-type]
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = model(input_ids=ids, use_cache=False).last_hidden_state
    expected = rounded(model, config)(input_ids=ids, use_cache=False).last_hidden_state
    for layer in layers_of(model):
        quantise_experts(layer, config.method, CPU)
    compute_quantised(model)
    ours = model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(ours, plain, atol=1e-4), "nothing was rounded"
    with pytest.raises(ConfigError, match="leave it out"):
        set_experts(model, "grouped_mm", CPU, torch.float32)


@pytest.mark.parametrize("kind", list(KINDS))
@torch.inference_mode()
def test_what_other_devices_run_is_the_loop_over_experts_and_compiles_whole(kind: str) -> None:
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    layer = layers_of(make(kind))[0]
    quantise_experts(layer, QuantizeConfig(scheme="int8").method, CPU)

    def gathered(*given: torch.Tensor) -> torch.Tensor:
        return functions["batched_mm"](layer, *given)  # type: ignore[no-any-return]

    def expanded(*given: torch.Tensor) -> torch.Tensor:
        return functions["grouped_mm"](Expanded(layer), *given)  # type: ignore[no-any-return]

    for rows, function in ((2, gathered), (50, expanded)):
        given = routing(layer, rows)
        expected = one_by_one(layer, *given)
        compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(function(*given), expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(compiled(*given), expected, atol=2e-5, rtol=2e-5)


@needs_packed
@pytest.mark.parametrize("kind", list(KINDS))
@torch.inference_mode()
def test_packed_experts_are_near_the_full_ones_and_no_row_depends_on_the_others(kind: str) -> None:
    layer = layers_of(make(kind))[0]
    hidden, index, weights = routing(layer, 40)
    expected = one_by_one(layer, hidden, index, weights)
    quantise_experts(layer, QuantizeConfig(scheme="int8_dynamic").method, CPU)
    ours = one_by_one(layer, hidden, index, weights)
    assert 1e-4 < float((ours - expected).norm() / expected.norm()) < 0.03
    for count in (1, 3, 17):
        assert torch.equal(one_by_one(layer, hidden[:count], index[:count], weights[:count]), ours[:count])


def test_experts_that_nobody_else_can_compute_are_refused_by_name_unless_they_are_excluded() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 8, 8))

    block = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "input_linear": Parallel(), "conv": nn.Conv1d(8, 8, 3)})
    network = nn.ModuleDict({"layers": nn.ModuleList([block])})
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.input_linear\.weight"):
        layers_to_quantise(network, QuantizeConfig(scheme="int8"), dit=False)
    others = QuantizeConfig(scheme="int8", exclude=("input_linear",))
    assert list(layers_to_quantise(network, others, dit=False)) == ["layers.0.q_proj"]


# ----------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module", params=["published", "fused"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Experts in their files one by one as models are published, or in one tensor a layer as GPT-OSS has them."""
    path = tmp_path_factory.mktemp("experts") / "original"
    write(path)
    kind = "qwen3, small experts" if request.param == "published" else "gpt-oss, transposed with biases"
    name, changes = KINDS[kind]
    for file in path.glob("*.safetensors*"):
        file.unlink()
    torch.manual_seed(0)
    ids = json.loads((path / "config.json").read_text())
    tokens = {key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")}
    config = getattr(transformers, name)(**{**SHAPE, **changes, **tokens, "max_position_embeddings": 512})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return path


def tokens_of(omni: Omni, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    outputs = omni.generate([OmniTokensPrompt(ids) for ids in prompts], GREEDY, progress=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@needs_packed
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
def test_a_model_with_quantised_experts_gives_the_same_tokens_alone_and_in_a_batch(folder: Path, scheme: str) -> None:
    pytest.importorskip("torchao")
    prompts = [tuple(range(3, 3 + length)) for length in (4, 9, 17, 6, 12)]
    with Omni(str(folder), device="cpu", quantize=scheme, progress=False) as omni:
        model = omni.orchestrator.stages["thinker"].component.model  # type: ignore[attr-defined]
        assert sum(isinstance(module, QuantisedExperts) for module in model.modules()) == 4
        alone = [tokens_of(omni, [prompt])[0] for prompt in prompts]
        assert tokens_of(omni, prompts) == alone


@needs_packed
def test_the_plan_knows_the_size_of_quantised_experts(folder: Path) -> None:
    def weights(**values: object) -> int:
        resolved = resolve(OmniEngineArgs.parse({"model": str(folder), "device": "cpu", **values}), registry=REGISTRY)
        return plan_memory(resolved, anywhere=True).stages["thinker"].memory.weights

    plain = ["thinker.budget.pack_weights=false"]
    with Omni(str(folder), device="cpu", overrides=plain, progress=False) as omni:
        model = omni.orchestrator.stages["thinker"].component.model  # type: ignore[attr-defined]
        chosen = layers_to_quantise(model, QuantizeConfig(scheme="int8"), dit=False)
        assert sum(is_experts(layer) for layer in chosen.values()) == 2
        saved = 0
        for layer in chosen.values():
            for _, weight in expert_weights(layer) if is_experts(layer) else [("", layer.weight)]:
                inputs = weight.shape[1] if is_experts(layer) and layer.is_transposed else weight.shape[-1]
                saved += weight.numel() * 3 - 4 * (weight.numel() // inputs)  # type: ignore[operator]
    assert weights() - weights(quantize="int8_dynamic") == saved
    assert weights() - weights(quantize="int8") == saved


def test_what_a_large_step_takes_for_experts_in_full_precision_is_counted() -> None:
    model = make("mixtral").half()
    assert expansion_bytes(model) == 0
    whole = sum(weight.numel() for _, weight in expert_weights(layers_of(model)[0]))
    for layer in layers_of(model):
        quantise_experts(layer, QuantizeConfig(scheme="int8").method, CPU)
    assert expansion_bytes(model) == whole * 2 * 2


@needs_packed
def test_quantised_experts_are_written_and_read_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    arguments = ["quantize", str(folder), "--scheme", "int8_dynamic", "--out", str(out), "--device", "cpu"]
    loose = ["--gate", "token_agreement=0.1", "--gate", "kl=5", "--gate", "perplexity_ratio=5"]
    result = CliRunner().invoke(app, [*arguments, *loose, "--tokens", "4"])
    assert result.exit_code == 0, result.output
    stored = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    experts = [name for name in stored if ".experts." in name and name.endswith(VALUES)]
    assert experts
    assert all(stored[name].dtype == torch.int8 for name in experts)
    left = [name for name in stored if "proj" in name and ".experts." in name and not name.endswith((VALUES, SCALE))]
    assert all("bias" in name for name in left), left
    report = json.loads((out / "quantisation_report.json").read_text())
    assert report["stored_in_full"] == {"thinker": []}
    assert sum(name.endswith("experts") for name in report["layers"]["thinker"]) == 2
    prompts = [tuple(range(5, 25))]
    answers = []
    for model, scheme in ((folder, "int8_dynamic"), (out, None)):
        with Omni(str(model), device="cpu", quantize=scheme, progress=False) as omni:
            answers.append(tokens_of(omni, prompts))
    assert answers[0] == answers[1]
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 0


@needs_packed
def test_experts_are_among_the_layers_that_a_gate_names(folder: Path, tmp_path: Path) -> None:
    arguments = ["quantize", str(folder), "--scheme", "int8_dynamic", "--out", str(tmp_path / "small")]
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--tokens", "4", "--gate", "kl=1e-12"])
    assert result.exit_code == 1, result.output
    assert "mlp.experts:" in result.output
