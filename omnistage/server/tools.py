"""Tools: offered to the model in a system message, and read back from what it writes.

The tools do not go through the checkpoint's own chat template. They are written into the system message in the form
that Hermes and Qwen models were trained on (`<tools>`, `<tool_call>`), which every model of ours can read, whatever
its template. Earlier calls in `messages` are written as that same text. With `tool_choice` "required" or a named
function the output is constrained by a JSON schema, so that there is exactly one call and its arguments fit; with
"auto" the model is free, and `<tool_call>` blocks in its text become calls.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from omnistage.errors import InvalidRequestError
from omnistage.omni import OutputStream
from omnistage.params import StructuredOutput
from omnistage.server.wire import WireModel
from omnistage.types import short_repr

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
MAX_TOOLS = 128

# ----------------------------------------------------------------------------------------------------- wire


class Function(WireModel):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema; null: no arguments.")
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(WireModel):
    type: Literal["function"] = "function"
    function: Function


class FunctionName(WireModel):
    name: str


class NamedChoice(WireModel):
    type: Literal["function"] = "function"
    function: FunctionName


class ToolFields(WireModel):
    """What a request may say about tools."""

    tools: tuple[Tool, ...] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="Without effect: a forced call is one call.")

    def toolbox(self) -> Toolbox | None:
        """The tools that the model may use in this answer."""
        if not self.tools or self.tool_choice == "none":
            return None
        if isinstance(self.tool_choice, NamedChoice):
            return Toolbox(self.tools, True, self.tool_choice.function.name)
        return Toolbox(self.tools, self.tool_choice == "required")

    @model_validator(mode="after")
    def _choice_fits(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("tools: two have the same name; rename one")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice needs tools; give some, or leave it out")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            named = short_repr(self.tool_choice.function.name)
            raise ValueError(f"tool_choice: there is no tool {named}; tools: {', '.join(names)[:200]}")
        return self


# --------------------------------------------------------------------------------------------------- prompt


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request. `forced`: the answer must be a call; `name`: of this one."""

    tools: tuple[Tool, ...]
    forced: bool = False
    name: str | None = None

    def structured(self) -> StructuredOutput | None:
        """What a forced call is constrained to: the arguments of a named function, or a call of any."""
        if not self.forced:
            return None
        if self.name is not None:
            schema = next(t.function.schema_of_arguments for t in self.tools if t.function.name == self.name)
            return StructuredOutput(json_schema=schema)
        definitions = {
            str(i): _moved(tool.function.schema_of_arguments, f"#/$defs/{i}") for i, tool in enumerate(self.tools)
        }
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for i, tool in enumerate(self.tools)
        ]
        return StructuredOutput(json_schema={"anyOf": calls, "$defs": definitions})

    def instructions(self) -> str:
        listed = "\n".join(json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False) for tool in self.tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>"
            f"\n\n{self._how()}"
        )

    def _how(self) -> str:
        call = '{"name": <function-name>, "arguments": <args-json-object>}'
        if self.name is not None:
            return f"Now call {self.name}: answer with the JSON object of its arguments, and nothing else."
        if self.forced:
            return f"Now call one function: answer with this JSON object, and nothing else:\n{call}"
        return (
            "For each function call, return a json object with function name and arguments within "
            f"{_OPEN}{_CLOSE} XML tags:\n{_OPEN}\n{call}\n{_CLOSE}"
        )


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself hold once it lies at `root` of another."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"{root}{reference[1:]}"
    return moved


def conversation(messages: Sequence[Mapping[str, Any]], toolbox: Toolbox | None) -> tuple[list[Mapping[str, Any]], int]:
    """`messages` with calls written as text and the tools offered, and how many messages now precede the first."""
    written = [_written(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if toolbox is None or not written:
        return written, 0
    text, first = toolbox.instructions(), written[0]
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        content = first.get("content")
        if isinstance(content, str) and content:
            return [{**first, "content": f"{content}\n\n{text}"}, *written[1:]], 0
        if isinstance(content, list) and content:
            return [{**first, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}, *written[1:]], 0
        return written, 0  # an empty one is refused where messages are checked
    return [{"role": "system", "content": text}, *written], 1


def _written(message: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return message
    if message.get("role") != "assistant":
        raise InvalidRequestError("is for assistant messages only; leave it out", param=f"{path}.tool_calls")
    if not isinstance(calls, list):
        raise InvalidRequestError("must be a list of calls", param=f"{path}.tool_calls")
    texts = [_call_text(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    if isinstance(content, list):
        return {**rest, "content": [*content, {"type": "text", "text": "\n" + "\n".join(texts)}]}
    if content is not None and not isinstance(content, str):
        raise InvalidRequestError("must be a string, a list of parts or null", param=f"{path}.content")
    return {**rest, "content": "\n".join([content, *texts] if content else texts)}


def _call_text(call: object, path: str) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidRequestError('must be a call: {"function": {"name": text, "arguments": text}}', param=path)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments  # a model wrote it and was cut off, perhaps: it is shown what it wrote
    return f"{_OPEN}\n{json.dumps({'name': name, 'arguments': value}, ensure_ascii=False)}\n{_CLOSE}"


# --------------------------------------------------------------------------------------------------- answer


@dataclass(slots=True)
class CallReader:
    """Reads the text of one answer as it comes: what is content and what is calls, as OpenAI's deltas."""

    toolbox: Toolbox
    calls: int = 0
    _held: str = field(default="")

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas that this piece of text completes."""
        if self.toolbox.name is not None:
            # All of the text is arguments: they stream as they come.
            begin = [self._call(self.toolbox.name, "")] if not self.calls else []
            more = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
            return [*begin, more] if text else begin
        self._held += text
        return [] if self.toolbox.forced else self._blocks()

    def end(self) -> list[dict[str, Any]]:
        """The deltas of what is left when the answer is over."""
        held, self._held = self._held, ""
        if self.toolbox.forced and (call := self._parsed(held)) is not None:
            return [call]
        # A call that was cut off midway is no call: the text is there for whoever wants it.
        return [{"content": held}] if held else []

    def _blocks(self) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        while True:
            before, opened, after = self._held.partition(_OPEN)
            if not opened:
                keep = _overlap(self._held, _OPEN)
                ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                if ready and not (self.calls and ready.isspace()):
                    made.append({"content": ready})
                return made
            if before and not before.isspace():
                made.append({"content": before})
            inside, closed, rest = after.partition(_CLOSE)
            if not closed:
                self._held = f"{opened}{after}"
                return made
            call = self._parsed(inside)
            made.append(call if call is not None else {"content": f"{opened}{inside}{closed}"})
            self._held = rest

    def _parsed(self, text: str) -> dict[str, Any] | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in {tool.function.name for tool in self.toolbox.tools}:
            return None
        return self._call(value["name"], json.dumps(value.get("arguments") or {}, ensure_ascii=False))

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
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


@asynccontextmanager
async def renamed(
    running: AbstractAsyncContextManager[OutputStream], rename: Callable[[str], str]
) -> AsyncIterator[OutputStream]:
    """A running request whose errors name fields as the client knows them."""
    try:
        async with running as stream:
            yield stream
    except InvalidRequestError as error:
        if error.param is not None:
            error.param = rename(error.param)
        raise


def shifted(by: int) -> Callable[[str], str]:
    """Paths into `messages` without the first `by`, which we added."""

    def rename(path: str) -> str:
        head, bracket, rest = path.partition("[")
        number, closing, tail = rest.partition("]")
        if head != "messages" or not bracket or not closing or not number.isdigit():
            return path
        return f"messages[{int(number) - by}]{tail}"

    return rename
