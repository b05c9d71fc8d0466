"""A random HunyuanVideo checkpoint in diffusers' layout.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of the published checkpoint.
"""

from __future__ import annotations

from torch import nn

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel, TinyPipeline
from omnistage.models._tiny_common import between
from omnistage.models.ltx.tiny import sharp_init

_IDS = common.following_ids(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))


def text_encoder(scale: float) -> nn.Module:
    """A Llama, on no device; the third hidden states from the end are read."""
    sizes = parts.decoder_sizes(scale, _IDS, vocab=128320, hidden=4096, feed_forward=14336, layers=(4, 32))
    config = transformers.LlamaConfig(max_position_embeddings=8192, **sizes)
    return parts.on_meta(lambda: transformers.LlamaModel(config))


def transformer(scale: float, *, text: int, pooled: int) -> nn.Module:
    """The transformer at `scale`, on no device."""
    head = between(scale, (16, 128), 16)
    return parts.diffusers_model(
        "HunyuanVideoTransformer3DModel",
        in_channels=16,
        out_channels=16,
        num_attention_heads=between(scale, (2, 24)),
        attention_head_dim=head,
        num_layers=between(scale, (2, 20)),
        num_single_layers=between(scale, (2, 40)),
        num_refiner_layers=between(scale, (1, 2)),
        text_embed_dim=text,
        pooled_projection_dim=pooled,
        rope_axes_dim=(head // 8, head * 7 // 16 // 2 * 2, head - head // 8 - head * 7 // 16 // 2 * 2),
    )


def autoencoder(scale: float) -> nn.Module:
    """The VAE: 8 pixels and 4 frames a latent at every scale, on no device."""
    return parts.diffusers_model(
        "AutoencoderKLHunyuanVideo",
        block_out_channels=tuple(between(scale, (8 * n, 128 * n), 8) for n in (1, 2, 4, 4)),
        layers_per_block=2 if scale else 1,
        norm_num_groups=32 if scale else 8,
    )


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    language = text_encoder(scale)
    clip = parts.clip(scale, hidden=(32, 768), layers=(2, 12), projected=False)
    video = transformer(scale, text=language.config.hidden_size, pooled=clip.config.hidden_size)  # type: ignore[union-attr, arg-type]
    return TinyPipeline(
        "HunyuanVideoPipeline",
        {
            "text_encoder": TinyModel(language, common.decoder_init),
            "text_encoder_2": TinyModel(clip, parts.clip_init, parts.clip_hub_name),
            "transformer": TinyModel(video, sharp_init),
            "vae": TinyModel(autoencoder(scale), parts.vae_init),
        },
        {
            "scheduler": parts.flow_scheduler(shift=7.0),
            "tokenizer": parts.qwen_tokenizer(_IDS, "PreTrainedTokenizerFast", qwen=False),
            "tokenizer_2": parts.clip_tokenizer(),
        },
    )


write = parts.writer(checkpoint)
