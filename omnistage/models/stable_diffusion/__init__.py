"""Stable Diffusion 1.x, 2.x and XL, with and without ControlNet: pictures from text, and from pictures."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "stable_diffusion",
    (
        "StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "StableDiffusionControlNetPipeline",
        "StableDiffusionControlNetImg2ImgPipeline",
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLControlNetPipeline",
        "StableDiffusionXLControlNetImg2ImgPipeline",
    ),
    variants=("v1", "v2", "inpaint", "lcm", "xl", "controlnet", "xl_controlnet"),
    aliases=("sd", "sdxl"),
)
