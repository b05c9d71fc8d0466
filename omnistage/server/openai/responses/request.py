"""`POST /v1/responses`: what clients send.

As in a chat, every field of OpenAI's is honoured, or accepted where it changes nothing, or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NotRequired, Self

from pydantic import ConfigDict, Field, JsonValue, field_validator, model_validator
from typing_extensions import TypedDict

from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.core.validation import field_error
from omnistage.server.http.openapi import bounds_of
from omnistage.server.openai.base import MAX_MODALITIES, IgnoredOptions, Metadata, WireModel, max_items, only
from omnistage.server.openai.chat.messages import MAX_MESSAGES, UncheckedMessages
from omnistage.server.openai.request_models import AudioOptions, Finite, LoraField, SamplesText
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
            raise field_error("schema", "goes with type json_schema; send both or neither")
        return self


class TextOptions(WireModel):
    format: TextFormat = TextFormat()
    verbosity: Annotated[Literal["medium"] | None, only("medium", why=_NOT_SUPPORTED)] = None


class ReasoningOptions(WireModel):
    """Only values that change nothing are accepted, and `none`: no thinking."""

    effort: Annotated[Literal["none", "medium"] | None, only("none", "medium", why=_NOT_SUPPORTED)] = None
    summary: Annotated[Literal["auto"] | None, only("auto", why=_NOT_SUPPORTED)] = None
    generate_summary: Annotated[Literal["auto"] | None, only("auto", why=_NOT_SUPPORTED)] = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[Literal["standard"] | None, only("standard", why=_NOT_SUPPORTED)] = None


class ImageOptions(WireModel):
    context_compression: Literal["auto", "disabled"] | None = Field(
        default=None, description="Pictures reach the model as they are."
    )


class ResponseStreamOptions(WireModel):
    include_obfuscation: bool | None = None


_MAX_INCLUDE = 32
_LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
"""Parts of items that no response has here; so they change nothing."""


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
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    store: Literal[False]
    temperature: float | None
    text: dict[str, JsonValue]
    top_logprobs: Literal[0]
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


_NO_LOGPROBS = "logprobs are returned by /v1/chat/completions; leave it out"
_NOT_KEPT = "are not stored here; send the conversation so far in input"


class ResponsesRequest(SamplesText, ResponseToolFields):
    """`POST /v1/responses`. The items of `input` are checked where their media are decoded."""

    model_config = ConfigDict(json_schema_extra=bounds_of(SamplingParams, max_output_tokens="max_tokens"))
    derived: ClassVar[frozenset[str]] = frozenset({"max_tokens", "structured"})
    not_exposed: ClassVar[frozenset[str]] = SamplesText.not_exposed | {
        "n",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "logprobs",
    }

    model: str
    input: Annotated[str | UncheckedMessages, max_items(MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    lora: LoraField = None
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions = TextOptions()
    # OpenAI's, without effect on the result
    metadata: Metadata | None = None
    store: bool | None = Field(default=None, description="Without effect: nothing is stored.")
    user: str | None = None
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
    top_logprobs: Annotated[Literal[0] | None, only(0, why=_NO_LOGPROBS)] = None
    truncation: Annotated[
        Literal["disabled"] | None, only("disabled", why="a conversation is never truncated; leave it out")
    ] = None
    reasoning: ReasoningOptions | None = None
    image: ImageOptions | None = None
    # OpenAI's, refused with a reason
    previous_response_id: Annotated[object, only([], {}, why=f"responses {_NOT_KEPT}")] = None
    conversation: Annotated[object, only([], {}, why=f"conversations {_NOT_KEPT}")] = None
    prompt: Annotated[object, only([], {}, why="prompts are not stored here; send it in instructions or input")] = None
    moderation: Annotated[object, only([], {}, why="moderation is not supported; leave it out")] = None
    access_programs: Annotated[object, only([], {}, why="access programs are not supported; leave it out")] = None
    context_management: Annotated[object, only([], {}, why="a conversation is never truncated; leave it out")] = None
    # Ours
    modalities: Annotated[tuple[Literal["text", "audio"], ...], max_items(MAX_MODALITIES)] | None = None
    audio: AudioOptions | None = None
    seed: int | None = None
    priority: int = 0
    timeout: Finite | None = None

    @field_validator("include", mode="before")
    @classmethod
    def _without_logprobs(cls, value: object) -> object:
        if isinstance(value, list | tuple) and _LOGPROBS in value:
            raise ValueError(_NO_LOGPROBS)
        return value

    @model_validator(mode="after")
    def _audio_fits(self) -> Self:
        if self.audio is not None and "audio" not in (self.modalities or ()):
            raise field_error("audio", "is for speech; add audio to modalities")
        if self.stream and self.audio is not None and self.audio.format not in ("pcm16", "wav"):
            raise field_error("audio.format", "a stream carries pcm16; ask for that")
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
            "model": self.model,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **reasoning},
            "safety_identifier": self.safety_identifier,
            "store": False,
            "temperature": self.temperature,
            "text": text,
            "top_logprobs": 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
        if self.service_tier is not None:
            echo["service_tier"] = "default"
        return echo

    def messages(self) -> list[Mapping[str, object]]:
        items: list[Mapping[str, object]] = (
            [{"role": "user", "content": self.input}] if isinstance(self.input, str) else list(self.input)
        )
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*first, *as_messages(items)[0]]

    def path(self, path: str) -> str:
        """A path into `messages()`, or one of the engines, as one into this request."""
        if path.startswith("structured"):
            return "tools" if path == "structured.structural_tag" else "text.format"
        if path in (renamed := {"voice": "audio.voice", "prompt": "input", "thinking": "reasoning.effort"}):
            return renamed[path]
        match = re.fullmatch(r"messages(?:\[(\d+)\])?(.*)", path)
        if match is None:
            return path
        index = int(match[1] or 0) - bool(self.instructions)
        if index < 0:
            return "instructions"
        if isinstance(self.input, str) or match[1] is None:
            return "input"
        return f"input[{as_messages(self.input)[1][index]}]{match[2]}"

    def exact_schemas(self) -> list[ExactSchema]:
        """Schemas beside tools that must be met; a schema without tools is checked by the engine."""
        return [] if self.toolbox is None else self.toolbox.exact_schemas(self.text.format.structured(), "text.format")

    def sampling(self) -> SamplingParams | None:
        structured, toolbox = self.text.format.structured(), self.toolbox
        if toolbox is not None:
            structured = toolbox.structured(structured)
        return self.sampling_params("max_output_tokens", structured=structured)
