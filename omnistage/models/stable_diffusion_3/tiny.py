"""A random Stable Diffusion 3.5 checkpoint in diffusers' layout.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of Stable Diffusion 3.5 Medium.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from omnistage.models._diffusers import private_api
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel, TinyPipeline
from omnistage.models._tiny_common import between

if TYPE_CHECKING:
    from diffusers import ConfigMixin, SD3Transformer2DModel


def transformer(scale: float, *, pooled: int) -> SD3Transformer2DModel:
    """The MMDiT at `scale`, on no device."""
    head = 16 if scale < 0.5 else 64
    heads = between(scale, (4, 24))
    layers = between(scale, (3, 24))
    return parts.diffusers_model(
        "SD3Transformer2DModel",
        sample_size=between(scale, (8, 128), 2),
        pos_embed_max_size=between(scale, (24, 384)),
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=head,
        num_attention_heads=heads,
        joint_attention_dim=parts.t5_width(scale),
        caption_projection_dim=heads * head,
        pooled_projection_dim=pooled,
        dual_attention_layers=tuple(range(layers // 2 + 1)),
        qk_norm="rms_norm",
    )


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    first = parts.clip(scale, hidden=(32, 768), layers=(2, 12), projected=True)
    second = parts.clip(scale, hidden=(32, 1280), layers=(2, 32), projected=True)
    mmdit = transformer(scale, pooled=first.config.projection_dim + second.config.projection_dim)
    return TinyPipeline(
        "StableDiffusion3Pipeline",
        {
            "text_encoder": TinyModel(first, parts.clip_init),
            "text_encoder_2": TinyModel(second, parts.clip_init),
            "text_encoder_3": TinyModel(parts.t5(scale), parts.t5_init),
            "transformer": TinyModel(
                mmdit, parts.transformer_init, fixed={"pos_embed.pos_embed": _positions(mmdit.config)}
            ),
            "vae": TinyModel(parts.autoencoder(scale, scaling_factor=1.5305, shift_factor=0.0609), parts.vae_init),
        },
        {
            "feature_extractor": None,
            "image_encoder": None,
            "scheduler": parts.flow_scheduler(shift=3.0),
            "tokenizer": parts.clip_tokenizer(),
            "tokenizer_2": parts.clip_tokenizer(pad_token="!"),
            "tokenizer_3": parts.t5_tokenizer(),
        },
    )


write = parts.writer(checkpoint)


def _positions(config: ConfigMixin) -> Tensor:
    """The sines that the transformer stores with its weights; a module on no device has none."""
    positions: Tensor = private_api.patch_embed(
        height=config.sample_size,
        width=config.sample_size,
        patch_size=config.patch_size,
        in_channels=config.in_channels,
        embed_dim=config.num_attention_heads * config.attention_head_dim,
        pos_embed_max_size=config.pos_embed_max_size,
    ).get_buffer("pos_embed")
    return positions
