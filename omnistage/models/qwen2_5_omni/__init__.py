"""Qwen2.5-Omni: a thinker, a talker and a streaming vocoder."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.family import Family
from omnistage.models._qwen_omni.bridges import talker2codec, thinker2talker
from omnistage.models.lazy import lazy, lazy_factory

FAMILY = Family(
    name="qwen2_5_omni",
    architectures=("qwen2_5_omni", "Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={
        f"qwen2_5_omni.{stage}": lazy_factory("qwen2_5_omni.load", f"load_{stage}")
        for stage in ("thinker", "talker", "token2wav")
    },
    bridges={
        "qwen2_5_omni.thinker2talker": thinker2talker,
        "qwen2_5_omni.talker2token2wav": talker2codec,
    },
    processor=lambda model: lazy("qwen2_5_omni.processor", "Qwen25OmniProcessor.load")(model.folder),
    tiny=lazy("qwen2_5_omni.tiny", "write"),
    verify=lazy("qwen2_5_omni.verify", "run"),
    plans_memory=True,
)
