"""JSON schemas: what cannot be enforced exactly is refused by name, and what is accepted is followed."""

from __future__ import annotations

import contextlib
import datetime
import enum
import functools
import json
import random
import time
import uuid
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

pytest.importorskip("xgrammar")

import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from omnistage.core.errors import InvalidRequestError, OmniError
from omnistage.core.params import StructuredOutput
from omnistage.engines.ar.sampling.grammar import GrammarCompiler
from omnistage.engines.ar.sampling.schema_support import check_regex, check_schema, for_xgrammar
from tests.unit.random_schemas import random_instance, random_schema
from tests.unit.test_grammar import EOS, TOKENIZER, WIDTH, generate

Schema = dict[str, Any]
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
OBJECT, ARRAY = {"type": "object"}, {"type": "array"}
TWO = {"a": INTEGER, "b": STRING}
A = {**OBJECT, "properties": {"a": INTEGER}, "required": ["a"]}
B = {**OBJECT, "properties": {"b": INTEGER}, "required": ["b"]}


def accepts(schema: Schema, text: str) -> bool:
    """Whether the text may be written, as the engine compiles the schema."""
    compiled = xgrammar.Grammar.from_json_schema(for_xgrammar(json.dumps(schema)))
    return bool(_is_grammar_accept_string(compiled, text))


# ---------------------------------------------------------------------------------------------------- refused

REFUSED: list[tuple[Schema, str]] = [
    ({**ARRAY, "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
    ({**ARRAY, "items": INTEGER, "contains": {"const": 3}}, "contains"),
    ({**NUMBER, "multipleOf": 3}, "multipleOf"),
    ({**INTEGER, "multipleOf": 1.5}, "multipleOf"),
    ({**INTEGER, "multipleOf": 2000}, "multipleOf"),
    ({**INTEGER, "multipleOf": 3, "minimum": 2}, "multipleOf"),
    ({**NUMBER, "exclusiveMinimum": 8324356828206.669}, "exclusiveMinimum"),
    ({**NUMBER, "exclusiveMaximum": -3938221920649432154}, "exclusiveMaximum"),
    ({"not": STRING}, "not"),
    ({**STRING, "if": {"const": "a"}, "then": {"minLength": 2}}, "if"),
    ({**OBJECT, "properties": TWO, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**OBJECT, "properties": TWO, "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({**OBJECT, "properties": TWO, "dependencies": {"a": ["b"]}}, "dependencies"),
    ({**OBJECT, "properties": TWO, "propertyNames": {"pattern": "^a$"}}, "propertyNames"),
    ({**OBJECT, "propertyNames": {"type": ["string", "integer"]}}, "propertyNames"),
    ({**OBJECT, "propertyNames": {"enum": ["a", 1]}}, "propertyNames"),
    ({**OBJECT, "propertyNames": {}}, "propertyNames"),
    ({**OBJECT, "properties": TWO, "patternProperties": {"^a$": STRING}}, "patternProperties"),
    ({**OBJECT, "patternProperties": {"^a+$": INTEGER, "^aa$": STRING}}, "patternProperties"),
    ({**OBJECT, "patternProperties": {"^.$": INTEGER}, "propertyNames": {"pattern": "^a$"}}, "patternProperties"),
    ({**OBJECT, "patternProperties": {"^(?!b)a$": INTEGER}}, "patternProperties"),
    ({**OBJECT, "properties": {"é": INTEGER}, "additionalProperties": True}, "additionalProperties"),
    ({**OBJECT, "additionalProperties": INTEGER, "minProperties": 2}, "minProperties"),
    ({**OBJECT, "properties": TWO, "required": ["c"]}, "required"),
    ({**OBJECT, "required": ["c"]}, "required"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER, "a~1b": STRING}}, "$ref"),
    ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}, "minimum": 3}, "minimum"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": ["integer", "null"]}}, "type": "integer"}, "type"),
    ({"anyOf": [INTEGER, STRING], "minimum": 3}, "minimum"),
    ({"anyOf": [INTEGER, STRING], "type": "integer"}, "type"),
    ({"anyOf": [A, B], **OBJECT, "properties": TWO}, "properties"),
    ({"anyOf": [INTEGER, STRING], "enum": [1, True]}, "anyOf"),
    ({"oneOf": [INTEGER, STRING], "maximum": 3}, "maximum"),
    ({"allOf": [INTEGER], "minimum": 3}, "minimum"),
    ({"allOf": [INTEGER, {"minimum": 3}]}, "allOf"),
    ({"enum": ["a", "bb"], "minLength": 2}, "minLength"),
    ({"enum": ["a", 1], "type": "string"}, "type"),
    ({"const": "a", "minLength": 2}, "minLength"),
    ({"const": "a", "enum": ["b"]}, "enum"),
    ({"const": 2**63}, "const"),
    ({"enum": [1, -(2**64)]}, "enum"),
    ({"type": []}, "type"),
    *(
        ({keyword: value}, keyword)
        for keyword, value in (
            *(("minLength", 2), ("maxLength", 2), ("pattern", "^a$"), ("format", "date"), ("minimum", 2)),
            *(("multipleOf", 2), ("required", ["a"]), ("minItems", 1), ("maxProperties", 1)),
            *(("patternProperties", {"a": INTEGER}), ("propertyNames", {"maxLength": 1})),
        )
    ),
    ({**STRING, "pattern": "^a+$", "minLength": 2}, "minLength"),
    ({**STRING, "format": "date", "maxLength": 9}, "maxLength"),
    ({**STRING, "pattern": "^a+$", "format": "date"}, "format"),
    ({**STRING, "format": "json-pointer"}, "format"),
    *(
        ({**STRING, "pattern": pattern}, "pattern")
        for pattern in (
            *(
                "^(?=b)a$",
                "^(?!b)a$",
                "(?<=b)a",
                "(?<!b)a",
                "(?i)a",
                "a^b",
                "a$b",
                "(a$)b",
                "b*^a",
                "^(^a)+$",
                r"\Aa\Z",
            ),
            *('^"$', r"^\n$", r"^\\$", r"^\x22$", r"^\u005c$", r"^\cJ$", "a\tb", ".|]", "[^]", "[]", r"\é"),
        )
    ),
]
OVERLAPPING: list[list[object]] = [
    [INTEGER, NUMBER],
    [{"const": 1}, {"const": 1.0}],
    [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}],
    [{"const": [1]}, {"const": [1.0]}],
    [{"const": "a"}, STRING],
    [A, B],
    [A, {**A, "properties": {"a": NUMBER}}],
    [{**OBJECT, "properties": {"kind": {"const": "a"}}}, {**OBJECT, "properties": {"kind": {"const": "b"}}}],
    [{**A, "additionalProperties": False}, {**A, "additionalProperties": False}],
    [{"anyOf": [STRING, INTEGER]}, {"anyOf": [{"type": "null"}, STRING]}],
    [True, STRING],
    [{}, STRING],
    [{"$ref": "#/oneOf/1"}, {"$ref": "#/oneOf/0"}],
]


@pytest.mark.parametrize(("schema", "keyword"), REFUSED, ids=lambda value: json.dumps(value)[:80])
def test_what_would_not_be_enforced_is_refused_by_name(schema: Schema, keyword: str) -> None:
    definitions = schema.pop("$defs", {}) if "$defs" in schema else {}
    inside = {**OBJECT, "properties": {"x": {**ARRAY, "items": schema}}, "required": ["x"], "$defs": definitions}
    with pytest.raises(InvalidRequestError) as caught:
        check_schema(inside, "structured.json_schema")
    assert caught.value.param == "structured.json_schema"
    assert caught.value.message.startswith(f"at #/properties/x/items: {keyword} is not supported: ")
    assert caught.value.message.count(";") >= 1 or "must be" in caught.value.message  # and what to do instead


@pytest.mark.parametrize("branches", OVERLAPPING, ids=lambda value: json.dumps(value)[:80])
def test_branches_that_may_overlap_are_refused(branches: list[object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^p: at #: oneOf .*; use anyOf if a value may fit several"):
        check_schema({"oneOf": branches}, "p")


def test_a_definition_is_checked_where_it_is_used_and_only_there() -> None:
    definitions = {"good": INTEGER, "bad": {"not": STRING}, "loop": {"anyOf": [INTEGER, {"$ref": "#/$defs/loop"}]}}
    check_schema({**ARRAY, "items": {"$ref": "#/$defs/good"}, "$defs": definitions}, "p")
    check_schema({**ARRAY, "items": {"$ref": "#/$defs/loop"}, "$defs": definitions}, "p")
    with pytest.raises(InvalidRequestError, match="at #/\\$defs/bad: not "):
        check_schema({**ARRAY, "items": {"$ref": "#/$defs/bad"}, "$defs": definitions}, "p")


def test_an_id_inside_is_refused_where_a_reference_would_mean_another_schema() -> None:
    inner = {"$id": "http://a/b", "$defs": {"x": STRING}, **OBJECT, "properties": {"y": {"$ref": "#/$defs/x"}}}
    with pytest.raises(InvalidRequestError, match="at #/properties/inner: \\$id "):
        check_schema({**OBJECT, "properties": {"inner": inner}, "$defs": {"x": INTEGER}}, "p")
    check_schema({"$id": "http://a/c", **OBJECT, "properties": {"x": {"$id": "http://a/b", **STRING}}}, "p")


def test_names_and_data_are_no_keywords() -> None:
    names = {"not": STRING, "if": STRING, "uniqueItems": STRING, "$dynamicRef": STRING, "pattern": STRING}
    check_schema({**OBJECT, "properties": names, "required": [*names], "default": {"not": {}}}, "p")
    check_schema({"enum": [{"not": 1, "required": ["x"]}], "examples": [{"$ref": "#/nowhere"}]}, "p")


@pytest.mark.parametrize("expression", ["a^b", "a$b", "(^a)+", r"\Aa", "(?=b)a", "(?<!b)a"])
def test_a_regular_expression_with_another_meaning_is_refused(expression: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GrammarCompiler(TOKENIZER, WIDTH, [EOS]).compile(StructuredOutput(regex=expression))
    assert caught.value.param == "structured.regex"
    assert ";" in caught.value.message


def test_plain_expressions_stay() -> None:
    phone = r"^(\(?\d{3}\)?[ -]?)?\d{3}-\d{4}$"
    for expression in ("^a|b$", "(?:^a$|^b$)", "^(?<year>\\d{4})$", "[(?=^$]+", r"\^\$\(\?=", "a+?", '"\\n', phone):
        check_regex(expression, "p")
    check_schema({**STRING, "pattern": phone}, "p")


def test_the_engine_refuses_before_it_compiles() -> None:
    compiler = GrammarCompiler(TOKENIZER, WIDTH, [EOS])
    for schema in ({**ARRAY, "uniqueItems": True}, json.dumps({**ARRAY, "uniqueItems": True})):
        with pytest.raises(InvalidRequestError, match=r"^structured.json_schema: at #: uniqueItems"):
            compiler.compile(StructuredOutput(json_schema=schema))


# --------------------------------------------------------------------------------------------------- accepted


class Colour(enum.Enum):
    red = "red"
    blue = "blue"


class Item(BaseModel):
    title: str
    description: str | None = None
    count: Annotated[int, Field(ge=0, lt=10)]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    volume: Annotated[float, Field(gt=0, le=1.5)]


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Everything(BaseModel):
    model_config = ConfigDict(extra="forbid")

    choice: Literal["x", "y"]
    only: Literal["z"]
    optional: int | None = None
    item: Item
    items: Annotated[list[Item], Field(min_length=1, max_length=3)]
    counts: dict[str, int]
    by_colour: dict[Colour, int]
    by_name: dict[Annotated[str, Field(pattern="^[a-z]+$")], int]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    colour: Colour = Field(description="of the thing")
    short: Annotated[str, Field(min_length=1, max_length=5)]
    code: Annotated[str, Field(pattern=r"^[a-z]{2,4}$")]
    pair: tuple[int, str]
    when: datetime.datetime
    day: datetime.date
    key: uuid.UUID
    flag: bool
    several: float | int | str | None
    anything: Any
    step: Annotated[int, Field(multiple_of=5)]
    share: Annotated[float, Field(ge=0, le=1)]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str


def closed(properties: Schema, **more: Any) -> Schema:
    """As OpenAI's and zod's converters write an object."""
    return {**OBJECT, "properties": properties, "required": [*properties], "additionalProperties": False, **more}


STEP = closed({"explanation": STRING, "output": STRING})
ACCEPTED: list[Schema] = [
    *(model.model_json_schema() for model in (Item, Cat, Dog, Node, Everything, Open)),
    # OpenAI's guide: chain of thought, moderation, recursion, unions, a user interface
    closed({"steps": {**ARRAY, "items": STEP}, "final_answer": STRING}),
    closed({"is_violating": {"type": "boolean"}, "category": {"type": ["string", "null"], "enum": ["a", "b", None]}}),
    closed({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "value": NUMBER}),
    closed({"item": {"anyOf": [{"$ref": "#/$defs/step"}, closed({"n": INTEGER})]}}, **{"$defs": {"step": STEP}}),
    closed(
        {
            "type": {**STRING, "enum": ["div", "button"]},
            "children": {**ARRAY, "items": {"$ref": "#"}},
            "attributes": {**ARRAY, "items": closed({"name": STRING, "value": STRING})},
        }
    ),
    closed(
        {"at": {**STRING, "format": "date-time"}, "to": {**STRING, "format": "email"}, "n": {**NUMBER, "minimum": 1}}
    ),
    # zod
    {"$schema": "https://json-schema.org/draft/2020-12/schema", **closed({"age": {**INTEGER, "exclusiveMinimum": 0}})},
    closed({"n": {**INTEGER, "minimum": -9007199254740991, "maximum": 9007199254740991}}),
    {**OBJECT, "propertyNames": STRING, "additionalProperties": NUMBER},
    {"oneOf": [closed({"t": {**STRING, "const": "a"}, "n": INTEGER}), closed({"t": {**STRING, "const": "b"}})]},
    {"oneOf": [{"$ref": "#/definitions/a"}, {"type": "null"}], "definitions": {"a": closed({"a": STRING})}},
    {**ARRAY, "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2, "maxItems": 2},
    # others
    {"oneOf": [closed({"a": INTEGER}), closed({"b": INTEGER})]},
    {"oneOf": [{"enum": ["a", 1]}, {"enum": ["b", None]}, ARRAY], "type": ["string", "number", "null", "array"]},
    {"oneOf": [closed({"in": closed({"k": {"const": i}})}) for i in range(3)]},
    {"oneOf": [{"const": i, "title": f"{i}"} for i in range(300)]},
    {"oneOf": [closed({"n": INTEGER, "kind": {"const": f"k{i}"}}) for i in range(200)]},
    {"allOf": [{"$ref": "#/$defs/a"}], "description": "older pydantic", "default": 1, "$defs": {"a": INTEGER}},
    {"const": "a", "enum": ["a"], "type": "string"},
    {"type": ["string", "null"], "minLength": 2, "maximum": 3, "uniqueItems": True},
    {"properties": {"a": INTEGER}, "required": ["a"], "minLength": 3},
    {**ARRAY, "items": {}, "uniqueItems": False, "minItems": 0, "maxItems": 2},
    {**STRING, "format": "colour", "maxLength": 4},
    {**INTEGER, "multipleOf": 3, "minimum": 0, "maximum": 20},
    {**OBJECT, "patternProperties": {"^[a-z]$": INTEGER}, "minProperties": 1},
    {**OBJECT, "properties": TWO, "minProperties": 1, "maxProperties": 1},
    {},
]


def validator(schema: Schema) -> Any:
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=False)


@pytest.mark.parametrize("schema", ACCEPTED, ids=lambda value: json.dumps(value)[:80])
def test_common_schemas_are_accepted_and_followed(schema: Schema) -> None:
    check_schema(schema, "p")
    valid = validator(schema)
    for seed in range(2):
        text, ended = generate({"json_schema": schema}, seed=seed, limit=150)
        assert not ended or valid.is_valid(json.loads(text)), text
    rng = random.Random(1)
    for _ in range(20):
        value = random_instance(rng, schema, schema)
        if accepts(schema, text := json.dumps(value, ensure_ascii=False)):
            assert valid.is_valid(value), text


def test_random_schemas_are_refused_or_followed() -> None:
    accepted = checked = 0
    for seed in range(400):
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            check_schema(schema, "p")
            grammar = xgrammar.Grammar.from_json_schema(for_xgrammar(json.dumps(schema)))
        except (OmniError, RuntimeError):
            continue
        accepted += 1
        valid = validator(schema)
        for text in {json.dumps(random_instance(rng, schema, schema), ensure_ascii=False) for _ in range(15)}:
            if _is_grammar_accept_string(grammar, text):
                checked += 1
                assert valid.is_valid(json.loads(text)), (seed, schema, text)
    assert accepted > 100
    assert checked > 200


@pytest.mark.parametrize("name", ["title", "description", "default"])
def test_objects_that_differ_in_a_property_called_like_a_comment_are_told_apart(name: str) -> None:
    def holder(schema: Schema) -> Schema:
        return {**OBJECT, "properties": {name: schema}, "required": [name]}

    schema = {**OBJECT, "properties": {"x": holder(STRING), "y": holder(INTEGER)}, "required": ["x", "y"]}
    assert accepts(schema, f'{{"x": {{"{name}": "a"}}, "y": {{"{name}": 1}}}}')
    assert not accepts(schema, f'{{"x": {{"{name}": "a"}}, "y": {{"{name}": "b"}}}}')
    either = {"anyOf": [{"const": {name: 1}}, {"const": {name: [2]}}]}
    assert accepts(either, f'{{"{name}":[2]}}')
    assert for_xgrammar(text := json.dumps(STEP)) == text
    compiler = GrammarCompiler(TOKENIZER, WIDTH, [EOS])
    tag = {"type": "json_schema", "json_schema": schema}
    for structured in (StructuredOutput(json_schema=schema), StructuredOutput(structural_tag=tag)):
        matcher = xgrammar.GrammarMatcher(compiler.compile(structured))
        assert matcher.accept_string(f'{{"x": {{"{name}": "a"}}, "y": {{"{name}": 1}}}}')


@pytest.mark.parametrize("pattern", ["^.é$", "^.[é-ü]$", r"^[A-z]\u00e9$", "^.😀$", "^\\s[\té]$"])
def test_no_pattern_ends_its_string(pattern: str) -> None:
    schema = {**STRING, "pattern": pattern}
    check_schema(schema, "p")
    last = "😀" if "😀" in pattern else "é"
    assert accepts(schema, json.dumps(f" {last}" if "A" not in pattern else f"a{last}", ensure_ascii=False))
    names = {**OBJECT, "patternProperties": {pattern: INTEGER}}
    for first in ('"', "\\", "\n"):
        assert not accepts(schema, f'"{first}{last}"')
        assert not accepts(names, f'{{"{first}{last}": 1}}')


# ----------------------------------------------------------------------------------------------------- bounds


def chain(length: int) -> Schema:
    """Definitions that lead to each other, each twice."""
    branches = {f"d{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(length)}
    return {"oneOf": [{"$ref": "#/$defs/d0"}, STRING], "$defs": {**branches, f"d{length}": INTEGER}}


LARGE: list[Schema] = [
    chain(1000),
    chain(12),
    {"oneOf": [{"const": i} for i in range(5000)]},
    {"oneOf": [closed({f"p{i}": INTEGER for i in range(20)}) for _ in range(150)]},
    {"oneOf": [{"enum": [f"{j}-{i}" for i in range(100)]} for j in range(60)]},
    {**OBJECT, "properties": {f"{i}": {} for i in range(8000)}},
    functools.reduce(lambda inner, _: {"anyOf": [inner, {"type": "null"}]}, range(60), INTEGER),
    {**STRING, "pattern": "(" * 30_000 + "^a$" + ")" * 30_000},
    {**STRING, "pattern": "(a*)*" * 10_000 + "$"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "#"},
]


def test_a_chain_of_references_is_followed() -> None:
    check_schema(chain(12), "p")


@pytest.mark.parametrize("schema", LARGE, ids=range(len(LARGE)))
def test_large_and_cyclic_schemas_are_checked_in_time(schema: Schema) -> None:
    began = time.thread_time()
    with contextlib.suppress(InvalidRequestError):
        check_schema(schema, "p")
    assert time.thread_time() - began < 2.0  # some milliseconds; comparing all pairs would take minutes
