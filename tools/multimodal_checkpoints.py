"""Small random checkpoints of any image-text-to-text or audio-language type of transformers, with its own processor.

Sizes are set by the names of settings, in the model's config and in those inside it; the processor is of the type's own
class, with a small tokenizer that has all special tokens which its source names.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models.multimodal_lm.processor import auto_model

sys.path.insert(0, str(Path(__file__).parent))
from multimodal_types import (
    CONFIGS,
    EXTRA_TOKENS,
    MARKS,
    MELS,
    NO_TEMPLATE,
    OPTIONS,
    PART_TYPES,
    PROCESSORS,
    TOKEN_IDS,
    TOKENS,
    WITH_TOWERS,
)

TEXT_VOCAB = 1280
HIDDEN = 64
PATCH = 8
IMAGE = 32
MAX_LENGTH = 8192

_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "width", "embedding_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "mlp_dim"), HIDDEN),
    **dict.fromkeys(("shared_expert_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size_mlp", "projector_hidden_size", "adapter_hidden_size"), HIDDEN),
    **dict.fromkeys(
        ("out_hidden_size", "projection_dim", "output_dim", "mm_hidden_size", "connector_hidden_size"), HIDDEN
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_global_key_value_heads"), 4),
    **dict.fromkeys(("decoder_layers",), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "attention_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "index_head_dim", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), TEXT_VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), MAX_LENGTH),
    # Shorter than the chats.
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 16),
    "window_size": 64,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "num_kv_shared_layers": 0,
    "text_hidden_size": HIDDEN,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "spatial_patch_size": PATCH,
    "max_source_positions": 1500,
    "num_mel_bins": 16,
}
_FIXED: dict[str, object] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}

CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- 'IMAGE' -}}{%- elif part.type == 'video' -%}{{- 'VIDEO' -}}"
    "{%- elif part.type == 'audio' -%}{{- 'AUDIO' -}}{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_TOKEN = re.compile(r"""["'](<[^<>"'\s{}]{1,40}>|\[[A-Z_]{2,20}\])["']""")


def small_config(model_type: str, overrides: dict[str, Any] | None = None) -> Any:
    kind = transformers.CONFIG_MAPPING[model_type]
    settings = _settings(kind())
    for name in WITH_TOWERS.get(model_type, ()):
        tower = kind.sub_configs[name]()
        settings[name] = {"model_type": tower.model_type, **_settings(tower)}
    return kind(**_merged(settings, overrides or {}))


def _merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _settings(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    values = vars(config)
    for name in config.sub_configs:
        if isinstance(values.get(name), transformers.PreTrainedConfig):
            inner = values[name]
            settings[name] = {"model_type": inner.model_type, **_settings(inner)}
    for name, value in values.items():
        if name in _FIXED:
            settings[name] = _FIXED[name]
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            settings[name] = _SIZES[name]
        elif name in ("image_size", "patch_size") and isinstance(value, (list, tuple)):
            settings[name] = [_SIZES[name]] * len(value)
    heads = next((values[n] for n in ("num_attention_heads", "n_head", "num_heads") if n in values), None)
    for name in ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "swa_num_key_value_heads"):
        if name in values:
            settings[name] = 4 if values[name] in (None, heads) else 2
    if "qk_rope_head_dim" in values and "head_dim" in settings:
        settings["head_dim"] = _SIZES["qk_rope_head_dim"]
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        settings["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}
    if "linear_num_key_heads" in values:
        settings["num_hidden_layers"] = 4  # the last of four has attention
    if values.get("deepstack_visual_indexes"):
        settings["deepstack_visual_indexes"] = [0, 1]
    if "fullatt_block_indexes" in values:
        settings["fullatt_block_indexes"] = [1]
    return settings


# --------------------------------------------------------------------------------------------- processors

_BASE_TOKENS = ("<pad>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MISSING = re.compile(r"(?:has no|missing required) attribute '?(\w+_token)(?:_id)?'?")


def processor_class(model_type: str) -> Any:
    names = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
    name = names.get(model_type) or PROCESSORS.get(model_type)
    if name is None:
        raise LookupError("transformers names no processor for it")
    return getattr(transformers, name)


def write(model_type: str, folder: Path, seed: int = 0, settings: dict[str, Any] | None = None) -> Any:
    """The checkpoint, as a published one lies in its folder; `settings` of its config differ from the usual."""
    config = small_config(model_type, _merged(CONFIGS.get(model_type, {}), settings or {}))
    processor = build_processor(model_type, config, folder)
    _set_token_ids(model_type, config, processor)
    torch.manual_seed(seed)
    model = auto_model(model_type).from_config(config, dtype=torch.float32).eval()
    _randomise(model, seed)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 1
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def _randomise(model: Any, seed: int) -> None:
    """Weights that make answers depend on every token and on media."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(noise * 0.05)
            elif "emb" in name and parameter.ndim == 2:
                parameter.copy_(noise * 0.5)
            else:
                fan_in = parameter[0].numel() if parameter.ndim > 2 else parameter.shape[-1]
                parameter.copy_(noise * 1.2 * fan_in**-0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("codebook.embed_sum"):  # Mimi's, which are zero at first: all codes would sound alike
                buffer.copy_(torch.randn(buffer.shape, generator=generator))


def build_processor(model_type: str, config: Any, folder: Path) -> Any:
    cls = processor_class(model_type)
    source = inspect.getsource(importlib.import_module(cls.__module__))
    tokens = list(dict.fromkeys([*_BASE_TOKENS, *TOKENS.get(model_type, ()), *_TOKEN.findall(source)]))
    extra = dict(EXTRA_TOKENS.get(model_type, {}))
    for _ in range(12):
        tokenizer = _tokenizer(folder, [*tokens, *extra.values()], extra)
        try:
            processor = cls(**_arguments(model_type, cls, config, tokenizer))
            return processor if model_type in NO_TEMPLATE else _with_template(model_type, processor)
        except (AttributeError, ValueError) as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing.group(1) in extra:
                raise
            name = missing.group(1)
            extra[name] = next((t for t in tokens if t.strip("<|>[]/") == name.removesuffix("_token")), f"<{name}>")
    raise LookupError("its tokenizer needs too many tokens")


def _tokenizer(folder: Path, tokens: list[str], extra: dict[str, str]) -> Any:
    special = {token: common.BASE_VOCAB + number for number, token in enumerate(dict.fromkeys(tokens))}
    settings = common.tokenizer_settings("PreTrainedTokenizerFast", MAX_LENGTH, qwen=False)
    settings |= {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>", "extra_special_tokens": extra}
    common.write_tokenizer(folder, special, settings)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def _arguments(model_type: str, cls: Any, config: Any, tokenizer: Any) -> dict[str, Any]:
    own = OPTIONS.get(model_type, {})
    parts: dict[str, Any] = {}
    for name in cls.get_attributes():
        if name.endswith("tokenizer"):
            parts[name] = tokenizer
        else:
            parts[name] = _part(model_type, name, own.get(name, {}))
    vision = getattr(config, "vision_config", None) or config
    values = vars(config) | {key: value for key, value in vars(vision).items() if key == "patch_size"}
    for name in inspect.signature(cls.__init__).parameters:
        if name not in parts and isinstance(values.get(name), int | str):
            parts[name] = values[name]
    return {**parts, **own.get("processor", {})}


def _part(model_type: str, name: str, options: dict[str, Any]) -> Any:
    auto = transformers.models.auto
    tables = {
        "image_processor": auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_processor": auto.video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
        "feature_extractor": auto.feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
        "audio_processor": auto.feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
    }
    found = tables[name].get(PART_TYPES.get(model_type, model_type))
    if isinstance(found, dict):
        found = found.get("torchvision") or found.get("pil")
    if found is None:
        raise LookupError(f"transformers names no {name} for it")
    cls = getattr(transformers, found)
    plain = cls()
    return cls(**{**_small_part(plain), **options})


def _small_part(part: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    merge = getattr(part, "merge_size", None)
    for name in ("size", "crop_size", "max_image_size", "high_res_size"):
        size = getattr(part, name, None)
        if not size:
            continue
        if isinstance(size, int):
            settings[name] = IMAGE
            continue
        size = dict(size)
        if "height" in size:
            settings[name] = {"height": IMAGE, "width": IMAGE}
        elif merge is not None and size.get("longest_edge", 0) and size["longest_edge"] > 10_000:
            unit = (PATCH * merge) ** 2
            settings[name] = {"shortest_edge": unit, "longest_edge": 24 * unit}
        elif "shortest_edge" in size and "longest_edge" in size:
            settings[name] = {"shortest_edge": IMAGE, "longest_edge": 2 * IMAGE}
        else:
            settings[name] = dict.fromkeys((k for k in size if size[k]), IMAGE)
    if isinstance(getattr(part, "patch_size", None), int):
        settings["patch_size"] = PATCH
    if getattr(part, "feature_size", None):
        settings["feature_size"] = MELS
    return settings


def _with_template(model_type: str, processor: Any) -> Any:
    template = CHAT_TEMPLATE
    for place, marks in MARKS.get(model_type, {}).items():
        template = template.replace(place, marks)
    for kind in ("image", "video", "audio"):
        token = getattr(processor, f"{kind}_token", None)
        token = getattr(token, "content", token) or f"<{kind}>"
        token = getattr(processor, f"{kind}_placeholder_token", token)
        template = template.replace(kind.upper(), token)
    processor.chat_template = processor.tokenizer.chat_template = template
    return processor


def _set_token_ids(model_type: str, config: Any, processor: Any) -> None:
    """The placeholders' ids, by the names that config and processor give them."""
    own = TOKEN_IDS.get(model_type, {})
    for key, texts in own.items():
        names = list(texts) if isinstance(texts, tuple) else texts
        setattr(config, key, processor.tokenizer.convert_tokens_to_ids(names))
    vocab = processor.tokenizer.get_vocab()
    if isinstance(getattr(config, "vocabulary_map", None), dict):
        config.vocabulary_map["<image>"] = vocab["<image>"]
    unused = TEXT_VOCAB - 1
    for part in [config, *(getattr(config, n) for n in config.sub_configs if getattr(config, n, None) is not None)]:
        for key, value in list(vars(part).items()):
            name = re.sub(r"_(id|index)$", "", key)
            if name == key or not name.endswith("token") or key in _FIXED or isinstance(value, (list, str)):
                continue
            text = getattr(processor.tokenizer, name, None) or getattr(processor, name, None)
            text = getattr(text, "content", text)
            stem = name.removesuffix("_token")
            guesses = (text, f"<|{stem}|>", f"<{stem}>", f"<|{stem}_pad|>", f"<start_of_{stem}>")
            guesses = (own.get(key), *guesses)
            found = next((vocab[g] for g in guesses if isinstance(g, str) and g in vocab), None)
            if found is None:
                found, unused = unused, unused - 1
            setattr(part, key, found)
