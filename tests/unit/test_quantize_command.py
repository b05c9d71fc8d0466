"""`omnistage quantize`: what it measures, what it refuses, and that what it writes is what it measured."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from omnistage import Omni
from omnistage.bench import quality
from omnistage.cli import app
from omnistage.config.quantize import QuantizeConfig
from omnistage.core.errors import CheckpointError, OmniError
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.engines.ar.cpu_kernels import apply_cpu_kernels
from omnistage.engines.quantisation.transform import Quantiser
from omnistage.hf import transformers
from omnistage.models.causal_lm.tiny import write
from omnistage.models.flux.tiny import write as write_flux
from omnistage.models.quantised_files import Mark, write_quantised
from omnistage.quantisation import packed
from omnistage.quantisation.numbers import pack, unpack
from omnistage.quantisation.schemes import MINIMUM, SCALE, VALUES

needs_packed = pytest.mark.skipif(not packed.has_packed_int8(), reason="this torch has no int8 kernels")
LOOSE = ("--gate", "token_agreement=0.5", "--gate", "kl=0.2", "--gate", "perplexity_ratio=1.2")
PLAIN = ["thinker.pack_weights=false", "thinker.merge_linears=false"]
BAD = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "original"
    write(path)
    return path


def _quantize(folder: Path, out: Path, tmp_path: Path, *more: str) -> tuple[int, str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is a lake?\nName a colour.\n", encoding="utf-8")
    arguments = ["quantize", str(folder), "--scheme", "int8_dynamic", "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--tokens", "6", "--calibrate", str(prompts), *more])
    return result.exit_code, result.output


@needs_packed
def test_what_was_written_gives_the_tokens_that_were_measured_and_verify_sees_changes(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "small"
    code, output = _quantize(folder, out, tmp_path, *LOOSE)
    assert code == 0, output
    report = json.loads((out / "quantisation_report.json").read_text())
    assert set(report["quantities"]) == {"token_agreement", "kl", "perplexity_ratio"}
    assert report["before_and_after"]["weight_bytes"][1] < report["before_and_after"]["weight_bytes"][0]
    prompt, greedy = OmniTokensPrompt(tuple(range(5, 25))), SamplingParams(temperature=0.0, max_tokens=16)
    tokens = []
    for model, scheme in ((folder, "int8_dynamic"), (out, None)):
        with Omni(str(model), device="cpu", quantize=scheme, progress=False) as omni:
            tokens.append(omni.generate(prompt, greedy, progress=False)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 0
    shard = next(path for path in sorted(out.glob("*.safetensors")) if any("norm" in name for name in load_file(path)))
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    changed = CliRunner().invoke(app, ["verify", str(out)])
    assert changed.exit_code == 2
    assert "changed after the report" in changed.output


@needs_packed
def test_a_scheme_made_worse_on_purpose_is_refused_and_nothing_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = packed.int8_rows

    def coarse(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = real(weight)
        return (values // 50) * 50, scale

    monkeypatch.setattr(packed, "int8_rows", coarse)
    out = tmp_path / "bad"
    code, output = _quantize(folder, out, tmp_path, *LOOSE)
    assert code == 1, output
    assert "nothing was written" in " ".join(output.split())
    assert "of its own output" in output
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


@needs_packed
def test_the_search_leaves_out_the_layers_that_were_made_worse_and_no_more_than_it_tries(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Omni(str(folder), device="cpu", overrides=PLAIN, progress=False) as omni:
        network = omni.orchestrator.stages["thinker"].component.model  # type: ignore[attr-defined]
        bad = network.get_submodule(BAD).weight.clone()
    real = packed.int8_rows

    def coarse(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = real(weight)
        return (torch.zeros_like(values) if torch.equal(weight, bad) else values), scale

    monkeypatch.setattr(packed, "int8_rows", coarse)
    tight = ("--gate", "token_agreement=0.5", "--gate", "kl=0.1", "--gate", "perplexity_ratio=1.5")
    code, output = _quantize(folder, tmp_path / "bad", tmp_path, *tight)
    assert code == 1, output
    assert f"{BAD}: 100.00%" in output, output
    code, output = _quantize(folder, tmp_path / "found", tmp_path, *tight, "--search")
    assert code == 0, output
    recipe = json.loads((tmp_path / "found" / "quantisation.json").read_text())
    layers = json.loads((tmp_path / "found" / "quantisation_report.json").read_text())["layers"]["thinker"]
    assert BAD not in layers
    assert BAD not in json.dumps(recipe).replace("[.]", ".")
    assert len(layers) == 20, "all others are quantised"


@torch.inference_mode()
def test_the_figures_of_a_text_report_are_recomputed_with_transformers_alone(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    out = tmp_path / "small"
    code, output = _quantize(folder, out, tmp_path, *LOOSE, "--scheme", "int8")
    assert code == 0, output
    before = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    after = copy.deepcopy(before)
    weights: dict[str, torch.Tensor] = {}
    for shard in out.glob("*.safetensors"):
        weights |= load_file(shard)
    for name in [name for name in weights if name.endswith(".values")]:
        scale = weights.pop(name.replace(".values", ".scale"))
        weights[name.removesuffix(".values")] = weights.pop(name).float() * scale[:, None]
    after.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    agreement, divergence, likelihoods = [], [], {"before": [], "after": []}
    for question in ("What is a lake?", "Name a colour."):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        whole = before.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=6, repetition_penalty=1.0
        )
        logs = {}
        for name, model in (("before", before), ("after", after)):
            logs[name] = model(whole).logits[0].double().log_softmax(-1).numpy()
            following = whole[0, 1:].numpy()
            likelihoods[name].append(-logs[name][np.arange(len(following)), following].mean())
        p, q = (logs[name][prompt.shape[1] - 1 : -1] for name in ("before", "after"))
        agreement.append((p.argmax(1) == q.argmax(1)).mean())
        divergence.append((np.exp(p) * (p - q)).sum(1).mean())
    quantities = json.loads((out / "quantisation_report.json").read_text())["quantities"]
    assert quantities["token_agreement"]["value"] == pytest.approx(np.mean(agreement))
    assert np.mean(divergence) > 0
    assert quantities["kl"]["value"] == pytest.approx(np.mean(divergence), rel=0.02)
    ratio = math.exp(np.mean(likelihoods["after"]) - np.mean(likelihoods["before"]))
    assert ratio != 1
    assert quantities["perplexity_ratio"]["value"] == pytest.approx(ratio, abs=1e-5)


@pytest.mark.parametrize("more", [("--gate", "kl=small"), ("--gate", "beauty=1"), ("--quantize", "int8")])
def test_bad_arguments_are_refused_before_anything_is_loaded(
    folder: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    code, _ = _quantize(folder, tmp_path / "out", tmp_path, *more)
    assert code == 2


def test_the_measures_of_text_are_those_of_their_definitions() -> None:
    torch.manual_seed(0)
    ours, theirs, ids = torch.randn(5, 7), torch.randn(5, 7), torch.tensor([0, 3, 2, 6, 1])
    p, q = (np.exp(each.double().numpy()) for each in (theirs, ours))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    assert quality.divergence(ours, theirs) == pytest.approx(float(np.mean(np.sum(p * np.log(p / q), axis=1))))
    assert quality.divergence(theirs, theirs) == pytest.approx(0, abs=1e-12)
    assert quality.token_agreement(ours, theirs) == np.mean(p.argmax(1) == q.argmax(1))
    expected = -np.mean([math.log(q[i, ids[i + 1]]) for i in range(4)])
    assert quality.negative_log_likelihood(ours, ids) == pytest.approx(expected)


def test_the_measures_of_pictures_and_speech_grow_with_the_damage() -> None:
    generator = np.random.default_rng(0)
    picture = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    noisy = [np.clip(picture + generator.normal(0, s, picture.shape), 0, 255).astype(np.uint8) for s in (5, 50)]
    assert quality.psnr(noisy[0], picture) > quality.psnr(noisy[1], picture)
    assert quality.psnr(255 - picture * 0, picture * 0) == pytest.approx(0)
    distances = [quality.structure_distance(each, picture) for each in (picture, *noisy)]
    assert distances[0] == pytest.approx(0, abs=1e-9)
    assert distances == sorted(distances)
    wave = np.sin(np.linspace(0, 900, 24_000)).astype(np.float32)
    assert quality.mel_distance(wave, wave, 24_000) == 0
    assert quality.mel_distance(wave * 10, wave, 24_000) == pytest.approx(20, abs=0.1)


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "float8", "int4"])
def test_stored_weights_come_back_within_half_a_step(scheme: str) -> None:
    weight = torch.randn(8, 256)
    config = QuantizeConfig.model_validate({"scheme": scheme})
    stored = pack(weight, config.method)
    assert sum(part.nbytes for part in stored.values()) < weight.nbytes / (6 if scheme == "int4" else 3)
    again = unpack(stored[VALUES], stored[SCALE], stored.get(MINIMUM))
    step = stored[SCALE].max() * (32 if scheme == "float8" else 1)
    assert (again - weight).abs().max() <= step / 2 * 1.001
    with pytest.raises(CheckpointError):
        unpack(stored[VALUES], stored[SCALE][:3], stored.get(MINIMUM))


def test_a_gate_is_not_passed_by_what_is_no_number() -> None:
    assert not any(gate.passes(math.nan) for gate in quality.GATES.values())


def test_weights_are_found_by_their_numbers_whatever_the_checkpoint_calls_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours, others, head = torch.randn(40, 32), torch.randn(40, 32), torch.randn(50, 32)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    weights = {"thinker.m.0.up.weight": ours, "talker.layers.0.up.weight": others, "thinker.embed.weight": head}
    save_file(weights, source / "model.safetensors")
    marks = {
        "thinker": {"text.layers.0.up": [Mark.of(ours, ours.dtype)], "lm_head": [Mark.of(head, head.dtype)]},
        "talker": {"layers.0.up": [Mark.of(others, others.dtype)]},
    }
    layers = {"thinker": ["text.layers.0.up", "lm_head"]}
    configs = {"thinker": QuantizeConfig(scheme="int8")}
    full = write_quantised(source, target, layers, configs, marks, lambda what, done: None)
    assert full == {"thinker": ["lm_head"]}, "a head that is the embedding is quantised when it is loaded"
    written = load_file(target / "model.safetensors")
    assert set(written) == {
        "thinker.m.0.up.weight.values",
        "thinker.m.0.up.weight.scale",
        "talker.layers.0.up.weight",
        "thinker.embed.weight",
    }
    assert torch.equal(written["talker.layers.0.up.weight"], others)
    assert torch.equal(written["thinker.embed.weight"], head)
    with pytest.raises(CheckpointError, match="none of the 1 quantised layers"):
        write_quantised(source, tmp_path / "none", {"thinker": ["lm_head"]}, configs, marks, lambda what, done: None)


def test_pictures_are_compared_at_one_seed_and_the_report_is_recomputed(tmp_path: Path) -> None:
    model, out = tmp_path / "flux", tmp_path / "small"
    write_flux(model)
    overrides = ["--set", "denoise.params.width=32", "--set", "denoise.params.height=32"]
    code, output = _quantize(model, out, tmp_path, "--steps", "1", *overrides)
    assert code == 0, output
    quantities = json.loads((out / "quantisation_report.json").read_text())["quantities"]
    pictures = []
    for folder in (model, out):
        with Omni(str(folder), device="cpu", progress=False) as omni:
            each = []
            for seed, prompt in enumerate(("What is a lake?", "Name a colour.")):
                params = DiffusionParams(seed=seed, steps=1, width=32, height=32)
                each.append(omni.generate(prompt, params, progress=False)[0].images[0].pixels.astype(float))
            pictures.append(each)
    errors = [np.mean((ours - theirs) ** 2) for ours, theirs in zip(*pictures, strict=True)]
    assert min(errors) > 0
    expected = float(np.mean([10 * np.log10(255**2 / error) for error in errors]))
    assert quantities["psnr"]["value"] == pytest.approx(expected, abs=1e-6)


@needs_packed
def test_a_recipe_of_other_layers_or_stages_and_damaged_files_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    assert _quantize(folder, out, tmp_path, *LOOSE)[0] == 0
    assert _quantize(folder, out, tmp_path, *LOOSE)[0] == 2, "an existing folder is not overwritten"
    recipe = json.loads((out / "quantisation.json").read_text())

    def refused(match: str) -> None:
        with pytest.raises(OmniError, match=match):
            Omni(str(out), device="cpu", progress=False).close()

    changed = json.loads(json.dumps(recipe))
    changed["stages"]["thinker"]["only"].append("^model[.]layers[.]99[.]mlp$")
    (out / "quantisation.json").write_text(json.dumps(changed))
    refused("layers.*99")
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 2
    (out / "quantisation.json").write_text(json.dumps({"stages": {"painter": recipe["stages"]["thinker"]}}))
    refused("painter")
    (out / "quantisation.json").write_text(json.dumps(recipe))
    for shard in out.glob("*.safetensors"):
        tensors = load_file(shard)
        names = [name for name in tensors if name.endswith(SCALE)]
        if names:
            save_file({**tensors, names[0]: tensors[names[0]][:-1].clone()}, shard)
            refused("scales")
            save_file({name: tensor for name, tensor in tensors.items() if name != names[0]}, shard)
            refused("scale|does not hold")
            shard.write_bytes(shard.read_bytes()[:-100])
            refused("not a readable safetensors")
            return
    pytest.fail("no quantised weights were written")


@torch.inference_mode()
def test_layers_with_the_weight_first_are_quantised_by_torchao_for_any_number_of_rows() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    network = nn.Module()
    network.layers = nn.ModuleList([nn.Sequential(layer)])
    apply_cpu_kernels(network)
    quantiser = Quantiser(QuantizeConfig(scheme="int8"), diffusion=False)
    expected = layer.weight.clone()
    quantiser.apply(network, torch.device("cpu"))
    assert quantiser.layers == ["layers.0.0"]
    apply_cpu_kernels(network)
    values, scale = packed.int8_rows(expected)
    for rows in (1, 6, 7, 16, 48, 49):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(layer(x), x @ (values * scale[:, None]).T + layer.bias, rtol=1e-4, atol=1e-4)
