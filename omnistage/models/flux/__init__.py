"""FLUX.1 dev, schnell and Kontext: pictures from text, from pictures, and by instruction."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "flux",
    (
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "FluxKontextPipeline",
    ),
    variants=("dev", "schnell", "kontext"),
    aliases=("flux1",),
)
