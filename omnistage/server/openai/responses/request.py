"""`POST /v1/responses`: what clients send.

As in a chat, every field of OpenAI's is honoured, or accepted where it changes nothing in the answer, or refused by
name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.core.validation import field_error
from omnistage.server.openai.base import WireModel
from omnistage.server.openai.request_models import AudioOptions, Finite
from omnistage.server.openai.responses.tools import ResponseToolFields, laid_out

_NO_DIAL = "this service has no such dial; leave it out"
_REFUSED = {
    "previous_response_id": "answers are not kept here; send the conversation so far in input",
    "conversation": "conversations are not kept here; send the conversation so far in input",
    "prompt": "there are no stored prompts here; send the text in instructions or input",
    "moderation": "nothing is moderated here; leave it out",
    "access_programs": "there are no access programs here; leave it out",
    "context_management": "a conversation is never shortened here; leave it out",
}
_HARMLESS: dict[str, tuple[tuple[object, ...], str]] = {
    "background": ((False,), "an answer is given while the client waits; leave it out"),
    "top_logprobs": ((0,), "logprobs are given by /v1/chat/completions; leave it out"),
    "truncation": (("disabled",), "a conversation is never shortened here; leave it out"),
}
"""Fields of which only some values change nothing, and why the others are refused."""


class TextFormat(WireModel):
    """As `response_format` of a chat, with the schema's fields beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def structured(self) -> StructuredOutput | None:
        if self.type == "json_object":
            return StructuredOutput(json_object=True)
        return StructuredOutput(json_schema=self.schema_) if self.schema_ is not None else None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise field_error("schema", "goes with type json_schema; give both or neither")
        return self


class TextOptions(WireModel):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = Field(default=None, description="The model is as brief as it is.")

    @field_validator("verbosity", mode="before")
    @classmethod
    def _no_dial(cls, value: Any) -> Any:
        if value not in (None, "medium"):
            raise ValueError(_NO_DIAL)
        return value


class ReasoningOptions(WireModel):
    """Taken where the model reasons as it does anyway, and where it is about reasoning items: there are none."""

    effort: Literal["medium"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None

    @field_validator("effort", "summary", "generate_summary", "mode", mode="before")
    @classmethod
    def _no_dial(cls, value: Any, info: Any) -> Any:
        harmless = {"effort": "medium", "mode": "standard"}.get(info.field_name, "auto")
        if value not in (None, harmless):
            raise ValueError(_NO_DIAL)
        return value


class PictureOptions(WireModel):
    context_compression: Literal["auto", "disabled"] | None = Field(
        default=None, description="Pictures reach the model as they are."
    )


class ResponseStreamOptions(WireModel):
    include_obfuscation: bool | None = None


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
"""Parts of items that no answer has here; so they change nothing."""


class ResponsesRequest(ResponseToolFields):
    """`POST /v1/responses`. The items of `input` are checked where their media are decoded."""

    model: str
    input: str | tuple[dict[str, Any], ...]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions = TextOptions()
    # OpenAI's, without effect on the answer
    metadata: dict[str, str] | None = None
    store: bool | None = Field(default=None, description="Without effect: nothing is stored.")
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="Prefixes are reused by themselves.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    max_tool_calls: int | None = Field(default=None, description="Of tools that a service runs; there are none here.")
    include: tuple[Includable, ...] | None = None
    # OpenAI's, of which only what changes nothing is taken
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    image: PictureOptions | None = None
    # OpenAI's, refused with a reason
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    access_programs: Any = None
    context_management: Any = None
    # Ours
    modalities: tuple[Literal["text", "audio"], ...] | None = None
    audio: AudioOptions | None = None
    seed: int | None = None
    priority: int = 0
    timeout: Finite | None = None

    @field_validator(*_REFUSED, mode="before")
    @classmethod
    def _refuse(cls, value: Any, info: Any) -> Any:
        if value not in (None, [], {}):
            raise ValueError(_REFUSED[info.field_name])
        return value

    @field_validator(*_HARMLESS, mode="before")
    @classmethod
    def _only_without_effect(cls, value: Any, info: Any) -> Any:
        harmless, why = _HARMLESS[info.field_name]
        if value is not None and value not in harmless:
            raise ValueError(why)
        return value

    @field_validator("include", mode="before")
    @classmethod
    def _without_logprobs(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and _LOGPROBS in value:
            raise ValueError("logprobs are given by /v1/chat/completions; leave them out")
        return value

    @model_validator(mode="after")
    def _audio_fits(self) -> Self:
        if self.audio is not None and "audio" not in (self.modalities or ()):
            raise field_error("audio", "is for spoken answers; add audio to modalities")
        if self.stream and self.audio is not None and self.audio.format not in ("pcm16", "wav"):
            raise field_error("audio.format", "a stream carries pcm16; ask for that")
        return self

    @property
    def obfuscates(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

    def told(self) -> dict[str, Any]:
        """What was asked for, as a response repeats it."""
        form = self.text.format.model_dump(by_alias=True, exclude_none=True)
        brief = {"verbosity": self.text.verbosity} if self.text.verbosity is not None else {}
        tier = {"service_tier": "default"} if self.service_tier is not None else {}
        reasoning = {"effort": None, "summary": None}
        if self.reasoning is not None:
            reasoning |= self.reasoning.model_dump(exclude_none=True)
        return {
            **super().told(),
            **tier,
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "model": self.model,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": reasoning,
            "safety_identifier": self.safety_identifier,
            "store": False,
            "temperature": self.temperature,
            "text": {"format": form, **brief},
            "top_logprobs": 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def messages(self) -> list[Mapping[str, Any]]:
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else list(self.input)
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*first, *laid_out(given)[0]]

    def path(self, path: str) -> str:
        """A path into `messages()`, or one that the engines gave, as one into this request."""
        if path.startswith("structured"):
            return "tools" if path == "structured.structural_tag" else "text.format"
        if path == "voice":
            return "audio.voice"
        if path == "prompt":
            return "input"
        found = re.fullmatch(r"messages(?:\[(\d+)\])?(.*)", path)
        if found is None:
            return path
        index = int(found[1] or 0) - bool(self.instructions)
        if index < 0:
            return "instructions"
        if isinstance(self.input, str) or found[1] is None:
            return "input"
        return f"input[{laid_out(self.input)[1][index]}]{found[2]}"

    def sampling(self) -> SamplingParams | None:
        structured, toolbox = self.text.format.structured(), self.toolbox()
        values: dict[str, object] = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": None if self.seed is None else self.seed % 2**63,  # OpenAI's may be negative
            "structured": toolbox.structured(structured) if toolbox is not None else structured,
        }
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return SamplingParams.parse(given) if given else None
        except InvalidRequestError as error:
            if error.param == "max_tokens":
                error.param = "max_output_tokens"
            raise
