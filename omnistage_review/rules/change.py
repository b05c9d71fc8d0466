"""Rules over a whole change rather than one Python file: configuration, missing tests, suppressions."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from omnistage_review.model import Change, ChangedFile, Finding, Severity
from omnistage_review.registry import Rule, add
from omnistage_review.syntax import is_shipped, is_test

_TODO = re.compile(r"\b(TODO|FIXME|XXX|HACK|CHANGEME|CHANGE_ME)\b")
_CONFIG_SUFFIXES = {".yaml", ".yml", ".toml", ".json", ".ini", ".cfg", ".env"}

TODO_IN_CONFIG = add(
    Rule(
        "CFG01",
        "TODO in shipped configuration",
        Severity.MEDIUM,
        "security",
        "Users run with this file. What is not decided in it is decided by chance, on their machines.",
        "Decide the value, or remove the key so that the documented default holds; keep the plan in an issue.",
    )
)
NEW_MODULE_WITHOUT_TEST = add(
    Rule(
        "TST01",
        "New module without a test",
        Severity.MEDIUM,
        "tests",
        "Nothing says what the module promises, and nobody notices when it stops doing it.",
        "Add a test that imports the module, or name the one that covers it in the description.",
    )
)
BAD_SUPPRESSION = add(
    Rule(
        "SUP01",
        "Suppression without effect",
        Severity.MEDIUM,
        "tests",
        "It names no reason, an unknown rule, or a rule that finds nothing there: it hides something or nothing.",
        "Write `# review: allow[RULE] reason`, or remove the comment.",
    )
)


def todo_in_config(file: ChangedFile) -> list[Finding]:
    path = PurePosixPath(file.path)
    if (
        path.suffix not in _CONFIG_SUFFIXES
        or file.binary
        or not is_shipped(file.path)
        or path.name.endswith("lock.json")
    ):
        return []
    if file.text is not None:
        lines = dict(enumerate(file.text.split("\n"), 1))
    else:
        lines = {hunk.new_start + at: line for hunk in file.hunks for at, line in enumerate(hunk.new_lines)}
    return [
        Finding(
            TODO_IN_CONFIG.id, TODO_IN_CONFIG.severity, file.path, line, f"`{match[1]}` in a configuration", lines[line]
        )
        for line in sorted(file.added_lines & lines.keys())
        if (match := _TODO.search(lines[line]))
    ]


def modules_without_test(change: Change) -> list[ChangedFile]:
    """Shipped Python files that no test of the change names; in a tree, those that no test at all names."""
    texts = [
        file.text or "\n".join(line for hunk in file.hunks for line in hunk.new_lines)
        for file in change.files
        if is_test(file.path)
    ]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    words |= {PurePosixPath(file.path).stem.removeprefix("test_") for file in change.files if is_test(file.path)}
    return [file for file in change.files if _needs_test(file) and PurePosixPath(file.path).stem not in words]


def _needs_test(file: ChangedFile) -> bool:
    path = PurePosixPath(file.path)
    return (
        path.suffix == ".py"
        and file.status != "deleted"
        and not file.binary
        and not path.name.startswith("__")
        and is_shipped(file.path)
        and bool(re.search(r"^\s*(def|class) ", file.text or "class ", re.MULTILINE))
    )


def new_modules_without_test(change: Change) -> list[Finding]:
    rule = NEW_MODULE_WITHOUT_TEST
    return [
        Finding(rule.id, rule.severity, file.path, 1, "no test of this change names the module", file.path)
        for file in modules_without_test(change)
        if file.status == "added" and not change.is_tree
    ]
