"""The Wan family: how it is recognised, and which of its checkpoints take pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.core.family import AnyProcessor
from omnistage.models._diffusers.family import drawing_family

if TYPE_CHECKING:
    from omnistage.core.checkpoint import Checkpoint


def _processor(model: Checkpoint) -> AnyProcessor:
    from omnistage.models._diffusers.processor import DrawingProcessor
    from omnistage.models.wan.components import takes_pictures

    return DrawingProcessor(takes_images=takes_pictures(model.hf_config))


FAMILY = drawing_family(
    "wan",
    ("WanPipeline", "WanImageToVideoPipeline"),
    processor=_processor,
    variants=("t2v", "t2v_experts", "i2v_clip", "flf2v", "i2v_experts", "ti2v"),
    aliases=("wan2",),
)
