"""Items of a conversation: as clients send them, as clients see them, and as messages for the model."""

from __future__ import annotations

import base64
import uuid
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import FailFast, Field

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.core.validation import short_repr
from omnistage.server.openai.base import WireModel
from omnistage.server.realtime.audio import RATES, base64_seconds, decode, from_base64
from omnistage.server.realtime.base import JsonObject, validate
from omnistage.server.realtime.config import AudioInputLimits

Role = Literal["system", "user", "assistant"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
MAX_PARTS = 64
_ITEM_BYTES = 1000
"""Memory of an item besides its content."""
CHARS_PER_SECOND = 20
"""Upper bound of the speaking rate, for speech that was cut off and whose full length is unknown."""
_MAX_WORD_CHARS = 20
"""Where no space comes for longer, the script has none."""


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:24]}"


# ---------------------------------------------------------------------------------------------- parts of messages


@dataclass(slots=True)
class Text:
    text: str

    @property
    def size(self) -> int:
        return len(self.text)

    def to_json(self, role: Role, _with_audio: bool) -> JsonObject:
        return {"type": "output_text" if role == "assistant" else "input_text", "text": self.text}

    def to_prompt(self) -> JsonObject | None:
        return {"type": "text", "text": self.text} if self.text else None


@dataclass(slots=True, eq=False)
class Audio:
    """Speech of the user: `int16 [n]`."""

    samples: NDArray[np.int16]
    rate: int
    transcript: str | None = None
    """What was said, once it has been transcribed."""

    @property
    def size(self) -> int:
        return self.samples.nbytes

    def to_json(self, _role: Role, with_audio: bool) -> JsonObject:
        data: JsonObject = {"type": "input_audio", "transcript": self.transcript}
        if with_audio:
            data["audio"] = base64.b64encode(self.samples.astype("<i2").tobytes()).decode()
        return data

    def to_prompt(self) -> JsonObject | None:
        return {"type": "audio", "audio": (self.samples, self.rate)}


@dataclass(slots=True)
class Image:
    url: str

    @property
    def size(self) -> int:
        return len(self.url)

    def to_json(self, _role: Role, _with_audio: bool) -> JsonObject:
        return {"type": "input_image", "image_url": self.url}

    def to_prompt(self) -> JsonObject | None:
        return {"type": "image_url", "image_url": {"url": self.url}}


@dataclass(slots=True)
class Speech:
    """Speech of the model: its transcript and duration. The audio itself is not kept."""

    transcript: str = ""
    ms: int = 0
    complete: bool = False
    """Whether all of the audio was generated."""

    @property
    def size(self) -> int:
        return len(self.transcript)

    def to_json(self, _role: Role, _with_audio: bool) -> JsonObject:
        return {"type": "output_audio", "transcript": self.transcript}

    def to_prompt(self) -> JsonObject | None:
        return {"type": "text", "text": self.transcript} if self.transcript else None

    def truncate(self, ms: int) -> None:
        """Keep the part of the transcript that can have been heard in the first `ms` milliseconds."""
        if self.complete:
            count = int(len(self.transcript) * (ms / self.ms if self.ms else 0.0))
        else:
            # The text runs ahead of the audio, whose full duration is unknown.
            count = ms * CHARS_PER_SECOND // 1000
        if count < len(self.transcript):
            head, space, word = self.transcript[: count + 1].rpartition(" ")
            self.transcript = head if space and len(word) <= _MAX_WORD_CHARS else self.transcript[:count]
        self.ms = min(ms, self.ms)


Part = Text | Audio | Image | Speech


# --------------------------------------------------------------------------------------------------------- items


@dataclass(slots=True)
class _Item:
    type: ClassVar[str]
    id: str = field(default_factory=lambda: new_id("item"), kw_only=True)
    status: ItemStatus = field(default="completed", kw_only=True)

    def to_json(self, *, with_audio: bool = False) -> JsonObject:
        """The item as clients see it."""
        head = {"id": self.id, "object": "realtime.item", "type": self.type, "status": self.status}
        return {**head, **self._content(with_audio)}

    def _content(self, with_audio: bool) -> JsonObject:
        raise NotImplementedError


@dataclass(slots=True)
class Message(_Item):
    type = "message"
    role: Role
    parts: list[Part]

    def _content(self, with_audio: bool) -> JsonObject:
        return {"role": self.role, "content": [part.to_json(self.role, with_audio) for part in self.parts]}

    def to_prompt(self) -> JsonObject | None:
        """A chat message; None for one without content."""
        content = [data for part in self.parts if (data := part.to_prompt()) is not None]
        return {"role": self.role, "content": content} if content else None

    @property
    def size(self) -> int:
        """Approximate bytes, for the conversation's limit."""
        return _ITEM_BYTES + sum(part.size for part in self.parts)


@dataclass(slots=True)
class FunctionCall(_Item):
    """A function that the model wants called."""

    type = "function_call"
    role: ClassVar[str] = "assistant"
    name: str
    call_id: str
    arguments: str = ""

    def _content(self, with_audio: bool) -> JsonObject:
        return {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}

    def to_prompt(self) -> JsonObject | None:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": self.role, "content": None, "tool_calls": [call]}

    @property
    def size(self) -> int:
        return _ITEM_BYTES + len(self.name) + len(self.arguments)


@dataclass(slots=True)
class FunctionOutput(_Item):
    type = "function_call_output"
    role: ClassVar[str] = "tool"
    call_id: str
    output: str

    def _content(self, with_audio: bool) -> JsonObject:
        return {"call_id": self.call_id, "output": self.output}

    def to_prompt(self) -> JsonObject | None:
        return {"role": self.role, "tool_call_id": self.call_id, "content": self.output or "null"}

    @property
    def size(self) -> int:
        return _ITEM_BYTES + len(self.output)


Item = Message | FunctionCall | FunctionOutput


# ---------------------------------------------------------------------------------------------- what clients send


class ContentIn(WireModel):
    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio", "text", "audio"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None

    def part(self, role: Role, limits: AudioInputLimits, path: str) -> Part:
        if role != "user" and self.type in ("input_audio", "input_image"):
            raise InvalidRequestError(f"is for user messages, and this one has the role {role}", param=f"{path}.type")
        if self.type == "input_audio":
            return _audio(self.audio, limits, f"{path}.audio")
        source = {"output_audio": "transcript", "audio": "transcript", "input_image": "image_url"}.get(
            self.type, "text"
        )
        value: str | None = getattr(self, source)
        if not value:
            raise InvalidRequestError("is missing or empty; send it", param=f"{path}.{source}")
        return Image(value) if self.type == "input_image" else Text(value)


class ItemIn(WireModel):
    type: str
    id: str | None = Field(default=None, min_length=1, max_length=64)
    object: str | None = None
    status: str | None = None

    def item(self, limits: AudioInputLimits, path: str) -> Item:
        raise NotImplementedError


class MessageIn(ItemIn):
    role: Role
    content: Annotated[tuple[ContentIn, ...], FailFast()] = Field(min_length=1, max_length=MAX_PARTS)

    def item(self, limits: AudioInputLimits, path: str) -> Item:
        parts = [part.part(self.role, limits, f"{path}.content[{i}]") for i, part in enumerate(self.content)]
        return Message(self.role, parts)


class FunctionCallIn(ItemIn):
    name: str = Field(min_length=1, max_length=64)
    arguments: str
    call_id: str | None = Field(default=None, min_length=1, max_length=64)

    def item(self, limits: AudioInputLimits, path: str) -> Item:
        return FunctionCall(self.name, self.call_id or new_id("call"), self.arguments)


class FunctionOutputIn(ItemIn):
    call_id: str = Field(min_length=1, max_length=64)
    output: str

    def item(self, limits: AudioInputLimits, path: str) -> Item:
        return FunctionOutput(self.call_id, self.output)


_ITEMS: dict[str, type[ItemIn]] = {
    "message": MessageIn,
    "function_call": FunctionCallIn,
    "function_call_output": FunctionOutputIn,
}


def parse_item(values: JsonObject, limits: AudioInputLimits, path: str) -> Item:
    """An item that a client sends. Raises `InvalidRequestError`. Decodes audio: run it in a worker thread."""
    kind = values.get("type")
    model = _ITEMS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidRequestError(f"must be one of {', '.join(_ITEMS)}, got {short_repr(kind)}", param=f"{path}.type")
    body = validate(model, values, path)
    item = body.item(limits, path)
    item.id = body.id or item.id
    return item


def _audio(audio: str | None, limits: AudioInputLimits, path: str) -> Audio:
    if audio is None:
        raise InvalidRequestError("is missing; send base64", param=path)
    if base64_seconds(audio, limits.format) > limits.max_seconds:
        raise LimitExceededError(f"is longer than the limit of {limits.max_seconds:g} s; split it", param=path)
    samples, rate = decode(from_base64(audio, path), limits.format, path), RATES[limits.format]
    if not len(samples) or len(samples) / rate < limits.min_seconds:
        raise MediaError(
            f"has {len(samples)} samples, and the model needs {limits.min_seconds * 1000:g} ms; send more audio",
            param=path,
        )
    return Audio(samples, rate)
