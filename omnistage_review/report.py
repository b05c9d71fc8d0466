"""Puts a report together: what the rules found, what is missing, what to ask, and a recommendation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from omnistage_review.analysis import Analysis
from omnistage_review.areas import AreaSummary, area_of, risk_of, summarise
from omnistage_review.checklist import Item, items_for
from omnistage_review.model import Change, Finding, Severity
from omnistage_review.rules.change import modules_without_test
from omnistage_review.syntax import is_shipped, is_test

MAX_QUESTIONS = 12
MIN_UNTESTED_LINES = 10  # smaller changes are covered by tests that exist, or are renames

_FIGURES = re.compile(r"\d+(\.\d+)?\s*(%|ms|s\b|tok|GB|MB|GiB|MiB|times|x\b|dB)", re.IGNORECASE)
_DEFINITION = re.compile(r"^\s*(?:async )?(?:def|class) ([A-Za-z]\w*)")


@dataclass(frozen=True, slots=True)
class Report:
    """All that the outputs print."""

    change: Change
    findings: tuple[Finding, ...]
    suppressed: tuple[tuple[Finding, str], ...]
    num_baseline: int
    areas: tuple[AreaSummary, ...]
    risk: int
    level: str
    checklist: tuple[Item, ...]
    missing_tests: tuple[str, ...]
    missing_docs: tuple[str, ...]
    questions: tuple[str, ...]
    recommendation: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    def count(self, severity: Severity) -> int:
        return sum(item.severity is severity for item in self.findings)


def build_report(change: Change, analysis: Analysis) -> Report:
    areas = summarise(change.files, analysis.findings)
    risk, level = risk_of(areas)
    tests, docs = _missing_tests(change), _missing_docs(change)
    checklist = items_for(area.area for area in areas)
    recommendation, reasons = _recommend(change, analysis, tests, level)
    return Report(
        change=change,
        findings=tuple(analysis.findings),
        suppressed=tuple(analysis.suppressed),
        num_baseline=analysis.num_baseline,
        areas=tuple(areas),
        risk=risk,
        level=level,
        checklist=tuple(checklist),
        missing_tests=tuple(tests),
        missing_docs=tuple(docs),
        questions=tuple(_questions(change, areas, checklist, tests)),
        recommendation=recommendation,
        reasons=tuple(reasons),
        notes=tuple(analysis.notes),
    )


def _missing_tests(change: Change) -> list[str]:
    if change.is_tree:
        return []
    return [file.path for file in modules_without_test(change) if len(file.added_lines) >= MIN_UNTESTED_LINES]


def _missing_docs(change: Change) -> list[str]:
    """Kinds of change that users notice, where no page of the change tells them."""
    if change.is_tree or any(area_of(file.path) == "docs" for file in change.files):
        return []
    noticed = [file for file in change.files if is_shipped(file.path) and area_of(file.path) in ("config", "server")]
    noticed += [file for file in change.files if is_shipped(file.path) and "/cli" in f"/{file.path}"]
    paths = sorted({file.path for file in noticed if file.size >= MIN_UNTESTED_LINES})
    return [f"{path} changed, but no documentation and no changelog" for path in paths]


def _removed_names(change: Change) -> list[tuple[str, str]]:
    """Public functions and classes that the diff removes and adds nowhere, with their files."""
    added: set[str] = set()
    removed: list[tuple[str, str]] = []
    for file in change.files:
        if file.path.endswith(".py") and is_shipped(file.path):
            for hunk in file.hunks:
                new = {match[1] for line in hunk.new_lines if (match := _DEFINITION.match(line))}
                old = [match[1] for line in hunk.old_lines if (match := _DEFINITION.match(line))]
                added |= new
                removed += [(name, file.path) for name in old]
    return [(name, path) for name, path in dict.fromkeys(removed) if name not in added]


def _questions(change: Change, areas: list[AreaSummary], checklist: list[Item], tests: list[str]) -> list[str]:
    questions = []
    if not change.is_tree:
        if not change.description.strip():
            questions.append("What problem does this solve? The description is empty.")
        if any(area.critical and area.lines > 50 for area in areas) and not _FIGURES.search(change.description):
            questions.append("What was measured before and after? The description has no figures.")
        removed = _removed_names(change)
        names = ", ".join(f"`{name}` ({path})" for name, path in removed[:5])
        if removed:
            questions.append(f"Who used what is removed: {names}{' and others' if len(removed) > 5 else ''}?")
        if tests:
            questions.append(f"Which tests cover {', '.join(f'`{PurePosixPath(path).name}`' for path in tests[:5])}?")
    touched = [area.area for area in areas if area.critical]
    questions += [item.text for item in checklist if not item.rules and set(item.areas) & set(touched)]
    return questions[:MAX_QUESTIONS]


def _recommend(change: Change, analysis: Analysis, tests: list[str], level: str) -> tuple[str, list[str]]:
    """A recommendation with its reasons. It never approves: that is a human's decision."""
    high = sum(item.severity is Severity.HIGH for item in analysis.findings)
    medium = sum(item.severity is Severity.MEDIUM for item in analysis.findings)
    reasons = []
    if high:
        reasons.append(f"{high} finding{'s' if high > 1 else ''} of high severity")
    if medium:
        reasons.append(f"{medium} finding{'s' if medium > 1 else ''} of medium severity")
    if tests:
        reasons.append(f"{len(tests)} changed module{'s' if len(tests) > 1 else ''} without a test in this change")
    if high:
        return "request changes", reasons
    if not change.files:
        return "nothing to review", ["the change has no files"]
    if medium or tests:
        return "discuss before merging", reasons
    if analysis.notes:
        return "review by hand", ["no finding, but not everything could be checked", *reasons]
    if level == "high":
        return "review by hand", ["no finding, but a large change to critical areas"]
    has_tests = any(is_test(file.path) for file in change.files)
    return "ready for a human's approval", ["no finding", "tests are part of the change" if has_tests else "low risk"]
