"""CSM: text, and clips of a conversation, in; speech out."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.family import Family
from omnistage.models.csm.bridges import frames2codec
from omnistage.models.lazy import lazy, lazy_factory

FAMILY = Family(
    name="csm",
    architectures=("csm", "CsmForConditionalGeneration"),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={f"csm.{stage}": lazy_factory("csm.load", f"load_{stage}") for stage in ("backbone", "codec")},
    bridges={"csm.frames2codec": frames2codec},
    processor=lambda model: lazy("csm.processor", "CsmProcessor.load")(model.folder),
    tiny=lazy("csm.tiny", "write"),
    verify=lazy("csm.verify", "run"),
    plans_memory=True,
)
