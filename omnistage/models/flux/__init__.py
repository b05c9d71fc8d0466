"""FLUX.1 dev, schnell, Kontext and Fill: pictures from text, from pictures, by instruction, and into masks."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "flux",
    (
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "FluxKontextPipeline",
        "FluxFillPipeline",
    ),
    variants=("dev", "schnell", "kontext", "fill"),
    aliases=("flux1",),
)
