"""Tools: what a request says about them, what constrains the text, and calls parsed from the text.

Tools reach the model through its chat template (`omnistage/models/chat_template.py`). Calls are written in the form of
Hermes and Qwen models, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. A forced choice, strict schemas, a
restricted set of tools and `parallel_tool_calls: false` are enforced by structured output; otherwise the model is free,
and text in that form becomes calls.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NotRequired

from annotated_types import Len, MaxLen
from pydantic import Field, field_validator
from typing_extensions import TypedDict

from omnistage.core.errors import InvalidRequestError
from omnistage.core.params import StructuredOutput
from omnistage.core.validation import short_repr
from omnistage.engines.ar.sampling.grammar_bounds import check_source
from omnistage.engines.ar.sampling.schema_support import check_schema
from omnistage.server.openai.base import WireModel, max_items

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,64})"\s*,\s*"arguments"\s*:\s*(?=\{)')
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_MAX_WHITESPACE = 32
"""In a row, inside a call's arguments: a model that is constrained to JSON can otherwise generate endless spaces."""
MAX_TOOLS = 128
_MAX_KEYWORDS = 128
"""At the top of a JSON schema. Its other levels are bounded by the values that a body may have."""

# --------------------------------------------------------------------------------------------------- requests

JsonSchema = Annotated[dict[str, object], max_items(_MAX_KEYWORDS)]


class Function(WireModel):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: JsonSchema | None = Field(default=None, description="A JSON schema; null: no arguments.")
    strict: bool | None = Field(default=None, description="True: arguments always fit the schema.")

    @property
    def arguments_schema(self) -> JsonSchema:
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}

    def spec(self) -> dict[str, object]:
        """As chat templates take it."""
        fields = ("name", "description", "parameters")
        function = {name: value for name in fields if (value := getattr(self, name)) is not None}
        return {"type": "function", "function": function}


class Tool(WireModel):
    type: Literal["function"] = "function"
    function: Function


class ToolChoice(WireModel):
    """A choice of some tools by name."""

    single: ClassVar[bool] = False
    """Whether it is one call of one tool."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]: ...

    @property
    def forced(self) -> bool:
        """Whether the model must call one of them."""
        return True


class FunctionName(WireModel):
    name: str


class NamedChoice(ToolChoice):
    single: ClassVar[bool] = True

    type: Literal["function"] = "function"
    function: FunctionName

    @property
    def names(self) -> tuple[str, ...]:
        return (self.function.name,)


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[NamedChoice, ...], Len(1, MAX_TOOLS), max_items(MAX_TOOLS)]


class AllowedChoice(ToolChoice):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.allowed_tools.tools)

    @property
    def forced(self) -> bool:
        return self.allowed_tools.mode == "required"


class ToolRules(WireModel):
    """The rules that chat and responses share; each writes `tools` and `tool_choice` in a form of its own."""

    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="False: one call at most.")

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _known_choice(cls, value: object) -> object:
        """Raises for a choice among tools that a service runs itself."""
        if isinstance(value, Mapping) and value.get("type", "function") not in ("function", "allowed_tools"):
            raise ValueError("its type must be function or allowed_tools; other tools are not supported")
        return value

    @property
    @abstractmethod
    def tool_functions(self) -> tuple[Function, ...]: ...

    @cached_property
    def toolbox(self) -> Toolbox | None:
        """The tools that the model may use. Raises `InvalidRequestError` for fields that do not fit together."""
        functions, choice, parallel = self.tool_functions, self.tool_choice, self.parallel_tool_calls is not False
        names = [function.name for function in functions]
        if len(set(names)) != len(names):
            raise InvalidRequestError("two have the same name; rename one", param="tools")
        if choice not in (None, "none", "auto") and not names:
            raise InvalidRequestError("needs tools; send some, or leave it out", param="tool_choice")
        if isinstance(choice, ToolChoice):
            for name in choice.names:
                if name not in names:
                    raise InvalidRequestError(
                        f"there is no tool {short_repr(name)}; tools: {', '.join(names)[:200]}", param="tool_choice"
                    )
            return Toolbox(functions, choice.forced, frozenset(choice.names), parallel and not choice.single)
        return Toolbox(functions, choice == "required", parallel=parallel) if names and choice != "none" else None


class ToolFields(ToolRules):
    """The fields of a chat that are about tools."""

    tools: Annotated[tuple[Tool, ...], MaxLen(MAX_TOOLS), max_items(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None

    @property
    def tool_functions(self) -> tuple[Function, ...]:
        return tuple(tool.function for tool in self.tools or ())


# ------------------------------------------------------------------------------------------------- constraints


@dataclass(frozen=True, slots=True)
class ExactSchema:
    """A JSON schema that must be met, with the request's field and the place in it."""

    schema: object
    param: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request. `forced`: the model must call; `allowed`: only these, None: all."""

    functions: tuple[Function, ...]
    forced: bool = False
    allowed: frozenset[str] | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The functions that may be called."""
        return self.allowed if self.allowed is not None else frozenset(function.name for function in self.functions)

    def specs(self) -> list[dict[str, object]]:
        return [function.spec() for function in self.functions]

    def exact_schemas(self, text: StructuredOutput | None = None, field: str = "response_format") -> list[ExactSchema]:
        """The schemas that must be met: of strict functions, and of a `text` without calls, which was sent in `field`.

        Without `strict: true`, a function's schema is enforced as far as it can be.
        """
        exact = [
            ExactSchema(function.arguments_schema, "tools", f"parameters of {function.name}, ")
            for function in self.functions
            if function.strict and function.name in self.names
        ]
        if text is not None and text.json_schema is not None:
            exact.append(ExactSchema(text.json_schema, field))
        return exact

    def structured(self, text: StructuredOutput | None = None) -> StructuredOutput | None:
        """What enforces the choice. `text` constrains a text without calls; None: it is free."""
        called = [function for function in self.functions if function.name in self.names]
        tags = [self._tag(function) for function in called]
        only = {"tags": tags, "stop_after_first": not self.parallel}
        calls: dict[str, object] = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, **only}
        if self.forced:
            return StructuredOutput(structural_tag=calls)
        if text is not None:
            schema = text.json_schema if text.json_schema is not None else {"type": "object"}
            either = [{"type": "json_schema", "json_schema": schema}, calls]
            return StructuredOutput(structural_tag={"type": "or", "elements": either})
        strict = any(function.strict for function in self.functions)
        if not strict and self.parallel and self.allowed is None:
            return None
        return StructuredOutput(structural_tag={"type": "triggered_tags", "triggers": [_OPEN], **only})

    def _tag(self, function: Function) -> dict[str, object]:
        constrained = self.forced or bool(function.strict)
        content = {
            "type": "json_schema",
            "json_schema": function.arguments_schema if constrained else {"type": "object"},
            "max_whitespace_cnt": _MAX_WHITESPACE,
        }
        begin = f'{_OPEN}\n{{"name": "{function.name}", "arguments": '
        return {"type": "tag", "begin": begin, "content": content, "end": f"}}\n{_CLOSE}"}


def check_schemas(schemas: Sequence[ExactSchema]) -> None:
    """Raise `InvalidRequestError` for one that cannot be enforced, or is too large."""
    if schemas:
        check_source([schema.schema for schema in schemas], schemas[0].param)
    for schema in schemas:
        try:
            check_schema(schema.schema, schema.param)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{schema.place}{error.message}", param=schema.param) from error


# ------------------------------------------------------------------------------------------------------- calls


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A call begins with its id and name; the arguments of later deltas belong to the call of their index."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict, total=False):
    """A piece of text, or of calls."""

    content: str
    tool_calls: list[ToolCallDelta]


@dataclass(slots=True)
class _ObjectEnd:
    """Finds where a JSON object ends in text that arrives in pieces."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def find(self, text: str) -> int | None:
        """The index behind the object's last character; None: it goes on."""
        for index, character in enumerate(text):
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
                    return index + 1
        return None


@dataclass(slots=True)
class CallReader:
    """Parses the text of one choice as it arrives into content and calls, as OpenAI's deltas.

    A call's arguments stream as they are written. A call that ends in the middle of them stays a call, with those.
    """

    toolbox: Toolbox
    calls: int = 0
    _state: Callable[[list[Delta]], bool] | None = None
    _pending: str = ""
    _end_of_object: _ObjectEnd = field(default_factory=_ObjectEnd)

    def push(self, text: str) -> list[Delta]:
        """The deltas that this piece of text completes."""
        self._pending += text
        deltas: list[Delta] = []
        while (self._state or self._in_text)(deltas):
            pass
        return deltas

    def end(self) -> list[Delta]:
        """The deltas of what is left when the text is over."""
        rest, self._pending = self._pending, ""
        if self._state == self._in_call:
            # Some models end without closing the call. A name without arguments is not a call.
            return [self._parsed(rest) or {"content": f"{_OPEN}{rest}"}]
        return [{"content": rest}] if rest and self._state is None else []

    # Each state consumes what it can of the held text and returns whether another state can go on with the rest.

    def _in_text(self, deltas: list[Delta]) -> bool:
        before, opening, after = self._pending.partition(_OPEN)
        keep = 0 if opening else _overlap(before, _OPEN)
        ready, self._pending = before[: len(before) - keep], after if opening else before[len(before) - keep :]
        if ready and not (ready.isspace() and (opening or self.calls)):
            deltas.append({"content": ready})
        if opening:
            self._state = self._in_call
        return bool(opening)

    def _in_call(self, deltas: list[Delta]) -> bool:
        head = _HEAD.match(self._pending)
        if head is not None and head[1] in self.toolbox.names:
            deltas.append(self._call(head[1], ""))
            self._pending = self._pending[head.end() :]
            self._end_of_object, self._state = _ObjectEnd(), self._in_arguments
            return True
        inside, closed, rest = self._pending.partition(_CLOSE)
        if not closed:
            return False
        deltas.append(self._parsed(inside) or {"content": f"{_OPEN}{inside}{closed}"})
        self._pending, self._state = rest, None
        return True

    def _in_arguments(self, deltas: list[Delta]) -> bool:
        end = self._end_of_object.find(self._pending)
        piece, self._pending = self._pending[:end], self._pending[end:] if end is not None else ""
        if piece:
            deltas.append({"tool_calls": [{"index": self.calls - 1, "function": {"arguments": piece}}]})
        if end is not None:
            self._state = self._behind_arguments
        return end is not None

    def _behind_arguments(self, _deltas: list[Delta]) -> bool:
        _, closed, rest = self._pending.partition(_CLOSE)
        if closed:
            self._pending, self._state = rest, None
        return bool(closed)

    def _parsed(self, text: str) -> Delta | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return None
        if name not in self.toolbox.names:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        return self._call(name, arguments.encode(errors="replace").decode())  # JSON may spell half a character

    def _call(self, name: str, arguments: str) -> Delta:
        self.calls += 1
        call: ToolCallDelta = {
            "index": self.calls - 1,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        return {"tool_calls": [call]}


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def read_whole(text: str, toolbox: Toolbox) -> tuple[str | None, list[ToolCall]]:
    """The content and the calls of a whole text."""
    reader = CallReader(toolbox)
    content = ""
    calls: list[ToolCall] = []
    for delta in (*reader.push(text), *reader.end()):
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            function = piece["function"]
            if "id" in piece:
                function_call: CalledFunction = {"name": function["name"], "arguments": function["arguments"]}
                calls.append({"id": piece["id"], "type": "function", "function": function_call})
            else:
                calls[-1]["function"]["arguments"] += function["arguments"]
    return (content.strip() or None) if calls else content, calls
