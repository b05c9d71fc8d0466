"""Wan 2.1 and 2.2: videos from text, and from pictures."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family
from omnistage.models.lazy import lazy

FAMILY = drawing_family(
    "wan",
    ("WanPipeline", "WanImageToVideoPipeline"),
    takes_images=lambda model: lazy("wan.components", "takes_pictures")(model.hf_config),
    variants=("t2v", "t2v_experts", "i2v_clip", "flf2v", "i2v_experts", "ti2v"),
    aliases=("wan2",),
)
