"""Runs the rules over a change: findings on changed lines, without those that are suppressed or in the baseline."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from omnistage_review import rules  # registers them
from omnistage_review.model import Change, ChangedFile, Finding, ReviewError
from omnistage_review.registry import RULES, Rule
from omnistage_review.rules.change import (
    BAD_SUPPRESSION,
    NEW_MODULE_WITHOUT_TEST,
    new_modules_without_test,
    todo_in_config,
)
from omnistage_review.syntax import ParsedFile, own_lines

MAX_FILE_CHARACTERS = 2_000_000
MAX_DROPPED_LINES = 7  # at the ends of a hunk, until it parses

_ALLOW = re.compile(r"#\s*review:\s*allow\s*\[([^\]]*)\][\s:,-]*(.*)")
_REGISTERED = rules.__all__


@dataclass(slots=True)
class Suppression:
    """A comment `# review: allow[RULE] reason`."""

    line: int
    rules: frozenset[str]
    reason: str
    used_rules: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Analysis:
    """What the rules say of a change."""

    findings: list[Finding] = field(default_factory=list)
    suppressed: list[tuple[Finding, str]] = field(default_factory=list)
    num_baseline: int = 0  # findings that the baseline holds
    notes: list[str] = field(default_factory=list)


def analyse(change: Change, baseline: frozenset[str] = frozenset()) -> Analysis:
    analysis = Analysis(notes=list(change.notes))
    unread = [file.path for file in change.files if file.binary and file.status != "deleted"]
    if unread:
        names = ", ".join(unread[:5]) + (" and others" if len(unread) > 5 else "")
        analysis.notes.append(f"{len(unread)} binary files, links or submodules were not checked: {names}")
    for file in change.files:
        if file.status != "deleted" and not file.binary:
            for item in todo_in_config(file):
                _sort_in(item, [item.source_line], analysis)
            if file.path.endswith((".py", ".pyi")):
                _analyse_file(file, analysis)
    texts = {file.path: file.text or "" for file in change.files}
    for item in new_modules_without_test(change):
        _sort_in(item, texts[item.path].split("\n"), analysis)
    analysis.findings = _numbered(analysis.findings)
    analysis.findings.sort(key=lambda item: (-item.severity.rank, item.path, item.line, item.rule))
    findings = [item for item in analysis.findings if item.fingerprint not in baseline]
    analysis.num_baseline, analysis.findings = len(analysis.findings) - len(findings), findings
    return analysis


def _sort_in(finding: Finding, lines: Iterable[str], analysis: Analysis) -> None:
    """A finding without a syntax tree: suppressed where one of these lines allows it with a reason."""
    for match in filter(None, map(_ALLOW.search, lines)):
        if finding.rule in _names(match) and match[2].strip():
            analysis.suppressed.append((finding, match[2].strip()))
            return
    analysis.findings.append(finding)


def _names(match: re.Match[str]) -> frozenset[str]:
    return frozenset(name.strip().upper() for name in match[1].split(",") if name.strip())


def _numbered(findings: list[Finding]) -> list[Finding]:
    """Findings of one rule on equal lines of a file are told apart by their order."""
    counts: Counter[tuple[str, str, str]] = Counter()
    result = []
    for item in sorted(findings, key=lambda item: (item.path, item.line)):
        key = (item.rule, item.path, item.source_line.strip())
        result.append(replace(item, occurrence=counts[key]))
        counts[key] += 1
    return result


def _analyse_file(file: ChangedFile, analysis: Analysis) -> None:
    if file.text is not None and "\r" in file.text:
        # Python ends a line there and git does not: the lines of the diff are not those of the code.
        analysis.notes.append(f"{file.path}: has carriage returns alone; all of its lines were checked")
        file.text, file.all_lines = file.text.replace("\r", "\n"), True
    changed = file.added_lines
    for parsed in _parse(file, analysis.notes):
        try:
            _apply_rules(parsed, changed, analysis)
        except RecursionError:
            analysis.notes.append(f"{file.path}: nested too deeply; not all rules ran")


def _parse(file: ChangedFile, notes: list[str]) -> Iterator[ParsedFile]:
    """The file, or what can be parsed of it; a note says what is missing."""
    if file.text is None:
        pieces = [piece for hunk in file.hunks for piece in _fragments(file.path, hunk.new_lines, hunk.new_start)]
        if file.hunks:
            note = f"{len(pieces)} of {len(file.hunks)} hunks of the diff were checked alone"
            notes.append(f"{file.path}: the new version is not at hand; {note}")
        yield from pieces
        return
    if len(file.text) > MAX_FILE_CHARACTERS:
        notes.append(
            f"{file.path}: {len(file.text):,} characters are over the limit of {MAX_FILE_CHARACTERS:,}; not checked"
        )
        return
    try:
        yield ParsedFile(file.path, file.text)
    except SyntaxError as error:
        notes.append(f"{file.path}:{error.lineno or 1}: not valid Python here ({error.msg}); its rules did not run")
    except (ValueError, RecursionError, MemoryError) as error:
        notes.append(f"{file.path}: cannot be parsed ({type(error).__name__}); its rules did not run")


def _fragments(path: str, lines: tuple[str, ...], start: int) -> Iterator[ParsedFile]:
    """A hunk as a file of its own, without lines at its ends where these do not parse; lines keep their numbers."""
    drops = [(total - last, last) for total in range(MAX_DROPPED_LINES + 1) for last in range(total + 1)]
    for first, last in drops:
        piece = [line.expandtabs(8) for line in lines[first : len(lines) - last]]
        indents = [len(line) - len(line.lstrip()) for line in piece if line.strip()]
        if not indents:
            return
        # A hunk often begins deeper than it ends: blocks around its first lines are opened for it.
        headers = [" " * indent + "if True:" for indent in sorted(set(indents)) if indent < indents[0]]
        text = textwrap.dedent("\n".join([*headers, *piece]))
        try:
            yield ParsedFile(path, "\n" * (start + first - 1 - len(headers)) + text + "\n", partial=True)
            return
        except SyntaxError:
            continue
        except (ValueError, RecursionError, MemoryError):
            return


def _apply_rules(parsed: ParsedFile, changed: frozenset[int], analysis: Analysis) -> None:
    suppressions = _suppressions(parsed)
    for rule in RULES.values():
        if rule.check is None or (parsed.partial and rule.whole_file):
            continue
        for node, message in rule.check(parsed):
            lines = own_lines(node)
            allowed = _allowed(parsed, suppressions, rule, lines)
            if allowed is not None:
                allowed.used_rules.add(rule.id)
            if changed.isdisjoint(lines):
                continue
            finding = _finding(parsed, rule, lines.start, message)
            if allowed is not None:
                analysis.suppressed.append((finding, allowed.reason))
            else:
                analysis.findings.append(finding)
    for item in suppressions:
        if item.line in changed and not parsed.partial:
            analysis.findings += [_finding(parsed, BAD_SUPPRESSION, item.line, problem) for problem in _problems(item)]


def _finding(parsed: ParsedFile, rule: Rule, line: int, message: str) -> Finding:
    source = parsed.lines[line - 1] if line <= len(parsed.lines) else ""
    return Finding(rule.id, rule.severity, parsed.path, line, message, source)


def _suppressions(parsed: ParsedFile) -> list[Suppression]:
    if "review:" not in parsed.text:
        return []
    suppressions = []
    for line, comment in parsed.comments():
        if match := _ALLOW.search(comment):
            suppressions.append(Suppression(line, _names(match), match[2].strip()))
    return suppressions


def _allowed(parsed: ParsedFile, suppressions: list[Suppression], rule: Rule, lines: range) -> Suppression | None:
    """The suppression of a finding: on its lines, or in comments right above. One without a reason does not count."""
    if not suppressions:
        return None
    first = lines.start
    while first > 1 and parsed.lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return next(
        (item for item in suppressions if rule.id in item.rules and item.reason and first <= item.line < lines.stop),
        None,
    )


def _problems(item: Suppression) -> Iterator[str]:
    if not item.rules:
        yield "the suppression names no rule"
    elif not item.reason:
        yield "the suppression gives no reason, so it is ignored"
    # A module is new once, its suppression stays.
    for name in sorted(item.rules - item.used_rules - {NEW_MODULE_WITHOUT_TEST.id}):
        if name not in RULES:
            yield f"there is no rule {name}"
        elif item.reason:
            yield f"{name} finds nothing here"


def read_baseline(path: Path) -> frozenset[str]:
    """The fingerprints of a baseline file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = data["findings"]
        return frozenset(str(entry["fingerprint"]) for entry in entries)
    except FileNotFoundError:
        raise ReviewError(f"{path}: no such baseline; write one with --write-baseline {path}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReviewError(f"{path} is not a baseline ({error}); write it again with --write-baseline") from error


def write_baseline(path: Path, findings: list[Finding]) -> None:
    entries = [
        {"fingerprint": item.fingerprint, "rule": item.rule, "path": item.path, "line": item.source_line.strip()}
        for item in sorted(findings, key=lambda item: (item.path, item.line, item.rule))
    ]
    path.write_text(json.dumps({"version": 1, "findings": entries}, indent=1) + "\n", encoding="utf-8")
