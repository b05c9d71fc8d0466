"""Qwen3-Omni: a thinker and a talker with mixtures of experts, a code predictor and a causal vocoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omnistage.core.family import Family
from omnistage.models._qwen_omni.bridges import talker2codec, thinker2talker
from omnistage.models.lazy import lazy, lazy_factory

_PIPELINE = Path(__file__).with_name("pipeline.yaml")


def _pipeline_of(config: Mapping[str, object]) -> Path:
    """Thinking and Captioner checkpoints have no talker."""
    return _PIPELINE if config.get("enable_audio_output", True) else _PIPELINE.with_name("thinker.yaml")


FAMILY = Family(
    name="qwen3_omni_moe",
    architectures=("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration"),
    pipeline=_PIPELINE,
    pipeline_of=_pipeline_of,
    components={
        f"qwen3_omni_moe.{stage}": lazy_factory("qwen3_omni_moe.load", f"load_{stage}")
        for stage in ("thinker", "talker", "code2wav")
    },
    bridges={
        "qwen3_omni_moe.thinker2talker": thinker2talker,
        "qwen3_omni_moe.talker2code2wav": talker2codec,
    },
    processor=lambda model: lazy("qwen3_omni_moe.processor", "Qwen3OmniProcessor.load")(model.folder),
    tiny=lazy("qwen3_omni_moe.tiny", "write"),
    verify=lazy("qwen3_omni_moe.verify", "run"),
    variants=("instruct", "thinking", "captioner"),
    plans_memory=True,
)
