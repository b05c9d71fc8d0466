"""Tools in `/v1/responses`: the same tools and constraints as in a chat, in that API's flatter form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.validation import field_error, short_repr
from omnistage.server.openai.base import WireModel
from omnistage.server.openai.tools import (
    MAX_TOOLS,
    AllowedChoice,
    AllowedTools,
    CallReader,
    Function,
    FunctionName,
    NamedChoice,
    Tool,
    Toolbox,
    ToolFields,
    ToolRules,
)

Emit = Callable[..., dict[str, Any]]
"""Makes an event of its type and values."""


class FlatTool(Function):
    type: Literal["function"] = "function"

    @model_validator(mode="before")
    @classmethod
    def _is_the_clients(cls, values: Any) -> Any:
        kind = values.get("type", "function") if isinstance(values, Mapping) else "function"
        if kind != "function":  # before its other fields, which are another kind's
            raise field_error("type", f"must be function, got {short_repr(kind)}: no tools are run here; leave it out")
        return values


class FlatChoice(WireModel):
    type: Literal["function"]
    name: str


class FlatAllowed(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: tuple[FlatChoice, ...] = Field(min_length=1, max_length=MAX_TOOLS)


class ResponseToolFields(ToolRules):
    """What a request may say about tools."""

    tools: tuple[FlatTool, ...] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | FlatAllowed | None = None

    def toolbox(self) -> Toolbox | None:
        """The tools that the model may use in this answer. Raises `InvalidRequestError` for fields that do not fit."""
        tools = tuple(Tool(function=Function(**tool.model_dump(exclude={"type"}))) for tool in self.tools or ())
        fields = ToolFields(
            tools=tools or None, tool_choice=self._choice(), parallel_tool_calls=self.parallel_tool_calls
        )
        fields.check_tools()
        return fields.toolbox()

    def _choice(self) -> Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None:
        choice = self.tool_choice
        if isinstance(choice, FlatChoice):
            return NamedChoice(function=FunctionName(name=choice.name))
        if isinstance(choice, FlatAllowed):
            named = tuple(NamedChoice(function=FunctionName(name=tool.name)) for tool in choice.tools)
            return AllowedChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=named))
        return choice

    def told(self) -> dict[str, Any]:
        """These fields as a response repeats them."""
        choice = self.tool_choice or "auto"
        return {
            "tools": [
                {"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in self.tools or ()
            ],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
        }


# ---------------------------------------------------------------------------------------------------- input


def laid_out(items: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Input items as messages of a chat, and for each message the item that it begins with.

    Calls that follow each other are one message: the model made them in one turn.
    """
    messages: list[Mapping[str, Any]] = []
    places: list[int] = []
    for index, item in enumerate(items):
        message = _message(item, f"input[{index}]")
        if messages and item.get("type") == "function_call" and messages[-1].get("tool_calls"):
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1]["tool_calls"], *message["tool_calls"]]}
            continue
        messages.append(message)
        places.append(index)
    return messages, places


def _message(item: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return {key: value for key, value in item.items() if key in ("role", "content")}
    if kind == "function_call":
        for key in ("call_id", "name", "arguments"):
            if not isinstance(item.get(key), str):
                raise InvalidRequestError("must be text", param=f"{path}.{key}")
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": item["call_id"], "function": function}]}
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise InvalidRequestError(
                "must be the call_id of the call that this is the result of", param=f"{path}.call_id"
            )
        if not isinstance(item.get("output"), str | list):
            raise InvalidRequestError("must be text, or a list of parts", param=f"{path}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    raise InvalidRequestError(
        "only items of type message, function_call and function_call_output are taken here", param=f"{path}.type"
    )


# --------------------------------------------------------------------------------------------------- output


class ToolOutput:
    """The output items of an answer that may hold calls, and the events on their way: one item is open at a time."""

    def __init__(self, own_id: str, toolbox: Toolbox, emit: Emit) -> None:
        self.items: list[dict[str, Any]] = []
        self._own_id = own_id
        self._reader = CallReader(toolbox)
        self._emit = emit
        self._open: dict[str, Any] | None = None

    def push(self, text: str) -> list[dict[str, Any]]:
        """The events of a piece of text."""
        return [made for delta in self._reader.push(text) for made in self._take(delta)]

    def end(self, status: str) -> list[dict[str, Any]]:
        """The events of what is left. There is always an item: an empty text is an answer too."""
        made = [made for delta in self._reader.end() for made in self._take(delta)]
        if not self.items:
            made += self._begin_message()
        return made + self._close(status)

    def _take(self, delta: Mapping[str, Any]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if "content" in delta:
            if self._open is None or self._open["type"] != "message":
                made += self._close("completed") + self._begin_message()
            made.append(self._text_event("delta", delta=delta["content"], logprobs=[]))
            self.items[-1]["content"][0]["text"] += delta["content"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                made += self._close("completed") + self._begin_call(call["id"], call["function"]["name"])
            if piece := call["function"]["arguments"]:
                made.append(self._call_event("delta", delta=piece))
                self.items[-1]["arguments"] += piece
        return made

    def _begin_message(self) -> list[dict[str, Any]]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        number = f"_{len(self.items)}" if self.items else ""
        item = {"type": "message", "id": f"msg_{self._own_id}{number}", "role": "assistant", "content": [part]}
        added = self._added(item, {**item, "content": []})
        return [added, self._part_event("added", part=dict(part))]

    def _begin_call(self, call_id: str, name: str) -> list[dict[str, Any]]:
        item = {"type": "function_call", "id": f"fc_{call_id.removeprefix('call_')}", "call_id": call_id}
        item |= {"name": name, "arguments": ""}
        return [self._added(item, dict(item))]

    def _added(self, item: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
        self.items.append(item)
        self._open = item
        index = len(self.items) - 1
        return self._emit("response.output_item.added", output_index=index, item={**shown, "status": "in_progress"})

    def _close(self, status: str) -> list[dict[str, Any]]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            made = [self._text_event("done", text=part["text"], logprobs=[]), self._part_event("done", part=part)]
        else:
            made = [self._call_event("done", name=item["name"], arguments=item["arguments"])]
        return [*made, self._emit("response.output_item.done", output_index=len(self.items) - 1, item=item)]

    def _text_event(self, kind: str, **values: object) -> dict[str, Any]:
        return self._of_item(f"response.output_text.{kind}", content_index=0, **values)

    def _part_event(self, kind: str, **values: object) -> dict[str, Any]:
        return self._of_item(f"response.content_part.{kind}", content_index=0, **values)

    def _call_event(self, kind: str, **values: object) -> dict[str, Any]:
        return self._of_item(f"response.function_call_arguments.{kind}", **values)

    def _of_item(self, kind: str, **values: object) -> dict[str, Any]:
        return self._emit(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **values)


def whole_output(own_id: str, toolbox: Toolbox, text: str, status: str) -> list[dict[str, Any]]:
    """The output items of an answer that did not stream."""
    output = ToolOutput(own_id, toolbox, lambda *_, **__: {})
    output.push(text)
    output.end(status)
    return output.items
