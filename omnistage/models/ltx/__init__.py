"""LTX-Video: videos from text, and from a picture."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "ltx",
    ("LTXPipeline", "LTXImageToVideoPipeline"),
    variants=("v0_9", "v0_9_1"),
    aliases=("ltx_video",),
)
