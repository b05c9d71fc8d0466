"""Random JSON schemas with a taste for keywords that disturb each other, and values that nearly fit them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ("a", "b", "title", "description", "x y", "é", "a-b.c", 'n"q', "[{|*/:")
VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, 5, 1.5, 2.0, "a", "b", "ab", "", "2020-01-01", True, False, None, [], {}, [1], [1, 1], ["a"]),
    *({"a": 1}, {"title": 1}, {"title": "a"}, {"a": "x", "b": 2}),
)
PATTERNS = (
    "^a$",
    "^a+$",
    "a",
    "^[a-c]{1,3}$",
    "^a|b$",
    "(a$)b",
    "x^a",
    "(?=a)a",
    "^\\d+$",
    "^.$",
    "\\n",
    "^[^a]$",
    '"',
)
STRINGS = ("", "a", "b", "ab", "aa", "aaaa", "2020-01-01", "1", "12", "\n", '"', "é", "c")
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """With the definitions that it may refer to."""
    return {**_schema(rng, 3), "$defs": {"a": _schema(rng, 1), "b": _schema(rng, 2)}}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    form = rng.random()
    if form < 0.08:
        schema["enum"] = rng.sample(VALUES, rng.randint(1, 4))
    elif form < 0.14:
        schema["const"] = rng.choice(VALUES)
    elif form < 0.22 and depth:
        branches = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        schema[rng.choice(("anyOf", "oneOf", "oneOf", "allOf"))] = branches
    elif form < 0.28:
        schema["$ref"] = rng.choice(("#/$defs/a", "#/$defs/b"))
    elif form < 0.30:
        return {}
    types = rng.sample(TYPES if depth else TYPES[:5], 2 if rng.random() < 0.07 else 1)
    often = 0.02 if schema else 0.3
    if rng.random() < (0.12 if schema else 0.95):
        schema["type"] = types[0] if len(types) == 1 else types

    def put(keyword: str, kind: str, make: Callable[[], object]) -> None:
        if rng.random() < (often if kind in types else 0.01):
            schema[keyword] = make()

    _put_scalars(rng, put)
    if depth:
        _put_containers(rng, put, depth, schema)
    if rng.random() < 0.01:
        schema["not"] = _schema(rng, 0)
    if rng.random() < 0.1:
        schema[rng.choice(("title", "description", "default", "x-other"))] = "q"
    return schema


def _put_scalars(rng: random.Random, put: Callable[[str, str, Callable[[], object]], None]) -> None:
    put("minLength", "string", lambda: rng.randint(0, 3))
    put("maxLength", "string", lambda: rng.randint(0, 3))
    put("pattern", "string", lambda: rng.choice(PATTERNS))
    put("format", "string", lambda: rng.choice(("date", "other", "uuid")))
    for kind in ("integer", "number"):
        for keyword in BOUNDS:
            put(keyword, kind, lambda: rng.choice((0, 1, 2, -1, 1.5, 2.0, 3)))
        put("multipleOf", kind, lambda: rng.choice((1, 2, 3, 0.5)))


def _put_containers(
    rng: random.Random,
    put: Callable[[str, str, Callable[[], object]], None],
    depth: int,
    schema: dict[str, Any],
) -> None:
    def inner() -> object:
        return _schema(rng, depth - 1)

    def other() -> object:
        return inner() if rng.random() < 0.5 else rng.random() < 0.5

    put("items", "array", inner)
    put("prefixItems", "array", lambda: [inner() for _ in range(rng.randint(1, 2))])
    put("unevaluatedItems", "array", other)
    put("minItems", "array", lambda: rng.randint(0, 2))
    put("maxItems", "array", lambda: rng.randint(0, 3))
    put("uniqueItems", "array", lambda: rng.random() < 0.5)
    for _ in range(4):
        put("properties", "object", lambda: {name: inner() for name in rng.sample(NAMES, rng.randint(1, 3))})
    known = [*schema.get("properties", {})] or [*NAMES]
    for _ in range(2):
        put("required", "object", lambda: rng.sample(known, 1))
    put("additionalProperties", "object", other)
    put("unevaluatedProperties", "object", other)
    put("minProperties", "object", lambda: rng.randint(0, 3))
    put("maxProperties", "object", lambda: rng.randint(0, 3))
    if rng.random() < 0.2:
        put("patternProperties", "object", lambda: {name: inner() for name in rng.sample(PATTERNS, rng.randint(1, 2))})
        put("propertyNames", "object", lambda: rng.choice(({"pattern": rng.choice(PATTERNS)}, _schema(rng, 0))))


def random_instance(rng: random.Random, schema: Any, root: dict[str, Any], depth: int = 0) -> Any:
    """A value that may fit; JSON schemas of other shapes than `random_schema` makes are taken, too."""
    if rng.random() < 0.05 or depth > 6 or not isinstance(schema, dict):
        return rng.choice(VALUES)
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        return random_instance(rng, target, root, depth + 1)
    if "const" in schema or "enum" in schema:
        return rng.choice([schema["const"]] if "const" in schema else schema["enum"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return random_instance(rng, rng.choice(schema[keyword]), root, depth + 1)
    types = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else "")
    kind = rng.choice(types) if isinstance(types, list) else types
    if kind in ("array", "object"):
        return (_array if kind == "array" else _object)(rng, schema, root, depth + 1)
    return rng.choice(
        {
            "string": STRINGS,
            "integer": (-2, -1, 0, 1, 2, 3, 4, 5, 6, 9),
            "number": (-2, -1, 0, 0.5, 1, 1.5, 2, 2.0, 2.5, 3, 4),
            "boolean": (True, False),
            "null": (None,),
        }.get(kind, VALUES)
    )


def _array(rng: random.Random, schema: dict[str, Any], root: dict[str, Any], depth: int) -> list[Any]:
    first = schema.get("prefixItems", [])
    rest = schema.get("items", schema.get("unevaluatedItems", True))
    count = rng.randint(0, 4)
    made = [random_instance(rng, first[i] if i < len(first) else rest, root, depth) for i in range(count)]
    return made + made[:1] if rng.random() < 0.2 else made


def _object(rng: random.Random, schema: dict[str, Any], root: dict[str, Any], depth: int) -> dict[str, Any]:
    made = {}
    for name, inner in schema.get("properties", {}).items():
        if rng.random() < (0.95 if name in schema.get("required", ()) else 0.6):
            made[name] = random_instance(rng, inner, root, depth)
    if rng.random() < 0.4:
        patterned = next(iter(schema.get("patternProperties", {"": True}).values()))
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", patterned))
        name = rng.choice((*NAMES, "aa", "1", "ab"))
        made[name] = random_instance(rng, others if rng.random() < 0.6 else patterned, root, depth)
    return made
