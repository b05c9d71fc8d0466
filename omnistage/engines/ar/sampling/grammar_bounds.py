"""What a constraint will cost, read from its source before anything is compiled.

Compiling takes time for each state from which many different tokens may come: for every character class, as often as it
is repeated. Following takes time where one text can be read in many ways, as counts inside of counts allow. Neither
number is exact. They refuse what is out of all proportion and tell the cheap from the dear; time limits do the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from omnistage.core.errors import InvalidRequestError, LimitExceededError
from omnistage.engines.ar.sampling.expression_scan import UNROLLED, ebnf_states, regex_states

MAX_SOURCE_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
"""xgrammar's time grows with the cube of a schema's nesting: 30 ms at 64 levels, 10 s at 512."""
MAX_PATTERN_CHARS, MAX_GRAMMAR_CHARS = 8 * 1024, 16 * 1024
"""Of all different regular expressions of a constraint; of all grammars. Scanning takes up to 2 ms a KiB of Python."""
_CHARS_EACH = 16
"""For the expression or the grammar itself, which takes time even when it is short."""
MAX_SCHEMAS = 2500
"""Objects in a JSON schema or a structural tag, without what enum, const and the like hold."""
MAX_STATES = 640
"""The unit is a state of `.` in `.{1,256}`, which takes some 7 ms to compile for a vocabulary of 49,000 tokens.

Two threads need about two seconds for the limit. It allows two large values of `maxLength`, or more if they are small.
"""
HOW_TO_SIMPLIFY = (
    "use fewer or shorter repetitions of character classes, few different values of maxLength, and fewer optional "
    "properties"
)
MAX_CHEAP_ALTERNATIVES = 16
CHEAP_STATES = 32
# Measured in the same unit: what may be left out is compared with all that may be left out behind it.
_PROPERTY_PAIR = 1 / 1300
_OPTIONAL_PAIR = 1 / 1250
_ADDITIONAL_STATE = 1.0
"""Of each property beside which others are allowed: their names must be told apart."""
_CHEAP_KEYWORDS = frozenset(
    (
        *("$defs", "$id", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default", "definitions"),
        *("description", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems", "maxLength"),
        *("maximum", "minItems", "minLength", "minimum", "nullable", "oneOf", "properties", "required", "strict"),
        *("title", "type"),
    )
)
DATA_KEYWORDS = frozenset(("const", "default", "enum", "examples", "description", "title"))
NAMING_KEYWORDS = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""What they hold are schemas by name, and a name may be that of a keyword."""


@dataclass(frozen=True, slots=True)
class GrammarCost:
    """What is known about a constraint before it is compiled."""

    states: int
    """Those that take time to compile."""
    cheap_masks: bool
    """No mask can be expensive: the text can be read in few ways at any place."""
    recursive: bool = False
    """It has rules of its own, which may contain themselves: then the states say little."""

    @property
    def cheap(self) -> bool:
        """It is compiled in well under a second."""
        return self.states <= CHEAP_STATES and not self.recursive


def cost_of(kind: str, text: str) -> GrammarCost:
    """Raises `LimitExceededError` for a constraint beyond the limits. `text` is valid JSON where `kind` says so."""
    param = f"structured.{kind}"
    if kind == "json_object":
        return GrammarCost(0, cheap_masks=True)
    if kind in ("regex", "grammar"):
        text_sources = _Sources(patterns={text}) if kind == "regex" else _Sources(grammars={text})
        text_sources.check_chars(param)
        sources = list(text_sources.states(param))
        cheap_masks = False
    else:
        parsed = json.loads(text)
        sources = list(_sources_in(parsed, param).states(param))
        # Strings of bounded length cost several times as much to follow.
        ways = _alternatives(parsed) * (4 if any(sources) else 1)
        cheap_masks = kind == "json_schema" and ways <= MAX_CHEAP_ALTERNATIVES
    states = round(sum(sources))
    if states > MAX_STATES:
        raise LimitExceededError(
            f"{states} states would have to be compiled, and {MAX_STATES} is the limit; {HOW_TO_SIMPLIFY}",
            param=param,
        )
    return GrammarCost(states, cheap_masks, recursive=kind == "grammar" or (kind == "structural_tag" and "::=" in text))


# ------------------------------------------------------------------------------------------------------- JSON


@dataclass(slots=True)
class _Sources:
    """What there is to compile in a constraint; equal ones are compiled once."""

    patterns: set[str] = field(default_factory=set)
    grammars: set[str] = field(default_factory=set)
    lengths: set[tuple[int, int]] = field(default_factory=set)
    objects: list[dict[str, object]] = field(default_factory=list)
    """Those with properties."""

    def add(self, node: dict[str, object]) -> None:
        """What stands in one object, without those inside."""
        pattern, grammar, by_pattern = node.get("pattern"), node.get("grammar"), node.get("patternProperties")
        if isinstance(pattern, str):
            self.patterns.add(pattern)
        if isinstance(grammar, str):
            self.grammars.add(grammar)
        if isinstance(by_pattern, dict):
            self.patterns.update(by_pattern)
        low, high = _count(node, "minLength"), _count(node, "maxLength")
        if low or high:
            self.lengths.add((low, high))
        if "properties" in node:
            self.objects.append(node)

    def check_chars(self, param: str) -> None:
        for name, texts, limit in (
            ("patterns", self.patterns, MAX_PATTERN_CHARS),
            ("grammars", self.grammars, MAX_GRAMMAR_CHARS),
        ):
            if (chars := sum(map(len, texts)) + _CHARS_EACH * len(texts)) > limit:
                raise LimitExceededError(
                    f"the {name} have {chars} characters together, counting {_CHARS_EACH} more for each, and {limit} "
                    "is the limit; shorten them, or list values in an enum",
                    param=param,
                )

    def states(self, param: str) -> Iterator[float]:
        yield from map(_property_states, self.objects)
        yield from (regex_states(pattern, param) for pattern in self.patterns)
        yield from (ebnf_states(grammar, param) for grammar in self.grammars)
        yield from (max(min(max(low, high), UNROLLED), 0) for low, high in self.lengths)


def check_shape(parsed: object, param: str) -> None:
    """Raises for a schema, a structural tag or a list of them that is too large, too deep or refers to others.

    Takes some milliseconds at most, whatever the size; the exact number of bytes is left to the one who writes them.
    """
    size = 0
    level = [parsed]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[object] = []
        for node in level:
            if isinstance(node, str):
                size += len(node)
            elif isinstance(node, list | tuple | dict):
                size += 2 * len(node)  # a value and a comma are two bytes at least
            if size > MAX_SOURCE_BYTES:
                raise LimitExceededError(f"at most {MAX_SOURCE_BYTES} bytes are taken; shorten it", param=param)
            if isinstance(node, list | tuple):
                below += node
            elif isinstance(node, dict):
                target = node.get("$ref")
                if isinstance(target, str) and not (target == "#" or target.startswith("#/")):
                    raise InvalidRequestError("a $ref must point into the schema itself ('#' or '#/...')", param=param)
                below += node.values()
        if not below:
            return
        level = below
    raise InvalidRequestError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten it", param=param)


def check_source(parsed: object, param: str) -> None:
    """Raises also for too many schemas, and for too much text in patterns and grammars: before any of it is scanned."""
    check_shape(parsed, param)
    _sources_in(parsed, param)


def _sources_in(parsed: object, param: str) -> _Sources:
    sources, schemas = _Sources(), 0
    level: list[object] = [parsed]
    while level:
        node = level.pop()
        if isinstance(node, list):
            level += node
        elif isinstance(node, dict):
            sources.add(node)
            level += _inside(node)
            schemas += 1
            if schemas > MAX_SCHEMAS:
                raise LimitExceededError(
                    f"it has more than {MAX_SCHEMAS} schemas; use fewer properties and alternatives", param=param
                )
    sources.check_chars(param)
    return sources


def _inside(node: dict[str, object]) -> Iterator[object]:
    """What is in an object of a schema, without data."""
    for keyword, value in node.items():
        if keyword in NAMING_KEYWORDS and isinstance(value, dict):
            yield from value.values()
        elif keyword not in DATA_KEYWORDS:
            yield value


def _property_states(node: dict[str, object]) -> float:
    """Those that may be left out are compared with all behind them; counting takes states for each number of them."""
    properties, required = node.get("properties"), node.get("required")
    low, high = _count(node, "minProperties"), _count(node, "maxProperties")
    if not isinstance(properties, dict):
        return 0.0
    if low or high:
        return len(properties) ** 2 * min(max(low, high or len(properties)), len(properties)) * _PROPERTY_PAIR
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    additional = any(node.get(keyword) for keyword in ("additionalProperties", "unevaluatedProperties"))
    optional = len(properties.keys() - names)
    return optional**2 * _OPTIONAL_PAIR + (len(properties) * _ADDITIONAL_STATE if additional else 0.0)


def _count(node: dict[str, object], keyword: str) -> int:
    value = node.get(keyword)
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else 0
    return value if isinstance(value, int) else 0  # of any size: beyond a float's it cannot be asked whether finite


def _alternatives(schema: object) -> float:
    """How many there are in the whole schema; infinite if it has keywords beyond the cheap ones."""
    if not isinstance(schema, dict):
        return 0
    if not _CHEAP_KEYWORDS.issuperset(schema):
        return float("inf")
    types = schema.get("type")
    total: float = len(types) if isinstance(types, list) else 0
    children = [schema.get("items"), schema.get("additionalProperties")]
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list):
            total += len(options)
            children += options
    for keyword in ("properties", "$defs", "definitions"):
        branches = schema.get(keyword)
        if isinstance(branches, dict):
            children += branches.values()
    return total + sum(_alternatives(child) for child in children)
