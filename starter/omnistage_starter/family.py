"""The starter family: hear → think → speak, and think → draw → paint."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.family import ComponentFactory, Family
from omnistage.models.lazy import lazy, lazy_factory
from omnistage_starter.bridges import BRIDGES
from omnistage_starter.bundle import StarterBundle

ARCHITECTURE = "OmnistageStarter"
"""The architecture in config.json of a starter's folder."""
_PACKAGE = "omnistage_starter"


def _loader(module: str, name: str) -> ComponentFactory:
    return lazy_factory(module, name, _PACKAGE)


FAMILY = Family(
    name="starter",
    architectures=(ARCHITECTURE, "omnistage_starter"),
    pipeline=Path(__file__).with_name("pipeline.yaml"),
    components={
        "starter.hear": _loader("hear", "load_hear"),
        "starter.think": _loader("think", "load_think"),
        "starter.speak": _loader("speak", "load_speak"),
        "starter.draw": _loader("draw", "load_draw"),
        "starter.paint": _loader("draw", "load_paint"),
    },
    bridges=BRIDGES,
    text_bridges=frozenset({"starter.hear2think", "starter.think2speak"}),
    processor=lambda model: lazy("processor", "StarterProcessor.load", _PACKAGE)(model),
    tiny=lazy("tiny", "write", _PACKAGE),
    verify=lazy("verify", "run", _PACKAGE),
    bundle=StarterBundle(),
)
