"""A random FLUX.1 checkpoint in diffusers' layout: dev, schnell, Kontext or Fill.

`scale` 0 is a toy of about a million parameters, 1 has FLUX.1's own shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel, TinyPipeline
from omnistage.models._tiny_common import between

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel

VARIANTS = {
    "dev": "FluxPipeline",
    "schnell": "FluxPipeline",
    "kontext": "FluxKontextPipeline",
    "fill": "FluxFillPipeline",
}
_FILL_CHANNELS = 64 + 64 + 256
"""Of a patch: its latents, those of the picture that is kept, and the mask's pixels."""


def transformer(scale: float, *, pooled: int, guided: bool, fill: bool = False) -> FluxTransformer2DModel:
    """FLUX's transformer at `scale`, on no device; `guided` is dev's, which takes its guidance as an input."""
    head = 32 if scale < 0.5 else 128
    return parts.diffusers_model(
        "FluxTransformer2DModel",
        patch_size=1,
        in_channels=_FILL_CHANNELS if fill else 64,
        out_channels=64,
        num_layers=between(scale, (2, 19)),
        num_single_layers=between(scale, (2, 38)),
        attention_head_dim=head,
        num_attention_heads=between(scale, (2, 24)),
        joint_attention_dim=parts.t5_width(scale),
        pooled_projection_dim=pooled,
        guidance_embeds=guided,
        axes_dims_rope=(head // 8, head * 7 // 16, head * 7 // 16),
    )


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    clip = parts.clip(scale, hidden=(32, 768), layers=(2, 12), projected=False)
    guided = variant != "schnell"
    flux = transformer(scale, pooled=clip.config.hidden_size, guided=guided, fill=variant == "fill")
    # schnell was distilled without the shift that grows with the picture.
    shift = {"shift": 3.0, "use_dynamic_shifting": True} if guided else {"shift": 1.0}
    return TinyPipeline(
        VARIANTS[variant],
        {
            "text_encoder": TinyModel(clip, parts.clip_init, parts.clip_hub_name),
            "text_encoder_2": TinyModel(parts.t5(scale), parts.t5_init),
            "transformer": TinyModel(flux, parts.transformer_init),
            "vae": TinyModel(parts.autoencoder(scale, scaling_factor=0.3611, shift_factor=0.1159), parts.vae_init),
        },
        {
            **({} if variant == "fill" else {"feature_extractor": None, "image_encoder": None}),
            "scheduler": parts.flow_scheduler(**shift),
            "tokenizer": parts.clip_tokenizer(),
            "tokenizer_2": parts.t5_tokenizer(),
        },
    )


write = parts.writer(checkpoint, VARIANTS)
