"""A report as Markdown, JSON and SARIF 2.1.0."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

from omnistage_review import __version__
from omnistage_review.areas import AreaSummary, area_of
from omnistage_review.model import Finding, Severity
from omnistage_review.registry import RULES
from omnistage_review.report import Report

MAX_FILES = 5  # of a critical area
MAX_SHOWN = 100  # findings of one severity in Markdown; JSON and SARIF hold all
_LEVELS = {Severity.HIGH: "error", Severity.MEDIUM: "warning", Severity.LOW: "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_URL = re.compile(r"https://[\w./-]+")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~])")


def _plain(text: str) -> str:
    """Text of the author of a change: on one line, and never markup, a mention or a control sequence."""
    return _MARKUP.sub(r"\\\1", _inert(text)).strip()


def _inert(text: str) -> str:
    """On one line; GitHub makes neither a mention nor a link of it."""
    return re.sub(r"(@|:(?=//)|\bwww(?=\.))", "\\1\u200b", _CONTROL.sub(" ", text))


def printable(text: str) -> str:
    """On one line, without control sequences."""
    return _CONTROL.sub(" ", text)


def _code(text: str) -> str:
    """A code span around any text."""
    text = _CONTROL.sub(" ", text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _bullets(items: Iterable[str]) -> list[str]:
    return [f"- {item}" for item in items]


def _message(text: str) -> str:
    """A rule's message: its code spans stay, all else is plain."""
    parts = re.split(r"(`[^`\n]+`)", _CONTROL.sub(" ", text))
    return "".join(part if at % 2 else _plain_keep(part).replace("`", "&#96;") for at, part in enumerate(parts))


def _plain_keep(text: str) -> str:
    return re.sub(r"([\\<>\[\]|*]|(?<!\w)_|_(?!\w))", r"\\\1", _inert(text))


def to_markdown(report: Report) -> str:
    change = report.change
    counts = ", ".join(f"{report.count(level)} {level.value}" for level in reversed(Severity))
    lines = [f"# Review: {_plain(change.title) or _plain(change.source)}", ""]
    where = _plain(change.source[:1].upper() + change.source[1:])
    where += f" ({change.url})" if _URL.fullmatch(change.url) else ""
    size = sum(file.size for file in change.files)
    lines.append(f"{where}. {len(change.files)} files, {size} lines added or removed. Findings: {counts}.")
    if report.suppressed or report.num_baseline:
        lines[-1] += f" Suppressed with a reason: {len(report.suppressed)}; in the baseline: {report.num_baseline}."
    lines += ["", f"**Recommendation: {report.recommendation}**", "", *_bullets(report.reasons), ""]
    lines += [f"Risk: {report.risk} of 100 ({report.level}).", "", "## Areas", ""]
    lines += ["| area | files | lines | risk | critical |", "| --- | --- | --- | --- | --- |"]
    for area in report.areas:
        lines.append(
            f"| {area.area} | {len(area.files)} | {area.lines} | {area.risk} | {'yes' if area.critical else ''} |"
        )
    critical = [f"**{area.area}**: {_largest(report, area)}" for area in report.areas if area.critical]
    lines += ["", *_section("Critical areas", critical), "## Findings", ""]
    for level in reversed(Severity):
        lines += _findings(report, level)
    if not report.findings:
        lines += ["None.", ""]
    lines += _section("Suppressed", [_suppressed(item, reason) for item, reason in report.suppressed[:MAX_SHOWN]])
    lines += _section(
        "Missing tests", [f"{_code(path)}: no test of this change names it" for path in report.missing_tests]
    )
    lines += _section("Missing docs", [_plain_keep(text) for text in report.missing_docs])
    checks = [f"[ ] {item.text} ({', '.join(item.rules) or 'human'})" for item in report.checklist]
    lines += _section("Checklist of the touched areas", checks)
    lines += _section("Questions for the author", [_message(text) for text in report.questions])
    lines += _section("Limits of this report", [_plain_keep(note) for note in report.notes])
    return "\n".join(lines).rstrip() + "\n"


def _largest(report: Report, area: AreaSummary) -> str:
    """The files of an area that change most."""
    sizes = {file.path: file.size for file in report.change.files}
    paths = sorted(area.files, key=lambda path: -sizes[path])
    rest = len(paths) - MAX_FILES
    names = ", ".join(f"{_code(path)} ({_count(sizes[path])})" for path in paths[:MAX_FILES])
    return f"{names} and {rest} more" if rest > 0 else names


def _suppressed(item: Finding, reason: str) -> str:
    return f"{_code(f'{item.path}:{item.line}')} {item.rule}: {_plain(reason)}"


def _count(lines: int) -> str:
    return f"{lines} line{'' if lines == 1 else 's'}"


def _section(title: str, items: list[str]) -> list[str]:
    return [f"## {title}", "", *_bullets(items), ""] if items else []


def _findings(report: Report, level: Severity) -> list[str]:
    """Findings of one severity, by rule, so that why and fix are said once."""
    findings = [item for item in report.findings if item.severity is level]
    lines: list[str] = []
    by_rule: dict[str, list[Finding]] = {}
    for item in findings[:MAX_SHOWN]:
        by_rule.setdefault(item.rule, []).append(item)
    for name, items in by_rule.items():
        rule = RULES[name]
        lines += [f"### {rule.id} {rule.title} ({level.value})", ""]
        lines += _bullets(f"{_code(f'{item.path}:{item.line}')} {_message(item.message)}" for item in items)
        lines += ["", f"Why: {rule.why}", "", f"Fix: {rule.fix}", ""]
    if len(findings) > MAX_SHOWN:
        lines += [f"{len(findings) - MAX_SHOWN} more of {level.value} severity are in the JSON and SARIF exports.", ""]
    return lines


def _finding_data(item: Finding) -> dict[str, Any]:
    rule = RULES[item.rule]
    return {
        "rule": item.rule,
        "title": rule.title,
        "severity": item.severity.value,
        "path": item.path,
        "line": item.line,
        "message": item.message,
        "why": rule.why,
        "fix": rule.fix,
        "fingerprint": item.fingerprint,
    }


def to_json(report: Report) -> str:
    change = report.change
    data = {
        "tool": "omnistage-review",
        "version": __version__,
        "source": change.source,
        "title": change.title,
        "description": change.description,
        "url": change.url,
        "recommendation": report.recommendation,
        "reasons": report.reasons,
        "risk": {"score": report.risk, "level": report.level},
        "areas": [
            {"area": area.area, "files": area.files, "lines": area.lines, "risk": area.risk, "critical": area.critical}
            for area in report.areas
        ],
        "files": [
            {
                "path": file.path,
                "status": file.status,
                "area": area_of(file.path),
                "lines": file.size,
                "binary": file.binary,
            }
            for file in change.files
        ],
        "findings": [_finding_data(item) for item in report.findings],
        "suppressed": [{**_finding_data(item), "reason": reason} for item, reason in report.suppressed],
        "baseline": report.num_baseline,
        "missing_tests": report.missing_tests,
        "missing_docs": report.missing_docs,
        "checklist": [{"topic": item.topic, "text": item.text, "rules": item.rules} for item in report.checklist],
        "questions": report.questions,
        "notes": report.notes,
    }
    return json.dumps(data, indent=2) + "\n"


def to_sarif(report: Report) -> str:
    names = sorted(RULES)
    rules = [
        {
            "id": name,
            "name": re.sub(r"\W", "", RULES[name].title.title()),
            "shortDescription": {"text": RULES[name].title},
            "fullDescription": {"text": RULES[name].why},
            "help": {"text": f"{RULES[name].why} {RULES[name].fix}"},
            "defaultConfiguration": {"level": _LEVELS[RULES[name].severity]},
        }
        for name in names
    ]
    results = [_result(item, names) for item in report.findings]
    for item, reason in report.suppressed:
        results.append({**_result(item, names), "suppressions": [{"kind": "inSource", "justification": reason}]})
    run = {
        "tool": {"driver": {"name": "omnistage-review", "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [{"level": "note", "message": {"text": note}} for note in report.notes],
            }
        ],
        "results": results,
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _result(item: Finding, names: list[str]) -> dict[str, Any]:
    location = {
        "artifactLocation": {"uri": quote(item.path, errors="replace")},
        "region": {"startLine": max(1, item.line)},
    }
    return {
        "ruleId": item.rule,
        "ruleIndex": names.index(item.rule),
        "level": _LEVELS[item.severity],
        "message": {"text": f"{item.message}. {RULES[item.rule].fix}"},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"omnistageReview/v1": item.fingerprint},
    }


FORMATS: dict[str, Callable[[Report], str]] = {"markdown": to_markdown, "json": to_json, "sarif": to_sarif}
SUFFIXES = {".md": "markdown", ".markdown": "markdown", ".json": "json", ".sarif": "sarif"}
