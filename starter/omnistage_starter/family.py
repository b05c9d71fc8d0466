"""The starter family: hear → think → speak, and think → draw → paint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.core.family import Family, InputProcessor, LoadContext
from omnistage_starter.bridges import BRIDGES
from omnistage_starter.bundle import StarterBundle

if TYPE_CHECKING:
    from omnistage.core.checkpoint import Checkpoint
    from omnistage.core.verification import ModelRunner

ARCHITECTURE = "OmnistageStarter"
"""The architecture in config.json of a starter's folder."""


def _hear(context: LoadContext) -> object:
    from omnistage_starter.hear import load_hear

    return load_hear(context)


def _think(context: LoadContext) -> object:
    from omnistage_starter.think import load_think

    return load_think(context)


def _speak(context: LoadContext) -> object:
    from omnistage_starter.speak import load_speak

    return load_speak(context)


def _draw(context: LoadContext) -> object:
    from omnistage_starter.draw import load_draw

    return load_draw(context)


def _paint(context: LoadContext) -> object:
    from omnistage_starter.draw import load_paint

    return load_paint(context)


def _processor(model: Checkpoint) -> InputProcessor:
    from omnistage_starter.processor import StarterProcessor

    return StarterProcessor.load(model)


def _tiny(folder: Path, **options: object) -> None:
    from omnistage_starter import tiny

    tiny.write(folder, **options)  # type: ignore[arg-type]


def _verify(runner: ModelRunner, **options: object) -> object:
    from omnistage_starter import verify

    return verify.run(runner, **options)  # type: ignore[arg-type]


FAMILY = Family(
    name="starter",
    architectures=(ARCHITECTURE, "omnistage_starter"),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={
        "starter.hear": _hear,
        "starter.think": _think,
        "starter.speak": _speak,
        "starter.draw": _draw,
        "starter.paint": _paint,
    },
    bridges=BRIDGES,
    text_bridges=frozenset({"starter.hear2think", "starter.think2speak"}),
    processor=_processor,
    tiny=_tiny,
    verify=_verify,
    bundle=StarterBundle(),
)
