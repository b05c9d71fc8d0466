"""A random Stable Diffusion 3.5 checkpoint in diffusers' layout.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of Stable Diffusion 3.5 Medium.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._tiny_common import between

_INDEX = {
    "feature_extractor": None,
    "image_encoder": None,
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_3": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "tokenizer_3": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "SD3Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}


def transformer(scale: float, *, pooled: int) -> Any:
    """The MMDiT at `scale`, on no device."""
    head = 16 if scale < 0.5 else 64
    heads = between(scale, (4, 24))
    layers = between(scale, (3, 24))
    return parts.on_meta(
        lambda: diffusers().SD3Transformer2DModel(
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
    )


def write(
    folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Callable[[str, float], None] | None = None
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    common.check_scale(scale)
    common.new_folder(folder)
    dtype = parts.stored_dtype(scale)
    clips = {
        "text_encoder": parts.clip(scale, hidden=(32, 768), layers=(2, 12), projected=True),
        "text_encoder_2": parts.clip(scale, hidden=(32, 1280), layers=(2, 32), projected=True),
    }
    pooled = sum(clip.config.projection_dim for clip in clips.values())
    mmdit = transformer(scale, pooled=pooled)
    models = {
        **{name: (clip, parts.clip_draw) for name, clip in clips.items()},
        "text_encoder_3": (parts.t5(scale), parts.t5_draw),
        "transformer": (mmdit, parts.transformer_draw),
        "vae": (parts.autoencoder(scale, scaling_factor=1.5305, shift_factor=0.0609), parts.vae_draw),
    }
    fixed = {"pos_embed.pos_embed": _positions(mmdit.config)}
    for done, (name, (model, rule)) in enumerate(models.items()):
        if progress is not None:
            progress(f"writing {name}", done / len(models))
        parts.write_model(folder / name, model, rule, seed=seed, dtype=dtype, fixed=fixed)
    parts.write_clip_tokenizer(folder / "tokenizer")
    parts.write_clip_tokenizer(folder / "tokenizer_2", pad_token="!")
    parts.write_t5_tokenizer(folder / "tokenizer_3")
    parts.write_flow_scheduler(folder / "scheduler", shift=3.0)
    parts.write_index(folder, "StableDiffusion3Pipeline", _INDEX)
    if progress is not None:
        progress("checkpoint written", 1.0)


def _positions(config: Any) -> Any:
    """The sines that the transformer stores with its weights; a module on no device has none."""
    made = diffusers().models.embeddings.PatchEmbed(
        height=config.sample_size,
        width=config.sample_size,
        patch_size=config.patch_size,
        in_channels=config.in_channels,
        embed_dim=config.num_attention_heads * config.attention_head_dim,
        pos_embed_max_size=config.pos_embed_max_size,
    )
    return made.pos_embed
