"""Tools: what a request says about them, what constrains the answer, and calls read back from what the model writes.

Tools reach the model through its chat template (`omnistage/models/chat_template.py`). Calls are written in the form of
Hermes and Qwen models, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. A forced choice, strict schemas, a
narrowed set of tools and `parallel_tool_calls: false` are held to by structured output; otherwise the model is free,
and what it writes in that form becomes calls.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator

from omnistage.core.errors import InvalidRequestError, OmniError
from omnistage.core.params import StructuredOutput
from omnistage.core.validation import short_repr
from omnistage.omni import OutputStream
from omnistage.server.openai.base import WireModel

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,64})"\s*,\s*"arguments"\s*:\s*(?=\{)')
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_MOST_WHITESPACE = 32
"""In a row, inside a call's arguments: a model that is held to JSON can otherwise go on with spaces for ever."""
MAX_TOOLS = 128

# ----------------------------------------------------------------------------------------------------- wire


class Function(WireModel):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema; null: no arguments.")
    strict: bool | None = Field(default=None, description="True: arguments always fit the schema.")

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(WireModel):
    type: Literal["function"] = "function"
    function: Function

    def spec(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class FunctionName(WireModel):
    name: str


class NamedChoice(WireModel):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: tuple[NamedChoice, ...] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(WireModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolRules(WireModel):
    """What chat and responses say about tools alike; each writes `tools` and `tool_choice` in a form of its own."""

    parallel_tool_calls: bool | None = Field(default=None, description="False: one call at most.")

    @field_validator("tool_choice", mode="before", check_fields=False)
    @classmethod
    def _known_choice(cls, value: Any) -> Any:
        """Raises for a choice among tools that a service runs itself."""
        if isinstance(value, Mapping) and value.get("type", "function") not in ("function", "allowed_tools"):
            raise ValueError("its type must be function or allowed_tools: there are no other tools here")
        return value


class ToolFields(ToolRules):
    """What a request may say about tools."""

    tools: tuple[Tool, ...] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None

    def toolbox(self) -> Toolbox | None:
        """The tools that the model may use in this answer."""
        choice, parallel = self.tool_choice, self.parallel_tool_calls is not False
        if not self.tools or choice == "none":
            return None
        if isinstance(choice, NamedChoice):
            return Toolbox(self.tools, True, frozenset({choice.function.name}), parallel=False)
        if isinstance(choice, AllowedChoice):
            names = frozenset(tool.function.name for tool in choice.allowed_tools.tools)
            return Toolbox(self.tools, choice.allowed_tools.mode == "required", names, parallel)
        return Toolbox(self.tools, choice == "required", parallel=parallel)

    def check_tools(self) -> None:
        """Raise `InvalidRequestError` where these fields do not go together."""
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise InvalidRequestError("two have the same name; rename one", param="tools")
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not names:
            raise InvalidRequestError("needs tools; give some, or leave it out", param="tool_choice")
        chosen: tuple[NamedChoice, ...] = (choice,) if isinstance(choice, NamedChoice) else ()
        chosen = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else chosen
        for one in chosen:
            if one.function.name not in names:
                named = short_repr(one.function.name)
                raise InvalidRequestError(
                    f"there is no tool {named}; tools: {', '.join(names)[:200]}", param="tool_choice"
                )


# ----------------------------------------------------------------------------------------------- constraints


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request. `forced`: the answer must be calls; `allowed`: of these only, None of all."""

    tools: tuple[Tool, ...]
    forced: bool = False
    allowed: frozenset[str] | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The functions that may be called."""
        return self.allowed if self.allowed is not None else frozenset(tool.function.name for tool in self.tools)

    def specs(self) -> list[dict[str, Any]]:
        return [tool.spec() for tool in self.tools]

    def structured(self, answer: StructuredOutput | None = None) -> StructuredOutput | None:
        """What holds the text to this choice. `answer` is what holds a text without calls; None: it is free."""
        tags = [self._tag(tool.function) for tool in self.tools if tool.function.name in self.names]
        only = {"tags": tags, "stop_after_first": not self.parallel}
        calls: dict[str, object] = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, **only}
        if self.forced:
            return StructuredOutput(structural_tag=calls)
        if answer is not None:
            schema = answer.json_schema if answer.json_schema is not None else {"type": "object"}
            either = [{"type": "json_schema", "json_schema": schema}, calls]
            return StructuredOutput(structural_tag={"type": "or", "elements": either})
        strict = any(tool.function.strict for tool in self.tools)
        if not strict and self.parallel and self.allowed is None:
            return None
        return StructuredOutput(structural_tag={"type": "triggered_tags", "triggers": [_OPEN], **only})

    def _tag(self, function: Function) -> dict[str, object]:
        held = self.forced or bool(function.strict)
        content = {
            "type": "json_schema",
            "json_schema": function.schema_of_arguments if held else {"type": "object"},
            "max_whitespace_cnt": _MOST_WHITESPACE,
        }
        begin = f'{_OPEN}\n{{"name": "{function.name}", "arguments": '
        return {"type": "tag", "begin": begin, "content": content, "end": f"}}\n{_CLOSE}"}


# --------------------------------------------------------------------------------------------------- answer

Delta = dict[str, Any]


@dataclass(slots=True)
class _ObjectEnd:
    """Finds where a JSON object ends in text that comes in pieces."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def find(self, text: str) -> int | None:
        """The place behind the object's last character; None: it goes on."""
        for place, character in enumerate(text):
            if self.in_string:
                if self.escaped:
                    self.escaped = False
                elif character == "\\":
                    self.escaped = True
                elif character == '"':
                    self.in_string = False
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return place + 1
        return None


@dataclass(slots=True)
class CallReader:
    """Reads the text of one answer as it comes: what is content and what is calls, as OpenAI's deltas.

    A call's arguments stream as they are written. A call that is cut off among them stays a call, with what there was.
    """

    toolbox: Toolbox
    calls: int = 0
    _state: Callable[[list[Delta]], bool] | None = None
    _held: str = ""
    _end_of_object: _ObjectEnd = field(default_factory=_ObjectEnd)

    def push(self, text: str) -> list[Delta]:
        """The deltas that this piece of text completes."""
        self._held += text
        made: list[Delta] = []
        while (self._state or self._in_text)(made):
            pass
        return made

    def end(self) -> list[Delta]:
        """The deltas of what is left when the answer is over."""
        held, self._held = self._held, ""
        if self._state == self._in_call:
            # Some models end with the call, without closing it. A head without arguments is no call.
            return [self._parsed(held) or {"content": f"{_OPEN}{held}"}]
        return [{"content": held}] if held and self._state is None else []

    # Each state takes what it can from the held text and says whether another is to go on with the rest.

    def _in_text(self, made: list[Delta]) -> bool:
        before, opened, after = self._held.partition(_OPEN)
        keep = 0 if opened else _overlap(before, _OPEN)
        ready, self._held = before[: len(before) - keep], after if opened else before[len(before) - keep :]
        if ready and not (ready.isspace() and (opened or self.calls)):
            made.append({"content": ready})
        if opened:
            self._state = self._in_call
        return bool(opened)

    def _in_call(self, made: list[Delta]) -> bool:
        head = _HEAD.match(self._held)
        if head is not None and head[1] in self.toolbox.names:
            made.append(self._call(head[1], ""))
            self._held = self._held[head.end() :]
            self._end_of_object, self._state = _ObjectEnd(), self._in_arguments
            return True
        inside, closed, rest = self._held.partition(_CLOSE)
        if not closed:
            return False
        made.append(self._parsed(inside) or {"content": f"{_OPEN}{inside}{closed}"})
        self._held, self._state = rest, None
        return True

    def _in_arguments(self, made: list[Delta]) -> bool:
        end = self._end_of_object.find(self._held)
        piece, self._held = self._held[:end], self._held[end:] if end is not None else ""
        if piece:
            made.append({"tool_calls": [{"index": self.calls - 1, "function": {"arguments": piece}}]})
        if end is not None:
            self._state = self._behind_arguments
        return end is not None

    def _behind_arguments(self, _made: list[Delta]) -> bool:
        _, closed, rest = self._held.partition(_CLOSE)
        if closed:
            self._held, self._state = rest, None
        return bool(closed)

    def _parsed(self, text: str) -> Delta | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self.toolbox.names:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        return self._call(value["name"], arguments)

    def _call(self, name: str, arguments: str) -> Delta:
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        return {"tool_calls": [{"index": self.calls - 1, "id": call_id, "type": "function", "function": function}]}


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def read_whole(text: str, toolbox: Toolbox) -> tuple[str | None, list[dict[str, Any]]]:
    """The content and the calls of a whole answer."""
    reader = CallReader(toolbox)
    content, calls = "", []
    for delta in (*reader.push(text), *reader.end()):
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append({key: value for key, value in piece.items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return (content.strip() or None) if calls else content, calls


# --------------------------------------------------------------------------------------------------- errors


Rename = Callable[[str], str] | Mapping[str, str]


def as_known(error: OmniError, rename: Rename) -> OmniError:
    """The error, with its field named as the client knows it."""
    if isinstance(error, InvalidRequestError) and error.param is not None:
        error.param = rename.get(error.param, error.param) if isinstance(rename, Mapping) else rename(error.param)
    return error


@asynccontextmanager
async def renamed(running: AbstractAsyncContextManager[OutputStream], rename: Rename) -> AsyncIterator[OutputStream]:
    """A running request whose errors name fields as the client knows them."""
    try:
        async with running as stream:
            yield stream
    except OmniError as error:
        as_known(error, rename)
        raise
