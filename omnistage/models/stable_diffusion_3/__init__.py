"""Stable Diffusion 3 and 3.5: pictures from text, and from pictures."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "stable_diffusion_3",
    (
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
    ),
    aliases=("sd3",),
)
