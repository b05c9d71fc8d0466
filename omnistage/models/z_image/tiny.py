"""A random Z-Image checkpoint in the layout of the published one, from a toy up to the true shapes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel, TinyPipeline
from omnistage.models._tiny_common import Init, between

REAL_VOCAB, FIRST_SPECIAL = 151936, 151643
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # in the order of the real vocabulary
_MIN_VOCAB = common.BASE_VOCAB + REAL_VOCAB - FIRST_SPECIAL


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    return TinyPipeline(
        "ZImagePipeline",
        {
            "text_encoder": TinyModel(text_encoder(scale), common.decoder_init),
            "transformer": TinyModel(transformer(scale), _transformer_init),
            "vae": TinyModel(parts.autoencoder(scale, scaling_factor=0.3611, shift_factor=0.1159), parts.vae_init),
        },
        {
            "scheduler": parts.flow_scheduler(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=False),
            "tokenizer": parts.qwen_tokenizer(special_ids(scale), chat_template=parts.QWEN3_CHAT),
        },
    )


write = parts.writer(checkpoint)


def special_ids(scale: float) -> dict[str, int]:
    return common.special_ids(SPECIAL_TOKENS, _vocab_size(scale), REAL_VOCAB, FIRST_SPECIAL)


def text_encoder(scale: float) -> nn.Module:
    """Qwen3, at scale 1 that of 4B, on no device."""
    ids = special_ids(scale)
    config = transformers.Qwen3Config(
        vocab_size=_vocab_size(scale),
        hidden_size=_text_width(scale),
        intermediate_size=between(scale, (128, 9728), 32),
        num_hidden_layers=between(scale, (3, 36)),
        num_attention_heads=between(scale, (4, 32), 8 if scale >= 0.5 else 2),
        num_key_value_heads=2 if scale < 0.5 else 8,
        head_dim=between(scale, (16, 128), 16),
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    return parts.on_meta(lambda: transformers.Qwen3ForCausalLM(config))


def transformer(scale: float) -> nn.Module:
    """The single-stream transformer, on no device."""
    heads, head_dim = between(scale, (2, 30)), between(scale, (32, 128), 32)
    return parts.diffusers_model(
        "ZImageTransformer2DModel",
        in_channels=16,
        dim=heads * head_dim,
        n_layers=between(scale, (2, 30)),
        n_refiner_layers=between(scale, (1, 2)),
        n_heads=heads,
        n_kv_heads=heads,
        cap_feat_dim=_text_width(scale),
        axes_dims=[head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8],
        axes_lens=[1536, 512, 512],
    )


def _transformer_init(name: str, shape: Sequence[int]) -> Init:
    if name.endswith("pad_token"):
        return Init(0.5)
    return parts.transformer_init(name, shape)


def _vocab_size(scale: float) -> int:
    return between(scale, (_MIN_VOCAB, REAL_VOCAB), 16)


def _text_width(scale: float) -> int:
    return between(scale, (64, 2560), 64)
