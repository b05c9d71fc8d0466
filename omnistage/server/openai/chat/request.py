"""`POST /v1/chat/completions`: what clients send.

Every field of OpenAI's is honoured, or accepted where it changes nothing in the answer, or refused by name: what would
change the answer is never left aside in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.params import DiffusionParams, SamplingParams, StructuredOutput
from omnistage.core.validation import field_error
from omnistage.server.openai.base import WireModel
from omnistage.server.openai.request_models import AudioOptions, SamplingFields
from omnistage.server.openai.tools import ToolFields

Modalities = tuple[Literal["text", "audio", "image"], ...]
NO_VIDEOS = "videos are jobs; use /v1/videos"

_REFUSED = {
    "functions": "is the older form of tools; send tools",
    "function_call": "is the older form of tool_choice; send tool_choice",
    "moderation": "nothing is moderated here; leave it out",
    "web_search_options": "there is no web search here; leave it out",
}
_ERROR_PATHS = {
    "structured.structural_tag": "tools",
    "structured.json_schema": "response_format.json_schema.schema",
    "structured": "response_format",
    "voice": "audio.voice",
    "prompt": "messages",
}
"""Fields as the engines name them, and as clients know them."""


class JsonSchema(WireModel):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

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
            raise field_error("json_schema", "is missing; give the schema, or use type json_object")
        return self


class ChatRequest(SamplingFields, ToolFields):
    """`messages` are checked where their media are decoded."""

    messages: tuple[dict[str, Any], ...]
    modalities: Modalities | None = None
    audio: AudioOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    # OpenAI's, without effect on the answer
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="Prefixes are reused by themselves.")
    prediction: dict[str, Any] | None = Field(default=None, description="Would only speed the answer up.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    # OpenAI's, of which only the value that changes nothing is taken
    store: Literal[False] | None = Field(default=None, description="Answers are not kept.")
    reasoning_effort: Literal["medium"] | None = Field(default=None, description="The model reasons as it does.")
    verbosity: Literal["medium"] | None = Field(default=None, description="The model is as brief as it is.")
    # OpenAI's, refused with a reason
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    web_search_options: Any = None
    # Ours
    use_audio_in_video: bool = False
    drawing: DiffusionParams | None = Field(default=None, description="For models that draw.")

    @field_validator(*_REFUSED, mode="before")
    @classmethod
    def _refuse(cls, value: Any, info: Any) -> Any:
        if value is not None:
            raise ValueError(_REFUSED[info.field_name])
        return value

    @field_validator("modalities", mode="before")
    @classmethod
    def _without_videos(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and "video" in value:
            raise ValueError(NO_VIDEOS)
        return value

    @field_validator("reasoning_effort", "verbosity", "store", mode="before")
    @classmethod
    def _only_without_effect(cls, value: Any, info: Any) -> Any:
        harmless = False if info.field_name == "store" else "medium"
        if value is not None and value != harmless:
            what = "answers are not kept here" if info.field_name == "store" else "this service has no such dial"
            raise ValueError(f"{what}; leave it out")
        return value

    @property
    def speaks(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def voice(self) -> str | None:
        return self.audio.voice_name if self.audio is not None else None

    def sampling(self) -> SamplingParams | None:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        name = "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"
        structured = self.response_format.structured() if self.response_format is not None else None
        toolbox = self.toolbox()
        if toolbox is not None:
            structured = toolbox.structured(structured)
        try:
            return self._sampling(max_tokens=getattr(self, name), logprobs=logprobs, structured=structured)
        except InvalidRequestError as error:
            if error.param == "max_tokens":
                error.param = name
            raise

    def check(self) -> None:
        """Raise `InvalidRequestError` where fields do not go together."""
        self.check_tools()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("needs logprobs: true", param="top_logprobs")
        if self.audio is not None and not self.speaks:
            raise InvalidRequestError("is for spoken answers; add audio to modalities", param="audio")
        # Where none is named a stream has the only one that it can have.
        if (
            self.stream
            and self.audio is not None
            and self.audio.model_fields_set & {"format"}
            and self.audio.format != "pcm16"
        ):
            raise InvalidRequestError("a stream carries pcm16; ask for that", param="audio.format")
        toolbox = self.toolbox()
        if toolbox is None:
            return
        if self.speaks:
            raise InvalidRequestError("a call would be spoken aloud; leave audio out of modalities", param="tools")
        if toolbox.forced and self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequestError("excludes a forced tool_choice; leave one out", param="response_format")

    def error_paths(self) -> Mapping[str, str]:
        """Names of fields as the engines know them, and where the client sent them."""
        drawn = self.drawing.model_fields_set if self.drawing is not None else set()
        # Some names are the request's own too: where both are sent, nobody knows which one is meant.
        return {**_ERROR_PATHS, **{name: f"drawing.{name}" for name in drawn - self.model_fields_set}}
