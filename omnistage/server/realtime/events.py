"""What clients send over the socket, one JSON object a message; and errors as they are told of them."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, ValidationError

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError
from omnistage.core.validation import short_repr
from omnistage.server.http.errors import body_of
from omnistage.server.openai.base import check_readable
from omnistage.server.realtime.base import Fields, first_problem

_MOST_ID = 512
LARGE_CHARS = 2**16
"""A message that is longer is read in a worker thread."""
MOST_CHARS = 2**20
"""Of an event that brings no media."""
MOST_MARKS = 100_000
"""Commas and brackets of a message. Media are a few long strings; a million small values would take seconds to read,
and a hundred times the message's memory."""


class ClientEvent(Fields):
    type: str
    event_id: str | None = Field(default=None, max_length=_MOST_ID)


class SessionUpdate(ClientEvent):
    session: dict[str, Any]


class AudioAppend(ClientEvent):
    audio: str


class AudioCommit(ClientEvent):
    pass


class AudioClear(ClientEvent):
    pass


class OutputClear(ClientEvent):
    pass


class ItemCreate(ClientEvent):
    item: dict[str, Any]
    previous_item_id: str | None = None


class ItemRetrieve(ClientEvent):
    item_id: str


class ItemDelete(ClientEvent):
    item_id: str


class ItemTruncate(ClientEvent):
    item_id: str
    content_index: int
    audio_end_ms: int = Field(ge=0)


class ResponseCreate(ClientEvent):
    response: dict[str, Any] | None = None


class ResponseCancel(ClientEvent):
    response_id: str | None = None


_EVENTS: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
    "output_audio_buffer.clear": OutputClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.delete": ItemDelete,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
_MAY_BE_LONG = frozenset({"input_audio_buffer.append", "conversation.item.create", "response.create"})


class GoneError(Exception):
    """There is no client to send to any more."""


class EventError(Exception):
    """An event that cannot be read, with the id that its client gave it."""

    def __init__(self, error: OmniError, event_id: str | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.event_id = event_id


def parse(text: str) -> ClientEvent:
    """The event in a message. Raises `EventError`."""
    marks = sum(map(text.count, ",[{"))
    if marks > MOST_MARKS:
        said = f"the message has {marks} commas and brackets, and may have {MOST_MARKS}; send less, or in pieces"
        raise EventError(LimitExceededError(said), None)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise EventError(InvalidRequestError("the message is not valid JSON; check it"), None) from None
    if not isinstance(values, dict):
        raise EventError(InvalidRequestError("the message is not a JSON object; send one event at a time"), None)
    given = values.get("event_id")
    event_id = given if isinstance(given, str) and len(given) <= _MOST_ID else None
    kind = values.get("type")
    known = _EVENTS.get(kind) if isinstance(kind, str) else None
    if known is None:
        names = ", ".join(_EVENTS)
        raise EventError(
            InvalidRequestError(f"there is no event {short_repr(kind)}; events: {names}", param="type"), event_id
        )
    if len(text) > MOST_CHARS and kind not in _MAY_BE_LONG:
        said = f"the message has {len(text)} characters, and {kind} may have {MOST_CHARS}; send less"
        raise EventError(LimitExceededError(said), event_id)
    try:
        check_readable(values)
        return known.model_validate(values)
    except ValidationError as error:
        raise EventError(first_problem(error, values), event_id) from None
    except InvalidRequestError as error:
        raise EventError(error, event_id) from None


def error_event(error: OmniError, event_id: str | None) -> dict[str, Any]:
    return {"type": "error", "error": {**body_of(error)["error"], "event_id": event_id}}
