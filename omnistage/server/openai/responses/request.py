"""`POST /v1/responses`: what clients send.

As in a chat, every field of OpenAI's is honoured, or accepted where it changes nothing, or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NotRequired, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator
from typing_extensions import TypedDict

from omnistage.core.errors import InvalidRequestError
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.core.validation import field_error
from omnistage.server.http.openapi import bounds_of
from omnistage.server.observe.audit import note_ignored
from omnistage.server.openai.base import MAX_MODALITIES, IgnoredOptions, Metadata, WireModel, max_items, only
from omnistage.server.openai.chat.messages import MAX_MESSAGES, UncheckedMessages
from omnistage.server.openai.extensions import STRUCTURED_PATHS, Effort, StructuredOutputs
from omnistage.server.openai.request_models import AudioOptions, Finite, SamplesText
from omnistage.server.openai.responses.tools import ResponseToolFields, as_messages
from omnistage.server.openai.tools import ExactSchema, JsonSchema

_NOT_SUPPORTED = "parameter not supported; leave it out"


class TextFormat(WireModel):
    """As `response_format` of a chat, with the schema's fields beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def structured(self) -> StructuredOutput | None:
        if self.type == "json_object":
            return StructuredOutput(json_object=True)
        return StructuredOutput(json_schema=self.schema_) if self.schema_ is not None else None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise field_error("schema", "requires type json_schema; send both or neither")
        return self


class TextOptions(WireModel):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Without effect.")


class ReasoningOptions(WireModel):
    """How much the model thinks, where its template can say so; `none`: not at all."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Without effect: the reasoning itself is returned."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(default=None, description="As summary.")
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[Literal["standard"] | None, only("standard", why=_NOT_SUPPORTED)] = None


class ImageOptions(WireModel):
    context_compression: Literal["auto", "disabled"] | None = Field(
        default=None, description="Pictures reach the model as they are."
    )


class ResponseStreamOptions(WireModel):
    include_obfuscation: bool | None = None


_MAX_INCLUDE = 32
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
"""All but the first are parts of items that no response has here; so they change nothing."""


class Echo(TypedDict):
    """What a response repeats of its request."""

    tools: list[dict[str, JsonValue]]
    tool_choice: str | dict[str, JsonValue]
    parallel_tool_calls: bool
    service_tier: NotRequired[Literal["default"]]
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    store: bool
    temperature: float | None
    text: dict[str, JsonValue]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


_NOT_KEPT = "are not stored here; send previous_response_id, or the conversation so far in input"


class ResponsesRequest(SamplesText, ResponseToolFields):
    """`POST /v1/responses`. The items of `input` are checked where their media are decoded."""

    model_config = ConfigDict(json_schema_extra=bounds_of(SamplingParams, max_output_tokens="max_tokens"))
    not_exposed: ClassVar[frozenset[str]] = SamplesText.not_exposed | {
        "n",
        "logit_bias",
        "min_tokens",
        "stop_token_ids",
        "allowed_token_ids",
        "skip_special_tokens",
    }

    input: Annotated[str | UncheckedMessages, max_items(MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: Finite | None = None  # this and top_p are echoed
    top_p: Finite | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions = TextOptions()
    # OpenAI's, without effect on the result
    metadata: Metadata | None = None
    store: bool | None = Field(default=None, description="Whether later requests may continue it; by default they may.")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: IgnoredOptions | None = Field(default=None, description="Prefixes are always reused.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    max_tool_calls: int | None = Field(default=None, description="Of tools that a service runs; there are none here.")
    include: Annotated[tuple[Includable, ...], max_items(_MAX_INCLUDE)] | None = None
    # OpenAI's, of which only what changes nothing is accepted
    background: Annotated[
        Literal[False] | None, only(False, why="background responses are not supported; leave it out")
    ] = None
    truncation: Annotated[
        Literal["disabled"] | None, only("disabled", why="a conversation is never truncated; leave it out")
    ] = None
    reasoning: ReasoningOptions | None = None
    image: ImageOptions | None = None
    # OpenAI's, refused with a reason
    conversation: Annotated[object, only([], {}, why=f"conversations {_NOT_KEPT}")] = None
    prompt: Annotated[object, only([], {}, why="prompts are not stored here; send it in instructions or input")] = None
    moderation: Annotated[object, only([], {}, why="moderation is not supported; leave it out")] = None
    access_programs: Annotated[object, only([], {}, why="access programs are not supported; leave it out")] = None
    context_management: Annotated[object, only([], {}, why="a conversation is never truncated; leave it out")] = None
    previous_response_id: str | None = Field(default=None, max_length=256)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    # vLLM's
    structured_outputs: StructuredOutputs | None = None
    # Ours
    modalities: Annotated[tuple[Literal["text", "audio"], ...], max_items(MAX_MODALITIES)] | None = None
    audio: AudioOptions | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def note_ignored(self) -> None:
        """Name the fields that were sent and have no effect in a header of the response."""
        reasoning = self.reasoning or ReasoningOptions()
        effects = {
            "text.verbosity": self.text.verbosity not in (None, "medium"),
            "reasoning.summary": reasoning.summary not in (None, "auto"),
            "reasoning.generate_summary": reasoning.generate_summary not in (None, "auto"),
        }
        note_ignored(*(name for name, ignored in effects.items() if ignored))

    @model_validator(mode="after")
    def _audio_fits(self) -> Self:
        if self.structured_outputs is not None and (self.text.format.type != "text" or self.tools):
            raise field_error("structured_outputs", "cannot be combined with text.format and tools; leave one out")
        if self.audio is not None and "audio" not in (self.modalities or ()):
            raise field_error("audio", "is for speech; add audio to modalities")
        if self.stream and self.audio is not None and self.audio.format not in ("pcm16", "wav"):
            raise field_error("audio.format", "a stream carries pcm16; set that")
        return self

    @property
    def obfuscates(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

    def echo(self) -> Echo:
        choice = self.tool_choice or "auto"
        text = self.text.model_dump(by_alias=True, exclude_none=True)
        reasoning = self.reasoning.model_dump(exclude_none=True) if self.reasoning is not None else {}
        echo: Echo = {
            "tools": [
                {"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in self.tools or ()
            ],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "model": self.model or "",
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **reasoning},
            "safety_identifier": self.safety_identifier,
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": text,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
        if self.service_tier is not None:
            echo["service_tier"] = "default"
        return echo

    def items(self) -> list[Mapping[str, object]]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else list(self.input)

    def messages(self, history: Sequence[Mapping[str, object]] = ()) -> list[Mapping[str, object]]:
        """The conversation: the items of `history`, then the input."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        try:
            return [*first, *as_messages([*history, *self.items()])[0]]
        except InvalidRequestError as error:
            error.param = self._input_path(error.param or "", len(history))
            raise

    def path(self, path: str, history: Sequence[Mapping[str, object]] = ()) -> str:
        """A path into `messages(history)`, or one of the engines, as one into this request."""
        if path.startswith("structured"):
            if self.structured_outputs is not None:
                return STRUCTURED_PATHS.get(path, "structured_outputs")
            return "tools" if path == "structured.structural_tag" else "text.format"
        if path in (renamed := {"voice": "audio.voice", "prompt": "input", "thinking": "reasoning.effort"}):
            return renamed[path]
        match = re.fullmatch(r"messages(?:\[(\d+)\])?(.*)", path)
        if match is None:
            return path
        index = int(match[1] or 0) - bool(self.instructions)
        if index < 0:
            return "instructions"
        if match[1] is None:
            return "input"
        item = as_messages([*history, *self.items()])[1][index]
        return self._input_path(f"input[{item}]{match[2]}", len(history))

    def _input_path(self, path: str, before: int) -> str:
        """A path into items of which so many came before the input, as one into this request."""
        match = re.fullmatch(r"input\[(\d+)\](.*)", path)
        if match is None:
            return path
        if (index := int(match[1]) - before) < 0:
            return "previous_response_id"
        return "input" if isinstance(self.input, str) else f"input[{index}]{match[2]}"

    def exact_schemas(self) -> list[ExactSchema]:
        """Schemas beside tools that must be met; a schema without tools is checked by the engine."""
        return [] if self.toolbox is None else self.toolbox.exact_schemas(self.text.format.structured(), "text.format")

    def sampling(self) -> SamplingParams | None:
        structured, toolbox = self.text.format.structured(), self.toolbox
        if toolbox is not None:
            structured = toolbox.structured(structured)
        if self.structured_outputs is not None:
            structured = self.structured_outputs.structured()
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return self.sampling_params("max_output_tokens", structured=structured, logprobs=logprobs)
