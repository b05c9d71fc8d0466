"""A model that thinks: its reasoning goes to clients apart from the answer, and never into the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import OutputChunk
from omnistage.server.request_stream import ObservedStream
from tests.server.harness import SERVE_LIMITS, make
from tests.server.realtime_client import TEXT, said, text_of, until_event
from tests.server.test_tools import TOOLS

CHAT: Any = [{"role": "user", "content": "Weather in Rome?"}]
GIVEN: dict[str, Any] = {"model": "omni", "messages": CHAT, "temperature": 0, "max_tokens": 4}
CALL = '<tool_call>\n{"name": "count", "arguments": {"n": 2}}\n</tool_call>'
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    place = tmp_path_factory.mktemp("served")
    made = {}
    for name, family, variant in (("omni", "qwen3_omni_moe", "thinking"), ("lm", "causal_lm", None)):
        folder = make(family, place / name, **({} if variant is None else {"variant": variant}))
        made[name] = AsyncOmni(folder, device="cpu", dtype="float32", overrides=SERVE_LIMITS, progress=False)
    yield made
    for omni in made.values():
        asyncio.run(omni.shutdown(drain=False))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model writes, a piece a token, in place of its own words; ask for as many tokens."""
    pieces: list[str] = []
    take = ObservedStream.take

    async def scripted(stream: ObservedStream) -> list[OutputChunk]:
        items = []
        for item in await take(stream):
            if item.final is not None:
                for output in item.final.outputs:
                    output.text = "".join(pieces)
            elif item.token_ids:
                said = stream.__dict__.setdefault("said", iter(pieces))
                item = replace(item, text="".join(next(said) for _ in item.token_ids))
            items.append(item)
        return items

    monkeypatch.setattr(ObservedStream, "take", scripted)
    return pieces


def chat(client: openai.OpenAI, script: list[str], **more: Any) -> tuple[Any, list[Any]]:
    """The whole answer, and the deltas of the same as a stream."""
    given = {**GIVEN, "max_tokens": len(script), "extra_body": {"ignore_eos": True}, **more}
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True))
    return whole, [chunk.choices[0].delta for chunk in chunks if chunk.choices]


def joined(deltas: list[Any], field: str) -> str:
    return "".join(getattr(delta, field, None) or "" for delta in deltas)


def test_reasoning_is_apart_from_the_answer_whole_and_streamed(client: openai.OpenAI, script: list[str]) -> None:
    script += ["Hm", ", well", ".\n", "</th", "ink>", "\n\n", "It", " rains."]
    whole, deltas = chat(client, script)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm, well.", "It rains.")
    assert joined(deltas, "reasoning_content") == "Hm, well."
    assert joined(deltas, "content") == "It rains."
    order = [bool(delta.content) for delta in deltas if delta.content or getattr(delta, "reasoning_content", None)]
    assert order == sorted(order)  # reasoning comes first
    assert sum(bool(getattr(delta, "reasoning_content", None)) for delta in deltas) > 1


def test_an_answer_that_ends_inside_the_block_is_reasoning_only(client: openai.OpenAI, script: list[str]) -> None:
    script += ["Hm", ", we", "ll</"]
    whole, deltas = chat(client, script)
    choice = whole.choices[0]
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == (
        "Hm, well</",
        None,
        "length",
    )
    assert whole.usage.completion_tokens_details.reasoning_tokens == 3
    assert joined(deltas, "reasoning_content") == "Hm, well</"
    assert not joined(deltas, "content")


def test_thinking_can_be_turned_off(client: openai.OpenAI, script: list[str], models: dict[str, AsyncOmni]) -> None:
    script += ["It", " rains."]
    for more in (
        {"extra_body": {**NO_THINKING, "ignore_eos": True}},
        {"reasoning_effort": "none", "extra_body": {"ignore_eos": True}},
    ):
        whole, deltas = chat(client, script, **more)
        assert whole.choices[0].message.content == joined(deltas, "content") == "It rains."
        assert not hasattr(whole.choices[0].message, "reasoning_content")
        assert whole.usage.completion_tokens_details.reasoning_tokens == 0
    thinking = client.chat.completions.create(**{**GIVEN, "max_tokens": 2}).usage
    assert whole.usage.prompt_tokens > thinking.prompt_tokens  # the template has closed the block


def test_the_end_of_the_block_is_found_in_what_the_model_itself_writes(
    client: openai.OpenAI, models: dict[str, AsyncOmni]
) -> None:
    block = models["omni"].processor.think_block(None)  # type: ignore[union-attr]
    assert block is not None
    given = {**GIVEN, "max_tokens": 3, "logit_bias": {str(block.end_token): 100}}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content == "</think></think>"  # the first one ends the block
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1


def test_calls_are_found_behind_the_reasoning_and_not_inside(client: openai.OpenAI, script: list[str]) -> None:
    script += ["I could ", CALL, " but", "</think>\n", CALL]
    whole, deltas = chat(client, script, tools=TOOLS)
    message = whole.choices[0].message
    assert message.reasoning_content == joined(deltas, "reasoning_content") == f"I could {CALL} but"
    assert [call.function.arguments for call in message.tool_calls] == ['{"n": 2}']
    assert sum(bool(call.id) for delta in deltas for call in delta.tool_calls or ()) == 1


def test_a_format_is_kept_behind_the_reasoning(client: openai.OpenAI, models: dict[str, AsyncOmni]) -> None:
    pytest.importorskip("xgrammar")
    block = models["omni"].processor.think_block(None)  # type: ignore[union-attr]
    assert block is not None
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    given = {**GIVEN, "max_tokens": 40, "response_format": form}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content is None  # a random model does not end its block by itself
    assert answer.usage.completion_tokens_details.reasoning_tokens == 40
    answer = client.chat.completions.create(**given, logit_bias={str(block.end_token): 100})
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1
    assert answer.choices[0].message.content.lstrip().startswith("{")
    without = client.chat.completions.create(**given, extra_body=NO_THINKING)
    assert without.choices[0].message.content.startswith("{")
    assert not hasattr(without.choices[0].message, "reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_a_reasoning_item_that_can_be_sent_back(
    client: openai.OpenAI, script: list[str], stream: bool
) -> None:
    script += ["Hm.", "</think>", "It", " rains."]
    given: Any = {"model": "omni", "input": "Rome?", "max_output_tokens": 4, "temperature": 0}
    if stream:
        events = list(client.responses.create(**given, stream=True))
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Hm."
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "It rains."
        added = [e.item.type for e in events if e.type == "response.output_item.added"]
        assert added == ["reasoning", "message"]
        response = events[-1].response
    else:
        response = client.responses.create(**given)
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, message.content[0].text) == ("message", "It rains.")
    items = [{"role": "user", "content": "Rome?"}, *(i.model_dump(exclude_none=True) for i in response.output)]
    again = client.responses.create(**{**given, "input": [*items, {"role": "user", "content": "Milan?"}]})
    assert again.usage.input_tokens > response.usage.input_tokens


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_a_realtime_answer_has_no_reasoning_in_it(client: openai.OpenAI, script: list[str]) -> None:
    script += ["Hm.", "</think>", "It", " rains.", "", ""]
    with client.realtime.connect(model="omni") as connection:
        connection.session.update(session=TEXT)  # type: ignore[arg-type]
        connection.conversation.item.create(item=said("Rome?"))  # type: ignore[arg-type]
        connection.response.create()
        events = until_event(connection, "response.done")
    assert text_of(events, "response.output_text.delta") == "It rains."
    assert events[-1].response.output[0].content[0].text == "It rains."


def test_a_message_may_carry_its_reasoning(client: openai.OpenAI) -> None:
    turns = [*CHAT, {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm."}, *CHAT]
    assert client.chat.completions.create(**{**GIVEN, "messages": turns}).choices
    wrong = [{"role": "user", "content": "a", "reasoning_content": "Hm."}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].reasoning_content"):
        client.chat.completions.create(**{**GIVEN, "messages": wrong})


def test_a_model_without_thinking_is_untouched(client: openai.OpenAI, script: list[str]) -> None:
    script += ["<think>", "a", "</think>", "b"]
    answer = client.chat.completions.create(**{**GIVEN, "model": "lm"}, extra_body={**NO_THINKING, "ignore_eos": True})
    assert answer.choices[0].message.content == "<think>a</think>b"
    with pytest.raises(openai.BadRequestError, match=r"enable_thinking: this model does not think"):
        client.chat.completions.create(
            **{**GIVEN, "model": "lm"}, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        )
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        client.chat.completions.create(**GIVEN, extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
