"""Any other pipeline of diffusers, run whole: one request at a time, with diffusers' own loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omnistage.config.checkpoint import ANY_PIPELINE
from omnistage.core.family import Family
from omnistage.models.lazy import lazy, lazy_factory


def _pipeline_of(index: Mapping[str, object]) -> Path:
    sound = lazy("diffusers_pipeline.inspection", "is_sound_pipeline")(index.get("_class_name"))
    return Path(__file__).with_name("sound.yaml" if sound else "pipeline.yaml")


FAMILY = Family(
    name="diffusers_pipeline",
    architectures=(ANY_PIPELINE,),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"diffusers_pipeline.draw": lazy_factory("diffusers_pipeline.component", "load")},
    bridges={},
    processor=lambda model: lazy("diffusers_pipeline.processor", "processor_of")(model.hf_config),
    tiny=lazy("diffusers_pipeline.tiny", "write"),
    variants=("stable_audio",),
    pipeline_of=_pipeline_of,
)
