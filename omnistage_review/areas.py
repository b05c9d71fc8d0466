"""The area of each file, and how risky a change to it is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from omnistage_review.model import ChangedFile, Finding, Severity
from omnistage_review.syntax import is_test

# The first pattern that a path matches names its area.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("docs", r"(^|/)docs?/|\.(md|rst)$|(^|/)(LICENSE|CHANGELOG|CODEOWNERS)"),
    ("config", r"(^|/)configs?/|config[^/]*\.py$|\.(ya?ml|toml|ini|cfg)$|(^|/)(args|arg_utils|settings)\.py$"),
    ("server", r"(^|/)(server|serving|entrypoints|api|openai|http|web)(/|\.py$)"),
    ("diffusion", r"diffus|(^|/)(schedulers|samplers|dit|flux|unet|vae|guiders|hooks)(/|_|\.|\d)"),
    ("multimodal", r"multi_?modal|(^|/)(media|vision|codec|processors?)(/|_|\.)|(audio|image|video)[^/]*(/|\.py$)"),
    ("worker", r"(^|/)(workers?|executor|placement|distributed|parallel|ray)(/|_|\.)|(runner|worker)[^/]*\.py$"),
    ("model executor", r"(^|/)(model_executor|models?|layers|kernels?|attention|csrc|ops|modeling)(/|_)"),
    ("engine", r"(^|/)(engines?|core|pipelines?|sampling|v1)(/|_|\.)|(scheduler|sampler|cache|engine)[^/]*\.py$"),
)  # fmt: skip
_COMPILED = tuple((area, re.compile(pattern, re.IGNORECASE)) for area, pattern in _PATTERNS)
WEIGHTS = {
    "engine": 5, "model executor": 5, "worker": 5, "diffusion": 4, "multimodal": 4, "server": 4, "config": 3,
    "other": 2, "tests": 1, "docs": 0,
}  # fmt: skip
CRITICAL_WEIGHT = 4
_FINDING_POINTS = {Severity.HIGH: 12, Severity.MEDIUM: 4, Severity.LOW: 0}


def area_of(path: str) -> str:
    if is_test(path):
        return "tests"
    return next((area for area, pattern in _COMPILED if pattern.search(path)), "other")


@dataclass(frozen=True, slots=True)
class AreaSummary:
    """What a change does to one area."""

    area: str
    files: tuple[str, ...]
    lines: int
    risk: int

    @property
    def critical(self) -> bool:
        return WEIGHTS[self.area] >= CRITICAL_WEIGHT


def summarise(files: Iterable[ChangedFile], findings: Iterable[Finding]) -> list[AreaSummary]:
    """The areas of a change, the riskiest first.

    An area's risk is its weight times the logarithm of its changed lines, plus points for each finding in it.
    """
    paths: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    points: dict[str, int] = {}
    for file in files:
        area = area_of(file.path)
        paths.setdefault(area, []).append(file.path)
        lines[area] = lines.get(area, 0) + file.size
    for item in findings:
        area = area_of(item.path)
        points[area] = points.get(area, 0) + _FINDING_POINTS[item.severity]
    result = [
        AreaSummary(
            area, tuple(names), lines[area], round(WEIGHTS[area] * math.log2(1 + lines[area])) + points.get(area, 0)
        )
        for area, names in paths.items()
    ]
    return sorted(result, key=lambda item: (-item.risk, item.area))


def risk_of(areas: list[AreaSummary]) -> tuple[int, str]:
    """The risk of the whole change, from 0 to 100, and its level: the sum of its areas, ever nearer to 100."""
    score = round(100 * (1 - math.exp(-sum(area.risk for area in areas) / 100)))
    return score, "low" if score < 25 else "medium" if score < 60 else "high"
