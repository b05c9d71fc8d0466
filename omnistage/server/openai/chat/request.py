"""`POST /v1/chat/completions`: what clients send.

Every field of OpenAI's is honoured, or accepted where it changes nothing, or refused by name: a field that would
change the result is never ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.params import DiffusionParams, SamplingParams, StructuredOutput
from omnistage.core.validation import field_error
from omnistage.server.openai.base import (
    MAX_MODALITIES,
    IgnoredOptions,
    Metadata,
    WireModel,
    max_items,
    only,
)
from omnistage.server.openai.chat.messages import UncheckedMessages
from omnistage.server.openai.extensions import TemplateFields
from omnistage.server.openai.request_models import AudioOptions, SamplingFields
from omnistage.server.openai.tools import ExactSchema, JsonSchema, ToolFields

_Drawing = Annotated[DiffusionParams, max_items(len(DiffusionParams.model_fields))]
Modalities = Annotated[tuple[Literal["text", "audio", "image"], ...], max_items(MAX_MODALITIES)]
NO_VIDEOS = "videos are made by jobs; use /v1/videos"
_NOT_SUPPORTED = "parameter not supported; leave it out"
FORMAT_PATHS = {
    "structured.json_schema": "response_format.json_schema.schema",
    "structured": "response_format",
}
_ERROR_PATHS = {
    **FORMAT_PATHS,
    "structured.structural_tag": "tools",
    "voice": "audio.voice",
    "prompt": "messages",
    "thinking": "chat_template_kwargs.enable_thinking",
}
"""Fields as the engines name them, and as clients know them."""


class SchemaFormat(WireModel):
    name: str = "answer"
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: SchemaFormat | None = None

    def structured(self) -> StructuredOutput | None:
        if self.type == "json_object":
            return StructuredOutput(json_object=True)
        if self.type == "json_schema":
            schema = self.json_schema.schema_ if self.json_schema is not None else None
            return StructuredOutput(json_schema=schema if schema is not None else {})
        return None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise field_error("json_schema", "is missing; send the schema, or use type json_object")
        return self


class ChatRequest(SamplingFields, TemplateFields, ToolFields):
    """`messages` are checked where their media are decoded."""

    ignored: ClassVar[Mapping[str, object]] = {
        **SamplingFields.ignored,
        "verbosity": "medium",
        "prediction": None,
    }

    messages: UncheckedMessages
    modalities: Modalities | None = None
    audio: AudioOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    # OpenAI's, without effect on the result
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: IgnoredOptions | None = Field(default=None, description="Prefixes are always reused.")
    prediction: IgnoredOptions | None = Field(default=None, description="Could only change the speed.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    # OpenAI's, of which only the value that changes nothing is accepted
    store: Annotated[Literal[False] | None, only(False, why="responses are not stored; leave it out")] = None
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Without effect.")
    # OpenAI's, refused with a reason
    functions: Annotated[object, only(why="is the older form of tools; send tools")] = None
    function_call: Annotated[object, only(why="is the older form of tool_choice; send tool_choice")] = None
    moderation: Annotated[object, only(why="moderation is not supported; leave it out")] = None
    web_search_options: Annotated[object, only(why="web search is not supported; leave it out")] = None
    # vLLM's and ours
    truncate_prompt_tokens: Annotated[None, only(why="a chat is never cut; shorten it")] = None
    documents: Annotated[None, only(why=f"{_NOT_SUPPORTED}, and send them as messages")] = None
    chat_template: Annotated[None, only(why="is the model's own; leave it out")] = None
    echo: Annotated[Literal[False] | None, only(False, why=_NOT_SUPPORTED)] = None
    include_reasoning: Annotated[Literal[True] | None, only(True, why=_NOT_SUPPORTED)] = None
    use_audio_in_video: bool = False
    drawing: _Drawing | None = Field(default=None, description="For models that draw.")

    @field_validator("modalities", mode="before")
    @classmethod
    def _without_videos(cls, value: object) -> object:
        if isinstance(value, list | tuple) and "video" in value:
            raise ValueError(NO_VIDEOS)
        return value

    @property
    def speaks(self) -> bool:
        return "audio" in (self.modalities or ())

    def _structured_text(self) -> StructuredOutput | None:
        if self.constraint_field is not None:
            return self.constraint()
        return self.response_format.structured() if self.response_format is not None else None

    def exact_schemas(self) -> list[ExactSchema]:
        """Schemas beside tools that must be met; a schema without tools is checked by the engine."""
        if self.toolbox is None:
            return []
        return self.toolbox.exact_schemas(self._structured_text(), _ERROR_PATHS["structured.json_schema"])

    def sampling(self) -> SamplingParams | None:
        structured = self._structured_text()
        if self.toolbox is not None:
            structured = self.toolbox.structured(structured)
        return self.sampling_params(
            "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens",
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured=structured,
        )

    def check(self) -> None:
        """Raise `InvalidRequestError` where fields do not fit together."""
        toolbox = self.toolbox
        self.note_ignored()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("needs logprobs: true", param="top_logprobs")
        if self.audio is not None and not self.speaks:
            raise InvalidRequestError("is for speech; add audio to modalities", param="audio")
        # Without an explicit format a stream has the only one that it can have.
        explicit = self.audio is not None and "format" in self.audio.model_fields_set
        if self.stream and explicit and self.audio is not None and self.audio.format != "pcm16":
            raise InvalidRequestError("a stream carries pcm16; ask for that", param="audio.format")
        if (constraint := self.constraint_field) is not None:
            if self.response_format is not None and self.response_format.type != "text":
                raise InvalidRequestError("cannot be combined with response_format; send one of them", param=constraint)
            if toolbox is not None:
                raise InvalidRequestError("cannot be combined with tools; leave one out", param=constraint)
        if toolbox is None:
            return
        if self.speaks:
            raise InvalidRequestError("a call would be spoken; leave audio out of modalities", param="tools")
        if toolbox.forced and self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequestError("excludes a forced tool_choice; leave one out", param="response_format")

    def error_paths(self) -> Mapping[str, str]:
        """Fields as the engines name them, and where the client sent them."""
        if self.drawing is None and self.constraint_field is None:
            return _ERROR_PATHS
        drawing = self.drawing.model_fields_set if self.drawing is not None else set()
        # Some names are the request's own too: where both are sent, it is unknown which one is meant.
        paths = {**_ERROR_PATHS, **{name: f"drawing.{name}" for name in drawing - self.model_fields_set}}
        return {**paths, **self.constraint_paths()}
