"""What the parts of the review speak: severities, changed files, findings."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field


class ReviewError(Exception):
    """The change cannot be read; the message says why and what to do."""


class Severity(enum.Enum):
    """How bad a finding is, from the least."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Hunk:
    """A piece of a diff: lines of both versions, without their markers."""

    old_start: int
    new_start: int
    old_lines: tuple[str, ...]
    new_lines: tuple[str, ...]
    added: frozenset[int]  # numbers in the new version


@dataclass(slots=True)
class ChangedFile:
    """One file of a change. `text` is the new version where it could be had."""

    path: str
    status: str = "modified"  # added, modified, deleted, renamed
    old_path: str | None = None
    binary: bool = False
    hunks: list[Hunk] = field(default_factory=list)
    text: str | None = None
    all_lines: bool = False  # every line counts as changed: a scan of a tree, or a file whose diff is not known
    removed: int = 0

    @property
    def added_lines(self) -> frozenset[int]:
        if self.all_lines and self.text is not None:
            return frozenset(range(1, self.text.count("\n") + 2))
        return frozenset().union(*(hunk.added for hunk in self.hunks))

    @property
    def size(self) -> int:
        """Lines added and removed."""
        return len(self.added_lines) + self.removed


@dataclass(slots=True)
class Change:
    """What is reviewed: a pull request, a range of commits, a diff, or a tree."""

    source: str
    title: str = ""
    description: str = ""
    url: str = ""
    files: list[ChangedFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be read or checked
    is_tree: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A place where a rule fails."""

    rule: str
    severity: Severity
    path: str
    line: int
    message: str
    source_line: str = ""
    occurrence: int = 0  # among findings of this rule in this file with the same text

    @property
    def fingerprint(self) -> str:
        """Stays the same when the line moves."""
        text = "\0".join((self.rule, self.path, self.source_line.strip(), str(self.occurrence)))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
