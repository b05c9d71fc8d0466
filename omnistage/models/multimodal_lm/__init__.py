"""Language models that take pictures, sounds or videos, by transformers' own merge of media and text."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.family import Family
from omnistage.models.lazy import lazy, lazy_factory

FAMILY = Family(
    name="multimodal_lm",
    architectures=("*MultimodalLM",),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"multimodal_lm.thinker": lazy_factory("multimodal_lm.component", "load")},
    bridges={},
    processor=lambda model: lazy("multimodal_lm.processor", "MultimodalProcessor.load")(model.folder),
    tiny=lazy("multimodal_lm.tiny", "write"),
    verify=lazy("multimodal_lm.verify", "run"),
    variants=("qwen2_5_vl", "llava", "qwen2_audio"),
    plans_memory=True,
)
