"""A random Qwen3-Omni checkpoint in the layout of the published one, from a toy up to the true 30B-A3B shapes.

File names, tensor names and token roles are those of the real checkpoint, so everything that loads this one loads that
one. `scale` 0 is a toy of about a million parameters, 1 the true shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.family import THINK_END, THINK_START
from omnistage.core.verification import Progress
from omnistage.models import _tiny_common as common
from omnistage.models._qwen_omni import tiny as omni
from omnistage.models._tiny_common import Init, between

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig

REAL_VOCAB, FIRST_SPECIAL = 152064, 151643
CODES, TALKER_VOCAB = 2048, 3072  # ids of sound; the talker's control ids lie above
CODEC_PAD, CODEC_BOS, CODEC_EOS = 2148, 2149, 2150
VARIANTS = ("instruct", "thinking", "captioner")
_SPEAKERS = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}

# In the order of the real vocabulary, from `FIRST_SPECIAL` on.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
TOKEN_ATTRIBUTES = omni.token_attributes(
    *("<|image_pad|>", "<|audio_pad|>", "<|video_pad|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>"),
)


def special_ids(vocab_size: int) -> dict[str, int]:
    return common.special_ids(SPECIAL_TOKENS, vocab_size, REAL_VOCAB, FIRST_SPECIAL)


def config_for(scale: float, *, speaks: bool = True) -> Qwen3OmniMoeConfig:
    """The configuration at `scale` in [0, 1]: every size grows with it, and 1 is the true 30B-A3B model."""
    from transformers import Qwen3OmniMoeConfig

    common.check_scale(scale)
    vocab_size = between(scale, (common.BASE_VOCAB + REAL_VOCAB - FIRST_SPECIAL, REAL_VOCAB), 16)
    dtype = str(common.stored_dtype(scale)).removeprefix("torch.")
    ids, words = special_ids(vocab_size), common.base_vocabulary()[0]
    width, layers = between(scale, (64, 2048), 64), between(scale, (4, 48))
    tokens = {
        **{f"{kind}_token_id": ids[f"<|{kind}_pad|>"] for kind in ("audio", "image", "video")},
        **{f"{side}_token_id": ids[f"<|{side}|>"] for side in ("audio_start", "audio_end")},
        **{f"{side}_token_id": ids[f"<|{side}|>"] for side in ("vision_start", "vision_end")},
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "dtype": dtype,
    }
    thinker = {
        **tokens,
        "user_token_id": words["user"],
        "text_config": {**_text_config(scale, width, layers), "vocab_size": vocab_size},
        "vision_config": _vision_config(scale, width),
        "audio_config": omni.audio_config(scale, width, **_audio_sizes(scale)),
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config={**tokens, **_talker_config(scale, width, layers)} if speaks else None,
        code2wav_config=_code2wav_config(scale) if speaks else None,
        enable_audio_output=speaks,
        im_start_token_id=ids["<|im_start|>"],
        im_end_token_id=ids["<|im_end|>"],
        tts_pad_token_id=ids["<tts_pad>"],
        tts_bos_token_id=ids["<tts_text_bos>"],
        tts_eos_token_id=ids["<tts_text_eod>"],
        **{f"{role}_token_id": words[role] for role in ("user", "assistant", "system")},
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
        dtype=dtype,
    )


def _mrope(head_dim: int) -> dict[str, object]:
    """Time, height and width share the head's half in the ratio 24 : 20 : 20, interleaved."""
    side = head_dim * 20 // 128
    section = [head_dim // 2 - 2 * side, side, side]
    return {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": section, "mrope_interleaved": True}


def _layers(layers: int, heads: int, kv_heads: int, hidden: int, feed_forward: int) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
    }


def _experts(scale: float, per_token: int, width: int) -> dict[str, object]:
    return {
        "num_experts": between(scale, (8, 128), 8),
        "num_experts_per_tok": between(scale, (2, per_token)),
        "moe_intermediate_size": between(scale, (32, width), 32),
        "norm_topk_prob": True,
        "max_position_embeddings": 65536,
        "decoder_sparse_step": 1,
    }


def _text_config(scale: float, width: int, layers: int) -> dict[str, object]:
    head_dim = between(scale, (16, 128), 16)
    return {
        **_experts(scale, 8, 768),
        **_layers(layers, between(scale, (4, 32), 4), 2 if scale < 0.5 else 4, width, between(scale, (64, 768), 32)),
        "head_dim": head_dim,
        "rope_parameters": _mrope(head_dim),
        "tie_word_embeddings": False,
    }


def _vision_config(scale: float, width: int) -> dict[str, object]:
    heads, depth = between(scale, (4, 16), 4), between(scale, (4, 27))
    return {
        "depth": depth,
        "hidden_size": heads * between(scale, (16, 72), 8),
        "intermediate_size": between(scale, (96, 4304), 16),
        "num_heads": heads,
        "out_hidden_size": width,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [depth * number // 27 for number in (8, 16, 24)],
    }


def _audio_sizes(scale: float) -> dict[str, int]:
    channels = between(scale, (16, 480), 16)
    return {"n_window": 50, "n_window_infer": 800, "conv_chunksize": 500, "downsample_hidden_size": channels}


def _talker_config(scale: float, thinker_width: int, thinker_layers: int) -> dict[str, object]:
    width, head_dim, groups = between(scale, (48, 1024), 16), between(scale, (16, 128), 16), between(scale, (4, 16))
    layers, depth, heads = between(scale, (2, 20)), between(scale, (2, 5)), between(scale, (4, 16), 4)
    return {
        "thinker_hidden_size": thinker_width,
        "accept_hidden_layer": thinker_layers // 2,
        "num_code_groups": groups,
        "codec_pad_id": CODEC_PAD,
        "codec_bos_id": CODEC_BOS,
        "codec_eos_token_id": CODEC_EOS,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": _SPEAKERS,
        "spatial_merge_size": 2,
        "text_config": {
            **_experts(scale, 6, 384),
            "vocab_size": TALKER_VOCAB,
            **_layers(layers, heads, 2, width, between(scale, (96, 2048), 32)),
            "shared_expert_intermediate_size": between(scale, (32, 768), 32),
            "head_dim": head_dim,
            "rope_parameters": _mrope(head_dim),
        },
        "code_predictor_config": {
            "vocab_size": CODES,
            **_layers(depth, heads, 2 if scale < 0.5 else 8, width, between(scale, (96, 3072), 32)),
            "head_dim": head_dim,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "num_code_groups": groups,
        },
    }


def _code2wav_config(scale: float) -> dict[str, object]:
    layers, heads = between(scale, (2, 8)), between(scale, (4, 16), 4)
    return {
        **_layers(layers, heads, heads, heads * between(scale, (16, 64), 16), between(scale, (96, 3072), 32)),
        "codebook_size": CODES,
        "num_quantizers": between(scale, (4, 16)),
        "max_position_embeddings": 8000,
        "sliding_window": 72,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        # Each rate halves the channels; together they make 1,920 samples of a frame: 24 kHz.
        "decoder_dim": between(scale, (64, 1536), 64),
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }


def hub_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of transformers' model by the names of the published checkpoint, which has each expert for itself."""
    experts, _, matrix = omni.hub_name(name).rpartition(".experts.")
    if not experts:
        yield matrix, tensor
        return
    for number, expert in enumerate(tensor):
        parts = {"gate_proj": 0, "up_proj": 1} if matrix == "gate_up_proj" else {"down_proj": 0}
        for part, half in parts.items():
            yield f"{experts}.experts.{number}.{part}.weight", expert.chunk(len(parts))[half]


def weight_rule(config: Qwen3OmniMoeConfig) -> common.Rule:
    """Weights for varied greedy answers of tokens that exist, and a sound that is not clipped."""
    eos = config.im_end_token_id

    def rule(name: str, shape: Sequence[int]) -> Init:
        if name == "thinker.lm_head.weight":
            return common.head_init(shape, (0, common.BASE_VOCAB), (eos, eos + 1))
        if name == "talker.codec_head.weight":
            return common.head_init(shape, (0, CODES), (CODEC_EOS, CODEC_EOS + 1))
        if name.startswith("code2wav."):
            return _code2wav_init(name, shape)
        if re.search(r"codec_embedding|pos_embed", name):
            return Init(0.5)
        if name.endswith(("q_norm.weight", "k_norm.weight")):  # attention that looks at single tokens
            return Init(0.1, mean=2.0)
        if ".lm_head." in name or name.endswith("mlp.gate.weight"):
            return common.normal(shape, gain=4.0)  # spread well apart: rounding must not change a choice
        return common.decoder_init(name, shape)

    return rule


def _code2wav_init(name: str, shape: Sequence[int]) -> Init:
    if len(shape) == 1:
        return Init(0.1, mean=0.5) if name.endswith(("scale", "gamma")) else common.vector_init(name)
    if "embedding" in name:
        return Init(1.0)
    if re.search(r"decoder\.\d+\.block\.1\.conv", name) or re.search(r"upsample\.\d+\.0", name):
        return common.normal(shape, fan_in=2 * shape[0])  # [in, out, kernel]; about two taps reach each sample
    # Residual units add little to the stream, and the last layer makes a sound of it that is not clipped.
    quiet = re.search(r"conv2\.conv\.weight|decoder\.6\.conv\.weight", name)
    return common.normal(shape, gain=0.2 if quiet else 1.0)


def write(
    folder: Path,
    *,
    seed: int = 0,
    scale: float = 0.0,
    variant: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty. Only the variant `instruct` speaks."""
    prepare_torchvision()
    from transformers import Qwen3OmniMoeForConditionalGeneration

    common.start(folder, scale, variant, VARIANTS)
    config = config_for(scale, speaks=variant in (None, VARIANTS[0]))
    ids = special_ids(config.thinker_config.text_config.vocab_size)
    # A small model must not need minutes for a photograph.
    max_pixels = 12845056 if scale == 1.0 else 64 * 32 * 32
    images = common.qwen_image_processor("Qwen3OmniMoeProcessor", max_pixels, patch_size=16)
    template = omni.chat_template(TOKEN_ATTRIBUTES, thinks=variant == "thinking")
    visible = (THINK_START, THINK_END)
    omni.write_processor(
        folder, "Qwen3OmniMoeProcessor", ids, TOKEN_ATTRIBUTES, template, images, seconds=300, visible=visible
    )
    with torch.device("meta"):
        tensors = Qwen3OmniMoeForConditionalGeneration(config).state_dict()
    tensors, dtype = (
        dict(pair for name, tensor in tensors.items() for pair in hub_tensors(name, tensor)),
        partial(omni.stored_dtype, "code2wav.", scale),
    )
    common.write_weights(folder, tensors, weight_rule(config), dtype, seed, progress)
    common.write_generation_config(folder, ids)
    config.save_pretrained(folder)  # last: a folder without it is no checkpoint
