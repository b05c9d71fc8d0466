"""One response as it is made: OpenAI's events in their order, and the items that it leaves in the conversation."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import OmniError
from omnistage.core.types import Modality
from omnistage.pipeline.outputs import Usage
from omnistage.server.http.errors import body_of
from omnistage.server.openai.tools import CallReader
from omnistage.server.realtime.audio import RATES, RateChanger, encode
from omnistage.server.realtime.config import SessionConfig
from omnistage.server.realtime.conversation import Conversation
from omnistage.server.realtime.items import Call, Item, Message, Spoken, Text, new_id

Event = dict[str, Any]
Status = Literal["completed", "cancelled", "incomplete", "failed"]
Reason = Literal["client_cancelled", "turn_detected", "max_output_tokens", "content_filter"]
CancelReason = Literal["client_cancelled", "turn_detected"]
_DELTA_SECONDS = 1
"""Sound in one event: a reader that is slow gets many of these, and an interruption comes between two."""


class Answer:
    """Turns what the engine gives into events. It sends nothing itself.

    One item is open at a time; the next one, or the end, closes it.
    """

    def __init__(
        self,
        own: str,
        config: SessionConfig,
        conversation: Conversation | None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """`own` is the part that its ids share; without a conversation the items are kept nowhere."""
        self.id = f"resp_{own}"
        self.config = config
        self.conversation = conversation
        self._metadata = metadata
        self._items: list[Item] = []
        self._open: Item | None = None
        toolbox = config.toolbox()
        self._calls = CallReader(toolbox) if toolbox is not None else None
        self._format = config.audio.output.format.type
        self._rate = RATES[self._format]
        self._changer: RateChanger | None = None
        self._sent = 0
        """Samples that have become events."""

    def made(self, item_id: str) -> bool:
        """Whether an item is this response's."""
        return any(item.id == item_id for item in self._items)

    # ------------------------------------------------------------------------------------------------ events

    def created(self) -> list[Event]:
        return [{"type": "response.created", "response": self._shown("in_progress")}]

    def text(self, delta: str) -> list[Event]:
        if self._calls is None:
            return self._said(delta)
        return [event for piece in self._calls.push(delta) for event in self._piece(piece)]

    def audio(self, samples: NDArray[np.float32], rate: int) -> list[Event]:
        made, message = self._message()
        if self._changer is None:
            self._changer = RateChanger(rate, self._rate)
        return [*made, *self._sound(message, self._changer.push(samples))]

    def ended(
        self,
        status: Status,
        usage: Usage | None,
        *,
        reason: Reason | None = None,
        error: OmniError | None = None,
    ) -> list[Event]:
        """The last events. A response that failed or was cancelled before it gave anything leaves no item."""
        made: list[Event] = []
        whole = status in ("completed", "incomplete")
        if self._calls is not None:
            made += [event for piece in self._calls.end() for event in self._piece(piece)]
        if whole and not self._items:
            made += self._message()[0]
        if whole and self._changer is not None and isinstance(self._open, Message):
            made += self._sound(self._open, self._changer.push(np.zeros(0, np.float32), last=True))
        made += self._close(status)
        details: Event = {"type": status}
        if reason is not None:
            details["reason"] = reason
        if error is not None:
            told = body_of(error)["error"]
            details["error"] = {key: told[key] for key in ("type", "code", "message")}
        shown = self._shown(status, None if status == "completed" else details, usage)
        return [*made, {"type": "response.done", "response": shown}]

    # -------------------------------------------------------------------------------------------- text and sound

    def _said(self, delta: str) -> list[Event]:
        made, message = self._message()
        part = message.parts[0]
        if isinstance(part, Spoken):
            part.transcript += delta
            return [*made, self._event("response.output_audio_transcript.delta", content_index=0, delta=delta)]
        if isinstance(part, Text):
            part.text += delta
        return [*made, self._event("response.output_text.delta", content_index=0, delta=delta)]

    def _message(self) -> tuple[list[Event], Message]:
        """The message that is open, and what it takes to open one."""
        if isinstance(self._open, Message):
            return [], self._open
        message = Message("assistant", [], status="in_progress")
        made = self._begin(message)
        message.parts.append(Spoken() if self.config.speaks else Text(""))
        made.append(self._event("response.content_part.added", content_index=0, part=_part(message)))
        return made, message

    def _sound(self, message: Message, samples: NDArray[np.float32]) -> list[Event]:
        made = []
        step = self._rate * _DELTA_SECONDS
        for start in range(0, len(samples), step):
            piece = samples[start : start + step]
            data = base64.b64encode(encode(piece, self._format)).decode()
            self._sent += len(piece)
            made.append(self._event("response.output_audio.delta", content_index=0, delta=data))
        if isinstance(message.parts[0], Spoken):
            message.parts[0].ms = self._sent * 1000 // self._rate
        return made

    # ------------------------------------------------------------------------------------------------- calls

    def _piece(self, piece: Mapping[str, Any]) -> list[Event]:
        """Events for what the reader of calls found: text, the beginning of a call, or more of its arguments."""
        made: list[Event] = []
        if "content" in piece:
            made += self._said(piece["content"])
        for call in piece.get("tool_calls", ()):
            if "id" in call:
                made += self._begin(Call(call["function"]["name"], call["id"], status="in_progress"))
            arguments = call["function"]["arguments"]
            if isinstance(self._open, Call) and arguments:
                self._open.arguments += arguments
                made.append(
                    self._event("response.function_call_arguments.delta", call_id=self._open.call_id, delta=arguments)
                )
        return made

    # ------------------------------------------------------------------------------------------------- items

    def _begin(self, item: Item) -> list[Event]:
        made = self._close("completed")
        if not self._items:
            item.id = f"item_{self.id.removeprefix('resp_')}"
        else:
            item.id = new_id("item")
        self._items.append(item)
        self._open = item
        made.append({"type": "response.output_item.added", **self._where, "item": item.shown()})
        if self.conversation is not None:
            before = self.conversation.add(item, bounded=False)
            made.append({"type": "conversation.item.added", "previous_item_id": before, "item": item.shown()})
        return made

    def _close(self, status: Status) -> list[Event]:
        item = self._open
        if item is None:
            return []
        item.status = "completed" if status == "completed" else "incomplete"
        made = self._call_done(item) if isinstance(item, Call) else []
        if isinstance(item, Message):
            made += self._message_done(item)
        shown = item.shown()
        if self.conversation is not None:
            before = self.conversation.before(item)
            made.append({"type": "conversation.item.done", "previous_item_id": before, "item": shown})
        made.append({"type": "response.output_item.done", **self._where, "item": shown})
        self._open = None
        spoken = item.parts[0] if isinstance(item, Message) else None
        if isinstance(spoken, Spoken):
            spoken.whole = status in ("completed", "incomplete")
            if not spoken.whole:
                # No more can have been heard than was sent; the client says it more exactly, if it knows.
                spoken.cut(spoken.ms)
        return made

    def _call_done(self, call: Call) -> list[Event]:
        told = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        return [self._event("response.function_call_arguments.done", **told)]

    def _message_done(self, message: Message) -> list[Event]:
        part = message.parts[0]
        made = []
        if isinstance(part, Spoken):
            made.append(self._event("response.output_audio.done", content_index=0))
            said = {"transcript": part.transcript}
            made.append(self._event("response.output_audio_transcript.done", content_index=0, **said))
        elif isinstance(part, Text):
            made.append(self._event("response.output_text.done", content_index=0, text=part.text))
        made.append(self._event("response.content_part.done", content_index=0, part=_part(message)))
        return made

    # ------------------------------------------------------------------------------------------------- shapes

    @property
    def _where(self) -> Event:
        return {"response_id": self.id, "output_index": len(self._items) - 1}

    def _event(self, kind: str, **values: object) -> Event:
        """An event of the item that was opened last."""
        return {"type": kind, **self._where, "item_id": self._items[-1].id, **values}

    def _shown(self, status: str, details: Event | None = None, usage: Usage | None = None) -> Event:
        output = self.config.audio.output
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": [item.shown() for item in self._items],
            "conversation_id": None if self.conversation is None else self.conversation.id,
            "output_modalities": list(self.config.output_modalities),
            "max_output_tokens": self.config.max_output_tokens,
            "audio": {"output": output.model_dump(mode="json", exclude_none=True)},
            "usage": None if usage is None else _usage(usage),
            "metadata": None if self._metadata is None else dict(self._metadata),
        }


def _part(message: Message) -> Event:
    part = message.parts[0]
    if isinstance(part, Spoken):
        return {"type": "audio", "transcript": part.transcript}
    return {"type": "text", "text": part.text if isinstance(part, Text) else ""}


def _usage(usage: Usage) -> Event:
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "cached_tokens": usage.cached_tokens,
            "text_tokens": usage.prompt_tokens - sum(usage.prompt_media.values()),
            "audio_tokens": usage.prompt_media.get(Modality.AUDIO, 0),
            "image_tokens": usage.prompt_media.get(Modality.IMAGE, 0),
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_seconds": usage.audio_seconds},
    }
