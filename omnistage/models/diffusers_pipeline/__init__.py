"""Any other pipeline of diffusers, run whole: one request at a time, with diffusers' own loop."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.checkpoint import ANY_PIPELINE
from omnistage.core.family import Family
from omnistage.models.lazy import lazy, lazy_factory

FAMILY = Family(
    name="diffusers_pipeline",
    architectures=(ANY_PIPELINE,),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"diffusers_pipeline.draw": lazy_factory("diffusers_pipeline.component", "load")},
    bridges={},
    # The component refuses pictures where its pipeline takes none.
    processor=lambda model: lazy("_diffusers.processor", "DrawingProcessor")(takes_images=True),
)
