"""GGUF files: served with the numbers that transformers reads from them, or refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage import Omni
from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.gguf import check_numbers
from omnistage.core.errors import CheckpointError, MissingDependencyError, OmniError, UnsupportedModelError
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.hf import transformers
from omnistage.models.causal_lm import tiny
from omnistage.models.registry import REGISTRY

gguf: Any = pytest.importorskip("gguf")
PROMPTS = [tuple(range(3, 3 + length)) for length in (4, 17, 9)]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in Q8_0, with its tokenizer, as llama.cpp's converter writes one."""
    folder = tmp_path_factory.mktemp("gguf")
    source = folder / "source"
    tiny.write(source)
    write_gguf(source, folder / "small.gguf")
    for file in source.iterdir():
        file.unlink()
    source.rmdir()
    return folder


@pytest.fixture(autouse=True)
def _home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_HOME", str(folder / "home"))


def write_gguf(
    source: Path, target: Path, *, without: str = "", scaling: str = "", factors: bool = False, **more: Any
) -> None:
    """`without` a tensor; with the `scaling` of positions as metadata, or with its `factors` as Llama 3.1 has them.

    `more`: tensors by their names, and numbers of metadata.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, tokenizer = model.config, json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    ids = {**tokenizer["model"]["vocab"], **{each["content"]: each["id"] for each in tokenizer["added_tokens"]}}
    tokens = {number: token for token, number in ids.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens.get(number, f"<unused {number}>") for number in range(config.vocab_size)])
    writer.add_token_types([1 if number in tokens else 5 for number in range(config.vocab_size)])
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges or ["a b"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.ones(config.head_dim // 2, np.float32))
    for name, item in more.items():
        if isinstance(item, np.ndarray):
            writer.add_tensor(name, item)
        else:
            writer.add_float32(name, item)
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        weight = tensor
        for kind, count in heads.items():
            if kind in name:  # llama.cpp has the halves of rotated pairs side by side
                weight = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        own = name
        for theirs, ours in NAMES.items():
            own = own.replace(theirs, ours)
        if own == without:
            continue
        data = weight.numpy().astype(np.float32)
        if data.ndim == 1:
            writer.add_tensor(own, data)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(own, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["small.gguf", ""], ids=["file", "folder"])
@torch.inference_mode()
def test_answers_are_those_of_transformers_over_the_same_file(folder: Path, name: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="small.gguf", dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
        expected.append(out[0, len(prompt) :].tolist())
    greedy = SamplingParams(temperature=0.0, max_tokens=10)
    plain = ["thinker.budget.pack_weights=false"]  # packed weights are not in the state that is compared
    with Omni(str(folder / name), device="cpu", overrides=plain, progress=False) as omni:
        outputs = omni.generate([OmniTokensPrompt(ids) for ids in PROMPTS], greedy, progress=False)
        component = omni.orchestrator.stages["thinker"].component  # type: ignore[attr-defined]
        ours, theirs = component.model.state_dict(), reference.state_dict()
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), "the numbers were rounded again"
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert [ids[: len(each)] for ids, each in zip(expected, found, strict=True)] == found
    assert any(len(each) > 3 for each in found)


def test_a_file_is_written_once_for_each_of_its_states(folder: Path) -> None:
    path = folder / "small.gguf"
    given = OmniEngineArgs(model=str(path), device="cpu")
    first = resolve(given, registry=REGISTRY).model
    assert first.name == "small"
    written = (first.folder / "config.json").stat().st_mtime_ns
    assert resolve(given, registry=REGISTRY).model.folder == first.folder
    assert (first.folder / "config.json").stat().st_mtime_ns == written
    path.touch()
    assert resolve(given, registry=REGISTRY).model.folder != first.folder
    assert not list(first.folder.parent.glob(".partial-*"))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"without": "blk.1.ffn_up.weight"}, CheckpointError, "lacks 1 weights.*layers.1.mlp.up_proj"),
        ({"scaling": "yarn"}, UnsupportedModelError, r"scales its positions \(llama.rope.scaling.type\)"),
        ({"factors": True}, UnsupportedModelError, r"scales its positions \(rope_freqs.weight\)"),
        ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, UnsupportedModelError, "64 numbers more.*blk.0.attn_q.bias"),
        ({"llama.attention.sliding_window": 8.0}, UnsupportedModelError, r"sliding_window 8,.*compute with none"),
        ({"llama.attention.layer_norm_epsilon": 0.5}, UnsupportedModelError, r"layer_norm_epsilon 0.5,"),
    ],
    ids=[
        "a weight is missing",
        "scaled positions",
        "factors of positions",
        "a weight too many",
        "a window",
        "another epsilon",
    ],
)
def test_a_file_of_which_transformers_would_make_another_model_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[OmniError], match: str
) -> None:
    tiny.write(tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "changed.gguf", **change)
    with pytest.raises(error, match=match):
        resolve(OmniEngineArgs(model=str(tmp_path / "changed.gguf"), device="cpu"), registry=REGISTRY)


@pytest.mark.parametrize(
    ("config", "metadata", "refused"),
    [
        (transformers.Starcoder2Config(), {"starcoder2.rope.freq_base": 10000.0}, ""),
        (transformers.Starcoder2Config(), {"starcoder2.rope.freq_base": 999999.0}, "freq_base 999999,.*10000"),
        (transformers.StableLmConfig(), {"stablelm.rope.dimension_count": 20.0}, ""),
        (transformers.StableLmConfig(), {"stablelm.rope.dimension_count": 80.0}, "dimension_count 80,.*with 20"),
        (transformers.Gemma2Config(), {"gemma2.attn_logit_softcapping": 50.0}, ""),
        (transformers.Gemma2Config(), {"gemma2.attn_logit_softcapping": 20.0}, "softcapping 20,.*with 50"),
        (transformers.Gemma2Config(num_hidden_layers=46), {}, "27 billion.*scale of attention"),
        (transformers.Gemma3TextConfig(num_hidden_layers=62), {}, "27 billion.*scale of attention"),
        (transformers.Gemma3TextConfig(), {"gemma3.rope.freq_base": 1e6}, ""),
        (transformers.Lfm2Config(), {"lfm2.attention.layer_norm_rms_epsilon": 1e-5}, ""),
        (transformers.Lfm2Config(rms_norm_eps=0.5), {"lfm2.attention.layer_norm_rms_epsilon": 0.5}, "with 0.5, 1e-05"),
        (transformers.LlamaConfig(), {"llama.logit_scale": 1.0}, ""),
        (transformers.LlamaConfig(), {"llama.logit_scale": 0.5}, "logit_scale 0.5,.*none"),
    ],
)
def test_numbers_that_transformers_replaces_by_its_own_are_refused(
    tmp_path: Path, config: Any, metadata: dict[str, float], refused: str
) -> None:
    path = tmp_path / "metadata.gguf"
    writer = gguf.GGUFWriter(str(path), config.model_type.removesuffix("_text"))
    for name, value in metadata.items():
        writer.add_float32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if refused:
        with pytest.raises(UnsupportedModelError, match=refused):
            check_numbers(path, config)
    else:
        check_numbers(path, config)


def test_a_cache_that_cannot_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_HOME", str(folder / "small.gguf"))
    with pytest.raises(CheckpointError, match=r"cannot be written.*OMNISTAGE_HOME"):
        resolve(OmniEngineArgs(model=str(folder / "small.gguf"), device="cpu"), registry=REGISTRY)


def test_what_cannot_be_read_is_refused_by_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, error: type[OmniError], match: str) -> None:
        with pytest.raises(error, match=match):
            resolve(OmniEngineArgs(model=str(path), device="cpu"), registry=REGISTRY)

    whole = (folder / "small.gguf").read_bytes()
    other, cut, shard = (tmp_path / name for name in ("other.gguf", "cut.gguf", "big-00001-of-00002.gguf"))
    other.write_bytes(b"PK\3\4 not a model")
    refused(other, CheckpointError, "other.gguf is not a GGUF file")
    cut.write_bytes(whole[: len(whole) // 2])
    refused(cut, UnsupportedModelError, "cannot read cut.gguf")
    shard.write_bytes(whole[:100])
    refused(shard, UnsupportedModelError, "one of several files")
    refused(tmp_path, CheckpointError, "has 3 GGUF files")
    writer = gguf.GGUFWriter(str(tmp_path / "clip.gguf"), "clip")
    writer.add_embedding_length(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "clip.gguf", UnsupportedModelError, "clip")
    assert not list((folder / "home" / "gguf").glob(".partial-*"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(folder / "small.gguf", MissingDependencyError, "pip install 'omnistage\\[gguf\\]'")
