"""Random Wan checkpoints in diffusers' layout.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of the variant's published checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from omnistage.hf import transformers
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.tiny import TinyModel, TinyPart, TinyPipeline
from omnistage.models._tiny_common import Init, between

if TYPE_CHECKING:
    from transformers import CLIPVisionModel

# Heads, feed-forward width and layers at scale 1.
_SHAPES: dict[str, tuple[int, int, int]] = {
    "t2v": (12, 8960, 30),
    "t2v_experts": (40, 13824, 40),
    "i2v_clip": (40, 13824, 40),
    "flf2v": (40, 13824, 40),
    "i2v_experts": (40, 13824, 40),
    "ti2v": (24, 14336, 30),
}
_CLIP_VARIANTS, _CHANNEL_VARIANTS = ("i2v_clip", "flf2v"), ("i2v_clip", "flf2v", "i2v_experts")
_BOUNDARIES = {"t2v_experts": 0.875, "i2v_experts": 0.9}
VARIANTS = tuple(_SHAPES)


def transformer(scale: float, variant: str, *, clip: CLIPVisionModel | None) -> nn.Module:
    """A transformer at `scale`, on no device."""
    heads, ffn, layers = _SHAPES[variant]
    latent = 48 if variant == "ti2v" else 16
    tokens = (clip.config.image_size // clip.config.patch_size) ** 2 + 1 if clip is not None else 0
    width = between(scale, (2, heads)) * _head(scale)
    return parts.diffusers_model(
        "WanTransformer3DModel",
        num_attention_heads=width // _head(scale),
        attention_head_dim=_head(scale),
        # The picture's latents and a mask of four channels come with the noise.
        in_channels=latent * 2 + 4 if variant in _CHANNEL_VARIANTS else latent,
        out_channels=latent,
        text_dim=parts.t5_width(scale),
        freq_dim=between(scale, (32, 256), 2),
        ffn_dim=between(scale, (64, ffn), 32),
        num_layers=between(scale, (2, layers)),
        image_dim=clip.config.hidden_size if clip is not None else None,
        added_kv_proj_dim=width if clip is not None else None,
        pos_embed_seq_len=2 * tokens if variant == "flf2v" else None,
    )


def text_encoder(scale: float) -> nn.Module:
    return parts.t5(scale, "UMT5", (1280, 256384))


def image_encoder(scale: float) -> CLIPVisionModel:
    """CLIP's view of a picture, at scale 1 that of ViT-H/14, on no device."""
    head = 16 if scale < 0.5 else 80
    width = between(scale, (32, 1280), head)
    patch = between(scale, (8, 14))
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=width * 4,
        num_hidden_layers=between(scale, (3, 32)),
        num_attention_heads=width // head,
        image_size=patch * between(scale, (4, 16)),
        patch_size=patch,
        hidden_act="gelu",
    )
    return parts.on_meta(lambda: transformers.CLIPVisionModel(config))


def autoencoder(scale: float, *, residual: bool) -> nn.Module:
    """The VAE of Wan 2.1, or (`residual`) that of Wan 2.2's small model, on no device."""
    blocks = 1 if scale == 0 else 2
    if not residual:
        base = between(scale, (8, 96), 8)
        return parts.diffusers_model("AutoencoderKLWan", base_dim=base, num_res_blocks=blocks)
    channels = range(48)
    return parts.diffusers_model(
        "AutoencoderKLWan",
        base_dim=between(scale, (8, 160), 8),
        decoder_base_dim=between(scale, (8, 256), 8),
        num_res_blocks=blocks,
        z_dim=len(channels),
        latents_mean=[round(0.3 * math.sin(c), 4) for c in channels],
        latents_std=[round(1.0 + 0.4 * math.cos(c), 4) for c in channels],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    small, pictures = variant == "ti2v", variant in _CHANNEL_VARIANTS
    clip = image_encoder(scale) if variant in _CLIP_VARIANTS else None
    models = {
        "text_encoder": TinyModel(text_encoder(scale), parts.t5_init),
        "transformer": TinyModel(transformer(scale, variant, clip=clip), _transformer_init),
        "vae": TinyModel(autoencoder(scale, residual=small), _vae_init),
    }
    scheduler = diffusers().UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0 if small else 3.0
    )
    others: dict[str, TinyPart | None] = {
        "tokenizer": parts.t5_tokenizer(),
        "scheduler": TinyPart("diffusers", "UniPCMultistepScheduler", scheduler.save_pretrained),
    }
    if variant in _BOUNDARIES:
        models["transformer_2"] = TinyModel(transformer(scale, variant, clip=None), _transformer_init)
    else:
        others["transformer_2"] = None
    if clip is not None:
        models["image_encoder"] = TinyModel(clip, parts.clip_init, _clip_hub_name)
        edge = clip.config.image_size
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": edge}, crop_size=edge)
        others["image_processor"] = TinyPart("transformers", "CLIPImageProcessor", processor.save_pretrained)
    elif pictures:
        others |= {"image_encoder": None, "image_processor": None}
    order = ("tokenizer", "scheduler", "transformer_2", "text_encoder", "transformer", "vae")
    return TinyPipeline(
        "WanImageToVideoPipeline" if pictures else "WanPipeline",
        models,
        others,
        order=("image_encoder", *order, "image_processor") if pictures else order,
        settings={"boundary_ratio": _BOUNDARIES.get(variant), "expand_timesteps": small},
    )


write = parts.writer(checkpoint, VARIANTS)


def _head(scale: float) -> int:
    return 16 if scale < 0.5 else 128


def _clip_hub_name(name: str) -> str:
    """Published checkpoints have every weight under `vision_model`."""
    return name if name.startswith("vision_model.") else f"vision_model.{name}"


def _transformer_init(name: str, shape: Sequence[int]) -> Init:
    # Most of the 512 text tokens are padding; attention must be sharp for the words among them to have an effect.
    if ".attn2.norm_" in name:
        return Init(0.1, mean=2.0)
    return parts.transformer_init(name, shape)


def _vae_init(name: str, shape: Sequence[int]) -> Init:
    if name.endswith("gamma"):
        return Init(0.1, mean=1.0)
    return parts.vae_init(name, shape)
