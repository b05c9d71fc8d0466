"""One pass over a regular expression or a grammar (EBNF): the states to compile, and counts inside of counts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from omnistage.core.errors import InvalidRequestError, LimitExceededError

MAX_NESTED_COUNT = 100_000
MAX_GROUP_DEPTH = 64
UNROLLED = 256
"""xgrammar counts instead of adding states beyond so many repetitions."""
# In the unit of `grammar_bounds.MAX_STATES`, measured with expressions like .?.?.? and a?a?a?: what may be left out is
# compared with all that may be left out behind it.
_NARROW_STATE = 0.3
_WIDE_PAIR = 0.45
_NARROW_PAIR = 0.02

_QUANTIFIER = r"(?P<quantifier>[*+?]|\{\s*(?P<low>\d+)\s*(?P<comma>,\s*(?P<high>\d*)\s*)?\})\??"
# A bracket or a quote that is never closed reaches to the end: so every character is looked at once.
REGEX_TOKEN = re.compile(
    rf"(?P<open>\((?:\?(?:[:=!]|<[=!]|<\w+>))?)|(?P<close>\))|"
    rf"(?P<narrow>\[[\w-]*\]|\\d)|(?P<wide>\[(?:\\.|[^\]\\])*\]?|\\[DwWsSpP]|\.)|{_QUANTIFIER}|"
    rf"(?P<or>\|)|(?P<atom>\\.|.)",
    re.DOTALL,
)
_EBNF = re.compile(
    rf"(?P<space>\s+|#[^\n]*)|(?P<rule>[\w.-]+)\s*::=|(?P<open>\()|(?P<close>\))|"
    rf'(?P<narrow>\[[\w-]*\])|(?P<wide>\[(?:\\.|[^\]\\])*\]?)|(?P<text>"(?:\\.|[^"\\])*"?)|{_QUANTIFIER}|'
    rf"(?P<or>\|)|(?P<ref>[\w.-]+)|(?P<atom>.)",
    re.DOTALL,
)

_Counts = dict[str, int]
"""How often what a name stands for is repeated at most; under the empty name, whatever is no name."""


@dataclass(slots=True)
class _Item:
    """An atom or a group, with its quantifier once that is read."""

    counts: _Counts = field(default_factory=dict)
    width: float = 0.0
    """States that each repetition adds; a group's are shared by its repetitions."""
    optional: int = 0
    """How many parts that may all be left out it consists of; 0: it may not be left out."""
    wide: bool = False
    """It has a state from which most tokens may come."""


@dataclass(slots=True)
class _Group:
    """What stands between two parentheses, or in a whole rule."""

    counts: _Counts = field(default_factory=dict)
    last: _Item | None = None
    """A quantifier may follow."""
    run: int = 0
    """Parts in a row, up to here, that may all be left out."""
    run_is_wide: bool = False
    wide: bool = False
    blank: bool = True
    """Everything in this alternative may be left out,"""
    any_blank: bool = False
    """or in an earlier one."""
    pairs: float = 0.0
    """States for runs that have ended."""

    def put(self, item: _Item | None) -> None:
        """Account for the item before, whose quantifier is known now."""
        old, self.last = self.last, item
        if old is None:
            return
        for name, count in old.counts.items():
            self.counts[name] = max(self.counts.get(name, 1), count)
        self.wide |= old.wide
        if old.optional:
            self.run += old.optional
            self.run_is_wide |= old.wide
        else:
            self.blank = False
            self.end_run()

    def end_run(self) -> None:
        if self.run > 1:
            self.pairs += self.run**2 * (_WIDE_PAIR if self.run_is_wide else _NARROW_PAIR)
        self.run, self.run_is_wide = 0, False

    def end_alternative(self) -> None:
        self.put(None)
        self.any_blank |= self.blank
        self.blank = True

    def close(self) -> _Item:
        """As one item of what it stands in."""
        self.end_alternative()
        optional = max(self.run, 1) if self.any_blank else 0
        self.end_run()
        return _Item(self.counts, optional=optional, wide=self.wide)


@dataclass(slots=True)
class _Scan:
    """A pass over a regular expression or a grammar. What does not parse is left to xgrammar to refuse."""

    param: str
    rules: dict[str, _Counts] = field(default_factory=dict)
    hollow: set[str] = field(default_factory=set)
    """Rules without alternatives and without any character."""
    groups: list[_Group] = field(default_factory=lambda: [_Group()])
    states: float = 0.0

    def run(self, pattern: re.Pattern[str], text: str) -> _Scan:
        name = ""
        for token in pattern.finditer(text):
            kind = "quantifier" if token["quantifier"] else token.lastgroup
            if kind == "rule":
                self._end_rule(name)
                name = token["rule"]
                self.hollow.add(name)
            elif kind == "open":
                self._open()
            elif kind == "close":
                self._close()
            elif kind == "or":
                self.hollow.discard(name)
                self.groups[-1].end_alternative()
            elif kind == "quantifier":
                self._repeat(token)
            elif kind != "space":
                width = {"wide": 1.0, "narrow": _NARROW_STATE}.get(kind or "", 0.0)
                self.states += width
                name_of_rule = token["ref"] if kind == "ref" else ""
                if kind != "ref" and token[0] != '""':
                    self.hollow.discard(name)
                self.groups[-1].put(_Item({name_of_rule: 1}, width, wide=kind == "wide"))
        self._end_rule(name)
        return self

    def _open(self) -> None:
        self.groups[-1].put(None)
        self.groups.append(_Group())
        if len(self.groups) > MAX_GROUP_DEPTH:
            raise InvalidRequestError(
                f"groups are nested deeper than {MAX_GROUP_DEPTH} levels; flatten them", param=self.param
            )

    def _close(self) -> None:
        if len(self.groups) > 1:
            group = self.groups.pop()
            self.groups[-1].put(group.close())
            self.states += group.pairs

    def _end_rule(self, name: str) -> None:
        while len(self.groups) > 1:
            self._close()
        rule = self.groups.pop()
        self.rules[name] = rule.close().counts
        self.states += rule.pairs
        self.groups.append(_Group())

    def _repeat(self, token: re.Match[str]) -> None:
        item = self.groups[-1].last
        if item is None:
            return
        low, high = token["low"], token["high"] or token["low"]
        count = max(_number(low), _number(high), 1) if low is not None else 1
        self.states += item.width * (min(count, UNROLLED) - 1)
        item.counts = {name: min(old * count, MAX_NESTED_COUNT + 1) for name, old in item.counts.items()}
        if token["quantifier"] in ("*", "?") or (low is not None and not _number(low)):
            item.optional = max(item.optional, 1)

    def circular(self) -> str | None:
        """A rule that stands for nothing but itself, or other rules that stand for it; None if there is none."""
        graph = {name: self.hollow.intersection(self.rules[name]) for name in self.hollow}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1]
            return min(cycle)
        return None

    def nested_count(self) -> int:
        """The largest product of counts inside of each other. A rule inside of itself counts once."""
        values: dict[str, int] = {}
        entered = set[str]()
        path = list(self.rules)
        while path:
            name = path[-1]
            if name in values:
                path.pop()
                continue
            counts = self.rules.get(name, {})
            missing = [ref for ref in counts if ref and ref not in values and ref not in entered]
            if missing and name not in entered:
                entered.add(name)
                path += missing
                continue
            path.pop()
            value = max((count * values.get(ref, 1) for ref, count in counts.items()), default=1)
            values[name] = min(value, MAX_NESTED_COUNT + 1)
        return max(values.values(), default=1)


def _number(digits: str) -> int:
    """Also of thousands of digits, which Python refuses to read."""
    return int(digits[:12])


def regex_states(text: str, param: str) -> float:
    """States to compile. Raises `LimitExceededError` for counts that multiply to too much, as `ebnf_states` does."""
    return _checked(_Scan(param).run(REGEX_TOKEN, text), param)


def ebnf_states(text: str, param: str) -> float:
    scan = _Scan(param).run(_EBNF, text)
    circular = scan.circular()
    if circular is not None:  # xgrammar would never return, and end the process with its stack
        raise InvalidRequestError(
            f"rule {circular[:100]!r} only refers to itself; give it a text to end with", param=param
        )
    return _checked(scan, param)


def _checked(scan: _Scan, param: str) -> float:
    if scan.nested_count() > MAX_NESTED_COUNT:
        raise LimitExceededError(
            f"repetition counts inside of each other multiply to more than {MAX_NESTED_COUNT:,}; lower them or remove "
            "one of them",
            param=param,
        )
    return scan.states
