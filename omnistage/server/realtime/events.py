"""Client events, one JSON object a message, and the error event."""

from __future__ import annotations

import json
from functools import partial

from pydantic import Field

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError
from omnistage.core.validation import short_repr
from omnistage.server.http.errors import body_of
from omnistage.server.http.json_body import check_readable, read_int, run_json
from omnistage.server.openai.base import WireModel
from omnistage.server.realtime.base import JsonObject, validate

_MAX_ID_CHARS = 512
LARGE_CHARS, _LARGE_VALUES = 2**16, 2**12
"""Larger messages are parsed in a worker thread."""
MAX_CHARS = 2**20
"""Of an event without media."""
MAX_VALUES = 100_000
"""Commas and brackets of a message. Media are a few long strings; a million small values would take seconds to parse,
and a hundred times the message's memory."""


class ClientEvent(WireModel):
    type: str
    event_id: str | None = Field(default=None, max_length=_MAX_ID_CHARS)


class SessionUpdate(ClientEvent):
    session: JsonObject


class AudioAppend(ClientEvent):
    audio: str


class ItemCreate(ClientEvent):
    item: JsonObject
    previous_item_id: str | None = None


class ItemEvent(ClientEvent):
    item_id: str


class ItemTruncate(ItemEvent):
    content_index: int
    audio_end_ms: int = Field(ge=0)


class ResponseCreate(ClientEvent):
    response: JsonObject | None = None


class ResponseCancel(ClientEvent):
    response_id: str | None = None


_EVENTS: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": ClientEvent,
    "input_audio_buffer.clear": ClientEvent,
    "output_audio_buffer.clear": ClientEvent,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemEvent,
    "conversation.item.delete": ItemEvent,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
_MEDIA_EVENTS = frozenset({"input_audio_buffer.append", "conversation.item.create", "response.create"})


class ClientGoneError(Exception):
    """The connection is closed, or the client does not read."""


class EventError(Exception):
    """An event that is refused, with the id that its client gave it."""

    def __init__(self, error: OmniError, event_id: str | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.event_id = event_id


async def read(text: str, owner: str | None) -> ClientEvent:
    """The event in a message of this owner. Raises `EventError`."""
    small = len(text) <= LARGE_CHARS and _separators(text) <= _LARGE_VALUES
    return await run_json(partial(parse, text), small=small, owner=owner)


async def read_object(text: str, owner: str | None) -> JsonObject:
    """The JSON object in a message of this owner, whatever event it is."""

    def load() -> JsonObject:
        values = _load(text)
        check_readable(values)
        return values

    small = len(text) <= LARGE_CHARS and _separators(text) <= _LARGE_VALUES
    return await run_json(load, small=small, owner=owner)


def parse(text: str) -> ClientEvent:
    """What `read` gives, in this thread."""
    event_id = None
    try:
        values = _load(text)
        sent_id = values.get("event_id")
        event_id = sent_id if isinstance(sent_id, str) and len(sent_id) <= _MAX_ID_CHARS else None
        return _event(values, len(text))
    except InvalidRequestError as error:
        raise EventError(error, event_id) from None


def _load(text: str) -> JsonObject:
    count = _separators(text)
    if count > MAX_VALUES:
        raise LimitExceededError(
            f"the message has {count} commas and brackets, and may have {MAX_VALUES}; send less, or in several messages"
        )
    try:
        values = json.loads(text, parse_int=read_int)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the message is not valid JSON; check it") from None
    if not isinstance(values, dict):
        raise InvalidRequestError("the message is not a JSON object; send one event per message")
    return values


def _separators(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _event(values: JsonObject, chars: int) -> ClientEvent:
    kind = values.get("type")
    model = _EVENTS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidRequestError(f"there is no event {short_repr(kind)}; events: {', '.join(_EVENTS)}", param="type")
    if chars > MAX_CHARS and kind not in _MEDIA_EVENTS:
        raise LimitExceededError(f"the message has {chars} characters, and {kind} may have {MAX_CHARS}; send less")
    check_readable(values)
    return validate(model, values)


def error_event(error: OmniError, event_id: str | None) -> JsonObject:
    return {"type": "error", "error": {**body_of(error)["error"], "event_id": event_id}}
