"""What a conversation is made of: items as clients send and see them, and as the model is shown them."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import FailFast, Field, ValidationError

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.core.validation import is_utf8, short_repr
from omnistage.server.realtime.audio import RATES, base64_seconds, decode, from_base64
from omnistage.server.realtime.base import Fields, first_problem
from omnistage.server.realtime.config import Hearing

Role = Literal["system", "user", "assistant"]
MAX_PARTS = 64
_ITEM_BYTES = 1000
"""What an item takes besides its content."""
CHARS_A_SECOND = 20
"""Of speech whose whole length nobody knows, because it was broken off: hardly anybody speaks faster."""
_LONGEST_WORD = 20
"""In characters: where no space comes for longer, the script has none."""


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:24]}"


# ---------------------------------------------------------------------------------------------------- what items hold


@dataclass(slots=True)
class Text:
    text: str

    @property
    def size(self) -> int:
        return len(self.text)

    def shown(self, role: Role, _sounds: bool) -> dict[str, Any]:
        return {"type": "output_text" if role == "assistant" else "input_text", "text": self.text}

    def for_model(self) -> Mapping[str, Any] | None:
        return {"type": "text", "text": self.text} if self.text else None


@dataclass(slots=True, eq=False)
class Sound:
    """What a user said: `int16 [n]`."""

    samples: NDArray[np.int16]
    rate: int

    @property
    def size(self) -> int:
        return self.samples.nbytes

    def shown(self, _role: Role, sounds: bool) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "input_audio", "transcript": None}
        return {**made, "audio": base64.b64encode(self.samples.astype("<i2").tobytes()).decode()} if sounds else made

    def for_model(self) -> Mapping[str, Any] | None:
        return {"type": "audio", "audio": (self.samples, self.rate)}


@dataclass(slots=True)
class Picture:
    url: str

    @property
    def size(self) -> int:
        return len(self.url)

    def shown(self, _role: Role, _sounds: bool) -> dict[str, Any]:
        return {"type": "input_image", "image_url": self.url}

    def for_model(self) -> Mapping[str, Any] | None:
        return {"type": "image_url", "image_url": {"url": self.url}}


@dataclass(slots=True)
class Spoken:
    """What the model said aloud. The sound itself is not kept, only how long it is."""

    transcript: str = ""
    ms: int = 0
    whole: bool = False
    """Nothing of the sound is missing at its end."""

    @property
    def size(self) -> int:
        return len(self.transcript)

    def shown(self, _role: Role, _sounds: bool) -> dict[str, Any]:
        return {"type": "output_audio", "transcript": self.transcript}

    def for_model(self) -> Mapping[str, Any] | None:
        return {"type": "text", "text": self.transcript} if self.transcript else None

    def cut(self, ms: int) -> None:
        """Keep of the transcript what can have been heard in the first `ms` milliseconds."""
        if self.whole:
            share = ms / self.ms if self.ms else 0.0
            count = int(len(self.transcript) * share)
        else:
            # The text runs ahead of the sound, and how long all of it would have been is not known.
            count = ms * CHARS_A_SECOND // 1000
        if count < len(self.transcript):
            head, space, word = self.transcript[: count + 1].rpartition(" ")
            self.transcript = head if space and len(word) <= _LONGEST_WORD else self.transcript[:count]
        self.ms = min(ms, self.ms)


Part = Text | Sound | Picture | Spoken


ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class _Item:
    """What all items of a conversation have."""

    type: ClassVar[str]
    id: str = field(default_factory=lambda: new_id("item"), kw_only=True)
    status: ItemStatus = field(default="completed", kw_only=True)

    def shown(self, *, sounds: bool = False) -> dict[str, Any]:
        """As clients see it; sound goes along only where it is asked for."""
        head = {"id": self.id, "object": "realtime.item", "type": self.type, "status": self.status}
        return {**head, **self._content(sounds)}

    def _content(self, sounds: bool) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(slots=True)
class Message(_Item):
    type = "message"
    role: Role
    parts: list[Part]

    def _content(self, sounds: bool) -> dict[str, Any]:
        return {"role": self.role, "content": [part.shown(self.role, sounds) for part in self.parts]}

    def for_model(self) -> Mapping[str, Any] | None:
        """As a chat message; None where there is nothing to say."""
        parts = [made for part in self.parts if (made := part.for_model()) is not None]
        return {"role": self.role, "content": parts} if parts else None

    @property
    def size(self) -> int:
        """What it takes of the conversation's bound, in bytes or so."""
        return _ITEM_BYTES + sum(part.size for part in self.parts)


@dataclass(slots=True)
class Call(_Item):
    """A function that the model wants called."""

    type = "function_call"
    name: str
    call_id: str
    arguments: str = ""

    def _content(self, sounds: bool) -> dict[str, Any]:
        return {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}

    def for_model(self) -> Mapping[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    @property
    def role(self) -> str:
        return "assistant"

    @property
    def size(self) -> int:
        return _ITEM_BYTES + len(self.name) + len(self.arguments)


@dataclass(slots=True)
class CallResult(_Item):
    """What a function gave."""

    type = "function_call_output"
    call_id: str
    output: str

    def _content(self, sounds: bool) -> dict[str, Any]:
        return {"call_id": self.call_id, "output": self.output}

    def for_model(self) -> Mapping[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output or "null"}

    @property
    def role(self) -> str:
        return "tool"

    @property
    def size(self) -> int:
        return _ITEM_BYTES + len(self.output)


Item = Message | Call | CallResult


# ------------------------------------------------------------------------------------------------- what clients send


class ContentIn(Fields):
    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio", "text", "audio"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class ItemIn(Fields):
    type: str
    id: str | None = Field(default=None, min_length=1, max_length=64)
    object: str | None = None
    status: str | None = None


class MessageIn(ItemIn):
    role: Role
    content: Annotated[tuple[ContentIn, ...], FailFast()] = Field(min_length=1, max_length=MAX_PARTS)


class CallIn(ItemIn):
    name: str = Field(min_length=1, max_length=64)
    arguments: str
    call_id: str | None = Field(default=None, min_length=1, max_length=64)


class CallResultIn(ItemIn):
    call_id: str = Field(min_length=1, max_length=64)
    output: str


_ITEMS: dict[str, type[ItemIn]] = {
    "message": MessageIn,
    "function_call": CallIn,
    "function_call_output": CallResultIn,
}


def parse_item(values: Mapping[str, Any], hearing: Hearing, prefix: str) -> Item:
    """An item that a client sends. Raises what is wrong with it. It decodes sound: a worker thread's work."""
    kind = values.get("type")
    known = _ITEMS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise InvalidRequestError(f"must be one of {', '.join(_ITEMS)}, got {short_repr(kind)}", param=f"{prefix}.type")
    try:
        given = known.model_validate(dict(values))
    except ValidationError as error:
        raise first_problem(error, values, prefix) from None
    item = _item(given, hearing, prefix)
    item.id = given.id or item.id
    return item


def _item(given: ItemIn, hearing: Hearing, prefix: str) -> Item:
    if isinstance(given, CallIn):
        arguments = _encodable(given.arguments, f"{prefix}.arguments")
        return Call(_encodable(given.name, f"{prefix}.name"), given.call_id or new_id("call"), arguments)
    if isinstance(given, CallResultIn):
        return CallResult(given.call_id, _encodable(given.output, f"{prefix}.output"))
    if not isinstance(given, MessageIn):
        raise InvalidRequestError("is of no known type", param=prefix)
    parts = [_part(part, given.role, hearing, f"{prefix}.content[{i}]") for i, part in enumerate(given.content)]
    return Message(given.role, parts)


def _part(given: ContentIn, role: Role, hearing: Hearing, path: str) -> Part:
    kind = given.type
    if role != "user" and kind in ("input_audio", "input_image"):
        raise InvalidRequestError(f"is for user messages; this one is of the {role}", param=f"{path}.type")
    if kind in ("output_audio", "audio"):
        return Text(_text(given.transcript, f"{path}.transcript"))
    if kind == "input_audio":
        return _sound(given.audio, hearing, f"{path}.audio")
    if kind == "input_image":
        return Picture(_text(given.image_url, f"{path}.image_url"))
    return Text(_text(given.text, f"{path}.text"))


def _sound(audio: str | None, hearing: Hearing, path: str) -> Sound:
    if audio is None:
        raise InvalidRequestError("is missing; give base64", param=path)
    if base64_seconds(audio, hearing.format) > hearing.most:
        raise LimitExceededError(f"is longer than the {hearing.most:g} s that one sound may have; split it", param=path)
    samples, rate = decode(from_base64(audio, path), hearing.format, path), RATES[hearing.format]
    if not len(samples) or len(samples) / rate < hearing.least:
        raise MediaError(
            f"has {len(samples)} samples, and the model hears {hearing.least * 1000:g} ms or more; send a longer sound",
            param=path,
        )
    return Sound(samples, rate)


def _text(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequestError("is missing or empty; give it", param=path)
    return _encodable(value, path)


def _encodable(value: str, path: str) -> str:
    if not is_utf8(value):
        raise InvalidRequestError("has half of a surrogate pair, which is no text; remove it", param=path)
    return value
