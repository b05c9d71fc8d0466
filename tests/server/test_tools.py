"""Tools in chat completions, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from omnistage.core.errors import LimitExceededError
from omnistage.engines.ar.sampling.schema_support import check_schema
from omnistage.omni import AsyncOmni
from omnistage.server.openai.tools import CallReader, Function, Toolbox, ToolFields, check_schemas, read_whole
from omnistage.server.service import Service
from tests.chat_templates import TOOL_TEMPLATE
from tests.server.harness import SERVE_LIMITS, Running, make, serving

USER = [{"role": "user", "content": "Weather in Rome?"}]
DIGITS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}
REFERRING = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}},
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": DIGITS}},
    {"type": "function", "function": {"name": "weather", "parameters": REFERRING}},
]
WRONG_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a", "parameters": {"type": "nope"}}}
DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"a": inner}, range(400), {})
DEEP_CALL: dict[str, Any] = {"id": "1", "function": {"name": "a", "arguments": '{"a":' * 900 + "1" + "}" * 900}}
GIVEN: dict[str, Any] = {"model": "lm", "messages": USER, "tools": TOOLS, "max_tokens": 200, "temperature": 0}
VALUES = {"count": ("n", (1, 2, 3)), "weather": ("unit", ("C", "F"))}


def box(*, forced: bool = False) -> Toolbox:
    return Toolbox(tuple(Function(**tool["function"]) for tool in TOOLS), forced)


def joined(events: list[Any]) -> tuple[str, list[dict[str, str]], str | None]:
    """What the deltas of a stream amount to."""
    content, calls, finish = "", [], None
    for choice in (event.choices[0] for event in events if event.choices):
        content += choice.delta.content or ""
        for piece in choice.delta.tool_calls or ():
            if piece.id:
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            calls[piece.index]["arguments"] += piece.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, calls, finish


# A random model may go on with white space that JSON allows until its tokens are used up: several seeds are tried.
def finished(client: openai.OpenAI, **more: Any) -> Any:
    for seed in range(8):
        answer = client.chat.completions.create(**{**GIVEN, "temperature": 1, "seed": seed, **more})
        if answer.choices[0].finish_reason != "length":
            return answer, seed
    raise AssertionError("no seed gives a whole call")


def test_a_required_call_is_made_and_fits_its_schema(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    answer, seed = finished(client, tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert call.type == "function"
    key, allowed = VALUES[call.function.name]
    assert json.loads(call.function.arguments)[key] in allowed
    more = {"temperature": 1, "seed": seed, "tool_choice": "required", "stream": True}
    content, calls, finish = joined(list(client.chat.completions.create(**{**GIVEN, **more})))
    assert (content, finish) == ("", "tool_calls")
    assert [(c["name"], c["arguments"]) for c in calls] == [(call.function.name, call.function.arguments)]


def test_a_named_function_is_called_and_its_arguments_stream(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    named = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    answer, seed = finished(client, **named)
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    events = list(client.chat.completions.create(**{**GIVEN, "temperature": 1, "seed": seed, **named, "stream": True}))
    _, calls, finish = joined(events)
    assert finish == "tool_calls"
    assert calls[0]["arguments"] == call.function.arguments
    assert sum(bool(e.choices and e.choices[0].delta.tool_calls) for e in events) > 2


def test_tools_are_read_by_the_model_and_none_leaves_them_out(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**{**GIVEN, "tools": openai.NOT_GIVEN, "max_tokens": 4})
    none = client.chat.completions.create(**{**GIVEN, "tool_choice": "none", "max_tokens": 4})
    auto = client.chat.completions.create(**{**GIVEN, "max_tokens": 4})
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens + 100
    assert auto.choices[0].finish_reason in ("stop", "length")
    assert auto.choices[0].message.tool_calls is None
    streamed = joined(list(client.chat.completions.create(**{**GIVEN, "max_tokens": 4, "stream": True})))
    assert streamed == (auto.choices[0].message.content, [], auto.choices[0].finish_reason)


def test_tools_go_through_the_models_own_template(tmp_path: Path) -> None:
    folder = make("causal_lm", tmp_path / "lm")
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE, encoding="utf-8")
    stock = AutoTokenizer.from_pretrained(folder)
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=SERVE_LIMITS, progress=False)
    service = Service()
    service.add("lm", omni)
    service.loading = False
    with serving(service) as running, running.client() as client:
        answer = client.chat.completions.create(**{**GIVEN, "max_tokens": 4})
        prompt = stock.apply_chat_template(USER, tools=TOOLS, add_generation_prompt=True)["input_ids"]
        assert answer.usage.prompt_tokens == len(prompt)
        if importlib.util.find_spec("xgrammar") is not None:
            call = finished(client, tool_choice="required")[0].choices[0].message.tool_calls[0]
            assert call.function.name in VALUES
    asyncio.run(omni.shutdown(drain=False))


def test_the_clients_own_reader_puts_streamed_calls_together(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    tools = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for seed in range(8):
        given = {**GIVEN, "temperature": 1, "seed": seed, "tools": tools, "tool_choice": "required"}
        try:
            with client.chat.completions.stream(**given) as stream:
                kinds = {event.type for event in stream}
                choice = stream.get_final_completion().choices[0]
        except openai.LengthFinishReasonError:
            continue
        assert "tool_calls.function.arguments.delta" in kinds
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            key, allowed = VALUES[call.function.name]
            assert call.function.parsed_arguments[key] in allowed
        return
    raise AssertionError("no seed gives a whole call")


def test_a_conversation_with_calls_and_results_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"n": 1}'}}
    messages: list[Any] = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    ]
    answer = client.chat.completions.create(**{**GIVEN, "messages": messages, "max_tokens": 4})
    assert answer.choices[0].message.role == "assistant"
    without = client.chat.completions.create(**{**GIVEN, "max_tokens": 4})
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 20


def test_several_calls_may_be_required_and_one_may_be_the_most(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    many = 0
    for seed in range(12):
        given = {**GIVEN, "temperature": 1, "seed": seed, "tool_choice": "required", "max_tokens": 300}
        choice = client.chat.completions.create(**given).choices[0]
        one = client.chat.completions.create(**given, parallel_tool_calls=False).choices[0]
        many = max(many, len(choice.message.tool_calls or ()))
        assert len(one.message.tool_calls or ()) <= 1
        if many > 1 and one.finish_reason == "tool_calls":
            return
    raise AssertionError("no seed gives two calls where two are allowed")


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    chosen = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    answer, _ = finished(client, tool_choice={"type": "allowed_tools", "allowed_tools": chosen})
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"weather"}


def test_a_strict_tool_is_held_to_its_schema_while_text_stays_free(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    choice = client.chat.completions.create(**{**GIVEN, "tools": tools, "max_tokens": 6}).choices[0]
    assert choice.message.content
    assert choice.message.tool_calls is None


def test_an_answer_is_json_or_calls(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": DIGITS}}
    for seed in range(8):
        given = {**GIVEN, "temperature": 1, "seed": seed, "response_format": asked}
        choice = client.chat.completions.create(**given).choices[0]
        if choice.finish_reason == "stop":
            assert json.loads(choice.message.content)["n"] in (1, 2, 3)
            return
        if choice.finish_reason == "tool_calls":
            return
    raise AssertionError("no seed gives a whole answer")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "omni", "modalities": ["text", "audio"]}, "audio"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [*USER, {"role": "user", "content": ""}]}, "messages[1].content"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "a"}}}, "tool_choice: its type"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]}, ""),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}]}, ""),
        ({"tools": [WRONG_TOOL], "tool_choice": "required"}, "tools: "),
    ],
)
def test_what_is_wrong_is_named(server: Running, change: dict[str, Any], named: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**GIVEN, **change})
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


def test_calls_are_read_from_text_however_it_is_cut() -> None:
    text = (
        'Let me see.<tool_call>\n{"name": "count", "arguments": {"n": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "weather", "arguments": {"unit": "C"}}</tool_call>'
    )
    content, calls = read_whole(text, box())
    assert content == "Let me see."
    assert [call["function"] for call in calls] == [
        {"name": "count", "arguments": '{"n": 1}'},
        {"name": "weather", "arguments": '{"unit": "C"}'},
    ]
    for size in range(1, 12):
        reader = CallReader(box())
        deltas = [d for i in range(0, len(text), size) for d in reader.push(text[i : i + size])] + reader.end()
        assert "".join(d.get("content", "") for d in deltas).strip() == "Let me see."
        found = [piece for d in deltas for piece in d.get("tool_calls", ())]
        assert [piece["function"]["name"] for piece in found if "id" in piece] == ["count", "weather"]
        arguments = ["", ""]
        for piece in found:
            arguments[piece["index"]] += piece["function"]["arguments"]
        assert arguments == ['{"n": 1}', '{"unit": "C"}']


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "a < b <tool",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["count"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": {"count": 1}}</tool_call>',
        '<tool_call>{"name": "count", "argum',
        "<tool_call>" + "[" * 50_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read_whole(text, box()) == (text, [])


def test_a_call_that_is_cut_off_keeps_what_there_was() -> None:
    text = '<tool_call>\n{"name": "count", "arguments": {"n": '
    content, calls = read_whole(text, box(forced=True))
    assert content is None
    assert [call["function"] for call in calls] == [{"name": "count", "arguments": '{"n": '}]
    for short in ("<tool_c", '<tool_call>{"name": "cou'):
        assert read_whole(short, box(forced=True)) == (short, [])


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(box())
    pieces = [
        '<tool_call>\n{"name": "count", "arguments": ',
        '{"n"',
        ': "}',
        '</tool_call>\\"',
        '"}',
        "}\n</tool_call>",
    ]
    made = [reader.push(piece) for piece in pieces]
    assert made[0] == []
    began, first = made[1]
    assert began["tool_calls"][0]["function"] == {"name": "count", "arguments": ""}
    assert began["tool_calls"][0]["id"].startswith("call_")
    assert first["tool_calls"] == [{"index": 0, "function": {"arguments": '{"n"'}}]
    arguments = "".join(p["function"]["arguments"] for deltas in made for d in deltas for p in d["tool_calls"])
    assert json.loads(arguments) == {"n": '}</tool_call>"'}
    assert made[-1] == []
    assert reader.end() == []


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"n": 1}, "name": "count"}</tool_call>',
        '<tool_call>{"name": "count", "arguments": "{\\"n\\": 1}"}</tool_call>',
        '<tool_call>{"name": "count", "parameters": {"n": 1}}</tool_call>',
        '<tool_call>{"name": "count", "arguments": {"n": 1}, "id": 3}</tool_call>',
        '<tool_call>{"name": "count", "parameters": {"n": 1}}',
    ],
)
def test_other_spellings_of_a_call_are_read(text: str) -> None:
    content, (call,) = read_whole(text, box())
    assert content is None
    assert call["function"]["name"] == "count"
    assert json.loads(call["function"]["arguments"]) == {"n": 1}


@pytest.mark.parametrize("arguments", ['"\\ud800"', '{"n": "\\ud800"}'])
def test_half_a_character_in_arguments_can_be_sent(arguments: str) -> None:
    _, (call,) = read_whole(f'<tool_call>{{"arguments": {arguments}, "name": "count"}}</tool_call>', box())
    assert "?" in call["function"]["arguments"].encode().decode()


UNIQUE: dict[str, Any] = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
}


def test_a_strict_function_that_cannot_be_held_to_its_schema_is_refused(server: Running) -> None:
    def tools(**more: object) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "pick", "parameters": UNIQUE, **more}}]

    body = {**GIVEN, "max_tokens": 1}
    for choice in ("auto", "required"):
        given = {**body, "tools": tools(strict=True), "tool_choice": choice}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=given)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "tools"
        assert "parameters of pick, at #/properties/ids: uniqueItems is not supported" in error["message"]
    # Without strict: as far as it can be enforced; and what the model may not call is not enforced at all.
    assert httpx.post(f"{server.url}/v1/chat/completions", json={**body, "tools": tools()}).is_success
    none = {**body, "tools": tools(strict=True), "tool_choice": "none"}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=none).is_success


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_a_format_that_cannot_be_enforced_is_refused_with_and_without_tools(server: Running, tools: object) -> None:
    pytest.importorskip("xgrammar")
    flat = [{"type": "function", "name": "count", "parameters": DIGITS}] if tools else None
    schema = {"name": "ids", "schema": UNIQUE}
    bodies = {
        "chat/completions": {
            **GIVEN,
            "tools": tools,
            "response_format": {"type": "json_schema", "json_schema": schema},
        },
        "responses": {
            **{"model": "lm", "input": "a", "tools": flat, "max_output_tokens": 1},
            "text": {"format": {"type": "json_schema", **schema}},
        },
    }
    for path, param in (("chat/completions", "response_format.json_schema.schema"), ("responses", "text.format")):
        answer = httpx.post(f"{server.url}/v1/{path}", json=bodies[path])
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], "at #/properties/ids: uniqueItems " in error["message"]) == (param, True)


@pytest.mark.parametrize(
    "large",
    [
        {"description": "x" * 70_000},
        {"properties": {"a": {"type": "string", "pattern": "[a-z]x?" * 8_500}}},
        {"properties": {"a": {"anyOf": [{}] * 3_000}}},
    ],
    ids=["bytes", "pattern", "schemas"],
)
def test_large_schemas_are_refused_before_they_are_checked(
    large: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnistage.server.openai.tools.check_schema", None)
    function = Function(name="f", parameters={"type": "object", **large}, strict=True)
    with pytest.raises(LimitExceededError) as refused:
        check_schemas(Toolbox((function,)).exact_schemas())
    assert refused.value.param == "tools"


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_schemas_are_checked_outside_the_event_loop(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones take some 20 ms, in which nobody else would be answered."""
    in_loop: list[bool] = []

    def check(schema: object, param: str) -> None:
        in_loop.append(asyncio._get_running_loop() is not None)
        check_schema(schema, param)

    monkeypatch.setattr("omnistage.server.openai.tools.check_schema", check)
    function = {"name": "f", "parameters": UNIQUE, "strict": True}
    flat, nested = {"type": "function", **function}, {"type": "function", "function": function}
    bodies = {
        "chat/completions": {**GIVEN, "tools": [nested]},
        "responses": {"model": "lm", "input": "a", "tools": [flat], "max_output_tokens": 1},
    }
    answer = httpx.post(f"{server.url}/v1/{path}", json=bodies[path])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert in_loop == [False]


def test_the_constraint_follows_the_choice() -> None:
    def tag(**given: Any) -> Any:
        box = ToolFields(tools=TOOLS, **given).toolbox
        made = box.structured() if box is not None else None
        return made.structural_tag if made is not None else None

    assert tag() is None
    assert tag(tool_choice="none") is None
    assert tag(parallel_tool_calls=False)["stop_after_first"] is True
    assert tag(parallel_tool_calls=False)["type"] == "triggered_tags"
    assert tag(tool_choice="required")["type"] == "tags_with_separator"
    named = tag(tool_choice={"type": "function", "function": {"name": "count"}})
    assert [t["content"]["json_schema"] for t in named["tags"]] == [DIGITS]
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    box = ToolFields(tools=[strict, TOOLS[1]]).toolbox
    assert box is not None
    schemas = [t["content"]["json_schema"] for t in box.structured().structural_tag["tags"]]
    assert schemas == [DIGITS, {"type": "object"}]  # what is not strict is the model's own affair
