"""A random FLUX.1 checkpoint in diffusers' layout: dev, schnell or Kontext.

`scale` 0 is a toy of about a million parameters, 1 has FLUX.1's own shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnistage.core.errors import ConfigError
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._tiny_common import between

VARIANTS = {"dev": "FluxPipeline", "schnell": "FluxPipeline", "kontext": "FluxKontextPipeline"}

_INDEX = {
    "feature_extractor": None,
    "image_encoder": None,
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "FluxTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}


def transformer(scale: float, *, pooled: int, guided: bool) -> Any:
    """FLUX's transformer at `scale`, on no device; `guided` is dev's, which is told its guidance."""
    head = 32 if scale < 0.5 else 128
    return parts.on_meta(
        lambda: diffusers().FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=between(scale, (2, 19)),
            num_single_layers=between(scale, (2, 38)),
            attention_head_dim=head,
            num_attention_heads=between(scale, (2, 24)),
            joint_attention_dim=parts.t5_width(scale),
            pooled_projection_dim=pooled,
            guidance_embeds=guided,
            axes_dims_rope=(head // 8, head * 7 // 16, head * 7 // 16),
        )
    )


def write(
    folder: Path,
    *,
    seed: int = 0,
    scale: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
    variant: str = "dev",
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    common.check_scale(scale)
    if variant not in VARIANTS:
        raise ConfigError(f"there is no {variant!r}; known: {', '.join(VARIANTS)}", param="variant")
    common.new_folder(folder)
    clip = parts.clip(scale, hidden=(32, 768), layers=(2, 12), projected=False)
    guided = variant != "schnell"
    models = {
        "text_encoder": (clip, parts.clip_draw),
        "text_encoder_2": (parts.t5(scale), parts.t5_draw),
        "transformer": (transformer(scale, pooled=clip.config.hidden_size, guided=guided), parts.transformer_draw),
        "vae": (parts.autoencoder(scale, scaling_factor=0.3611, shift_factor=0.1159), parts.vae_draw),
    }
    for done, (name, (model, rule)) in enumerate(models.items()):
        if progress is not None:
            progress(f"writing {name}", done / len(models))
        hub_name = parts.clip_hub_name if name == "text_encoder" else str
        dtype = parts.stored_dtype(scale)
        parts.write_model(folder / name, model, rule, seed=seed, dtype=dtype, hub_name=hub_name)
    parts.write_clip_tokenizer(folder / "tokenizer")
    parts.write_t5_tokenizer(folder / "tokenizer_2")
    # schnell was distilled without the shift that grows with the picture.
    shift = {"shift": 3.0, "use_dynamic_shifting": True} if guided else {"shift": 1.0}
    parts.write_flow_scheduler(folder / "scheduler", **shift)
    parts.write_index(folder, VARIANTS[variant], _INDEX)
    if progress is not None:
        progress("checkpoint written", 1.0)
