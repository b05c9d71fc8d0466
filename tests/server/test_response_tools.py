"""Tools in `/v1/responses`, with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from omnistage.core.types import FinishReason, Modality
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk
from omnistage.server.openai.responses.request import ResponsesRequest
from omnistage.server.openai.responses.response import ResponseWriter
from omnistage.server.openai.responses.tools import as_messages
from tests.server.harness import Running

DIGITS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "count", "description": "Counts.", "parameters": DIGITS, "strict": True}
]
GIVEN: dict[str, Any] = {"model": "lm", "input": "How many?", "tools": TOOLS, "max_output_tokens": 200}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "call_1", "name": "count", "arguments": '{"n": 1}'}
TEXT = 'So: <tool_call>\n{"name": "count", "arguments": {"n": 2}}\n</tool_call>'


def finished(client: openai.OpenAI, **more: Any) -> tuple[Any, int]:
    for seed in range(8):
        answer = client.responses.create(**{**GIVEN, **more}, extra_body={"seed": seed})
        if answer.status == "completed":
            return answer, seed
    raise AssertionError("no seed gives a whole answer")


def test_a_required_call_is_made_whole_and_streamed(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    answer, seed = finished(client, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "count")
    assert json.loads(call.arguments)["n"] in (1, 2, 3)
    assert answer.tools[0].name == "count"
    given = {**GIVEN, "tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"seed": seed}}
    events = list(client.responses.create(**given, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments


def test_calls_and_results_reach_the_model(client: openai.OpenAI) -> None:
    asked = {"role": "user", "content": "How many?"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "one"}
    short = {**GIVEN, "max_output_tokens": 16}
    first = client.responses.create(**{**short, "input": [asked]})
    second = client.responses.create(**{**short, "input": [asked, CALL, result]})
    assert second.usage.input_tokens > first.usage.input_tokens + 20
    assert first.output[0].type == "message"
    assert first.tool_choice == "auto"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"input": [CALL, {"type": "function_call", "call_id": "a", "name": "count"}]}, "input[1].arguments"),
        ({"input": [CALL, CALL, {"role": "user", "content": ""}]}, "input[2].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"model": "omni", "modalities": ["text", "audio"]}, "tools"),
    ],
)
def test_what_is_wrong_is_named(server: Running, change: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={**GIVEN, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_calls_of_one_turn_are_one_message() -> None:
    messages, places = as_messages(
        [{"role": "user", "content": "a"}, CALL, {**CALL, "call_id": "call_2"}, {"role": "user"}]
    )
    assert places == [0, 1, 3]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_1", "call_2"]


def final(text: str, reason: FinishReason = FinishReason.STOP) -> OmniRequestOutput:
    return OmniRequestOutput("req-1", [CompletionOutput(text=text, finish_reason=reason)], finish_reason=reason)


def test_text_and_calls_are_items_of_their_own_however_the_text_is_cut() -> None:
    body = ResponsesRequest(model="lm", input="Hi", tools=tuple(TOOLS))
    message, call = ResponseWriter("req-1", body).response(final(TEXT))["output"]
    assert message["type"] == "message"
    assert call["type"] == "function_call"
    assert message["content"][0].get("text") == "So: "
    assert (call["name"], call["arguments"], call["status"]) == ("count", '{"n": 2}', "completed")
    for size in (1, 3, 7):
        writer = ResponseWriter("req-1", body)
        pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
        events = [event for piece in pieces for event in writer.events(OutputChunk("req-1", Modality.TEXT, text=piece))]
        events += writer.events(OutputChunk("req-1", Modality.TEXT, final=final(TEXT)))
        spoken = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        written = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
        assert (spoken, written) == ("So: ", '{"n": 2}')
        opened = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
        closed = [e["output_index"] for e in events if e["type"] == "response.output_item.done"]
        assert opened == closed == [0, 1]
    (empty,) = ResponseWriter("req-1", body).response(final("", FinishReason.LENGTH))["output"]
    assert (empty["type"], empty["status"]) == ("message", "incomplete")
