"""FLUX.2 klein and dev: pictures from text and from reference pictures."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "flux2",
    ("Flux2KleinPipeline", "Flux2Pipeline"),
    variants=("distilled", "base", "dev"),
    aliases=("flux2_klein",),
)
