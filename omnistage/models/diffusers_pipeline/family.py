"""Any pipeline of diffusers that no other family claims."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.config.checkpoint import ANY_PIPELINE
from omnistage.core.family import AnyProcessor, Family, LoadContext

if TYPE_CHECKING:
    from omnistage.core.checkpoint import Checkpoint


def _draw(context: LoadContext) -> object:
    from omnistage.models.diffusers_pipeline.component import load

    return load(context)


def _processor(model: Checkpoint) -> AnyProcessor:
    from omnistage.models._diffusers.processor import DrawingProcessor

    return DrawingProcessor(takes_images=True)  # the component refuses them where its pipeline takes none


FAMILY = Family(
    name="diffusers_pipeline",
    architectures=(ANY_PIPELINE,),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"diffusers_pipeline.draw": _draw},
    bridges={},
    processor=_processor,
)
