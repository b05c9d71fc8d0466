"""Tools in `/v1/responses`: the same tools and constraints as in a chat, in that API's flatter form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from annotated_types import Len, MaxLen
from pydantic import model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.validation import field_error, short_repr
from omnistage.server.openai.base import max_items
from omnistage.server.openai.tools import MAX_TOOLS, Function, ToolChoice, ToolRules


class FlatTool(Function):
    type: Literal["function"] = "function"

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, values: object) -> object:
        kind = values.get("type", "function") if isinstance(values, Mapping) else "function"
        if kind != "function":  # before its other fields, which are another kind's
            raise field_error("type", f"must be function, got {short_repr(kind)}: other tools are not supported")
        return values


class FlatChoice(ToolChoice):
    single: ClassVar[bool] = True

    type: Literal["function"]
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


class FlatAllowed(ToolChoice):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[FlatChoice, ...], Len(1, MAX_TOOLS), max_items(MAX_TOOLS)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.name for tool in self.tools)

    @property
    def forced(self) -> bool:
        return self.mode == "required"


class ResponseToolFields(ToolRules):
    """The fields of a request that are about tools."""

    tools: Annotated[tuple[FlatTool, ...], MaxLen(MAX_TOOLS), max_items(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | FlatAllowed | None = None

    @property
    def tool_functions(self) -> tuple[Function, ...]:
        return self.tools or ()


# --------------------------------------------------------------------------------------------------------- input


def as_messages(items: Sequence[Mapping[str, object]]) -> tuple[list[Mapping[str, object]], list[int]]:
    """Input items as messages of a chat, and for each message the index of the item that it begins with.

    Consecutive calls are one message: the model made them in one turn. Reasoning belongs to the message behind it.
    """
    messages: list[Mapping[str, object]] = []
    first_items: list[int] = []
    calls: list[dict[str, object]] = []
    reasoning: dict[str, object] = {}
    for index, item in enumerate(items):
        if item.get("type") == "reasoning":
            calls, reasoning = [], _reasoning(item, f"input[{index}]")
            continue
        if item.get("type") != "function_call":
            calls = []
            message = _message(item, f"input[{index}]")
            messages.append({**message, **reasoning} if message.get("role") == "assistant" else message)
            first_items.append(index)
            reasoning = {}
            continue
        call = _call(item, f"input[{index}]")
        if not calls:
            calls = []
            messages.append({"role": "assistant", "content": None, "tool_calls": calls, **reasoning})
            reasoning = {}
            first_items.append(index)
        calls.append(call)
    return messages, first_items


def _reasoning(item: Mapping[str, object], path: str) -> dict[str, object]:
    """The text of a reasoning item as a field of a message; summaries and encrypted text are not shown to the model."""
    parts = item.get("content")
    if parts is not None and not isinstance(parts, list):
        raise InvalidRequestError("must be a list of parts", param=f"{path}.content")
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts or ()]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("must be parts of reasoning_text", param=f"{path}.content")
    return {"reasoning_content": "".join(map(str, texts))} if texts else {}


def _call(item: Mapping[str, object], path: str) -> dict[str, object]:
    for key in ("call_id", "name", "arguments"):
        if not isinstance(item.get(key), str):
            raise InvalidRequestError("must be text", param=f"{path}.{key}")
    return {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}


def _message(item: Mapping[str, object], path: str) -> Mapping[str, object]:
    kind = item.get("type", "message")
    if kind == "message":
        return {key: value for key, value in item.items() if key in ("role", "content")}
    if kind != "function_call_output":
        raise InvalidRequestError(
            "must be message, reasoning, function_call or function_call_output; other items are not supported",
            param=f"{path}.type",
        )
    if not isinstance(item.get("call_id"), str):
        raise InvalidRequestError("must be the call_id of the call that this is the result of", param=f"{path}.call_id")
    if not isinstance(item.get("output"), str | list):
        raise InvalidRequestError("must be text, or a list of parts", param=f"{path}.output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
