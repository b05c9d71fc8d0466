"""What a constraint costs is read from its source: what is out of proportion is refused before it is compiled."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from omnistage.core.errors import InvalidRequestError, LimitExceededError
from omnistage.engines.ar.sampling.grammar_bounds import MAX_PATTERN_CHARS, MAX_STATES, check_source, cost_of

HUGE = "^(.{1,500}){400,500}$"


def schema(**keywords: object) -> tuple[str, str]:
    return "json_schema", json.dumps(keywords)


def tag(**content: object) -> tuple[str, str]:
    return "structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": [content]}})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", HUGE),
        ("regex", f"a|(b{HUGE}c)"),
        ("regex", "((((a{1,60}){1,60}){1,60})){1,60}"),
        ("grammar", "root ::= ([a-z]{1,500}){400,500}"),
        ("grammar", 'root ::= line{1,500}\nline ::= "x" word "y"\nword ::= [a-z]{1,500}'),
        schema(type="string", pattern=HUGE),
        schema(properties={"a": {"items": {"anyOf": [{"pattern": HUGE}]}}}),
        schema(patternProperties={HUGE: {"type": "integer"}}),
        *(schema(properties={name: {"pattern": HUGE}}) for name in ("title", "description", "default", "enum")),
        schema(**{"$defs": {"examples": {"properties": {"const": {"pattern": HUGE}}}}}),
        tag(type="regex", pattern=HUGE),
        tag(type="grammar", grammar="root ::= ([a-z]{1,500}){400,500}"),
        tag(type="json_schema", json_schema={"pattern": HUGE}),
    ],
)
def test_counts_inside_of_counts_are_refused_wherever_they_stand(kind: str, text: str) -> None:
    with pytest.raises(LimitExceededError, match="more than 100,000") as refused:
        cost_of(kind, text)
    assert refused.value.param == f"structured.{kind}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "." * 4000),
        ("regex", ".?" * 120),
        ("regex", "(.|)" * 120),
        ("regex", "(.*)" * 120),
        ("regex", "a?" * 1000),
        ("grammar", "root ::= " + "[^a]? " * 120),
        schema(properties={f"p{i}": {"maxLength": 200 + i} for i in range(20)}),
        schema(properties={f"p{i}": {"pattern": f"^.{{1,{200 + i}}}$"} for i in range(20)}),
        schema(properties={f"p{i}": {} for i in range(400)}, maxProperties=200),
        schema(properties={f"p{i}": {} for i in range(2000)}),
        schema(properties={f"p{i}": {"type": "string"} for i in range(2100)}, additionalProperties=True),
    ],
)
def test_what_takes_long_to_compile_is_refused_with_both_numbers(kind: str, text: str) -> None:
    with pytest.raises(LimitExceededError, match=rf"\d+ states .* {MAX_STATES} is the limit"):
        cost_of(kind, text)


LONG = "[a-z]x?" * 8_500


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", LONG),
        ("grammar", 'root ::= "a"' + ' "b"' * 5_000),
        schema(properties={"a": {"type": "string", "pattern": LONG}}),
        schema(patternProperties={LONG: {}}),
        schema(anyOf=[{"type": "string", "pattern": f"^a{i}$"} for i in range(600)]),
        tag(type="json_schema", json_schema={"pattern": LONG}),
        tag(type="grammar", grammar='root ::= "a"' + ' "b"' * 5_000),
    ],
)
def test_long_patterns_and_grammars_are_refused_before_they_are_scanned(
    kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scanning 60 KB takes a tenth of a second of Python, in which nobody else is served."""
    monkeypatch.setattr("omnistage.engines.ar.sampling.expression_scan._Scan", None)
    with pytest.raises(LimitExceededError, match=r"(8192|16384) is the limit; shorten them") as refused:
        cost_of(kind, text)
    assert refused.value.param == f"structured.{kind}"


def test_a_pattern_that_is_used_often_counts_once() -> None:
    often = [{"type": "string", "pattern": "a" * 4_000}] * 10
    assert MAX_PATTERN_CHARS < 10 * 4_000
    check_source(often, "tools")
    cost_of(*schema(anyOf=often))


@pytest.mark.parametrize(
    "source",
    [
        {"anyOf": [{}] * 14_000},
        {"enum": [0] * 500_000},
        {"properties": {f"p{i}": {"type": "string"} for i in range(40_000)}},
        {"properties": {"a": {"enum": ["x" * 1000] * 1000, "description": "y"}}},
        {"description": "x" * 10**6},
    ],
    ids=lambda source: next(iter(source)),
)
def test_what_is_too_large_is_refused_without_writing_or_scanning_it(source: dict[str, object]) -> None:
    with pytest.raises(LimitExceededError, match=r"at most 65536 bytes|more than 2500 schemas"):
        check_source(source, "tools")


@pytest.mark.parametrize(("kind", "text"), [("regex", "(" * 70 + "a" + ")" * 70), ("grammar", "root ::= " + "(" * 70)])
def test_deep_groups_are_refused(kind: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="nested deeper than 64"):
        cost_of(kind, text)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= root{2}",
        "root ::= root{0,}",
        'root ::= "a"\nr ::= r{2,}',
        'root ::= ("" root){2,}',
        "root ::= a{200}\na ::= b\nb ::= root?",
    ],
)
def test_a_rule_that_stands_only_for_itself_is_refused(text: str) -> None:
    """xgrammar ends the whole process for some of them."""
    for kind, source in (("grammar", text), tag(type="grammar", grammar=text)):
        with pytest.raises(InvalidRequestError, match="only refers to itself"):
            cost_of(kind, source)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", r"\d{4}-\d{2}-\d{2}"),
        ("regex", "[a-z]{1,64}"),
        ("regex", r"([a-z]{1,63}\.){1,127}[a-z]{2,63}"),
        ("regex", r"[\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63}){1,8}"),
        ("regex", r"\(\{1,500\}\)[({1,9})]{400}\{"),
        ("regex", ".{1,100000}"),
        ("regex", "(yes|no|perhaps) *(x?y)?" * 20),
        (
            "grammar",
            'root ::= "{" pair ("," pair){0,50} "}" # (x{1,999}){1,999}\npair ::= "\\"" [a-z]{1,50} "\\":" root',
        ),
        ("grammar", 'root ::= "(x{1,999}){1,999}"'),
        ("grammar", 'root ::= sum\nsum ::= product | sum "+" product\nproduct ::= [0-9]+ | "(" root ")"'),
        schema(type="string", maxLength=10_000),
        schema(type="array", items={"type": "string", "maxLength": 1000}, maxItems=1000),
        schema(properties={f"p{i}": {"type": "string", "maxLength": 200} for i in range(50)}),
        schema(
            properties={"pattern": {"type": "string"}, "grammar": {"type": "string"}, "maxLength": {"type": "number"}}
        ),
        schema(enum=[{"pattern": HUGE}], default={"pattern": HUGE}),
        schema(maxLength=10**30, minLength="wrong"),
        schema(maxLength=10**400, minLength=-(10**400), minProperties=10**400, maxProperties=1e300),
        schema(properties={f"p{i}": {} for i in range(1000)}, required=[f"p{i}" for i in range(1000)]),
        schema(properties={f"p{i}": {} for i in range(300)}),
        ("json_object", ""),
    ],
)
def test_what_people_write_is_let_through(kind: str, text: str) -> None:
    cost_of(kind, text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 60 + "a?" * 30_000,
        "[" * 60_000,
        '"' * 60_000,
        "a{" + "9" * 60_000 + "}",
        "x ::= " * 9000,
        "\\" * 60_001,
        "".join(f"r{i} ::= r{i + 1}\n" for i in range(4000)),
    ],
)
@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_reading_takes_time_in_proportion_to_the_source(kind: str, text: str) -> None:
    start = time.thread_time()
    with contextlib.suppress(InvalidRequestError):
        cost_of(kind, text)
    assert time.thread_time() - start < 5.0


def test_only_schemas_with_few_alternatives_and_no_patterns_have_cheap_masks() -> None:
    person = {"properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": ["integer", "null"]}}}
    assert cost_of("json_object", "").cheap_masks
    assert cost_of(*schema(**person)).cheap_masks
    assert cost_of(*schema(anyOf=[{"type": "null"}] * 16)).cheap_masks
    assert not cost_of(*schema(anyOf=[{"type": "null"}] * 17)).cheap_masks
    assert not cost_of(*schema(anyOf=[{"maxLength": 9}] * 5)).cheap_masks
    assert not cost_of(*schema(items={"type": "string", "pattern": "a"})).cheap_masks
    assert not cost_of(*schema(allOf=[person])).cheap_masks
    assert not cost_of("regex", "a").cheap_masks
    assert not cost_of("grammar", 'root ::= "a"').cheap_masks


def test_a_schema_of_many_optional_properties_is_not_compiled_among_the_cheap_ones() -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(300)}
    assert not cost_of(*schema(properties=properties)).cheap
    assert cost_of(*schema(properties=properties, required=list(properties))).cheap
    few = dict(list(properties.items())[:30])
    assert cost_of(*schema(properties=few)).cheap
    assert cost_of(*schema(properties=few, additionalProperties=True)).cheap
