"""Causal LMs on our engine against transformers, one by one: greedy tokens, penalties, logits; and what we refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageInput, TokenChunk
from omnistage.core.verification import VerifyRow, count_differences
from omnistage.engines.ar.attention import recording, sdpa
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm import probe, tiny, verify
from omnistage.models.causal_lm.component import CausalLM, load
from omnistage.models.loading import max_sequence_length
from omnistage.models.registry import REGISTRY

SHAPE: dict[str, object] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}

# Each differs from the others in what the engine has to get right.
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama, grouped heads": ("LlamaConfig", {}),
    "llama, scaled positions": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, "num_key_value_heads": 6},
    ),
    "qwen2, biases": ("Qwen2Config", {}),
    "qwen3, normed heads": ("Qwen3Config", {}),
    "mistral, sliding window": ("MistralConfig", {"sliding_window": 7}),
    "gemma3, window in some layers": ("Gemma3TextConfig", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "mixtral, experts": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2, learned positions": ("GPT2Config", {"num_key_value_heads": None, "head_dim": None}),
    "gemma2, soft caps": ("Gemma2Config", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0}),
    "granite, scaled logits": ("GraniteConfig", {"logits_scaling": 4.0}),
    "cohere, scaled logits": ("CohereConfig", {"logit_scale": 0.25}),
    "gpt-oss, sinks": ("GptOssConfig", {"num_local_experts": 4, "sliding_window": 5}),
    "phimoe, a window in the mask alone": (
        "PhimoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    ),
    "deepseek, values narrower than keys": (
        "DeepseekV3Config",
        {"num_key_value_heads": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
}

PENALTIES: list[dict[str, object]] = [
    {},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8},
    {"min_tokens": 6},
    {"suppress_token_ids": tuple(range(40, 80))},
]


def make_model(kind: str, **changes: object) -> transformers.PreTrainedModel:
    options = {name: value for name, value in {**SHAPE, **changes}.items() if value is not None}
    config = getattr(transformers, kind)(**options)
    torch.manual_seed(sum(kind.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def prompts(count: int, vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [tuple(torch.randint(3, vocab_size, (n,), generator=generator).tolist()) for n in lengths]


@torch.inference_mode()
def reference(
    model: transformers.PreTrainedModel, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], torch.Tensor]:
    """Generated ids, and the raw logits `[n, V]` that they came from."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        repetition_penalty=params.repetition_penalty,
        suppress_tokens=list(params.suppress_token_ids) or None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.stack(out.logits)[:, 0]


def ours(
    component: CausalLM, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]
) -> list[tuple[list[int], list[float]]]:
    """Ids and their logprobs, all requests in one stage whose budget mixes chunks and single tokens."""
    budget = ARBudget(kv_blocks=64, block_size=8, max_batch_tokens=64, prefill_chunk=16)
    stage = ARStage("thinker", component, budget)
    for number, (prompt, params) in enumerate(asked):
        stage.submit(StageInput(RequestInfo(str(number)), params, ARInput(prompt)))
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in asked]
    for chunk in stage.drain():
        assert chunk.error is None
        if isinstance(chunk.payload, TokenChunk):
            tokens, logprobs = answers[int(chunk.request_id)]
            tokens.extend(chunk.payload.token_ids)
            logprobs.extend(item.chosen.logprob for item in chunk.payload.logprobs)
    return answers


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_greedy_answers_are_those_of_transformers(name: str) -> None:
    kind, changes = ARCHITECTURES[name]
    model = make_model(kind, **changes)
    asked = []
    for number, prompt in enumerate(prompts(10, 160)):
        options: dict[str, object] = {"temperature": 0.0, "max_tokens": 14, "logprobs": 0}
        asked.append((prompt, SamplingParams.parse({**options, **PENALTIES[number % len(PENALTIES)]})))
    expected = [reference(model, prompt, params) for prompt, params in asked]
    got = ours(CausalLM(model), asked)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert len({tuple(tokens) for tokens, _ in got}) > 5, "answers this alike would hide a difference"
    for (tokens, logprobs), (_, logits) in zip(got, expected, strict=True):
        wanted = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


# ------------------------------------------------------------------------------------------ what we refuse


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("DogeConfig", {}),  # a mask of its own
        ("BloomConfig", {"n_head": 6, "num_key_value_heads": None}),  # attention of its own
        ("FalconConfig", {"num_kv_heads": 6, "num_key_value_heads": None, "head_dim": None}),
        ("RwkvConfig", {"attention_hidden_size": 48}),  # no attention, and a state in no cache of transformers
        ("ZayaConfig", {"num_experts": 2}),  # a state inside its attention
    ],
)
def test_models_that_are_more_than_a_plain_decoder_are_refused(kind: str, changes: dict[str, object]) -> None:
    model = make_model(kind, **changes)
    with pytest.raises(UnsupportedModelError):
        CausalLM(model)


def test_attention_that_goes_elsewhere_is_refused_even_where_no_logits_show_it() -> None:
    model = make_model("BloomConfig", n_head=6, num_key_value_heads=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(UnsupportedModelError, match="attention in its own code"):
        CausalLM(model)


def test_windows_are_those_of_the_models_masks_whatever_its_modules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Gemma3TextConfig", sliding_window=64, sliding_window_pattern=2)
    # As long as the text is shorter than the window, no logits could show it.
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "sliding_window", None)
    assert [module.paged_window for module in CausalLM(model).attention_modules] == [64, None, 64]


@pytest.mark.parametrize("window", [4999, 5001, None], ids=["one less", "one more", "none"])
def test_a_window_that_is_read_wrongly_is_found_however_long_it_is(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_check_cached_windows", lambda *args: None)
    sound = CausalLM(make_model("MistralConfig", sliding_window=5000))
    assert [module.paged_window for module in sound.attention_modules] == [5000] * 3
    monkeypatch.setattr(recording, "_window_of", lambda *args: window)
    with pytest.raises(UnsupportedModelError, match="MistralAttention would attend to other keys"):
        CausalLM(make_model("MistralConfig", sliding_window=5000))


@pytest.mark.parametrize("place", [sdpa._Chunk, sdpa.SdpaPlan])
def test_an_engine_that_applies_another_window_is_found(place: type, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mask" if place is sdpa._Chunk else "single_mask"
    plain = getattr(place, name)
    monkeypatch.setattr(place, name, lambda self, window, *more: plain(self, window and window + 1, *more))
    with pytest.raises(UnsupportedModelError, match="would attend to other keys"):
        CausalLM(make_model("Gemma3TextConfig", sliding_window=64, sliding_window_pattern=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_wrong_model_is_refused_in_every_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("LlamaConfig").to(dtype)
    plain = CausalLM.logits
    # Far less than the rounding of float16 leaves room for, and enough for other tokens.
    monkeypatch.setattr(CausalLM, "logits", lambda self, hidden: plain(self, hidden).mul(1.02))
    with pytest.raises(UnsupportedModelError, match="other logits"):
        CausalLM(model)


def test_the_probe_leaves_the_weights_as_they_are() -> None:
    model = make_model("LlamaConfig").half()
    before = dict(model.named_parameters())
    CausalLM(model)
    assert all(tensor is before[name] for name, tensor in model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (
            "DeepseekV32Config",
            {"num_key_value_heads": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
            "indexed_attention",
        ),
        ("DogeConfig", {}, "a mask of its own"),
        (
            "FalconConfig",
            {"num_kv_heads": 6, "num_key_value_heads": None, "head_dim": None},
            "attention in its own code",
        ),
    ],
)
def test_a_refusal_names_what_is_missing(kind: str, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        CausalLM(make_model(kind, **changes))


def test_rotary_embeddings_that_depend_on_the_batch_limit_the_length() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    model = make_model("Phi3Config", num_attention_heads=6, rope_parameters=rope, original_max_position_embeddings=64)
    assert CausalLM(model).spec.max_length == 64
    assert max_sequence_length(transformers.LlamaConfig(rope_parameters={"full_attention": rope})) == 64


def test_attention_that_counts_positions_in_the_cache_of_transformers_is_refused() -> None:
    # Llama 4 scales queries from position 8,192 on, by the row of the batch that a token is in.
    model = make_model(
        "Llama4TextConfig", num_local_experts=2, attention_chunk_size=None, layer_types=["full_attention"] * 3
    )
    with pytest.raises(UnsupportedModelError, match="counts positions"):
        CausalLM(model)


# ---------------------------------------------------------------------------------------------- loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write(tmp_path / "tiny")
    return tmp_path / "tiny"


def load_folder(folder: Path) -> CausalLM:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages["thinker"]
    return load(LoadContext(resolved.model, "thinker", stage, torch.device("cpu"), torch.float32))


def test_end_tokens_come_from_the_generation_config(folder: Path) -> None:
    ids = tiny.special_ids()
    assert load_folder(folder).eos_token_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])


def rewrite(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Change or drop one weight of a sharded checkpoint."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    if tensor is None:
        del tensors[name], index["weight_map"][name]
    else:
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_missing_weight_is_not_made_up(folder: Path) -> None:
    rewrite(folder, "model.layers.1.mlp.up_proj.weight", None)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_folder(folder)


def test_a_weight_of_another_shape_is_not_made_up(folder: Path) -> None:
    rewrite(folder, "model.norm.weight", torch.ones(65))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* \[65\]"):
        load_folder(folder)


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        load_folder(folder)


# ----------------------------------------------------------------------------------------------- verify


def test_verify_finds_a_sound_checkpoint_equal_in_tokens_and_logits(folder: Path) -> None:
    said: list[float] = []
    rows = verify.run(OmniRunner(folder), cases=4, seed=1, progress=lambda _doing, share: said.append(share))
    assert [row.quantity for row in rows] == ["tokens", "logits"] * 4
    assert all(row.ok for row in rows), rows
    assert said == sorted(said)
    assert said[-1] == 1.0


def test_verify_gives_the_same_cases_for_the_same_seed(folder: Path) -> None:
    def cases(seed: int) -> list[str]:
        return [row.case for row in verify.run(OmniRunner(folder), cases=3, seed=seed)]

    assert cases(5) == cases(5) != cases(6)


def test_verify_finds_an_engine_that_computes_something_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CausalLM.logits
    monkeypatch.setattr(CausalLM, "_check_same", lambda self, expected: None)
    monkeypatch.setattr(CausalLM, "logits", lambda self, hidden: plain(self, hidden).roll(1, dims=1))
    rows = verify.run(OmniRunner(folder), cases=2)
    assert not any(row.ok for row in rows)


def test_verify_of_no_cases_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        verify.run(OmniRunner(folder), cases=0)


def test_a_shorter_answer_counts_as_different() -> None:
    assert count_differences((1, 2, 3), (1, 5)) == 2
    assert not VerifyRow.judge("x", "tokens", count_differences((1,), ()), 0.0).ok
