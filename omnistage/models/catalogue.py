"""What of the installed transformers and diffusers is served: by the table of `tools/coverage.py`, or by signature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omnistage.core.errors import OmniError
from omnistage.core.registry import Registry
from omnistage.hf import transformers

TABLE = Path(__file__).parent / "causal_lm" / "coverage.json"
"""Written by `tools/coverage.py --write`: the release that it is of, and for each type its state and the reason."""
MEDIA_TABLE = Path(__file__).parent / "media_coverage.json"
"""Written by `tools/make_media_table.py` from the pages of the other coverage tools."""
NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Entry:
    """One family, type or pipeline."""

    kind: str
    name: str
    state: str
    reason: str = ""


def families(registry: Registry) -> Iterator[Entry]:
    """All registered families, with the classes that they claim."""
    for family in registry.families().values():
        yield Entry("family", family.name, "served", ", ".join(family.architectures))


def language_models() -> Iterator[Entry]:
    """Every type that `AutoModelForCausalLM` of the installed transformers makes."""
    judged = json.loads(TABLE.read_text())
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for name in sorted(names):
        state, reason = judged["types"].get(name, (NOT_JUDGED, "tried when it is loaded: exact, fallback or refused"))
        yield Entry("language model", name, state, reason)


def media_models() -> Iterator[Entry]:
    """Types that take or give pictures, video and sound, as far as they were judged."""
    for kind, types in json.loads(MEDIA_TABLE.read_text())["kinds"].items():
        for name, (state, reason) in types.items():
            yield Entry(kind, name, state, reason)


def judged_release() -> str:
    """The release of transformers that the tables are of, the older one where they differ."""
    releases = [json.loads(table.read_text())["transformers"] for table in (TABLE, MEDIA_TABLE)]
    return str(min(releases, key=lambda release: [int(part) for part in release.split(".") if part.isdigit()]))


def pipelines(registry: Registry) -> Iterator[Entry]:
    """Every pipeline of the installed diffusers. Those without a family are judged by what they take and give."""
    from omnistage.models._diffusers.loading import diffusers
    from omnistage.models.diffusers_pipeline.inspection import check_pipeline

    package = diffusers()
    owners = {name: family.name for family in registry.families().values() for name in family.architectures}
    for name in sorted(dir(package)):
        if not name.endswith("Pipeline") or name == "DiffusionPipeline":
            continue
        try:
            cls = getattr(package, name)
        except (ImportError, RuntimeError) as error:  # a package that it needs is not there
            yield Entry("pipeline", name, "refused", f"{type(error).__name__} when it is imported")
            continue
        if not isinstance(cls, type) or not issubclass(cls, package.DiffusionPipeline):
            continue
        if name in owners:
            yield Entry("pipeline", name, "family", owners[name])
            continue
        try:
            check_pipeline(cls)
            yield Entry("pipeline", name, "whole", "runs as one call, one request at a time")
        except OmniError as error:
            yield Entry("pipeline", name, "refused", error.message)
