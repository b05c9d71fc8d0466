"""Expectations of chats, completions, structured outputs and tools."""

from __future__ import annotations

import json
import re
from typing import Any

from .expectation import Answer, Body, Expectation

MODEL = "starter"
SAY = [{"role": "user", "content": "Say hello to Ann."}]
SCHEMA: Body = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: Body = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
REGEX = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
EBNF = 'root ::= "Hello" | "Bye"'
ALL: list[Expectation] = []


def chat(source: str, says: str, holds: Any, **body: Any) -> None:
    fields = {"model": MODEL, "messages": SAY, "max_tokens": 8, "temperature": 0} | body
    ALL.append(Expectation(source, says, "/v1/chat/completions", sent(fields), holds))


def text(source: str, says: str, holds: Any, **body: Any) -> None:
    fields = {"model": MODEL, "prompt": "Hello, my name is", "max_tokens": 5, "temperature": 0} | body
    ALL.append(Expectation(source, says, "/v1/completions", sent(fields), holds))


def sent(fields: Body) -> Body:
    return {name: value for name, value in fields.items() if value is not ...}


def status(code: int) -> Any:
    return lambda answer: answer.status == code


def refused(answer: Answer) -> bool:
    return answer.status in (400, 422) and bool(answer.error["message"])


def finish(answer: Answer) -> Any:
    return answer.data["choices"][0]["finish_reason"]


def calls(answer: Answer) -> Any:
    return answer.message["tool_calls"]


def is_json(answer: Answer) -> bool:
    return set(json.loads(answer.text)) == {"name", "age"}


def usages(answer: Answer) -> list[Any]:
    return [event.get("usage") for event in answer.events]


def streamed_call(answer: Answer) -> bool:
    """One call or several, which the model may make: the pieces of each have its index."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in answer.events:
        for piece in (one for choice in event["choices"] for one in choice["delta"].get("tool_calls") or ()):
            index, function = piece["index"], piece["function"]
            names[index] = names.get(index) or function["name"]
            arguments[index] = arguments.get(index, "") + (function.get("arguments") or "")
    # The last call may be cut off by max_tokens; the first may not.
    return set(names.values()) == {"get_weather"} and "city" in json.loads(arguments[0])


def logprobs(answer: Answer) -> Any:
    return answer.data["choices"][0]["logprobs"]


def _vllm_chat() -> None:
    v = "vllm test_chat"
    chat(
        v,
        "one choice, the assistant's, with usage",
        lambda a: a.message["role"] == "assistant" and len(a.data["choices"]) == 1,
    )
    chat(
        v,
        "usage adds up",
        lambda a: (
            a.data["usage"]["total_tokens"] == a.data["usage"]["prompt_tokens"] + a.data["usage"]["completion_tokens"]
        ),
    )
    chat(
        v,
        "the length ends it",
        lambda a: finish(a) == "length" and a.data["usage"]["completion_tokens"] == 3,
        max_tokens=3,
    )
    chat(
        v,
        "max_completion_tokens too",
        lambda a: a.data["usage"]["completion_tokens"] == 3,
        max_tokens=...,
        max_completion_tokens=3,
    )
    chat(v, "no log probabilities unasked", lambda a: logprobs(a) is None, logprobs=False)
    chat(
        v,
        "zero alternatives",
        lambda a: len(logprobs(a)["content"][0]["top_logprobs"]) == 0,
        logprobs=True,
        top_logprobs=0,
    )
    chat(
        v,
        "five alternatives",
        lambda a: len(logprobs(a)["content"][0]["top_logprobs"]) == 5,
        logprobs=True,
        top_logprobs=5,
    )
    chat(v, "21 alternatives are too many", refused, logprobs=True, top_logprobs=21)
    chat(v, "alternatives need logprobs", refused, top_logprobs=2)
    chat(
        v,
        "a stream says what the whole says, and ends with a finish reason",
        lambda a: a.deltas and a.events[-1]["choices"][0]["finish_reason"],
        stream=True,
    )
    chat(v, "the role comes first", lambda a: a.events[0]["choices"][0]["delta"]["role"] == "assistant", stream=True)
    chat(
        v,
        "include_usage: a last event without choices",
        lambda a: (
            a.events[-1]["choices"] == []
            and a.events[-1]["usage"]["completion_tokens"] == 8
            and not any(usages(a)[:-1])
        ),
        stream=True,
        stream_options={"include_usage": True},
    )
    chat(
        v,
        "include_usage false: none",
        lambda a: not any(usages(a)),
        stream=True,
        stream_options={"include_usage": False},
    )
    chat(
        v,
        "continuous_usage_stats: in each event",
        lambda a: all(usages(a)),
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    chat(v, "stream_options without a stream", refused, stream_options={"include_usage": True})
    chat(v, "stream_options with stream false", refused, stream=False, stream_options={"include_usage": True})
    chat(v, "stream_options null is none", status(200), stream_options=None)
    chat(v, "n answers", lambda a: len(a.data["choices"]) == 2, n=2, temperature=1)
    chat(v, "a second user's message in a row", status(200), messages=SAY + SAY)
    chat(v, "a system's message", status(200), messages=[{"role": "system", "content": "Be brief."}, *SAY])
    chat(v, "a developer's message", status(200), messages=[{"role": "developer", "content": "Be brief."}, *SAY])
    chat(v, "content as parts", status(200), messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    chat(
        v,
        "several text parts",
        status(200),
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}],
    )
    chat(v, "no messages", refused, messages=[])
    chat(v, "messages are missing", refused, messages=...)
    chat(v, "an unknown role", refused, messages=[{"role": "king", "content": "x"}])
    chat(
        v,
        "a part of an unknown kind",
        refused,
        messages=[{"role": "user", "content": [{"type": "smell", "smell": "x"}]}],
    )
    chat(
        v,
        "an image that is no URL",
        refused,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    )
    chat(
        v,
        "longer than the context",
        lambda a: refused(a) and "token" in a.error["message"],
        messages=[{"role": "user", "content": "dog " * 9000}],
    )
    chat(v, "more to write than the context holds", refused, max_tokens=10_000_000)
    chat(v, "no tokens to write", refused, max_tokens=-1)
    chat(v, "an unknown model is 404", status(404), model="nobody")
    chat(v, "the model may be left out", status(200), model=...)
    chat(v, "temperature below zero", refused, temperature=-1)
    chat(v, "top_p above one", refused, top_p=1.5)
    chat(v, "top_k -1 and 0 mean all", status(200), top_k=-1)
    chat(v, "top_k 0", status(200), top_k=0)
    chat(v, "min_p", status(200), min_p=0.1)
    chat(v, "repetition_penalty", status(200), repetition_penalty=1.2)
    chat(
        v,
        "a wrong type says which field",
        lambda a: refused(a) and "max_tokens" in a.error["message"],
        max_tokens="many",
    )
    chat(v, "an unknown field is ignored", status(200), extra_field="0")
    chat(v, "chat_template_kwargs of no template", status(200), chat_template_kwargs={"enable_thinking": False})
    chat(v, "a chat template of the client's is not trusted", refused, chat_template="{{ messages[0].content }}")
    chat(v, "add_generation_prompt false", status(200), add_generation_prompt=False)
    chat(
        v,
        "continue_final_message",
        lambda a: a.status == 200 and not a.text.startswith("Hello, dear"),
        messages=[*SAY, {"role": "assistant", "content": "Hello, dear"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    chat(
        v,
        "continue_final_message and add_generation_prompt exclude each other",
        refused,
        continue_final_message=True,
        add_generation_prompt=True,
    )
    chat(
        v,
        "echo of the last message",
        lambda a: a.text.startswith("Hello, dear"),
        messages=[*SAY, {"role": "assistant", "content": "Hello, dear"}],
        add_generation_prompt=False,
        continue_final_message=True,
        echo=True,
    )
    chat(
        v,
        "invocation of a stop string",
        lambda a: finish(a) == "stop" and "a" not in a.text.lower(),
        stop=["a", "A"],
        max_tokens=30,
    )
    chat(
        v,
        "include_stop_str_in_output",
        lambda a: a.text.lower().endswith("a"),
        stop=["a", "A"],
        include_stop_str_in_output=True,
        max_tokens=30,
    )
    chat(
        v,
        "stop_reason is the string",
        lambda a: a.data["choices"][0]["stop_reason"] in ("a", "A"),
        stop=["a", "A"],
        max_tokens=30,
    )
    chat(v, "min_tokens", lambda a: a.data["usage"]["completion_tokens"] >= 30, min_tokens=30, max_tokens=40)
    chat(v, "ignore_eos", lambda a: a.data["usage"]["completion_tokens"] == 60, ignore_eos=True, max_tokens=60)
    chat(v, "bad_words", status(200), bad_words=["Hello"])
    chat(v, "allowed_token_ids", lambda a: a.status == 200, allowed_token_ids=[28, 29, 30])
    chat(v, "allowed_token_ids outside of the vocabulary", refused, allowed_token_ids=[9_999_999])
    chat(v, "logit_bias", status(200), logit_bias={"28": 100})
    chat(v, "logit_bias outside of the vocabulary", refused, logit_bias={"9999999": 1})
    chat(
        v,
        "return_token_ids",
        lambda a: len(a.data["choices"][0]["token_ids"]) == 8 and a.data["prompt_token_ids"],
        return_token_ids=True,
    )
    chat(
        v,
        "return_tokens_as_token_ids",
        lambda a: logprobs(a)["content"][0]["token"].startswith("token_id:"),
        logprobs=True,
        top_logprobs=1,
        return_tokens_as_token_ids=True,
    )
    chat(v, "prompt_logprobs", lambda a: a.data["prompt_logprobs"], prompt_logprobs=1)
    chat(v, "the same seed says the same", status(200), seed=5, temperature=1)
    chat(v, "a seed beyond 64 bits", refused, seed=2**64)
    chat(v, "priority", status(200), priority=1)
    chat(v, "user, metadata and store are taken", status(200), user="ann", metadata={"a": "b"}, store=False)
    chat(v, "service_tier", status(200), service_tier="auto")
    chat(v, "reasoning_effort where nothing reasons", status(200), reasoning_effort="low")
    chat(v, "request_id of the client's", lambda a: a.data["id"].endswith("abc"), request_id="abc")


def _vllm_structured() -> None:
    s = "vllm test_chat (structured_outputs)"
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    chat(s, "response_format json_schema", is_json, response_format=form, max_tokens=60)
    chat(
        s,
        "json_schema, streamed",
        lambda a: set(json.loads(a.deltas)) == {"name", "age"},
        response_format=form,
        max_tokens=60,
        stream=True,
    )
    chat(
        s,
        "response_format json_object",
        lambda a: isinstance(json.loads(a.text), dict) if finish(a) == "stop" else a.text.lstrip().startswith("{"),
        response_format={"type": "json_object"},
        max_tokens=60,
    )
    chat(s, "response_format text", status(200), response_format={"type": "text"})
    chat(s, "json_schema without a schema", refused, response_format={"type": "json_schema"})
    chat(s, "an unknown format", refused, response_format={"type": "xml"})
    chat(s, "structured_outputs json", is_json, structured_outputs={"json": SCHEMA}, max_tokens=60)
    chat(
        s,
        "structured_outputs regex",
        lambda a: re.fullmatch(REGEX, a.text),
        structured_outputs={"regex": REGEX},
        max_tokens=40,
    )
    chat(
        s,
        "structured_outputs choice",
        lambda a: a.text in ("Python", "C++"),
        structured_outputs={"choice": ["Python", "C++"]},
        max_tokens=10,
    )
    chat(
        s,
        "structured_outputs grammar",
        lambda a: a.text in ("Hello", "Bye"),
        structured_outputs={"grammar": EBNF},
        max_tokens=10,
    )
    chat(
        s,
        "structural_tag",
        status(200),
        response_format={"type": "structural_tag", "format": {"type": "const_string", "value": "Hello"}},
    )
    chat(s, "two kinds at once", refused, structured_outputs={"regex": "a", "choice": ["a"]})
    chat(s, "no kind", refused, structured_outputs={})
    chat(s, "a regular expression that is none", refused, structured_outputs={"regex": "[("})
    chat(
        s,
        "with log probabilities",
        lambda a: logprobs(a)["content"],
        structured_outputs={"choice": ["Python", "C++"]},
        logprobs=True,
        top_logprobs=5,
    )
    chat(s, "a format that is no object", refused, response_format="json")


def _vllm_tools() -> None:
    t = "vllm tool_use"
    named = {"type": "function", "function": {"name": "get_weather"}}
    chat(
        t,
        "a named tool is called",
        lambda a: "city" in json.loads(calls(a)[0]["function"]["arguments"]),
        tools=[TOOL],
        tool_choice=named,
        max_tokens=80,
    )
    chat(
        t,
        "required: one is called, finish_reason tool_calls",
        lambda a: calls(a)[0]["function"]["name"] == "get_weather" and finish(a) == "tool_calls",
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    chat(
        t,
        "an id of each call",
        lambda a: calls(a)[0]["id"] and calls(a)[0]["type"] == "function",
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    chat(t, "required, streamed", streamed_call, tools=[TOOL], tool_choice="required", max_tokens=80, stream=True)
    chat(t, "named, streamed", streamed_call, tools=[TOOL], tool_choice=named, max_tokens=80, stream=True)
    chat(t, "none: no call", lambda a: not a.message.get("tool_calls"), tools=[TOOL], tool_choice="none")
    chat(t, "auto", status(200), tools=[TOOL], tool_choice="auto")
    chat(
        t,
        "a name that is no tool's",
        refused,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "nothing"}},
    )
    chat(t, "a choice without tools", refused, tool_choice=named)
    chat(t, "required without tools", refused, tool_choice="required")
    chat(t, "tools that are empty", lambda a: a.status in (200, 400), tools=[])
    chat(t, "a choice of no kind", refused, tools=[TOOL], tool_choice="please")
    chat(t, "a malformed choice", refused, tools=[TOOL], tool_choice={"function": {"name": "get_weather"}})
    chat(t, "tools that are no objects", refused, tools=[{"type": "function"}])
    chat(
        t,
        "parallel_tool_calls false: one call",
        lambda a: len(calls(a)) == 1,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    asked = [
        *SAY,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    ]
    chat(t, "a tool's result", lambda a: a.text, messages=asked, tools=[TOOL])
    chat(
        t,
        "content null beside calls",
        status(200),
        messages=[asked[0], {**asked[1], "content": None}, asked[2]],
        tools=[TOOL],
    )
    chat(t, "a tool without parameters", status(200), tools=[{"type": "function", "function": {"name": "now"}}])


for part in (_vllm_chat, _vllm_structured, _vllm_tools):
    part()
