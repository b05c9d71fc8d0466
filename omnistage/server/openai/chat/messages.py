"""The form of chat messages, for the OpenAPI document; `parse_messages` checks them, where their media are decoded."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from annotated_types import Gt, MinLen
from pydantic import AfterValidator, Field, SkipValidation
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from omnistage.core.validation import field_error
from omnistage.server.openai.base import max_items, too_many
from omnistage.server.openai.tools import MAX_TOOLS, ToolCall

MAX_MESSAGES = 16_384
_MAX_ITEMS = {"content": 1024, "output": 1024, "tool_calls": MAX_TOOLS}
"""Parts and calls of one message."""


class UrlObject(TypedDict):
    url: str
    detail: NotRequired[str]


MediaUrl = Annotated[str | UrlObject, Field(description="A `data:` URL; others as far as the service allows them.")]


class TextPart(TypedDict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class ImagePart(TypedDict):
    type: Literal["image_url", "input_image"]
    image_url: MediaUrl


class AudioData(TypedDict):
    data: Annotated[str, Field(description="Base64.")]
    format: NotRequired[str]


class AudioPart(TypedDict):
    type: Literal["input_audio"]
    input_audio: AudioData


class AudioUrlPart(TypedDict):
    type: Literal["audio_url"]
    audio_url: MediaUrl


class VideoPart(TypedDict):
    type: Literal["video_url"]
    video_url: MediaUrl
    fps: NotRequired[Annotated[float, Gt(0)]]
    min_frames: NotRequired[Annotated[int, Field(ge=1)]]
    max_frames: NotRequired[Annotated[int, Field(ge=2)]]


MessagePart = TextPart | ImagePart | AudioPart | AudioUrlPart | VideoPart


class Message(TypedDict):
    """One message of a conversation; only an assistant's may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[Annotated[str, MinLen(1)] | Annotated[list[MessagePart], MinLen(1)] | None]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[Annotated[str | None, Field(description="As the assistant's message had it.")]]


def _has_bounds(value: object) -> object:
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "must be an object")
    for field, limit in _MAX_ITEMS.items():
        items = value.get(field)
        if isinstance(items, list) and len(items) > limit:
            raise field_error(field, too_many(len(items), limit))
    return value


UncheckedMessage = Annotated[Message, SkipValidation, AfterValidator(_has_bounds)]
UncheckedMessages = Annotated[
    tuple[UncheckedMessage, ...], max_items(MAX_MESSAGES), Field(json_schema_extra={"minItems": 1})
]
