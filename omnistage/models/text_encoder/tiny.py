"""Random checkpoints of text encoders in the layouts that published ones have."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from omnistage.core.verification import Progress
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models.causal_lm import tiny as causal_lm

MAX_TOKENS = 64
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_PACKAGE = "sentence_transformers.models"


def write(
    folder: Path, *, seed: int = 0, scale: float = 0.0, variant: str = "encoder", progress: Progress | None = None
) -> None:
    """A BERT with mean pooling, a Qwen3 with last-token pooling, or a BERT with a head for one or several classes."""
    common.start(folder, scale, variant, ("encoder", "decoder", "cross_encoder", "classifier"))
    ids = causal_lm.special_ids()
    settings = common.tokenizer_settings("PreTrainedTokenizerFast", MAX_TOKENS, {}, qwen=False)
    common.write_tokenizer(folder, ids, settings)
    shapes = {**_SIZES, "vocab_size": 1024, "max_position_embeddings": 2 * MAX_TOKENS, "pad_token_id": 0}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        _model(variant, shapes).save_pretrained(folder)
    if progress is not None:
        progress("weights written", 1.0)
    if variant in ("encoder", "decoder"):
        _write_layout(folder, "lasttoken" if variant == "decoder" else "mean_tokens")


def _model(variant: str, shapes: dict[str, int]) -> transformers.PreTrainedModel:
    if variant == "decoder":
        return transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**shapes, num_key_value_heads=2, head_dim=16, is_matryoshka=True)
        )
    if variant == "encoder":
        return transformers.BertModel(transformers.BertConfig(**shapes))
    labels = {"id2label": {0: "relevance"}, "label2id": {"relevance": 0}}
    if variant == "classifier":
        names = ("violence", "harassment", "spam")
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        labels["problem_type"] = "multi_label_classification"
    return transformers.BertForSequenceClassification(transformers.BertConfig(**shapes, **labels))


def _write_layout(folder: Path, pooling: str) -> None:
    """The files of sentence-transformers: pooling, then vectors of length 1."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"{_PACKAGE}.{kind}"}
        for place, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    sizes = {"word_embedding_dimension": _SIZES["hidden_size"], f"pooling_mode_{pooling}": True}
    modes = {f"pooling_mode_{mode}": False for mode in ("cls_token", "max_tokens", "mean_tokens")}
    common.write_json(folder / "1_Pooling" / "config.json", {**modes, **sizes})
    common.write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    prompts = {"query": "query: ", "document": ""}
    common.write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
