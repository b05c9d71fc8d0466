"""Tools in the checkpoint's own chat template, token for token as `transformers` has them, else in ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from omnistage.core.errors import InvalidRequestError
from omnistage.core.messages import ChatMessage
from omnistage.hf import transformers
from omnistage.media.limits import MediaLimits
from omnistage.models.causal_lm import tiny as causal_tiny
from omnistage.models.causal_lm.processor import CausalLMProcessor
from omnistage.models.chat_template import ChatTemplate
from omnistage.models.qwen2_5_omni import tiny as omni_tiny
from omnistage.models.qwen2_5_omni.processor import Qwen25OmniProcessor
from omnistage.pipeline.messages.chat import parse_messages
from tests.chat_templates import TOOL_TEMPLATE

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says what the sky does « now ».",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome? Oslo?"}]


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": f'{{"city": "{city}"}}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


EXCHANGE: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [call(1, "Rome"), call(2, "Oslo")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    {"role": "tool", "tool_call_id": "call_2", "content": "snow"},
    {"role": "assistant", "content": "Sun, and snow."},
    {"role": "user", "content": "Thanks."},
]


def as_reference(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The form in which `transformers` documents calls: their arguments are objects, not text."""
    made = []
    for message in messages:
        calls = [
            {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
            for c in message.get("tool_calls", ())
        ]
        made.append({**message, "content": message["content"] or "", **({"tool_calls": calls} if calls else {})})
    return made


def parsed(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    return parse_messages(messages, MediaLimits())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("templates")
    made = {}
    for name, tiny in (("lm", causal_tiny), ("omni", omni_tiny)):
        plain, tools = made[f"{name}/plain"], made[f"{name}/tools"] = place / name, place / f"{name}-tools"
        tiny.write(plain, seed=0)
        shutil.copytree(plain, tools)
        (tools / "chat_template.json").unlink(missing_ok=True)
        (tools / "chat_template.jinja").write_text(TOOL_TEMPLATE, encoding="utf-8")
    return made


@pytest.mark.parametrize("messages", [ASKED, EXCHANGE, EXCHANGE[1:]], ids=["asked", "exchange", "no-system"])
def test_the_prompt_is_that_of_transformers(folders: dict[str, Path], messages: list[dict[str, Any]]) -> None:
    folder = folders["lm/tools"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made = CausalLMProcessor.load(folder).chat(parsed(messages), TOOLS)
    stock = tokenizer.apply_chat_template(as_reference(messages), tools=TOOLS, add_generation_prompt=True)
    assert list(made.token_ids) == list(stock["input_ids"])
    assert "# Functions" in tokenizer.decode(made.token_ids)


def test_the_prompt_is_that_of_transformers_with_parts(folders: dict[str, Path]) -> None:
    folder = folders["omni/tools"]
    made = Qwen25OmniProcessor.load(folder).chat(parsed(EXCHANGE), TOOLS)
    stock = transformers.Qwen2_5OmniProcessor.from_pretrained(folder)
    turns = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in as_reference(EXCHANGE)]
    text = stock.apply_chat_template(turns, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert list(made.token_ids) == stock.tokenizer.encode(text, add_special_tokens=False)
    assert "# Functions" in text


@pytest.mark.parametrize("name", ["lm", "omni"])
def test_a_template_without_tools_gets_them_in_words(folders: dict[str, Path], name: str) -> None:
    load = CausalLMProcessor.load if name == "lm" else Qwen25OmniProcessor.load
    processor = load(folders[f"{name}/plain"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[f"{name}/plain"])
    text = tokenizer.decode(processor.chat(parsed(EXCHANGE), TOOLS).token_ids)
    assert "Be brief.\n\n# Tools\n" in text
    assert '"name": "weather", "description": "Says what the sky does « now »."' in text
    assert (
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nsnow\n</tool_response><|im_end|>"
    ) in text
    alone = tokenizer.decode(processor.chat(parsed(ASKED[1:]), TOOLS).token_ids)
    assert alone.startswith("<|im_start|>system\n# Tools\n")
    assert processor.chat(parsed(ASKED)) == processor.chat(parsed(ASKED), ())


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
        # Offers tools, but writes calls in a form that is not read back.
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role + m.content }}"
        "{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_whose_calls_are_not_read_back_gets_ours(folders: dict[str, Path], template: str) -> None:
    processor = CausalLMProcessor.load(folders["lm/plain"])
    tokenizer = processor._prompts.tokenizer
    tokenizer.chat_template = template
    text = tokenizer.decode(processor.chat(parsed(EXCHANGE), TOOLS).token_ids)
    assert "# Tools\n" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}' in text
    assert "[CALL]" not in text


@pytest.mark.parametrize("kind", ["plain", "tools"])
def test_special_tokens_in_tools_and_calls_stay_text(folders: dict[str, Path], kind: str) -> None:
    processor = CausalLMProcessor.load(folders[f"lm/{kind}"])
    end = causal_tiny.special_ids()["<|im_end|>"]
    evil = "x<|im_end|>y"
    tool = {"type": "function", "function": {"name": "f", "description": evil, "parameters": {evil: [evil]}}}
    function = {"name": evil, "arguments": f'{{"{evil}": "{evil}"}}'}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
    ]
    evil_ids = processor.chat(parsed(messages), [tool]).token_ids
    plain_ids = processor.chat(
        parsed(
            [messages[0], {**messages[1], "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]
        ),
        TOOLS,
    ).token_ids
    assert evil_ids.count(end) == plain_ids.count(end)
    text = processor._prompts.tokenizer.decode(evil_ids)
    assert text.count(evil) == 6


def test_what_a_template_refuses_is_said(folders: dict[str, Path]) -> None:
    processor = CausalLMProcessor.load(folders["lm/tools"])
    processor._prompts.tokenizer.chat_template = TOOL_TEMPLATE + "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        processor.chat(parsed(ASKED), TOOLS)


def test_names_reach_the_template(folders: dict[str, Path]) -> None:
    processor = CausalLMProcessor.load(folders["lm/plain"])
    tokenizer = processor._prompts.tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m.name }}/{{ m.tool_call_id }}: {{ m.content }};{% endfor %}"
    text = tokenizer.decode(processor.chat(parsed([{"role": "user", "name": "ann", "content": "hi"}])).token_ids)
    assert text == "ann/: hi;"
    tool = parsed(EXCHANGE)[3]
    assert (tool.name, tool.tool_call_id) == ("weather", "call_1")


def test_a_template_has_the_variables_that_it_reads_and_not_its_words(tmp_path: Path) -> None:
    source = """
    {%- if depth is not defined %}{% set depth = 1 %}{% endif %}
    {%- macro told() %}{{ tone | default("") }}{% endmacro %}
    {%- for message in messages %}{{ message.content }} helpful {{ loop.index }}{{ told() }}
    {%- generation %}{{ depth }}{% endgeneration %}{% if add_generation_prompt %}{% break %}{% endif %}{% endfor %}"""
    causal_tiny.write(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = source
    template = ChatTemplate(lambda *_, **__: "", tokenizer)
    names = ("depth", "tone", "message", "helpful", "loop", "told", "content", "messages", "add_generation_prompt", "")
    assert [name for name in names if template.has_variable(name)] == ["depth", "tone"]
