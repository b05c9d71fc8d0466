"""Z-Image: pictures from text, and from pictures."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "z_image",
    (
        "ZImagePipeline",
        "ZImageImg2ImgPipeline",
    ),
    aliases=("z-image",),
)
