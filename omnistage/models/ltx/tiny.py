"""Random LTX-Video checkpoints in diffusers' layout.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of LTX-Video 0.9 (2B).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel, TinyPipeline
from omnistage.models._tiny_common import Init, between

VARIANTS = ("v0_9", "v0_9_1")


def transformer(scale: float, channels: int) -> nn.Module:
    """The transformer at `scale`, on no device."""
    heads, head = between(scale, (2, 32)), between(scale, (16, 64), 16)
    return parts.diffusers_model(
        "LTXVideoTransformer3DModel",
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=heads,
        attention_head_dim=head,
        cross_attention_dim=heads * head,
        num_layers=between(scale, (2, 28)),
        caption_channels=parts.t5_width(scale),
    )


def autoencoder(scale: float, *, timestep_conditioning: bool) -> nn.Module:
    """The VAE: 32 pixels and 8 frames a latent at every scale, on no device."""
    widths = tuple(between(scale, (8 * n, 128 * n), 8) for n in (1, 2, 4, 4))
    layers = (4, 3, 3, 3, 4) if scale else (1, 1, 1, 1, 1)
    decoder: dict[str, object] = {"decoder_block_out_channels": widths, "decoder_layers_per_block": layers}
    if timestep_conditioning:  # 0.9.1's decoder, without the noise that it injects: that has no seed
        decoder = {
            "decoder_block_out_channels": tuple(between(scale, (8 * n, 256 * n), 8) for n in (1, 2, 4)),
            "decoder_layers_per_block": (5, 6, 7, 8) if scale else (1, 1, 1, 1),
            "decoder_spatio_temporal_scaling": (True, True, True),
            "decoder_inject_noise": (False, False, False, False),
            "upsample_residual": (True, True, True),
            "upsample_factor": (2, 2, 2),
            "timestep_conditioning": True,
        }
    return parts.diffusers_model(
        "AutoencoderKLLTXVideo",
        latent_channels=between(scale, (16, 128), 16),
        block_out_channels=widths,
        layers_per_block=layers,
        **decoder,
    )


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    vae = autoencoder(scale, timestep_conditioning=variant == "v0_9_1")
    channels = int(vae.config.latent_channels)  # type: ignore[union-attr, arg-type]
    positions = torch.arange(channels)
    statistics = {
        "latents_mean": (0.3 * torch.sin(positions)).round(decimals=4),
        "latents_std": (1.0 + 0.4 * torch.cos(positions)).round(decimals=4),
    }
    return TinyPipeline(
        "LTXPipeline",
        {
            "text_encoder": TinyModel(parts.t5(scale), parts.t5_init),
            "transformer": TinyModel(transformer(scale, channels), sharp_init),
            "vae": TinyModel(vae, parts.vae_init, fixed=statistics),
        },
        {
            "scheduler": parts.flow_scheduler(
                use_dynamic_shifting=True, base_image_seq_len=1024, base_shift=0.95, max_shift=2.05, shift_terminal=0.1
            ),
            "tokenizer": parts.t5_tokenizer(),
        },
    )


write = parts.writer(checkpoint, VARIANTS)


def sharp_init(name: str, shape: Sequence[int]) -> Init:
    """A transformer whose attention is sharp, for single words to have an effect."""
    if ".attn2.norm_" in name or ".attn.norm_" in name:
        return Init(0.1, mean=2.0)
    return parts.transformer_init(name, shape)
