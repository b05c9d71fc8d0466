"""Rules by their ids. A rule is a function over a parsed file that yields the nodes at which it fails."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from omnistage_review.model import Severity
from omnistage_review.syntax import ParsedFile

Hits: TypeAlias = Iterator[tuple[ast.AST, str]]
Check: TypeAlias = Callable[[ParsedFile], Hits]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rule looks for, why it matters and how to fix it. Rules over the whole change have no check of a file."""

    id: str
    title: str
    severity: Severity
    topic: str
    why: str
    fix: str
    check: Check | None = None
    whole_file: bool = False  # cannot judge a file of which only pieces are known

    @property
    def anchor(self) -> str:
        """Of its heading on the rules' page."""
        title = f"{self.id} {self.title}".lower()
        return "".join(letter for letter in title if letter.isalnum() or letter in "_- ").replace(" ", "-")


RULES: dict[str, Rule] = {}


def add(rule: Rule) -> Rule:
    if rule.id in RULES:
        raise ValueError(f"two rules have the id {rule.id}")
    RULES[rule.id] = rule
    return rule


def rule(
    id: str, title: str, severity: str, topic: str, *, why: str, fix: str, whole_file: bool = False
) -> Callable[[Check], Check]:
    """Registers a function as the check of a rule."""

    def register(check: Check) -> Check:
        add(Rule(id, title, Severity(severity), topic, why, fix, check, whole_file))
        return check

    return register
