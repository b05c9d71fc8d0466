"""Which JSON schemas can be enforced exactly: the others are refused by name.

xgrammar leaves keywords out that it does not know, and where several stand together it takes one and leaves out the
rest. `check_schema` refuses what would be left out, so that an answer always fits its schema. An answer may be bound
more tightly than the schema asks: a pattern matches the whole string, and only the listed properties are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from omnistage.core.errors import InvalidRequestError
from omnistage.engines.ar.sampling.expression_scan import REGEX_TOKEN
from omnistage.engines.ar.sampling.grammar_bounds import DATA_KEYWORDS, NAMING_KEYWORDS
from omnistage.engines.ar.sampling.schema_overlap import ANY_TYPE, FORMS, Json, Overlap, covers

_UNTYPED = "without a type beside it, it would not be enforced; add the type"
_CHECK_YOURSELF = "leave it out and check the answer"
_NEVER = {
    "not": "a grammar has no negation; list what is allowed",
    "if": "conditions cannot be enforced; use anyOf with one branch for each case",
    "$dynamicRef": "only $ref is supported; use that",
    "$recursiveRef": "only $ref is supported; use that",
    "uniqueItems": f"items cannot be compared with each other; {_CHECK_YOURSELF}",
    "contains": f"items cannot be counted by what they are; use prefixItems, or {_CHECK_YOURSELF}",
    "dependencies": "properties cannot depend on others; use anyOf with one branch for each case",
    "dependentRequired": "properties cannot depend on others; use anyOf with one branch for each case",
    "dependentSchemas": "properties cannot depend on others; use anyOf with one branch for each case",
}
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OF_TYPE = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "array": frozenset(("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems", "contains")),
    "object": frozenset(
        (
            *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
            *("propertyNames", "minProperties", "maxProperties"),
            *("dependencies", "dependentRequired", "dependentSchemas"),
        )
    ),
}
_SPECIFIC = frozenset[str]().union(*_OF_TYPE.values())
_GENERAL = frozenset(("not", "if", "$dynamicRef", "$recursiveRef"))
_WITHOUT_EFFECT: tuple[tuple[str, object], ...] = (
    *(("uniqueItems", False), ("minItems", 0), ("minLength", 0), ("minProperties", 0), ("required", [])),
    ("additionalProperties", True),
)
FORMATS = frozenset(
    (
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
        *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    )
)
"""Those that xgrammar enforces; any other is a comment."""
_UNQUOTED_FORMATS = frozenset(("json-pointer", "relative-json-pointer"))
"""Their grammars let quotes into the string."""
_COMMENTS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema"),
    )
)
_MAX_MULTIPLE = 1024
_MAX_MULTIPLE_RANGE = 10_000
_MAX_EXACT, _MAX_EXACT_INTEGER = 1e9, 2**53
"""Bounds beyond, with and without decimals, have more digits than xgrammar keeps."""
_MAX_PATH = 200
_ESCAPES = frozenset("dDwWsSbBpPkxunrtfvc")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\})")
_UNPRINTABLE = re.compile("[^ -~]")
_SPECIAL_GROUP = re.compile(r"\(\?(?!:|P?<[A-Za-z_])(?:<?[=!]|\w{0,4})")


def check_schema(schema: object, param: str) -> None:
    """Raises `InvalidRequestError` for a schema that would not be enforced as it stands.

    `schema` is parsed JSON of limited size. What is no valid schema at all is left to xgrammar to refuse.
    """
    _Check(schema, param).run()


def check_regex(expression: str, param: str) -> None:
    """Raises `InvalidRequestError` for an expression that xgrammar would take for another one."""
    reason = _regex_problem(expression, in_json=False)
    if reason is not None:
        raise InvalidRequestError(reason, param=param)


@dataclass(slots=True)
class _Check:
    root: object
    param: str
    overlap: Overlap = field(init=False)
    inner_id: str | None = None
    """Where a schema inside has an id: from there on, a `$ref` would mean something else."""
    has_ref: bool = False
    patterns: set[str] = field(default_factory=set)
    """Those that have been checked."""

    def __post_init__(self) -> None:
        self.overlap = Overlap(self.root)

    def run(self) -> None:
        stack: list[tuple[object, str]] = [(self.root, "#")]
        visited: dict[int, Json] = {}  # they are kept: an identity must not come again
        while stack:
            node, path = stack.pop()
            if not isinstance(node, dict) or id(node) in visited:
                continue
            visited[id(node)] = node
            stack += self._check(node, path)
            if node is not self.root and isinstance(node.get("$id"), str) and not node["$id"].startswith("#"):
                self.inner_id = path
        if self.inner_id is not None and self.has_ref:
            self._refuse(self.inner_id, "$id", "a schema inside another has no id here; remove it")

    def _refuse(self, path: str, keyword: str, reason: str) -> NoReturn:
        where = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."
        raise InvalidRequestError(f"at {where}: {keyword} is not supported: {reason}", param=self.param)

    def _check(self, node: Json, path: str) -> Iterator[tuple[object, str]]:
        """Refuse what would not be enforced; the schemas inside, with their paths."""
        form = next((keyword for keyword in FORMS if keyword in node), None)
        types = self.overlap.types(node)
        declared = types if types is not ANY_TYPE else frozenset[str]()
        asserted = [keyword for keyword in node if self._asserts(node, keyword, types)]
        for keyword in asserted:
            if keyword in _NEVER:
                self._refuse(path, keyword, _NEVER[keyword])
        if form is not None:
            self._check_form(node, form, asserted, path)
            return self._inside(node, (form,), path)
        if "type" in node and not node["type"]:
            self._refuse(path, "type", "an empty list allows no value; name a type")
        if asserted and not declared:
            self._refuse(path, asserted[0], _UNTYPED)
        if "string" in declared:
            self._check_string(node, path)
        if declared & {"integer", "number"}:
            self._check_number(node, declared, path)
        if "object" in declared:
            self._check_object(node, path)
        return self._inside(node, asserted, path)

    @staticmethod
    def _asserts(node: Json, keyword: str, types: frozenset[str]) -> bool:
        """Whether the keyword excludes values of these types."""
        if keyword in _GENERAL:
            return True
        if keyword not in _SPECIFIC or not any(keyword in _OF_TYPE.get(kind, ()) for kind in types):
            return False
        if keyword == "format" and node[keyword] not in FORMATS:
            return False
        value = node[keyword]
        return not any(keyword == name and type(value) is type(no) and value == no for name, no in _WITHOUT_EFFECT)

    def _check_form(self, node: Json, form: str, asserted: list[str], path: str) -> None:
        beside = [*asserted, *(keyword for keyword in FORMS if keyword in node and keyword != form)]
        options, value = node.get("enum"), node.get("const")
        if form == "const" and beside == ["enum"] and isinstance(options, list) and value in options:
            beside = []
        if beside:
            self._refuse(path, beside[0], f"beside {form} it would not be enforced; move it into {_target(form)}")
        options_listed = [value] if form == "const" else options if form == "enum" and isinstance(options, list) else []
        if any(isinstance(number, int) and abs(number) >= 2**63 for number in options_listed):
            self._refuse(path, form, "integers beyond 64 bits would be rounded; use a string")
        if "type" in node and not covers(self.overlap.declared(node), self.overlap.types(node)):
            self._refuse(path, "type", f"beside {form} it would not be enforced; move it into {_target(form)}")
        if form == "allOf" and isinstance(node["allOf"], list) and len(node["allOf"]) != 1:
            self._refuse(path, "allOf", "only one branch can be enforced; merge the branches into one schema")
        if form == "$ref":
            self.has_ref = True
            if isinstance(node["$ref"], str) and re.search("[~%]|//", node["$ref"]):
                self._refuse(path, "$ref", "escaped names are not found; give the definition a plain name")
        if form == "oneOf" and not self.overlap.all_disjoint(node["oneOf"]):
            self._refuse(
                path,
                "oneOf",
                "two branches may fit the same value, or cannot be told apart; use anyOf if a value may fit several, "
                "or require a property in each that has another const there",
            )

    def _check_string(self, node: Json, path: str) -> None:
        pattern, known = node.get("pattern"), node.get("format") in FORMATS
        bounds = [keyword for keyword in ("minLength", "maxLength") if node.get(keyword)]
        if node.get("maxLength") == 0:
            bounds.append("maxLength")
        if isinstance(pattern, str):
            if known:
                self._refuse(path, "format", "beside pattern one of them would not be enforced; leave one out")
            if bounds:
                self._refuse(
                    path, bounds[0], "beside pattern it would not be enforced; count there, as in ^[a-z]{2,5}$"
                )
            self._check_pattern(pattern, "pattern", path)
        elif known and bounds:
            self._refuse(path, bounds[0], "beside format it would not be enforced; leave one out")
        if node.get("format") in _UNQUOTED_FORMATS:
            self._refuse(path, "format", f"{node['format']} cannot be enforced; use a pattern")

    def _check_pattern(self, pattern: str, keyword: str, path: str) -> None:
        if pattern in self.patterns:
            return
        self.patterns.add(pattern)
        reason = _regex_problem(pattern, in_json=True)
        if reason is not None:
            self._refuse(path, keyword, reason)

    def _check_number(self, node: Json, types: frozenset[str], path: str) -> None:
        step, bounds = node.get("multipleOf"), {name: node[name] for name in _NUMBERS & node.keys()}
        if "number" in types:
            if step is not None:
                self._refuse(path, "multipleOf", "only integers can be counted in steps; use type integer")
            for name, bound in bounds.items():
                limit = _MAX_EXACT if isinstance(bound, float) and not bound.is_integer() else _MAX_EXACT_INTEGER
                if isinstance(bound, int | float) and abs(bound) > limit:
                    self._refuse(path, name, "it has too many digits to be enforced; round it, or use type integer")
        elif isinstance(step, int | float):
            bounds.pop("multipleOf")
            low, high = _numbers(node, "minimum", "exclusiveMinimum"), _numbers(node, "maximum", "exclusiveMaximum")
            if step != int(step) or step > _MAX_MULTIPLE:
                self._refuse(path, "multipleOf", f"it must be an integer up to {_MAX_MULTIPLE}")
            if bounds and not (low and high and min(high) - max(low) < _MAX_MULTIPLE_RANGE):
                self._refuse(
                    path,
                    "multipleOf",
                    f"beside bounds it needs both, less than {_MAX_MULTIPLE_RANGE:,} apart; add them",
                )

    def _check_object(self, node: Json, path: str) -> None:
        properties, patterns, names = (node.get(key) for key in ("properties", "patternProperties", "propertyNames"))
        declared = properties if isinstance(properties, dict) else {}
        required = node.get("required")
        required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        for name in required:
            if name not in declared:
                self._refuse(path, "required", f"{name[:100]!r} is not in properties; add it there")
        if declared and names is not None:
            self._refuse(path, "propertyNames", "beside properties it would not be enforced; leave it out")
        if isinstance(patterns, dict) and patterns:
            if declared or names is not None or len(patterns) > 1:
                self._refuse(
                    path, "patternProperties", "only one pattern can be enforced, and nothing beside it; use properties"
                )
            self._check_pattern(next(iter(patterns)), "patternProperties", path)
        if names is not None and not (isinstance(names, dict) and self._is_name(names)):
            self._refuse(path, "propertyNames", "it must describe strings only; add type: string there")
        others = [key for key in ("additionalProperties", "unevaluatedProperties") if node.get(key, False) is not False]
        closed = declared and not others
        if any(least > len(set(required)) + 1 for least in _numbers(node, "minProperties")) and not closed:
            self._refuse(
                path, "minProperties", "the same name could come twice; list the names in properties, or use 1"
            )
        for name in declared if others else ():
            if not (name.isascii() and name.isprintable()) or '"' in name or "\\" in name:
                reason = f"it would take in {name[:100]!r}, too; rename that to plain ASCII, or leave it out"
                self._refuse(path, others[0], reason)

    def _is_name(self, names: Json) -> bool:
        strings = any(self._asserts(names, keyword, frozenset({"string"})) for keyword in names)
        types = self.overlap.types(names)
        return types == {"string"} or (strings and types is ANY_TYPE)

    def _inside(self, node: Json, keywords: list[str] | tuple[str, ...], path: str) -> Iterator[tuple[object, str]]:
        for keyword in keywords:
            value = node[keyword]
            if keyword == "$ref" and isinstance(value, str):
                yield self.overlap.target(value), value
            elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
                yield from ((item, f"{path}/{keyword}/{index}") for index, item in enumerate(value))
            elif keyword in ("properties", "patternProperties") and isinstance(value, dict):
                yield from ((item, f"{path}/{keyword}/{name}") for name, item in value.items())
            elif keyword == "propertyNames" and isinstance(value, dict):
                untyped = not any(form in value for form in ("type", *FORMS))
                yield {"type": "string", **value} if untyped else value, f"{path}/{keyword}"
            elif keyword in ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"):
                yield value, f"{path}/{keyword}"


def _target(form: str) -> str:
    return {"$ref": "the definition", "const": "the value", "enum": "the values"}.get(form, "each branch")


def _numbers(node: Json, *keywords: str) -> list[int | float]:
    values = (node.get(keyword) for keyword in keywords)
    return [value for value in values if isinstance(value, int | float)]


# ------------------------------------------------------------------------------------------- what xgrammar misreads


def for_xgrammar(text: str) -> str:
    """The schema or structural tag as xgrammar reads it rightly.

    - To find equal schemas it leaves out titles, descriptions and other comments, but also properties of these names:
      two objects that differ in the type of their `title` would both get that of the first. They get a number.
    - Characters beyond ASCII in a pattern make `.` and classes match quotes, which end the string. They get escaped.
    """
    document = json.loads(text)
    numbers: dict[str, int] = {}
    changed = False
    stack = [document]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            for keyword, value in node.items():
                if keyword in NAMING_KEYWORDS and isinstance(value, dict):
                    stack += value.values()
                elif keyword not in DATA_KEYWORDS:
                    stack.append(value)
            hidden = _overlooked(node)
            if hidden:
                key = json.dumps(hidden, sort_keys=True)
                node["x-omnistage-number"] = numbers.setdefault(key, len(numbers))
            changed |= bool(hidden) | _escape_patterns(node)
    return json.dumps(document, ensure_ascii=False) if changed else text


def _escape_patterns(node: Json) -> bool:
    pattern, by_pattern = node.get("pattern"), node.get("patternProperties")
    changed = False
    if isinstance(pattern, str) and node.get("type") != "regex":  # that is a structural tag's
        node["pattern"] = _UNPRINTABLE.sub(_escaped, pattern)
        changed = node["pattern"] != pattern
    if isinstance(by_pattern, dict):
        renamed = {_UNPRINTABLE.sub(_escaped, name): value for name, value in by_pattern.items()}
        changed |= renamed.keys() != by_pattern.keys()
        node["patternProperties"] = renamed
    return changed


def _escaped(character: re.Match[str]) -> str:
    code = ord(character[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"


def _overlooked(node: Json) -> list[object]:
    mappings = [value for key in ("properties", "patternProperties") if isinstance(value := node.get(key), dict)]
    values = [node["const"]] if "const" in node else node.get("enum")
    return [
        *({name: value} for schemas in mappings for name, value in schemas.items() if name in _COMMENTS),
        *(value for value in (values if isinstance(values, list) else ()) if isinstance(value, dict | list)),
    ]


# ------------------------------------------------------------------------------------------- regular expressions


@dataclass(slots=True)
class _Group:
    at_start: bool
    """Where it begins, nothing has been read,"""
    at_end: bool
    """or a `$` has been."""
    any_end: bool = False
    """One of its alternatives contains a `$`,"""
    anchored: bool = False
    """or any anchor."""


def _regex_problem(expression: str, *, in_json: bool) -> str | None:
    """Why xgrammar would take the expression for another one; None if it would not."""
    groups = [_Group(True, False)]
    at_start, at_end, anchored = True, False, False
    for token in REGEX_TOKEN.finditer(expression):
        kind, text, group = "quantifier" if token["quantifier"] else token.lastgroup, token[0], groups[-1]
        if problem := _escape_problem(expression, token, in_json=in_json and kind == "atom"):
            return problem
        if kind == "open":
            if special := _SPECIAL_GROUP.match(expression, token.start()):
                return (
                    f"lookarounds and flags cannot be enforced ({special[0]} at {special.start()}); rewrite it without"
                )
            groups.append(_Group(at_start, at_end))
            anchored = False
        elif kind == "or":
            group.any_end |= at_end
            at_start, at_end, anchored = group.at_start, group.at_end, False
        elif kind == "close" and len(groups) > 1:
            groups.pop()
            at_start, at_end, anchored = False, at_end or group.any_end, group.anchored
            groups[-1].anchored |= anchored
        elif kind == "quantifier":
            if anchored:
                return f"{text} at {token.start()} repeats ^ or $; move that out"
        elif text == "^" or text == "$":
            if text == "^" and not at_start:
                return f"^ at {token.start()} is not at the beginning; write \\^ for the character, or remove it"
            at_end |= text == "$"
            group.anchored = anchored = True
        else:
            if at_end:
                return f"what is at {token.start()} follows $; write \\$ for the character, or remove it"
            at_start, anchored = False, False
    return None


def _escape_problem(expression: str, token: re.Match[str], *, in_json: bool) -> str | None:
    """`in_json`: the token is a character of a JSON string, where some would have to be escaped."""
    text = token[0]
    for character in _ESCAPED.findall(text) if "\\" in text else ():
        if (character.isalpha() or not character.isascii()) and character not in _ESCAPES:
            return f"\\{character} at {token.start()} is no known escape; remove the backslash"
    if text in ("[]", "[^]"):
        return f"{text} at {token.start()} means different things; write \\] for the character, [\\s\\S] for any"
    if not in_json:
        return None
    code = _CODE.match(expression, token.start())
    character = chr(min(int(code[1] or code[2] or code[3], 16), 0x10FFFF)) if code is not None else text[-1]
    if text == "]":
        return f"] at {token.start()} closes nothing; write \\] for the character"
    if character in '"\\' or character < " " or (len(text) > 1 and code is None and character in "nrtfv0c"):
        return f"{text!r} at {token.start()} would have to be escaped in JSON; leave it out"
    return None
