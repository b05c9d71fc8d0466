"""A random Qwen2.5-Omni checkpoint in the layout of the published one, from a toy up to the true 7B shapes.

File names, tensor names, token roles and speaker entries are those of the real checkpoint, so everything that loads
this one loads that one. `scale` 0 is a toy of a few million parameters, 1 the true shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.errors import ConfigError
from omnistage.core.verification import Progress
from omnistage.models import _tiny_common as common
from omnistage.models._qwen_omni import tiny as omni
from omnistage.models._tiny_common import Init, between

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

REAL_VOCAB, FIRST_SPECIAL = 152064, 151643
CODEC_TOKENS = 8192  # ids of sound; the talker's few control ids lie above
CODEC_PAD, CODEC_BOS, CODEC_EOS, CODEC_MASK = 8292, 8293, 8294, 8296

# In the order of the real vocabulary, from `FIRST_SPECIAL` on.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>"),
    *("<|IMAGE|>", "<|VIDEO|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
# Ids without a token, in the embedding only: they steer the talker.
_TEXT_PAD, _TEXT_START, _TEXT_END = 151859, 151860, 151861
_SPEAKERS = {"Ethan": 151870, "Chelsie": 151872}

TOKEN_ATTRIBUTES = omni.token_attributes(
    *("<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>")
)
CHAT_TEMPLATE = omni.chat_template(TOKEN_ATTRIBUTES, system="You are a helpful assistant.")


def token_id(real_id: int, vocab_size: int) -> int:
    """Where a special id of the real vocabulary lies in one of `vocab_size`: as far from the end."""
    return real_id - REAL_VOCAB + vocab_size


def special_ids(vocab_size: int) -> dict[str, int]:
    return common.special_ids(SPECIAL_TOKENS, vocab_size, REAL_VOCAB, FIRST_SPECIAL)


def config_for(scale: float, vocab_size: int | None = None) -> Qwen2_5OmniConfig:
    """The configuration at `scale` in [0, 1]: every size grows with it, and 1 is the true 7B model.

    It needs no files, so a benchmark can build the true shapes straight on a device; `initialise` then gives weights
    whose codec ids stay inside the vocoder's vocabulary.
    """
    from transformers import Qwen2_5OmniConfig

    common.check_scale(scale)
    smallest = common.BASE_VOCAB + REAL_VOCAB - FIRST_SPECIAL
    if vocab_size is None:
        vocab_size = between(scale, (smallest, REAL_VOCAB), 16)
    if vocab_size < smallest:
        raise ConfigError(
            f"the tokenizer needs a vocabulary of at least {smallest}; got {vocab_size}", param="vocab_size"
        )
    dtype = str(common.stored_dtype(scale)).removeprefix("torch.")
    heads, head_dim = between(scale, (4, 28), 4), between(scale, (16, 128), 16)
    ids = special_ids(vocab_size)
    shared_ids = {
        "audio_token_index": ids["<|AUDIO|>"],
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }
    thinker = {
        **shared_ids,
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "user_token_id": common.USER_TOKEN_ID,
        "tie_word_embeddings": False,
        "text_config": _text_config(scale, vocab_size, heads, head_dim),
        "vision_config": common.qwen_vision_config(scale, heads * head_dim, heads=4, width=96),
        "audio_config": omni.audio_config(scale, heads * head_dim, n_window=100),
        "dtype": dtype,
    }
    return Qwen2_5OmniConfig(
        thinker_config=thinker,
        talker_config={**shared_ids, **_talker_config(scale, vocab_size, heads * head_dim), "dtype": dtype},
        token2wav_config={"dit_config": _dit_config(scale), "bigvgan_config": _bigvgan_config(scale)},
        enable_audio_output=True,
        architectures=["Qwen2_5OmniModel"],
        dtype=dtype,
    )


def _text_config(scale: float, vocab_size: int, heads: int, head_dim: int) -> dict[str, object]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": heads * head_dim,
        "intermediate_size": between(scale, (128, 18944), 32),
        "num_hidden_layers": between(scale, (3, 28)),
        "num_attention_heads": heads,
        "num_key_value_heads": 2 if scale < 0.5 else 4,
        "max_position_embeddings": 32768,
        "rope_parameters": common.mrope(head_dim),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }


def _talker_config(scale: float, vocab_size: int, embedding_size: int) -> dict[str, object]:
    head_dim = between(scale, (16, 128), 16)
    return {
        "vocab_size": 8448,
        "tts_text_start_token_id": token_id(_TEXT_START, vocab_size),
        "tts_text_end_token_id": token_id(_TEXT_END, vocab_size),
        "tts_text_pad_token_id": token_id(_TEXT_PAD, vocab_size),
        "tts_codec_start_token_id": CODEC_BOS,
        "tts_codec_end_token_id": CODEC_EOS,
        "tts_codec_pad_token_id": CODEC_PAD,
        "tts_codec_mask_token_id": CODEC_MASK,
        "embedding_size": embedding_size,
        "hidden_size": between(scale, (48, 896), 16),
        "intermediate_size": between(scale, (96, 18944), 32),
        "num_hidden_layers": between(scale, (2, 24)),
        "num_attention_heads": between(scale, (4, 12), 4),
        "num_key_value_heads": 2 if scale < 0.5 else 4,
        "head_dim": head_dim,
        "max_position_embeddings": 32768,
        "rope_parameters": common.mrope(head_dim),
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    }


def _dit_config(scale: float) -> dict[str, object]:
    heads, head_dim, layers = between(scale, (4, 16), 4), between(scale, (16, 64), 8), between(scale, (4, 22))
    channels = between(scale, (32, 256), 16)
    return {
        "hidden_size": heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "emb_dim": between(scale, (64, 512), 16),
        "block_size": 24,
        "look_ahead_layers": [10 * layers // 22],
        "look_backward_layers": [0, 20 * layers // 22],
        "repeats": 2,
        "num_embeds": 8193,
        "mel_dim": 80,
        "enc_emb_dim": 192,
        "enc_dim": 128,
        "enc_channels": [channels] * 4 + [3 * channels],
        "enc_attention_channels": between(scale, (16, 64), 8),
        "enc_se_channels": between(scale, (16, 64), 8),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _bigvgan_config(scale: float) -> dict[str, object]:
    # The rates make 240 samples of a mel frame: 24 kHz. Each layer halves the channels.
    if scale == 0.0:
        # Most of a toy's time would go into the real model's 18 blocks; these 8 depend on nearly as many frames.
        return {
            "mel_dim": 80,
            "upsample_initial_channel": 64,
            "upsample_rates": [5, 3, 4, 4],
            "upsample_kernel_sizes": [11, 7, 8, 8],
            "resblock_kernel_sizes": [3, 11],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
        }
    return {
        "mel_dim": 80,
        "upsample_initial_channel": between(scale, (128, 1536), 64),
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
    }


def weight_rule(config: Qwen2_5OmniConfig) -> common.Rule:
    """Weights for varied greedy answers of tokens that exist, and a sound that is not clipped."""
    eos = config.thinker_config.eos_token_id

    def rule(name: str, shape: Sequence[int]) -> Init:
        if name == "thinker.lm_head.weight":
            return common.head_init(shape, (0, common.BASE_VOCAB), (eos, eos + 1))
        if name == "talker.codec_head.weight":
            # The vocoder embeds the ids of sound only; beside them the talker may end.
            return common.head_init(shape, (0, CODEC_TOKENS), (CODEC_EOS, CODEC_EOS + 1))
        if "code2wav_bigvgan_model" in name:
            return _bigvgan_init(name, shape)
        if "code2wav_dit_model" in name:
            return _dit_init(name, shape)
        return common.decoder_init(name, shape)

    return rule


def _dit_init(name: str, shape: Sequence[int]) -> Init:
    if len(shape) == 1:
        return Init(0.05)
    if name.endswith("codec_embed.weight"):
        return Init(1.0)
    if "norm" in name:
        # Gates and shifts near a trained model's: each block adds to the stream, none dominates it.
        return common.normal(shape, gain=0.5)
    return common.normal(shape)


def _bigvgan_init(name: str, shape: Sequence[int]) -> Init:
    if len(shape) == 1:
        return Init(0.1 if name.endswith(("alpha", "beta")) else 0.02)
    if ".ups." in name:
        return common.normal(shape, fan_in=2 * shape[0])  # [in, out, kernel]; about two taps reach each sample
    if "resblocks" in name:
        return common.normal(shape, gain=0.5)
    return common.normal(shape, gain=0.1 if "conv_post" in name else 1.0)


def initialise(model: Qwen2_5OmniForConditionalGeneration, *, seed: int = 0) -> None:
    """Give a model that was built on its device the weights of a checkpoint, without files.

    The values are those of `write` on a CPU; another device gives others for the same seed.
    """
    rule = weight_rule(model.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(common.initial(omni.hub_name(name), parameter.shape, rule, seed, parameter.device))


def speakers(vocab_size: int, seed: int = 0) -> dict[str, dict[str, int | torch.Tensor]]:
    """The voices: the text token that starts a reply, a speaker embedding [1, 192] and a reference mel [1, n, 80]."""
    voices: dict[str, dict[str, int | torch.Tensor]] = {}
    for name, start in _SPEAKERS.items():
        voices[name] = {
            "bos_token": token_id(start, vocab_size),
            "cond": common.initial(f"{name}.cond", (1, 192), lambda *_: Init(1.0), seed),
            "ref_mel": common.initial(f"{name}.ref_mel", (1, 120, 80), lambda *_: Init(1.5, mean=-4.0), seed),
        }
    return voices


def write(folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Progress | None = None) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    prepare_torchvision()
    from transformers import Qwen2_5OmniForConditionalGeneration

    config = config_for(scale)
    common.new_folder(folder)
    vocab_size: int = config.thinker_config.text_config.vocab_size
    ids = special_ids(vocab_size)
    # A small model must not need minutes for a photograph, nor pad every sound to the real model's five minutes.
    full_size = scale == 1.0
    images = common.qwen_image_processor("Qwen2_5OmniProcessor", 12845056 if full_size else 64 * 28 * 28)
    seconds = 300 if full_size else 30
    omni.write_processor(folder, "Qwen2_5OmniProcessor", ids, TOKEN_ATTRIBUTES, CHAT_TEMPLATE, images, seconds=seconds)
    with torch.device("meta"):
        tensors = Qwen2_5OmniForConditionalGeneration(config).state_dict()
    torch.save(speakers(vocab_size, seed), folder / "spk_dict.pt")
    tensors, dtype = (
        {omni.hub_name(name): tensor for name, tensor in tensors.items()},
        partial(omni.stored_dtype, "token2wav.", scale),
    )
    common.write_weights(folder, tensors, weight_rule(config), dtype, seed, progress)
    common.write_generation_config(folder, ids)
    config.save_pretrained(folder)  # last: a folder without it is no checkpoint
