"""What a constraint will cost, read from its source before anything is compiled."""

from __future__ import annotations

import json

MAX_CHEAP_ALTERNATIVES = 16

_CHEAP_KEYWORDS = frozenset(
    (
        "$defs",
        "$id",
        "$ref",
        "$schema",
        "additionalProperties",
        "anyOf",
        "const",
        "default",
        "definitions",
        "description",
        "enum",
        "examples",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "nullable",
        "oneOf",
        "properties",
        "required",
        "strict",
        "title",
        "type",
    )
)


def is_cheap(kind: str, text: str) -> bool:
    """Whether no mask of this constraint can be expensive: the text can be read in few ways at any place.

    So it is for JSON without patterns and with few alternatives. `text` is valid JSON if `kind` says so.
    """
    if kind == "json_object":
        return True
    return kind == "json_schema" and _alternatives(json.loads(text)) <= MAX_CHEAP_ALTERNATIVES


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
        named = schema.get(keyword)
        if isinstance(named, dict):
            children += named.values()
    return total + sum(_alternatives(child) for child in children)
