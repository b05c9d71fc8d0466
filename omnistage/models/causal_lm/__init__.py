"""Plain decoder-only language models."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.family import Family
from omnistage.models.lazy import lazy, lazy_factory

FAMILY = Family(
    name="causal_lm",
    architectures=("*",),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"causal_lm.thinker": lazy_factory("causal_lm.component", "load_any")},
    bridges={},
    processor=lambda model: lazy("causal_lm.processor", "CausalLMProcessor.load")(model.folder),
    tiny=lazy("causal_lm.tiny", "write"),
    verify=lazy("causal_lm.verify", "run"),
    plans_memory=True,
)
