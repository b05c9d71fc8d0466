"""Qwen2.5-Omni: thinker → talker → token2wav."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.core.family import Family, InputProcessor, LoadContext
from omnistage.models.qwen2_5_omni.bridges import talker2token2wav, thinker2talker

if TYPE_CHECKING:
    from omnistage.core.checkpoint import Checkpoint
    from omnistage.core.verification import ModelRunner


def _thinker(context: LoadContext) -> object:
    from omnistage.models.qwen2_5_omni.load import load_thinker

    return load_thinker(context)


def _talker(context: LoadContext) -> object:
    from omnistage.models.qwen2_5_omni.load import load_talker

    return load_talker(context)


def _token2wav(context: LoadContext) -> object:
    from omnistage.models.qwen2_5_omni.load import load_token2wav

    return load_token2wav(context)


def _processor(model: Checkpoint) -> InputProcessor:
    from omnistage.models.qwen2_5_omni.processor import Qwen25OmniProcessor

    return Qwen25OmniProcessor.load(model.folder)


def _tiny(folder: Path, **options: object) -> None:
    from omnistage.models.qwen2_5_omni import tiny

    tiny.write(folder, **options)  # type: ignore[arg-type]


def _verify(runner: ModelRunner, **options: object) -> object:
    from omnistage.models.qwen2_5_omni import verify

    return verify.run(runner, **options)  # type: ignore[arg-type]


FAMILY = Family(
    name="qwen2_5_omni",
    architectures=("qwen2_5_omni", "Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={
        "qwen2_5_omni.thinker": _thinker,
        "qwen2_5_omni.talker": _talker,
        "qwen2_5_omni.token2wav": _token2wav,
    },
    bridges={
        "qwen2_5_omni.thinker2talker": thinker2talker,
        "qwen2_5_omni.talker2token2wav": talker2token2wav,
    },
    processor=_processor,
    tiny=_tiny,
    verify=_verify,
    plans_memory=True,
)
