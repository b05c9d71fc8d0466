"""The events of one response in OpenAI's order, and the items that it adds to the conversation."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omnistage.core.errors import OmniError
from omnistage.core.types import Modality
from omnistage.media.audio import StreamResampler
from omnistage.media.tempo import TempoStretcher
from omnistage.pipeline.outputs import Usage
from omnistage.server.http.errors import body_of
from omnistage.server.openai.tools import CallReader, Delta, ToolCall
from omnistage.server.realtime.audio import RATES, encode
from omnistage.server.realtime.base import JsonObject
from omnistage.server.realtime.config import SessionConfig
from omnistage.server.realtime.conversation import Conversation
from omnistage.server.realtime.items import FunctionCall, Item, Message, Speech, Text, new_id

Status = Literal["completed", "cancelled", "incomplete", "failed"]
CancelReason = Literal["client_cancelled", "turn_detected"]
Reason = Literal["max_output_tokens", "content_filter"] | CancelReason
_DELTA_SECONDS = 1
"""Audio of one event: an interruption takes effect between two of them, also for a slow reader."""


class ResponseBuilder:
    """Turns the engine's output into events, which it returns and does not send.

    One item is open at a time; the next item, or the end, closes it.
    """

    def __init__(
        self,
        suffix: str,
        config: SessionConfig,
        conversation: Conversation | None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """`suffix` is what the ids of response and request share; without a conversation no items are kept."""
        self.id = f"resp_{suffix}"
        self.config = config
        self.conversation = conversation
        self._metadata = metadata
        self._events: list[JsonObject] = []
        self._items: list[Item] = []
        self._open: Item | None = None
        toolbox = config.toolbox()
        self._calls = CallReader(toolbox) if toolbox is not None else None
        self._format = config.audio.output.format.type
        self._rate = RATES[self._format]
        self._resampler: StreamResampler | None = None
        self._samples_sent = 0
        self._tempo: TempoStretcher | None = None

    def owns(self, item_id: str) -> bool:
        """Whether an item belongs to this response."""
        return any(item.id == item_id for item in self._items)

    def created(self) -> list[JsonObject]:
        self._emit("response.created", response=self._to_json("in_progress"))
        return self._take()

    def text(self, delta: str) -> list[JsonObject]:
        if self._calls is None or self.config.speaks:  # what is spoken has been parsed before
            self._add_text(delta)
        else:
            self._add_parsed(self._calls.push(delta))
        return self._take()

    def audio(self, samples: NDArray[np.float32], rate: int) -> list[JsonObject]:
        message = self._message()
        if self._resampler is None:
            self._resampler = StreamResampler(rate, self._rate)
            if (speed := self.config.audio.output.speed) not in (None, 1.0):
                self._tempo = TempoStretcher(rate, speed or 1.0)
        if self._tempo is not None:
            samples = self._tempo.push(samples)
        self._add_audio(message, self._resampler.push(samples))
        return self._take()

    def calls(self, calls: Sequence[ToolCall]) -> list[JsonObject]:
        """Whole calls, behind what was said before them."""
        self._end_audio()
        for call in calls:
            function = call["function"]
            self._begin(FunctionCall(function["name"], call["id"], function["arguments"], status="in_progress"))
            delta = {"call_id": call["id"], "delta": function["arguments"]}
            self._emit_of_item("response.function_call_arguments.delta", **delta)
        return self._take()

    def finish(
        self, status: Status, usage: Usage | None, *, reason: Reason | None = None, error: OmniError | None = None
    ) -> list[JsonObject]:
        """The last events. A response that failed or was cancelled before any output leaves no item."""
        reached_end = status in ("completed", "incomplete")
        if self._calls is not None and not self.config.speaks:
            self._add_parsed(self._calls.end())
        if reached_end and not self._items:
            self._message()
        if reached_end:
            self._end_audio()
        self._close(status)
        details: JsonObject = {"type": status}
        if reason is not None:
            details["reason"] = reason
        if error is not None:
            body = body_of(error)["error"]
            details["error"] = {key: body[key] for key in ("type", "code", "message")}
        self._emit("response.done", response=self._to_json(status, None if status == "completed" else details, usage))
        return self._take()

    def _end_audio(self) -> None:
        """Send what is left of the open message's audio, after which it has no more."""
        if self._resampler is None or not isinstance(self._open, Message):
            return
        nothing = np.zeros(0, np.float32)
        last = nothing if self._tempo is None else self._tempo.push(nothing, last=True)
        self._add_audio(self._open, self._resampler.push(last, last=True))
        self._resampler = self._tempo = None

    # ----------------------------------------------------------------------------------------------- content

    def _message(self) -> Message:
        """The open message; opens one where there is none."""
        if isinstance(self._open, Message):
            return self._open
        message = Message("assistant", [], status="in_progress")
        self._begin(message)
        message.parts.append(Speech() if self.config.speaks else Text(""))
        self._emit_of_item("response.content_part.added", content_index=0, part=_part(message))
        return message

    def _add_text(self, delta: str) -> None:
        part = self._message().parts[0]
        if isinstance(part, Speech):
            part.transcript += delta
            self._emit_of_item("response.output_audio_transcript.delta", content_index=0, delta=delta)
        elif isinstance(part, Text):
            part.text += delta
            self._emit_of_item("response.output_text.delta", content_index=0, delta=delta)

    def _add_audio(self, message: Message, samples: NDArray[np.float32]) -> None:
        step = self._rate * _DELTA_SECONDS
        for start in range(0, len(samples), step):
            piece = samples[start : start + step]
            data = base64.b64encode(encode(piece, self._format)).decode()
            self._samples_sent += len(piece)
            self._emit_of_item("response.output_audio.delta", content_index=0, delta=data)
        if isinstance(message.parts[0], Speech):
            message.parts[0].ms = self._samples_sent * 1000 // self._rate

    def _add_parsed(self, deltas: Sequence[Delta]) -> None:
        """Deltas of a chat message: text, the beginning of a call, or more of a call's arguments."""
        for delta in deltas:
            if "content" in delta:
                self._add_text(delta["content"])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    self._begin(FunctionCall(call["function"]["name"], call["id"], status="in_progress"))
                arguments = call["function"]["arguments"]
                if isinstance(self._open, FunctionCall) and arguments:
                    self._open.arguments += arguments
                    name = "response.function_call_arguments.delta"
                    self._emit_of_item(name, call_id=self._open.call_id, delta=arguments)

    # ------------------------------------------------------------------------------------------------- items

    def _begin(self, item: Item) -> None:
        self._close("completed")
        item.id = new_id("item") if self._items else f"item_{self.id.removeprefix('resp_')}"
        self._items.append(item)
        self._open = item
        self._emit("response.output_item.added", **self._position, item=item.to_json())
        if self.conversation is not None:
            before = self.conversation.add(item, bounded=False)
            self._emit("conversation.item.added", previous_item_id=before, item=item.to_json())

    def _close(self, status: Status) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = "completed" if status == "completed" else "incomplete"
        part = item.parts[0] if isinstance(item, Message) else None
        if isinstance(item, FunctionCall):
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            self._emit_of_item("response.function_call_arguments.done", **call)
        elif isinstance(part, Speech):
            self._emit_of_item("response.output_audio.done", content_index=0)
            name = "response.output_audio_transcript.done"
            self._emit_of_item(name, content_index=0, transcript=part.transcript)
        elif isinstance(part, Text):
            self._emit_of_item("response.output_text.done", content_index=0, text=part.text)
        if isinstance(item, Message):
            self._emit_of_item("response.content_part.done", content_index=0, part=_part(item))
        data = item.to_json()
        if self.conversation is not None:
            self._emit("conversation.item.done", previous_item_id=self.conversation.id_before(item), item=data)
        self._emit("response.output_item.done", **self._position, item=data)
        if isinstance(part, Speech):
            part.complete = status in ("completed", "incomplete")
            if not part.complete:
                # Not more can have been heard than was sent; a client that knows better sends a truncate event.
                part.truncate(part.ms)

    # ------------------------------------------------------------------------------------------------ events

    @property
    def _position(self) -> JsonObject:
        return {"response_id": self.id, "output_index": len(self._items) - 1}

    def _emit(self, event_type: str, **fields: object) -> None:
        self._events.append({"type": event_type, **fields})

    def _emit_of_item(self, event_type: str, **fields: object) -> None:
        """An event of the item that was opened last."""
        self._emit(event_type, **self._position, item_id=self._items[-1].id, **fields)

    def _take(self) -> list[JsonObject]:
        events, self._events = self._events, []
        return events

    def _to_json(self, status: str, details: JsonObject | None = None, usage: Usage | None = None) -> JsonObject:
        output = self.config.audio.output
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": [item.to_json() for item in self._items],
            "conversation_id": None if self.conversation is None else self.conversation.id,
            "output_modalities": list(self.config.output_modalities),
            "max_output_tokens": self.config.max_output_tokens,
            "audio": {"output": output.model_dump(mode="json", exclude_none=True)},
            "usage": None if usage is None else _usage(usage),
            "metadata": None if self._metadata is None else dict(self._metadata),
        }


def _part(message: Message) -> JsonObject:
    part = message.parts[0]
    if isinstance(part, Speech):
        return {"type": "audio", "transcript": part.transcript}
    return {"type": "text", "text": part.text if isinstance(part, Text) else ""}


def _usage(usage: Usage) -> JsonObject:
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
