"""All that we use of diffusers beyond its public API, in one place.

Helpers of its pipelines that begin with an underscore, and names that it defines but does not export. No other file
of the families touches such a name; a test compares `NAMES` with the installed release.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omnistage.models._diffusers.loading import diffusers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
    from PIL import Image
    from torch import nn

_FLUX_KONTEXT = "pipelines.flux.pipeline_flux_kontext"
_FLUX2_KLEIN = "pipelines.flux2.pipeline_flux2_klein"
_GLM_IMAGE = "models.transformers.transformer_glm_image"
_EMBEDDINGS = "models.embeddings"

NAMES: dict[str, tuple[str, ...] | None] = {
    "DiffusionPipeline._load_connected_pipes": None,
    "FluxPipeline._pack_latents": ("latents", "batch_size", "num_channels_latents", "height", "width"),
    "FluxPipeline._unpack_latents": ("latents", "height", "width", "vae_scale_factor"),
    "FluxPipeline._prepare_latent_image_ids": ("batch_size", "height", "width", "device", "dtype"),
    "Flux2KleinPipeline._pack_latents": ("latents",),
    "Flux2KleinPipeline._patchify_latents": ("latents",),
    "Flux2KleinPipeline._unpatchify_latents": ("latents",),
    "Flux2KleinPipeline._prepare_latent_ids": ("latents",),
    "Flux2KleinPipeline._prepare_text_ids": ("x", "t_coord"),
    "QwenImagePipeline._unpack_latents": ("latents", "height", "width", "vae_scale_factor"),
    "GlmImagePipeline._compute_generation_params": ("image_grid_thw", "is_text_to_image"),
    "GlmImagePipeline._upsample_token_ids": ("token_ids", "token_h", "token_w"),
    f"{_FLUX_KONTEXT}.PREFERRED_KONTEXT_RESOLUTIONS": None,
    f"{_FLUX2_KLEIN}.compute_empirical_mu": ("image_seq_len", "num_steps"),
    f"{_FLUX2_KLEIN}.Flux2ImageProcessor._resize_to_target_area": ("image", "target_area"),
    f"{_GLM_IMAGE}.GlmImageKVCache": ("num_layers",),
    f"{_GLM_IMAGE}.GlmImageKVCache.set_mode": ("self", "mode"),
    f"{_EMBEDDINGS}.PatchEmbed": (
        *("height", "width", "patch_size", "in_channels", "embed_dim", "layer_norm", "flatten", "bias"),
        *("interpolation_scale", "pos_embed_type", "pos_embed_max_size"),
    ),
}
"""Dotted names inside diffusers, and the parameters that we rely on; None for one that is not called."""


def fetches_checkpoints(pipeline_class: type[DiffusionPipeline]) -> bool:
    """Whether a pipeline downloads other checkpoints by itself."""
    return bool(pipeline_class._load_connected_pipes)


# ---------------------------------------------------------------------------------------------------------- FLUX.1


def flux_pack(latents: Tensor) -> Tensor:
    """`[B, patches, 4 * channels]` of `[B, channels, h, w]`: a row of channels for each patch of 2 by 2."""
    packed: Tensor = diffusers().FluxPipeline._pack_latents(latents, *latents.shape)
    return packed


def flux_unpack(packed: Tensor, *, width: int, height: int, vae_scale_factor: int) -> Tensor:
    """`[B, channels, h, w]` of packed latents; the sizes are those of the picture."""
    latents: Tensor = diffusers().FluxPipeline._unpack_latents(packed, height, width, vae_scale_factor)
    return latents


def flux_position_ids(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`[rows * columns, 3]` of a grid of patches."""
    ids: Tensor = diffusers().FluxPipeline._prepare_latent_image_ids(1, rows, columns, device, dtype)
    return ids


def kontext_resolutions() -> list[tuple[int, int]]:
    """(width, height) of the pictures that FLUX.1 Kontext was trained on."""
    diffusers()
    return list(import_module(f"diffusers.{_FLUX_KONTEXT}").PREFERRED_KONTEXT_RESOLUTIONS)


# --------------------------------------------------------------------------------------------------- FLUX.2 klein


def flux2_pack(latents: Tensor) -> Tensor:
    """`[B, h * w, channels]` of `[B, channels, h, w]`."""
    packed: Tensor = diffusers().Flux2KleinPipeline._pack_latents(latents)
    return packed


def flux2_patchify(latents: Tensor) -> Tensor:
    """`[B, 4 * channels, h / 2, w / 2]` of `[B, channels, h, w]`."""
    patches: Tensor = diffusers().Flux2KleinPipeline._patchify_latents(latents)
    return patches


def flux2_unpatchify(patches: Tensor) -> Tensor:
    """The inverse of `flux2_patchify`."""
    latents: Tensor = diffusers().Flux2KleinPipeline._unpatchify_latents(patches)
    return latents


def flux2_position_ids(latents: Tensor) -> Tensor:
    """`[h * w, 4]` of the patches of `[1, channels, h, w]`."""
    ids: Tensor = diffusers().Flux2KleinPipeline._prepare_latent_ids(latents)[0]
    return ids


def flux2_text_ids(embeds: Tensor) -> Tensor:
    """`[n, 4]` of a text's rows `[n, channels]`."""
    ids: Tensor = diffusers().Flux2KleinPipeline._prepare_text_ids(embeds[None])[0]
    return ids


def flux2_shift(tokens: int, steps: int) -> float:
    """The shift (`mu`) of FLUX.2's schedule."""
    diffusers()
    return float(import_module(f"diffusers.{_FLUX2_KLEIN}").compute_empirical_mu(image_seq_len=tokens, num_steps=steps))


def flux2_resize(picture: Image.Image, area: int) -> Image.Image:
    """The picture at about this many pixels."""
    diffusers()
    processor = import_module(f"diffusers.{_FLUX2_KLEIN}").Flux2ImageProcessor
    resized: Image.Image = processor._resize_to_target_area(picture, area)
    return resized


# ----------------------------------------------------------------------------------------------------- the others


def qwen_image_unpack(packed: Tensor, *, width: int, height: int, vae_scale_factor: int) -> Tensor:
    """`[B, channels, 1, h, w]` of packed latents; the sizes are those of the picture."""
    latents: Tensor = diffusers().QwenImagePipeline._unpack_latents(packed, height, width, vae_scale_factor)
    return latents


def glm_generation_params(grids: Tensor, *, from_text: bool) -> tuple[int, int, int, int]:
    """New tokens, where the picture's begin among them, and the rows and columns of its grid."""
    count, offset, rows, columns = diffusers().GlmImagePipeline._compute_generation_params(grids, from_text)
    return count, offset, rows, columns


def glm_upsample(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """`[1, 4 * n]` of the `n` picture tokens of a grid, as the transformer takes them."""
    upsampled: Tensor = diffusers().GlmImagePipeline._upsample_token_ids(tokens, rows, columns)
    return upsampled


def glm_cache(num_layers: int, mode: str) -> GlmImageKVCache:
    """Keys and values of input pictures; `mode` is "write" or "read"."""
    diffusers()
    cache = import_module(f"diffusers.{_GLM_IMAGE}").GlmImageKVCache(num_layers=num_layers)
    cache.set_mode(mode)
    return cache


def patch_embed(**settings: int) -> nn.Module:
    """Stable Diffusion 3's patch embedding, with the table of positions that checkpoints store."""
    diffusers()
    module: nn.Module = import_module(f"diffusers.{_EMBEDDINGS}").PatchEmbed(**settings)
    return module
