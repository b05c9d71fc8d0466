"""What single types need, where the names of settings do not make a small checkpoint of them."""

from __future__ import annotations

from typing import Any

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
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense", "dense"],
            "per_layer_config": {},
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "feature_size": MELS},
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "llava_next": {"image_grid_pinpoints": _PINPOINTS},
    "llava_next_video": {"image_grid_pinpoints": _PINPOINTS, "image_seq_length": 16},
    "llava_onevision": {"image_grid_pinpoints": _PINPOINTS},
    **{t: {"mm_tokens_per_image": 4} for t in ("gemma3", "shieldgemma2")},
    "t5gemma2": {
        "encoder": {"mm_tokens_per_image": 4},
        "decoder": {"layer_types": ["sliding_attention", "full_attention"]},
    },
    "gemma3n": {"vision_config": {"hidden_size": 2048}, "audio_config": {"input_feat_size": 128}},
    "mllama": {
        "vision_config": {
            "num_global_layers": 1,
            "attention_heads": 4,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 192,
        },
        "text_config": {"cross_attention_layers": [1]},
    },
    "llama4": {
        "vision_config": {
            "intermediate_size": 256,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        }
    },
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "alpha": 1.0,
                "mrope_section": [2, 3, 3],
            },
        }
    },
    "fuyu": {"patch_size": 30, "image_size": 60},
    "florence2": {
        "vision_config": {
            "patch_size": [7, 3, 3, 3],
            "depths": [1, 1, 1, 1],
            "embed_dim": [16, 16, 32, 64],
            "num_heads": [2, 2, 2, 4],
            "num_groups": [2, 2, 2, 4],
            "window_size": 4,
        }
    },
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "lfm3_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "minimax_m3_vl": {"vision_config": {"patch_size": 14, "image_size": 56}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "muse_spark": {
        "out_hidden_size": 256,
        "audio_config": {"num_hidden_layers": 4},
        "vision_config": {"layer_types": None},
    },
    "aria": {"vision_config": {"patch_size": 14, "image_size": 490}},
    "got_ocr2": {"vision_config": {"image_size": 512}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    **{
        t: {"projector_config": {"encoder_hidden_size": 1024}, "window_size": 15}
        for t in ("granite_speech", "granite_speech_plus")
    },
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 64}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 64}}},
        "word_timestamp_config": {"blank_token_id": 1279},
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "chameleon": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocabulary_map": {f"IMGIMG{chr(65 + n // 10)}{chr(65 + n % 10)}Z": 1000 + n for n in range(64)},
        "vq_config": {"num_embeddings": 64, "base_channels": 32, "resolution": 32},
    },
    "emu3": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "vocabulary_map": {
            **{f"<|visual token {n:06d}|>": 1000 + n for n in range(64)},
            "<|extra_200|>": 1100,
        },
        "vq_config": {"codebook_size": 64, "base_channels": 32, "hidden_size": 128},
    },
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}}},
    "qwen2_5_omni_thinker": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_start_token_id": 0,
        "audio_start_token_id": 0,
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 0, "audio_start_token_id": 0},
    "muse_glimmer": {"out_hidden_size": 256},
    "fast_vlm": {"vision_config": {"hidden_size": 2048}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0, 1]}},
    "granite4_vision": {
        "image_grid_pinpoints": _PINPOINTS,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
    },
    "phi4_multimodal": {
        "vision_config": {"crop_size": 32},
        "audio_config": {"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 64},
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
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "ngram_vocab_size_base": 1000,
            "split_ngram_parts": 1,
        }
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": [32, 32], "patch_size": 8},
        },
        "projector_pooling_ratio": 2,
        "vision_use_cls_token": True,
    },
}
"""Settings of types whose default config cannot be made small by names alone."""
WITH_TOWERS = dict.fromkeys(("gemma4", "gemma4_unified"), ("vision_config", "audio_config"))
"""Of types whose default config has no towers, unlike published ones."""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    **{t: {"feature_extractor": {"feature_size": 1}} for t in ("vibevoice_asr", "kyutai_speech_to_text")},
    "perception_lm": {
        "processor": {"patch_size": 8, "pooling_ratio": 2},
        "image_processor": {"tile_size": 32, "max_num_tiles": 4},
    },
    "fast_vlm": {
        "processor": {"patch_size": 32, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"},
        "image_processor": {"size": {"shortest_edge": 256}, "crop_size": {"height": 256, "width": 256}},
    },
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
    "lfm2_vl": {"image_processor": {"encoder_patch_size": 8}},
    "llama4": {"processor": {"patch_size": 8, "pixel_shuffle_ratio": 0.5}},
    "chameleon": {"processor": {"image_seq_length": 4}},
    "fuyu": {
        "image_processor": {
            "size": {"height": 60, "width": 60},
            "patch_size": {"height": 30, "width": 30},
        }
    },
    "emu3": {"image_processor": {"min_pixels": 1024, "max_pixels": 4096}},
    "gemma3n": {
        "image_processor": {"size": {"height": 768, "width": 768}},
        "feature_extractor": {"feature_size": 128},
    },
    "shieldgemma2": {"processor": {"image_seq_length": 4}},
    "t5gemma2": {"processor": {"image_seq_length": 4}},
    "minimax_m3_vl": {"image_processor": {"patch_size": 14}, "video_processor": {"patch_size": 14}},
    "paligemma": {"image_processor": {"image_seq_length": 16}},
    "florence2": {"image_processor": {"image_seq_length": 2}},
    "gemma3": {"processor": {"image_seq_length": 4}},
    "gemma4": {"feature_extractor": {"feature_size": 128}},
    "aya_vision": {
        "processor": {"patch_size": 8, "img_size": 32, "downsample_factor": 2},
        "image_processor": {"max_patches": 2},
    },
    "internvl": {"processor": {"image_seq_length": 4}, "image_processor": {"max_patches": 2}},
    "ernie4_5_vl_moe": {"video_processor": {"draw_on_frames": False}},
    "step3p7": {"image_processor": {"vision_patch_size": 8, "patch_size": 32}},
    "deepseek_vl_hybrid": {"processor": {"num_image_tokens": 16}},
    "granite4_vision": {
        "processor": {"downsample_rate": "1/2", "vision_feature_select_strategy": "full"},
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
    "llama4": {"image_token_id": "<|patch|>", "image_token_index": "<|patch|>"},
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
    "fuyu": ("|SPEAKER|", "|NEWLINE|", "<0x04>"),
    "molmo2": ("<im_patch>", "<im_start>", "<im_end>", "<im_col>", "<low_res_im_start>"),
    "ovis2": ("<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    "minimax_m3_vl": ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
}
"""Special tokens that a processor needs and its source does not spell."""
EXTRA_TOKENS = {
    **{t: {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"} for t in ("gemma4", "gemma4_unified")},
    "kosmos-2": {"unk_token": "<unk>"},
    "emu3": {"image_token": "<image>"},
}
"""Names of special tokens that a tokenizer has, where its processor does not ask for them one after the other."""
_GLM_MARKS = {"IMAGE": "<|begin_of_image|>IMAGE<|end_of_image|>", "VIDEO": "<|begin_of_video|>VIDEO<|end_of_video|>"}
MARKS: dict[str, dict[str, str]] = {
    "hunyuan_vl": {"IMAGE": "<image_start_token><image_token><image_end_token>"},
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"), _GLM_MARKS),
}
"""What stands for an item in a chat, where it is more than its token."""
PART_TYPES = {
    "fast_vlm": "llava",
    "mistral4": "mistral_large4",
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

PROCESSORS = {
    "cosmos3_omni": "Qwen3VLProcessor",
    "glm_ocr": "Glm46VProcessor",
    "glmga": "Glm46VProcessor",
    "fast_vlm": "LlavaProcessor",
    "mistral4": "PixtralProcessor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
    "kosmos-2": "Kosmos2Processor",
    "kosmos-2.5": "Kosmos2_5Processor",
}
"""Of types that transformers' own table leaves out."""
NO_TEMPLATE = (
    *("blip", "blip-2", "florence2", "git", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5"),
    *("fuyu", "pix2struct", "pp_formulanet", "udop"),
)
"""Types without a chat template, whose processors find a place for media themselves."""
