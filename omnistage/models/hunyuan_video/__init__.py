"""HunyuanVideo: videos from text."""

from __future__ import annotations

from omnistage.models._diffusers.family import drawing_family

FAMILY = drawing_family(
    "hunyuan_video",
    ("HunyuanVideoPipeline",),
    takes_images=lambda model: False,
    aliases=("hunyuan",),
)
