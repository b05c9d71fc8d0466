"""A checkpoint's chat template, with tools: by the template's own means where it has them, else by ours.

A template that offers `tools` and writes calls in the form that Hermes and Qwen models were trained on
(`<tool_call>{"name": ..., "arguments": ...}</tool_call>`) is given the tools, the calls and their results as they are.
Any other gets that same form in plain messages: the tools in the system message, calls and results as text. So an
answer's calls are written in one form whatever the model, and it is the one that is read back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from omnistage.core.errors import InvalidRequestError, OmniError
from omnistage.core.family import THINK_END, THINK_START, ThinkBlock
from omnistage.core.messages import PLAIN_TEMPLATE, ChatMessage, Part, TemplateOptions, TextPart
from omnistage.core.types import ARInput
from omnistage.core.validation import short_repr
from omnistage.models.prompts import GuardedText, PromptTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Turn = dict[str, Any]
"""A message as templates take it."""
ToolSpec = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`, as templates take it."""
_CALL = re.compile(r"""<tool_call>\s*\{"name": "probe_call", "arguments": \{"probe": 1\}\}\s*</tool_call>""")
_FIXED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "conversation", "chat_template", "add_generation_prompt", "tokenize"}
    | {
        "continue_final_message",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
    }
    | {"max_length", "tokenizer_kwargs", "processor_kwargs", "load_audio_from_video", "bos_token", "eos_token"}
    | {"raise_exception", "strftime_now", "range", "namespace"}
)
"""Of every template, and the parameters of `apply_chat_template`: not for requests to set."""
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags that transformers adds to Jinja; without effect on which variables a template reads."""
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def turn_of(message: ChatMessage, content: Any) -> Turn:
    """A message as templates take it; only what it has."""
    calls = [
        {
            **({"id": call.id} if call.id is not None else {}),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    more = {
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
    }
    return {"role": message.role, "content": content, **{key: value for key, value in more.items() if value}}


_REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a template without support for tools raises when it is given some: its own error, or that of an expression."""


class Render(Protocol):
    """Applies the checkpoint's template; it may raise anything. `options` are variables of the template."""

    def __call__(self, turns: list[Turn], tools: list[ToolSpec] | None, **options: Any) -> str: ...


class ChatTemplate:
    """Turns to text. `parts` says whether the template wants content as a list of parts rather than as text."""

    def __init__(
        self, render: Render, tokenizer: PreTrainedTokenizerFast, *, parts: bool = False, source: object = None
    ) -> None:
        """`source` is the template's own text; None: the tokenizer's."""
        source = source or tokenizer.chat_template
        self._source = source if isinstance(source, str) else ""
        self._render = render
        self._parts = parts
        added = {str(token): (index, token.special) for index, token in tokenizer.added_tokens_decoder.items()}
        # Special tokens are not part of an answer's text.
        ends = [added[token] for token in (THINK_START, THINK_END) if token in added and not added[token][1]]
        self._think_end = ends[1][0] if len(ends) == 2 else None
        self._opens: dict[bool | None, bool] = {}

    def text(
        self,
        turns: Sequence[Turn],
        tools: Sequence[ToolSpec],
        guarded: GuardedText,
        thinking: bool | None = None,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> str:
        """The prompt of `turns`, whose content is guarded already; what else users wrote is guarded here.

        Raises `PromptTooLongError` for text that cannot fit, else `InvalidRequestError` with the template's own
        reason.
        """
        try:
            offers = [_guarded(tool, guarded) for tool in tools]
            ready = [{key: _guarded(v, guarded) if key != "content" else v for key, v in t.items()} for t in turns]
            uses_tools = offers or any(turn["role"] == "tool" or "tool_calls" in turn for turn in ready)
            if uses_tools and not self.takes_tools:
                ready, offers = self._render_tools_as_text(ready, offers), []
            options = _options(thinking)
            if template is not PLAIN_TEMPLATE:
                options |= self._checked(template, ready, guarded)
            return self._render(ready, offers or None, **options)
        except OmniError:
            raise
        except RecursionError as error:
            raise InvalidRequestError("tools or calls are nested too deeply; flatten them", param="tools") from error
        except Exception as error:  # the template is a program of the checkpoint's: it may raise anything
            raise InvalidRequestError(template_refusal(error), param="messages") from error

    def has_variable(self, name: str) -> bool:
        """Whether the template reads a variable of this name, beside those that every template gets."""
        return name in self._variables

    @cached_property
    def _variables(self) -> frozenset[str]:
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", self._source))
        except TemplateError:  # nor can it be rendered
            return frozenset()
        return frozenset(find_undeclared_variables(parsed)) - _FIXED_VARIABLES

    def _checked(self, template: TemplateOptions, turns: Sequence[Turn], guarded: GuardedText) -> dict[str, Any]:
        """What the template is rendered with. Raises `InvalidRequestError`."""
        for name in template.variables:
            if not self.has_variable(name):
                raise InvalidRequestError(
                    f"the model's chat template has no variable {short_repr(name)}; leave it out",
                    param=f"chat_template_kwargs.{short_repr(name)[1:-1]}",
                )
        options = {name: _guarded(value, guarded) for name, value in template.variables.items()}
        if template.continue_final:
            if not turns or turns[-1]["role"] != "assistant" or "tool_calls" in turns[-1] or not turns[-1]["content"]:
                raise InvalidRequestError(
                    "needs a last message of the assistant with text, which the answer continues",
                    param="continue_final_message",
                )
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        elif not template.generation_prompt:
            options["add_generation_prompt"] = False
        return options

    def message_tokens(self, count: Callable[[str], int]) -> int:
        """Tokens that the template writes around each message, at least; `count` gives those of a text."""
        try:
            return max(1, min(self._tokens_between(roles, count) for roles in (("user", "assistant"), ("user",))))
        except Exception:  # the checkpoint's program, as above: a template may refuse two messages of one role
            return 1

    def _tokens_between(self, roles: Sequence[str], count: Callable[[str], int]) -> int:
        turns = [{"role": roles[i % len(roles)], "content": self._content("a")} for i in range(9)]
        return (count(self._render(turns, None)) - count(self._render(turns[:5], None))) // 4 - 1

    def think_block(self, thinking: bool | None) -> ThinkBlock | None:
        """That of answers to chats which are rendered so; None where the tokenizer has no tokens for one."""
        if self._think_end is None:
            return None
        if thinking not in self._opens:
            try:
                text = self._render([{"role": "user", "content": self._content("a")}], None, **_options(thinking))
                self._opens[thinking] = text.rstrip().endswith(THINK_START)
            except Exception:  # the checkpoint's program, as above
                self._opens[thinking] = False
        return ThinkBlock(self._think_end, self._opens[thinking])

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template offers tools and writes calls and results, in the form that is read back."""
        ask: list[Turn] = [{"role": "user", "content": self._content("a")}]
        call = {"id": "probe0001", "type": "function"}
        function = {"name": "probe_call", "arguments": {"probe": 1}}
        exchange: list[Turn] = [
            *ask,
            {"role": "assistant", "content": self._content(""), "tool_calls": [{**call, "function": function}]},
            {
                "role": "tool",
                "content": self._content("probe_result"),
                "tool_call_id": "probe0001",
                "name": "probe_call",
            },
        ]
        try:
            offers = "probe_tool" in self._render(ask, [_PROBE_TOOL])
            text = self._render(exchange, [_PROBE_TOOL])
        except _REFUSALS:
            return False
        return offers and _CALL.search(text) is not None and "probe_result" in text

    # ------------------------------------------------------------------------------------------- our own form

    def _render_tools_as_text(self, turns: Sequence[Turn], tools: Sequence[ToolSpec]) -> list[Turn]:
        result: list[Turn] = []
        for turn in turns:
            content = turn["content"]
            if turn["role"] == "tool":
                content = self._around("<tool_response>\n", content, "\n</tool_response>")
                if result and result[-1].get("results"):  # several results make one turn
                    result[-1]["content"] = self._join(self._around("", result[-1]["content"], "\n"), content)
                else:
                    result.append({"role": "user", "content": content, "results": True})
                continue
            plain = {key: value for key, value in turn.items() if key != "tool_calls"}
            texts = [_call_text(call["function"]) for call in turn.get("tool_calls", ())]
            if texts:
                plain["content"] = self._around("", content, ("" if _is_empty(content) else "\n") + "\n".join(texts))
            result.append(plain)
        for turn in result:
            turn.pop("results", None)
        return self._with_tools(result, instructions(tools)) if tools else result

    def _with_tools(self, turns: list[Turn], text: str) -> list[Turn]:
        if turns and turns[0]["role"] == "system":
            return [{**turns[0], "content": self._around("", turns[0]["content"], f"\n\n{text}")}, *turns[1:]]
        return [{"role": "system", "content": self._content(text)}, *turns]

    def _content(self, text: str) -> Any:
        if not self._parts:
            return text
        return [{"type": "text", "text": text}] if text else []

    def _around(self, before: str, content: Any, after: str) -> Any:
        return self._join(self._join(self._content(before), content), self._content(after))

    @staticmethod
    def _join(left: Any, right: Any) -> Any:
        return left + right


def _options(thinking: bool | None) -> dict[str, Any]:
    return {} if thinking is None else {"enable_thinking": thinking}


def instructions(tools: Sequence[ToolSpec]) -> str:
    """The description of the tools for a model whose template has none."""
    tool_lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tool_lines}\n</tools>"
        "\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
        "\n</tool_call>"
    )


def _is_empty(content: Any) -> bool:
    if isinstance(content, str):
        return not content
    return all(part.get("text") == "" for part in content)


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _guarded(value: Any, guarded: GuardedText) -> Any:
    """`value` with the special tokens in all of its texts, keys too, set aside."""
    if isinstance(value, str):
        return guarded.guard(value)
    if isinstance(value, Mapping):
        return {guarded.guard(key): _guarded(item, guarded) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(item, guarded) for item in value]
    return value


def template_refusal(error: Exception) -> str:
    """The error message for a chat template that failed."""
    reason = str(error) or type(error).__name__
    return f"the chat template refuses these messages: {reason}"


def joined_texts(parts: Sequence[Part]) -> list[Part]:
    """Parts with neighbouring texts made one: a special token must not hide across their border."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            merged[-1] = TextPart(last.text + part.text)
        else:
            merged.append(part)
    return merged


class ChatProcessor:
    """What processors share that render a chat by its template and tokenise the result."""

    _template: ChatTemplate
    _prompts: PromptTokenizer
    _message_tokens: int
    """Tokens of a message at least."""

    def _check_messages(self, messages: Sequence[ChatMessage], source: object) -> None:
        """Raise where there is no template (`source`), or there are more messages than fit."""
        if not source:
            raise InvalidRequestError("this model has no chat template; use generate() with a plain prompt")
        limits, count = self._prompts.limits, len(messages)
        if count * self._message_tokens > limits.max_tokens:  # they need not be rendered to be refused
            raise limits.too_long(f"{count} messages")

    def has_variable(self, name: str) -> bool:
        return self._template.has_variable(name)

    def think_block(self, thinking: bool | None) -> ThinkBlock | None:
        return self._template.think_block(thinking)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._prompts.decode(token_ids)

    def text_tokens(self, text: str) -> Sequence[int]:
        return self._prompts.text_input(text).token_ids

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        return self._prompts.spellings(token_ids)

    def text(self, prompt: str) -> ARInput:
        return self._prompts.text_input(prompt)

    def voices(self) -> Sequence[str]:
        return ()
