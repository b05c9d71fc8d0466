"""Any plain `transformers` causal LM as a one-stage text pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.core.family import Family, InputProcessor, LoadContext

if TYPE_CHECKING:
    from omnistage.core.checkpoint import Checkpoint
    from omnistage.core.verification import ModelRunner


def _thinker(context: LoadContext) -> object:
    from omnistage.models.causal_lm.component import load

    return load(context)


def _processor(model: Checkpoint) -> InputProcessor:
    from omnistage.models.causal_lm.processor import CausalLMProcessor

    return CausalLMProcessor.load(model.folder)


def _tiny(folder: Path, **options: object) -> None:
    from omnistage.models.causal_lm import tiny

    tiny.write(folder, **options)  # type: ignore[arg-type]


def _verify(runner: ModelRunner, **options: object) -> object:
    from omnistage.models.causal_lm import verify

    return verify.run(runner, **options)  # type: ignore[arg-type]


FAMILY = Family(
    name="causal_lm",
    architectures=("*",),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={"causal_lm.thinker": _thinker},
    bridges={},
    processor=_processor,
    tiny=_tiny,
    verify=_verify,
    plans_memory=True,
)
