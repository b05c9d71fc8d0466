"""Expectations of completions, and those of SGLang's tests."""

from __future__ import annotations

import json
import re

from .expected_chat import (
    EBNF,
    REGEX,
    SAY,
    SCHEMA,
    TOOL,
    calls,
    chat,
    finish,
    is_json,
    logprobs,
    refused,
    status,
    text,
    usages,
)


def _vllm_completions() -> None:
    c = "vllm test_completion"
    text(c, "a text of five tokens", lambda a: a.text and a.data["usage"]["completion_tokens"] == 5)
    text(c, "object and id", lambda a: a.data["object"] == "text_completion" and a.data["id"].startswith("cmpl"))
    text(c, "tokens as a prompt", lambda a: a.text, prompt=[1, 2, 3])
    text(c, "several prompts of tokens", lambda a: len(a.data["choices"]) == 2, prompt=[[1, 2, 3], [4, 5]])
    text(c, "several prompts", lambda a: [x["index"] for x in a.data["choices"]] == [0, 1], prompt=["a", "b"])
    text(c, "n answers of each", lambda a: len(a.data["choices"]) == 4, prompt=["a", "b"], n=2, temperature=1)
    text(
        c,
        "several prompts, streamed",
        lambda a: {x["index"] for e in a.events for x in e["choices"]} == {0, 1},
        prompt=["a", "b"],
        stream=True,
    )
    text(c, "no log probabilities unasked", lambda a: logprobs(a) is None)
    text(c, "zero alternatives", lambda a: len(logprobs(a)["token_logprobs"]) == 5, logprobs=0)
    text(c, "five alternatives", lambda a: all(5 <= len(t) <= 6 for t in logprobs(a)["top_logprobs"]), logprobs=5)
    text(c, "more than the model gives", refused, logprobs=21)
    text(c, "offsets of the text", lambda a: logprobs(a)["text_offset"][0] == 0, logprobs=1)
    text(c, "a stream", lambda a: a.deltas and a.events[-1]["choices"][0]["finish_reason"] == "length", stream=True)
    text(
        c,
        "include_usage",
        lambda a: a.events[-1]["usage"]["completion_tokens"] == 5,
        stream=True,
        stream_options={"include_usage": True},
    )
    text(
        c,
        "continuous_usage_stats",
        lambda a: all(usages(a)),
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    text(c, "stream_options without a stream", refused, stream_options={"include_usage": True})
    text(c, "echo", lambda a: a.text.startswith("Hello, my name is"), echo=True)
    text(c, "echo of nothing more", lambda a: a.text == "Hello, my name is", echo=True, max_tokens=0)
    text(
        c,
        "echo with the prompt's log probabilities",
        lambda a: logprobs(a)["token_logprobs"][0] is None,
        echo=True,
        logprobs=1,
    )
    text(c, "prompt_logprobs", lambda a: a.data["choices"][0]["prompt_logprobs"], prompt_logprobs=1)
    text(c, "no prompt", refused, prompt=...)
    text(c, "an empty prompt", refused, prompt="")
    text(c, "an empty list", refused, prompt=[])
    text(c, "tokens outside of the vocabulary", refused, prompt=[9_999_999])
    text(c, "negative tokens", refused, prompt=[-1])
    text(c, "suffix is refused in plain words", lambda a: refused(a) and "suffix" in a.error["message"], suffix="x")
    text(c, "best_of", lambda a: a.status in (200, 400), best_of=2)
    text(c, "logit_bias", lambda a: a.status == 200, logit_bias={"28": 100})
    text(c, "allowed_token_ids", lambda a: a.status == 200, allowed_token_ids=[28, 29])
    text(c, "stop at once", lambda a: finish(a) == "stop", stop=[" "], max_tokens=30)
    text(c, "truncate_prompt_tokens", status(200), truncate_prompt_tokens=2)
    text(c, "truncate_prompt_tokens too large", refused, truncate_prompt_tokens=10_000_000)
    text(c, "longer than the context", refused, prompt="dog " * 9000)
    text(c, "return_token_ids", lambda a: len(a.data["choices"][0]["token_ids"]) == 5, return_token_ids=True)
    text(c, "skip_special_tokens false", status(200), skip_special_tokens=False)
    text(c, "add_special_tokens", status(200), add_special_tokens=True)
    text(c, "max_tokens null: as the service decides", status(200), max_tokens=None, stop=["\n", "."])
    text(c, "kv_transfer_params null", status(200), kv_transfer_params=None)


def _structured() -> None:
    s = "vllm test_chat (structured_outputs)"
    text(
        s,
        "completions: regex",
        lambda a: re.fullmatch(REGEX, a.text),
        structured_outputs={"regex": REGEX},
        max_tokens=40,
    )
    text(
        s,
        "completions: choice",
        lambda a: a.text in ("Python", "C++"),
        structured_outputs={"choice": ["Python", "C++"]},
        max_tokens=10,
    )
    text(s, "completions: json", is_json, structured_outputs={"json": SCHEMA}, max_tokens=60)
    text(
        s,
        "completions: grammar",
        lambda a: a.text in ("Hello", "Bye"),
        structured_outputs={"grammar": EBNF},
        max_tokens=10,
    )
    text(
        s,
        "completions: response_format",
        is_json,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
        max_tokens=60,
    )


def _sglang() -> None:
    g = "sglang test_openai_server"
    text(g, "echo and log probabilities", lambda a: len(logprobs(a)["tokens"]) > 5, echo=True, logprobs=3)
    text(g, "parallel samples", lambda a: len(a.data["choices"]) == 3, n=3, temperature=1)
    text(g, "a regular expression", lambda a: re.fullmatch(r"\d{3}", a.text), regex=r"\d{3}")
    text(g, "a JSON schema", is_json, json_schema=json.dumps(SCHEMA), max_tokens=60)
    text(g, "ebnf", lambda a: a.text in ("Hello", "Bye"), ebnf=EBNF)
    text(g, "penalties", status(200), frequency_penalty=1.0, presence_penalty=1.0)
    text(g, "min_p, top_k, min_tokens", status(200), min_p=0.1, top_k=5, min_tokens=2, temperature=1)
    text(g, "rid", status(200), rid="abc")
    text(g, "ignore_eos", lambda a: a.data["usage"]["completion_tokens"] == 5, ignore_eos=True)
    chat(g, "a regular expression", lambda a: re.fullmatch(r"\d{3}", a.text), regex=r"\d{3}")
    chat(g, "ebnf", lambda a: a.text in ("Hello", "Bye"), ebnf=EBNF)
    chat(
        g, "matched_stop", lambda a: a.data["choices"][0]["matched_stop"] in ("a", "A"), stop=["a", "A"], max_tokens=30
    )
    chat(g, "stop_token_ids", lambda a: a.status == 200, stop_token_ids=[28])
    chat(g, "no_stop_trim", status(200), stop=["a", "A"], no_stop_trim=True)
    chat(
        g,
        "an assistant's prefill",
        status(200),
        messages=[*SAY, {"role": "assistant", "content": "Hello"}],
        continue_final_message=True,
    )
    chat(g, "tool_choice required", lambda a: calls(a), tools=[TOOL], tool_choice="required", max_tokens=80)
    chat(
        g,
        "strict functions",
        lambda a: "city" in json.loads(calls(a)[0]["function"]["arguments"]),
        tools=[{**TOOL, "function": {**TOOL["function"], "strict": True}}],
        tool_choice="required",
        max_tokens=80,
    )
    chat(
        g,
        "two tools, parallel",
        status(200),
        tools=[
            TOOL,
            {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
        ],
    )
    chat(
        g,
        "a stream of n answers",
        lambda a: {x["index"] for e in a.events for x in e["choices"]} == {0, 1},
        n=2,
        stream=True,
        temperature=1,
    )
    chat(g, "reasoning left out", status(200), separate_reasoning=True)


for part in (_vllm_completions, _structured, _sglang):
    part()
