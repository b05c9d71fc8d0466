"""Small random checkpoints of any image-text-to-text or audio-language type of transformers, with its own processor.

Sizes are set by the names of settings, in the model's config and in those inside it; the processor is of the type's own
class, with a small tokenizer that has all special tokens which its source names.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models.multimodal_lm.processor import auto_model

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
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), 64),
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

PROCESSORS = {
    "cosmos3_omni": "Qwen3VLProcessor",
    "glm_ocr": "Glm46VProcessor",
    "glmga": "Glm46VProcessor",
    "fast_vlm": "LlavaProcessor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
    "kosmos-2": "Kosmos2Processor",
    "kosmos-2.5": "Kosmos2_5Processor",
}
"""Of types that transformers' own table leaves out."""
NO_TEMPLATE = (
    *("blip", "blip-2", "florence2", "git", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5"),
    *("pix2struct", "pp_formulanet", "udop"),
)
"""Types without a chat template, whose processors find a place for media themselves."""
_BASE_TOKENS = ("<pad>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MISSING = re.compile(r"has no attribute '?(\w+_token)(?:_id)?'?")


def processor_class(model_type: str) -> Any:
    names = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
    name = names.get(model_type) or PROCESSORS.get(model_type)
    if name is None:
        raise LookupError("transformers names no processor for it")
    return getattr(transformers, name)


def write(model_type: str, folder: Path, seed: int = 0) -> Any:
    """The checkpoint, as a published one lies in its folder."""
    config = small_config(model_type, CONFIGS.get(model_type))
    processor = build_processor(model_type, config, folder)
    _set_token_ids(model_type, config, processor)
    torch.manual_seed(seed)
    model = auto_model(model_type).from_config(config, dtype=torch.float32).eval()
    _randomise(model, seed)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
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


def build_processor(model_type: str, config: Any, folder: Path) -> Any:
    cls = processor_class(model_type)
    source = inspect.getsource(importlib.import_module(cls.__module__))
    tokens = list(dict.fromkeys([*_BASE_TOKENS, *TOKENS.get(model_type, ()), *_TOKEN.findall(source)]))
    extra: dict[str, str] = {}
    for _ in range(12):
        tokenizer = _tokenizer(folder, [*tokens, *extra.values()], extra)
        try:
            processor = cls(**_arguments(model_type, cls, config, tokenizer))
            return processor if model_type in NO_TEMPLATE else _with_template(processor)
        except AttributeError as error:
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


def _with_template(processor: Any) -> Any:
    template = CHAT_TEMPLATE
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


MELS = 16
_PINPOINTS = [[32, 64], [64, 32], [64, 64]]
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
CONFIGS: dict[str, dict[str, Any]] = {
    **{
        t: {"text_config": {"rope_parameters": _MROPE}}
        for t in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "glm46v", "glm4v", "glm_ocr", "glmga")
    },
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "llava_next": {"image_grid_pinpoints": _PINPOINTS},
    "llava_next_video": {"image_grid_pinpoints": _PINPOINTS, "image_seq_length": 16},
    "llava_onevision": {"image_grid_pinpoints": _PINPOINTS},
    "gemma3": {"mm_tokens_per_image": 4},
    "aria": {"vision_config": {"patch_size": 14, "image_size": 490}},
    "got_ocr2": {"vision_config": {"image_size": 512}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    **{
        t: {"projector_config": {"encoder_hidden_size": 1024}, "window_size": 15}
        for t in ("granite_speech", "granite_speech_plus")
    },
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 64}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "nemo_speechlm": {"head_config": {"audio_hidden_size": 64}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "step3p7": {"text_config": {"sliding_window": 64}},
    "chameleon": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "emu3": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}}},
    "qwen2_5_omni_thinker": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_start_token_id": 0,
        "audio_start_token_id": 0,
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 0, "audio_start_token_id": 0},
    "muse_glimmer": {"out_hidden_size": 256},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0, 1]}},
    "granite4_vision": {
        "image_grid_pinpoints": _PINPOINTS,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
    },
    "phi4_multimodal": {
        "audio_config": {"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 64}
    },
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        }
    },
    "kimi_k25": {"projection_hidden_size": 64, "projector_hidden_size": 64},
    "paligemma": {"text_config": {"num_image_tokens": 16}},
}
"""Settings of types whose default config cannot be made small by names alone."""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "vibevoice_asr": {"feature_extractor": {"feature_size": 1}},
    "llava": {"processor": {"num_additional_image_tokens": 1}},
    "llava_next": {
        "processor": {"num_additional_image_tokens": 1},
        "image_processor": {"image_grid_pinpoints": _PINPOINTS},
    },
    "llava_next_video": {
        "processor": {"num_additional_image_tokens": 1},
        "image_processor": {"image_grid_pinpoints": _PINPOINTS},
    },
    "llava_onevision": {"processor": {"num_image_tokens": 16}, "image_processor": {"image_grid_pinpoints": _PINPOINTS}},
    "paligemma": {"image_processor": {"image_seq_length": 16}},
    "florence2": {"image_processor": {"image_seq_length": 17}},
    "gemma3": {"processor": {"image_seq_length": 4}},
    "aya_vision": {
        "processor": {"patch_size": 8, "img_size": 32, "downsample_factor": 2},
        "image_processor": {"max_patches": 2},
    },
    "internvl": {"processor": {"image_seq_length": 4}, "image_processor": {"max_patches": 2}},
    "ernie4_5_vl_moe": {"video_processor": {"draw_on_frames": False}},
    "step3p7": {"image_processor": {"vision_patch_size": 8, "patch_size": 32}},
    "deepseek_vl_hybrid": {"processor": {"num_image_tokens": 16}},
    "granite4_vision": {
        "processor": {"downsample_rate": "1/2"},
        "image_processor": {"image_grid_pinpoints": _PINPOINTS},
    },
    "janus": {"processor": {"num_image_tokens": 16}},
    "aria": {"image_processor": {"max_image_size": 490}},
    "cohere2_vision": {"image_processor": {"patch_size": 2, "max_patches": 2}},
    "got_ocr2": {"image_processor": {"size": {"height": 512, "width": 512}}},
    "ovis2": {"processor": {"image_seq_length": 16}},
    "phi4_multimodal": {"audio_processor": {"feature_size": 80}},
    "qianfan_ocr": {"processor": {"image_seq_length": 4}, "image_processor": {"max_patches": 2}},
    "vipllava": {"processor": {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}},
    "deepseek_vl": {"processor": {"num_image_tokens": 16}},
    "idefics3": {"processor": {"image_seq_len": 4}},
    "smolvlm": {"processor": {"image_seq_len": 4}, "image_processor": {"do_image_splitting": False}},
    "granite_docling": {"processor": {"image_seq_len": 1}},
}
"""Of a type's processor and its parts."""
_OMNI_IDS = {"vision_start_token_id": "<vision_bos_token>", "audio_start_token_id": "<audio_bos_token>"}
TOKEN_IDS: dict[str, dict[str, Any]] = {
    "molmo2": {"image_patch_id": "<im_patch>"},
    "qwen2_5_omni_thinker": _OMNI_IDS,
    "qwen3_omni_moe_thinker": _OMNI_IDS,
    "aya_vision": {"image_token_id": "<|IMG_PATCH|>", "image_token_index": "<|IMG_PATCH|>"},
    "ovis2": {
        "image_token_id": "<IMG_ATOM>",
        "visual_indicator_token_ids": ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    },
}
"""Tokens of a config that are named otherwise there."""
TOKENS: dict[str, tuple[str, ...]] = {
    "molmo2": ("<im_patch>", "<im_start>", "<im_end>", "<im_col>", "<low_res_im_start>"),
    "ovis2": ("<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    "minimax_m3_vl": ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
}
"""Special tokens that a processor needs and its source does not spell."""
PART_TYPES = {
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "glm4v_moe": "glm4v",
    "musicflamingo": "audioflamingo3",
    "glm_ocr": "glm46v",
    "glmga": "glm46v",
    "qwen3_vl_moe": "qwen3_vl",
    "shieldgemma2": "gemma3",
    "diffusion_gemma": "gemma4",
}
"""Whose parts a type's processor is made of, where transformers lists none for it."""
