"""Tools in chat completions, with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from omnistage.errors import InvalidRequestError
from omnistage.server.tools import CallReader, Function, Tool, Toolbox, conversation, read_whole, shifted
from tests.server.conftest import Running

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
GIVEN: dict[str, Any] = {"model": "lm", "messages": USER, "tools": TOOLS, "max_tokens": 200, "temperature": 0}
VALUES = {"count": ("n", (1, 2, 3)), "weather": ("unit", ("C", "F"))}


def box(*, forced: bool = False, name: str | None = None) -> Toolbox:
    tools = tuple(Tool(function=Function(**tool["function"])) for tool in TOOLS)
    return Toolbox(tools, forced, name)


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


def test_a_conversation_with_calls_and_results_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"n": 1}'}}
    messages: list[Any] = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    ]
    answer = client.chat.completions.create(**{**GIVEN, "messages": messages, "max_tokens": 4})
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "omni", "modalities": ["text", "audio"]}, "audio"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [*USER, {"role": "user", "content": ""}]}, "messages[1].content"),
    ],
)
def test_what_is_wrong_is_named(server: Running, change: dict[str, Any], named: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**GIVEN, **change}, timeout=30)
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
        assert [piece["function"]["name"] for piece in found] == ["count", "weather"]
        assert [piece["index"] for piece in found] == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "a < b <tool",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "count", "argum',
        "<tool_call>" + "[" * 50_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read_whole(text, box()) == (text, [])


def test_a_call_that_was_cut_off_stays_text() -> None:
    assert read_whole('{"name": "cou', box(forced=True)) == ('{"name": "cou', [])


def test_the_tools_join_a_system_message_or_make_one() -> None:
    made, added = conversation([{"role": "system", "content": "Be brief."}, *USER], box())
    assert added == 0
    assert made[0]["content"].startswith("Be brief.\n\n# Tools")
    parts = [{"type": "text", "text": "Be brief."}]
    made, added = conversation([{"role": "developer", "content": parts}, *USER], box())
    assert (added, len(made[0]["content"])) == (0, 2)
    made, added = conversation(USER, box())
    assert (added, made[0]["role"], made[1:]) == (1, "system", USER)
    assert conversation(USER, None) == (USER, 0)
    assert shifted(1)("messages[3].content[0]") == "messages[2].content[0]"
    assert shifted(1)("modalities") == "modalities"


def test_earlier_calls_become_text() -> None:
    call = {"id": "1", "function": {"name": "count", "arguments": "{oops"}}
    (message,), _ = conversation([{"role": "assistant", "content": "So:", "tool_calls": [call]}], None)
    assert message == {
        "role": "assistant",
        "content": 'So:\n<tool_call>\n{"name": "count", "arguments": "{oops"}\n</tool_call>',
    }
    parts = [{"type": "text", "text": "So:"}]
    (message,), _ = conversation([{"role": "assistant", "content": parts, "tool_calls": [call]}], None)
    assert len(message["content"]) == 2
    for wrong in ({"tool_calls": "x"}, {"tool_calls": [call], "content": 5}):
        with pytest.raises(InvalidRequestError):
            conversation([{"role": "assistant", **wrong}], None)
