"""Random Wan checkpoints in diffusers' layout.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of the variant's published checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from omnistage.core.errors import ConfigError
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._tiny_common import Draw, between

Variant = Literal["t2v", "t2v_experts", "i2v_clip", "flf2v", "i2v_experts", "ti2v"]

# Heads, feed-forward width and layers at scale 1.
_SHAPES: dict[Variant, tuple[int, int, int]] = {
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
_TEXT_VOCAB = (1280, 256384)


def transformer(scale: float, variant: Variant, *, clip: Any | None) -> Any:
    """A transformer at `scale`, on no device."""
    heads, ffn, layers = _SHAPES[variant]
    latent = 48 if variant == "ti2v" else 16
    tokens = (clip.config.image_size // clip.config.patch_size) ** 2 + 1 if clip is not None else 0
    width = between(scale, (2, heads)) * _head(scale)
    return parts.on_meta(
        lambda: diffusers().WanTransformer3DModel(
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
    )


def text_encoder(scale: float) -> Any:
    """UMT5's encoder, at scale 1 that of umt5-xxl, on no device."""
    width, head = parts.t5_width(scale), 16 if scale < 0.5 else 64
    config = transformers.UMT5Config(
        vocab_size=between(scale, _TEXT_VOCAB, 64),
        d_model=width,
        d_kv=head,
        d_ff=between(scale, (96, 10240), 32),
        num_layers=between(scale, (2, 24)),
        num_heads=width // head,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return parts.on_meta(lambda: transformers.UMT5EncoderModel(config))


def image_encoder(scale: float) -> Any:
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


def autoencoder(scale: float, *, residual: bool) -> Any:
    """The VAE of Wan 2.1, or (`residual`) that of Wan 2.2's small model, on no device."""
    blocks = 1 if scale == 0 else 2
    if not residual:
        base = between(scale, (8, 96), 8)
        return parts.on_meta(lambda: diffusers().AutoencoderKLWan(base_dim=base, num_res_blocks=blocks))
    channels = range(48)
    return parts.on_meta(
        lambda: diffusers().AutoencoderKLWan(
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
    )


def write(
    folder: Path,
    *,
    seed: int = 0,
    scale: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
    variant: Variant = "t2v",
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    common.check_scale(scale)
    if variant not in _SHAPES:
        raise ConfigError(f"there is no {variant!r}; known: {', '.join(_SHAPES)}", param="variant")
    common.new_folder(folder)
    clip = image_encoder(scale) if variant in _CLIP_VARIANTS else None
    models: dict[str, tuple[Any, common.Rule]] = {
        "text_encoder": (text_encoder(scale), parts.t5_draw),
        "transformer": (transformer(scale, variant, clip=clip), _transformer_draw),
        "vae": (autoencoder(scale, residual=variant == "ti2v"), _vae_draw),
    }
    if variant in _BOUNDARIES:
        models["transformer_2"] = (transformer(scale, variant, clip=None), _transformer_draw)
    if clip is not None:
        models["image_encoder"] = (clip, parts.clip_draw)
        edge = clip.config.image_size
        transformers.CLIPImageProcessor(size={"shortest_edge": edge}, crop_size=edge).save_pretrained(
            folder / "image_processor"
        )
    for done, (name, (model, rule)) in enumerate(models.items()):
        if progress is not None:
            progress(f"writing {name}", done / len(models))
        parts.write_model(
            folder / name,
            model,
            rule,
            seed=seed,
            dtype=parts.stored_dtype(scale),
            hub_name=_clip_hub_name if name == "image_encoder" else str,
        )
    parts.write_t5_tokenizer(folder / "tokenizer")
    diffusers().UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0 if variant == "ti2v" else 3.0
    ).save_pretrained(folder / "scheduler")
    _write_index(folder, variant, {name: type(model) for name, (model, _) in models.items()})
    if progress is not None:
        progress("checkpoint written", 1.0)


def _write_index(folder: Path, variant: Variant, classes: dict[str, type[Any]]) -> None:
    named = {
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
        "transformer_2": None,
        **{name: (cls.__module__.partition(".")[0], cls.__name__) for name, cls in classes.items()},
    }
    pictures = variant in _CHANNEL_VARIANTS
    if pictures:
        clip = "image_encoder" in classes
        named = {
            "image_encoder": None,
            **named,
            "image_processor": ("transformers", "CLIPImageProcessor") if clip else None,
        }
    parts.write_index(
        folder,
        "WanImageToVideoPipeline" if pictures else "WanPipeline",
        named,
        boundary_ratio=_BOUNDARIES.get(variant),
        expand_timesteps=variant == "ti2v",
    )


def _head(scale: float) -> int:
    return 16 if scale < 0.5 else 128


def _clip_hub_name(name: str) -> str:
    """Published checkpoints have every weight under `vision_model`."""
    return name if name.startswith("vision_model.") else f"vision_model.{name}"


def _transformer_draw(name: str, shape: Sequence[int]) -> Draw:
    # Most of the 512 text tokens are padding; attention must be sharp for the words among them to be felt.
    if ".attn2.norm_" in name:
        return Draw(0.1, mean=2.0)
    return parts.transformer_draw(name, shape)


def _vae_draw(name: str, shape: Sequence[int]) -> Draw:
    if name.endswith("gamma"):
        return Draw(0.1, mean=1.0)
    return parts.vae_draw(name, shape)
