"""Adapters give what `peft` gives, for each request of a mixed batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import AdapterError, ConfigError
from omnistage.core.family import LoadContext
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, OmniTokensPrompt, RequestInfo, StageInput, TokenChunk
from omnistage.engines.adapters.library import AdapterLibrary, AdapterLimits, AdapterSource
from omnistage.engines.ar import adapters as ar_adapters
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.causal_lm.own_forward import OwnForwardLM
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from tests.parity.adapter_checkpoints import CONFIGS, with_adapters
from tests.parity.conftest import Checkpoints
from tests.parity.test_causal_lm import make_model
from tests.parity.test_recurrent import hybrid

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


def component_of(folder: Path, name: str = "thinker") -> ARComponent:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages[name]
    context = LoadContext(resolved.model, name, stage, torch.device("cpu"), torch.float32)
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
    stage = stage_of(base, merge_linears=True, pack_weights=False)
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


def test_a_thinker_of_qwen2_5_omni_gets_what_peft_gives_it(
    checkpoint_of: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Trained on the thinker, and by its keys on the whole model."""
    folder, adapters = checkpoint_of("qwen2_5_omni"), tmp_path_factory.mktemp("adapters")
    whole = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    layers = r"model\.(language_model\.)?layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
    configs = {"text": {"r": 4, "lora_alpha": 8, "target_modules": layers}}
    reference = with_adapters(whole.thinker, configs, folder=adapters)
    tensors = load_file(adapters / "text" / "adapter_model.safetensors")
    (adapters / "of_the_whole").mkdir()
    save_file(
        {key.replace("base_model.model.", "base_model.model.thinker."): tensor for key, tensor in tensors.items()},
        adapters / "of_the_whole" / "adapter_model.safetensors",
    )
    config = (adapters / "text" / "adapter_config.json").read_text()
    (adapters / "of_the_whole" / "adapter_config.json").write_text(config)
    library = library_of(adapters, ["text", "of_the_whole"])
    budget = ARBudget(kv_blocks=64, block_size=8, run_ahead=False)
    stage = ARStage("thinker", component_of(folder), budget, library)
    base = Base(folder, adapters, reference)
    requests: list[tuple[Sequence[int], Wanted]] = [(PROMPTS[2], "text"), (PROMPTS[2], None), (PROMPTS[1], "text")]
    answers = run(stage, [*requests, (PROMPTS[2], "of_the_whole")])
    for (prompt, wanted), answer in zip(requests, answers, strict=False):
        check(base, prompt, wanted, answer)
    assert answers[3][0] == answers[0][0] != answers[1][0]
    stage = ARStage("talker", component_of(folder, "talker"), budget, library_of(adapters, [], at_run_time=True))
    assert stage.adapters is not None
    with pytest.raises(AdapterError, match=r"thinker\.model.* is not a linear layer of stage 'talker'"):
        stage.adapters.load("x", AdapterSource(adapters / "of_the_whole"))


def test_a_stage_in_a_process_of_its_own_has_the_configured_adapters(base: Base) -> None:
    adapters = {name: base.adapters / name for name in ("all", "feed")}
    place = ("deployment.placement.apart.stages=[thinker]", f'deployment.adapter_folders=["{base.adapters}"]')
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    each = [params, *(params.merged(SamplingParams.parse({"lora": name})) for name in adapters)]
    prompts = [OmniTokensPrompt(PROMPTS[3])] * 3
    with Omni(base.folder, device="cpu", dtype="float32", adapters=adapters, overrides=place, progress=False) as omni:
        answers = [output.token_ids for output in omni.generate(prompts, each, progress=False)]
        assert set(omni.adapters.names()) == {"all", "feed"}
        with pytest.raises(AdapterError, match="there is no adapter 'other'"):
            omni.generate(prompts[0], SamplingParams.parse({"lora": "other"}), progress=False)
        with pytest.raises(AdapterError, match="runs in another process"):
            omni.adapters.load("more", "mlp")
        with pytest.raises(AdapterError, match="another process"):
            omni.adapters.unload("all")
    stage = stage_of(base)
    expected = run(stage, [(PROMPTS[3], None), (PROMPTS[3], "all"), (PROMPTS[3], "feed")], max_tokens=6)
    assert answers == [tokens for tokens, _ in expected]


def test_a_stage_that_is_built_anew_keeps_its_adapters(base: Base) -> None:
    library = library_of(base.adapters, ["all"], at_run_time=True)
    stage = stage_of(base, library=library)
    library.load("feed", AdapterSource(base.adapters / "feed"))
    requests: list[tuple[Sequence[int], Wanted]] = [(PROMPTS[3], "all"), (PROMPTS[3], None), (PROMPTS[3], "feed")]
    expected = run(stage, requests)
    budget = ARBudget(kv_blocks=64, block_size=8, run_ahead=False)
    again = ARStage("thinker", stage.component, budget, library)
    assert [tokens for tokens, _ in run(again, requests)] == [tokens for tokens, _ in expected]


def test_adapters_of_a_quantised_base_are_added_in_float(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """To its outputs, whatever computes them: as PEFT does over the dequantised weights."""
    torchao = pytest.importorskip("torchao.quantization")
    monkeypatch.setattr("omnistage.models.decoder.apply_cpu_kernels", lambda model: None)  # they are for float weights
    component = component_of(base.folder)
    torchao.quantize_(component.decoder, torchao.Int8WeightOnlyConfig())
    library = library_of(base.adapters, ["all", "feed"])
    stage = ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8, run_ahead=False), library)
    hooked = [module for module in component.decoder.modules() if hasattr(module, "adapter_up")]
    assert len(hooked) == 7 * component.spec.num_layers
    assert all(
        type(module.weight) is not torch.nn.Parameter or hasattr(module.weight, "dequantize") for module in hooked
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    for name, module in component.decoder.named_modules():
        if isinstance(module, torch.nn.Linear):
            model.get_decoder().get_submodule(name).weight.data = module.weight.dequantize()
    configs = {name: CONFIGS[name] for name in CONFIGS}
    dequantised = Base(base.folder, base.adapters, with_adapters(model, configs))
    requests: list[tuple[Sequence[int], Wanted]] = [(PROMPTS[3], "all"), (PROMPTS[2], None), (PROMPTS[1], "feed")]
    for (prompt, wanted), answer in zip(requests, run(stage, requests), strict=True):
        check(dequantised, prompt, wanted, answer)


def on_recurrent(folder: Path, targets: Sequence[str]) -> tuple[CausalLM, Any]:
    """A model with recurrent layers, and PEFT's over another one like it; three adapters in the folder."""
    options = {"r": 3, "lora_alpha": 9, "target_modules": list(targets)}
    return CausalLM(hybrid()), with_adapters(hybrid(), dict.fromkeys(("one", "two", "three"), options), folder)


def test_layers_beside_recurrent_ones_get_what_peft_gives_them(tmp_path: Path) -> None:
    component, reference = on_recurrent(tmp_path, ["q_proj", "o_proj", "down_proj"])
    library = library_of(tmp_path, ["one", "two", "three"])
    stage = ARStage("thinker", component, ARBudget(kv_blocks=32, block_size=8, prefill_chunk=8), library)
    asked: list[tuple[tuple[int, ...], Wanted]] = [
        (tuple(3 + (number * 37 + start) % 150 for number in range(5 + 6 * start)), wanted)
        for start, wanted in enumerate((None, "one", "two", "three", "one"))
    ]
    for (prompt, wanted), (tokens, logprobs) in zip(asked, run(stage, asked, ignore_eos=False), strict=True):
        check(Base(tmp_path, tmp_path, reference), prompt, wanted, (tokens, logprobs))


def test_recurrent_layers_themselves_take_no_adapters(tmp_path: Path) -> None:
    # They take a step's rows apart, so that a row would get what another one's adapter adds.
    component, _ = on_recurrent(tmp_path, ["q_proj", "in_proj_qkv"])
    with pytest.raises(
        AdapterError, match=r"linear_attn\.in_proj_qkv is not a linear layer.*recurrent layers are none"
    ):
        ARStage("thinker", component, ARBudget(kv_blocks=16, block_size=8), library_of(tmp_path, ["one"]))


def test_a_model_that_runs_its_own_forward_takes_no_adapters(tmp_path: Path) -> None:
    component = OwnForwardLM(make_model("BloomConfig", n_head=6, num_key_value_heads=None))
    with pytest.raises(ConfigError, match="not in a flattened batch, and does not support adapters"):
        ARStage("thinker", component, ARBudget(kv_blocks=16, block_size=8), library_of(tmp_path, ["one"]))
