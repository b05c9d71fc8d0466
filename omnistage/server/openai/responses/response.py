"""What `/v1/responses` returns: a response object, or the typed events of a stream that ends with it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
from typing_extensions import TypedDict, Unpack

from omnistage.core.types import FinishReason
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk, Usage
from omnistage.server.http.errors import body_of, rename_param
from omnistage.server.openai.audio.encode import encode_audio, pcm16
from omnistage.server.openai.chat.response import TokenChoice, token_choices
from omnistage.server.openai.response_models import Padded, TokenCounts, pad, speech_tokens
from omnistage.server.openai.responses.request import Echo, ResponsesRequest
from omnistage.server.openai.tools import CallReader, Delta

Reason = Literal["max_output_tokens", "timeout", "content_filter"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_INCOMPLETE: dict[FinishReason, Reason] = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.DEADLINE: "timeout",
    FinishReason.CONTENT_FILTER: "content_filter",
}

# -------------------------------------------------------------------------------------------------------- models


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: list[TokenChoice]


class OutputAudio(TypedDict):
    type: Literal["output_audio"]
    data: str
    transcript: str


class MessageItem(TypedDict):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText | OutputAudio]


class CallItem(TypedDict):
    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[object]
    content: list[ReasoningText]


Item = MessageItem | CallItem | ReasoningItem


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int
    text_tokens: int
    audio_tokens: int
    audio_seconds: float


class ResponseUsage(TokenCounts):
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class ResponseError(TypedDict):
    code: str | None
    message: str


class IncompleteDetails(TypedDict):
    reason: Reason


class ResponseObject(Echo):
    """A response. Most of its fields repeat the request's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[Item]
    usage: ResponseUsage | None


class PartFields(TypedDict, total=False):
    part: OutputText | OutputAudio | ReasoningText
    delta: str
    text: str
    logprobs: list[TokenChoice]


class ItemFields(PartFields, total=False):
    content_index: int
    name: str
    arguments: str


class EventFields(ItemFields, Padded, total=False):
    response: ResponseObject
    item_id: str
    output_index: int
    item: Item


class ResponseEvent(EventFields):
    """One event of a streamed response; `type` says which other fields it has."""

    type: str
    sequence_number: int


# -------------------------------------------------------------------------------------------------------- writer


def _empty_text() -> OutputText:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> ResponseUsage:
    """As a chat counts: the tokens of speech are tokens of the output."""
    speech = speech_tokens(usage)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens + speech,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "text_tokens": usage.completion_tokens,
            "audio_tokens": speech,
            "audio_seconds": usage.audio_seconds,
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens + speech,
    }


class ResponseWriter:
    """The typed events of one response, numbered in their order. One item is open at a time."""

    def __init__(
        self, request_id: str, body: ResponsesRequest, keep: Callable[[ResponseObject], None] | None = None
    ) -> None:
        """`keep` is called with the response where it is complete, or was cut off."""
        self._keep = keep
        self._logprobs: list[TokenChoice] = []
        """Of tokens whose text has not been sent."""
        self._suffix = request_id.removeprefix("req-")
        self._body = body
        self._created = int(time.time())
        toolbox = body.toolbox
        self._reader = CallReader(toolbox) if toolbox is not None else None
        self._items: list[Item] = []
        self._open: Item | None = None
        self._part = _empty_text()
        """Of the message that was opened last."""
        self._reasoning_part: ReasoningText = {"type": "reasoning_text", "text": ""}
        self._num_sent = 0

    def response(self, final: OmniRequestOutput) -> ResponseObject:
        """The response of a request that has ended and did not stream: the one of the stream's last event."""
        self._reasoning(final.outputs[0].reasoning if final.outputs else "")
        self._text(final.text)
        return self._end(final)[-1]["response"]

    def events(self, item: OutputChunk) -> list[ResponseEvent]:
        # Not before the first item: an error until then has an HTTP status.
        events = [] if self._num_sent else self._begin(item)
        if item.final is not None:
            return events + self._end(item.final)
        events += self._reasoning(item.reasoning)
        if self._body.wants_logprobs and item.logprobs and not (item.reasoning and not item.text):
            self._logprobs += token_choices(item.logprobs)
        if item.text:
            return events + self._text(item.text)
        if item.audio is not None:
            samples = pcm16(np.asarray(item.audio.samples, dtype=np.float32))
            events.append(self._event("response.audio.delta", delta=base64.b64encode(samples).decode()))
        return events

    def _begin(self, item: OutputChunk) -> list[ResponseEvent]:
        response = self._object("in_progress")
        events = [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]
        # With tools, what the first item is is not known yet; nor while it may be reasoning.
        settled = self._reader is None and not item.reasoning and (item.text or item.audio is not None)
        return events + self._open_message() if settled else events

    def _reasoning(self, text: str) -> list[ResponseEvent]:
        if not text:
            return []
        events: list[ResponseEvent] = []
        if self._open is None or self._open["type"] != "reasoning":
            events += self._close("completed") + self._open_reasoning()
        events.append(self._part_event("response.reasoning_text.delta", delta=text))
        self._reasoning_part["text"] += text
        return events

    def _text(self, text: str) -> list[ResponseEvent]:
        deltas: list[Delta] = [{"content": text}] if self._reader is None else self._reader.push(text)
        return [event for delta in deltas for event in self._delta(delta)]

    def _delta(self, delta: Delta) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if "content" in delta:
            if self._open is None or self._open["type"] != "message":
                events += self._close("completed") + self._open_message()
            logprobs, self._logprobs = self._logprobs, []
            events.append(self._part_event("response.output_text.delta", delta=delta["content"], logprobs=logprobs))
            self._part["text"] += delta["content"]
            self._part["logprobs"] += logprobs
        for call in delta.get("tool_calls", ()):
            self._logprobs = []
            if "id" in call:
                events += self._close("completed") + self._open_call(call["id"], call["function"]["name"])
            piece = call["function"]["arguments"]
            if piece and self._open is not None and self._open["type"] == "function_call":
                events.append(self._item_event("response.function_call_arguments.delta", delta=piece))
                self._open["arguments"] += piece
        return events

    def _end(self, final: OmniRequestOutput) -> list[ResponseEvent]:
        if final.error is not None:
            error = body_of(rename_param(final.error, self._body.path))["error"]
            response = self._object("failed")
            response["error"] = {"code": error["code"], "message": error["message"]}
            return [self._event("response.failed", response=response)]
        events = [event for delta in self._reader.end() for event in self._delta(delta)] if self._reader else []
        if not self._items:
            events += self._open_message()  # an empty text is an item too
        reason = None if final.finish_reason is None else _INCOMPLETE.get(final.finish_reason)
        status: Literal["incomplete", "completed"] = "incomplete" if reason is not None else "completed"
        events += self._close(status, self._audio(final))
        response = self._object(status)
        response["incomplete_details"] = None if reason is None else {"reason": reason}
        response["output"] = self._items
        response["usage"] = _usage(final.usage)
        if self._keep is not None:
            self._keep(response)
        return [*events, self._event(f"response.{status}", response=response)]

    def _audio(self, final: OmniRequestOutput) -> OutputAudio | None:
        if final.audio is None:
            return None
        # A stream has sent pcm16 already; its last event repeats it, for clients that read only that.
        format = "pcm16" if self._body.stream else (self._body.audio.format if self._body.audio else "wav")
        data = base64.b64encode(encode_audio(final.audio, format)).decode()
        return {"type": "output_audio", "data": data, "transcript": final.text}

    def _object(self, status: Literal["in_progress", "completed", "incomplete", "failed"]) -> ResponseObject:
        return {
            "id": f"resp_{self._suffix}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._body.echo(),
        }

    # ---------------------------------------------------------------------------------------------------- items

    def _open_message(self) -> list[ResponseEvent]:
        number = f"_{len(self._items)}" if self._items else ""
        item: MessageItem = {
            "type": "message",
            "id": f"msg_{self._suffix}{number}",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        events = self._add(item, {**item, "content": []})
        self._part = _empty_text()
        item["content"].append(self._part)
        return [*events, self._part_event("response.content_part.added", part=_empty_text())]

    def _open_reasoning(self) -> list[ResponseEvent]:
        item: ReasoningItem = {
            "type": "reasoning",
            "id": f"rs_{self._suffix}",
            "status": "in_progress",
            "summary": [],
            "content": [],
        }
        events = self._add(item, {**item, "content": []})
        item["content"].append(self._reasoning_part)
        return [*events, self._part_event("response.content_part.added", part={**self._reasoning_part})]

    def _open_call(self, call_id: str, name: str) -> list[ResponseEvent]:
        item: CallItem = {
            "type": "function_call",
            "id": f"fc_{call_id.removeprefix('call_')}",
            "status": "in_progress",
            "call_id": call_id,
            "name": name,
            "arguments": "",
        }
        return self._add(item, {**item})

    def _add(self, item: Item, copy: Item) -> list[ResponseEvent]:
        self._items.append(item)
        self._open = item
        return [self._event("response.output_item.added", output_index=len(self._items) - 1, item=copy)]

    def _close(self, status: ItemStatus, audio: OutputAudio | None = None) -> list[ResponseEvent]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            event = "response.function_call_arguments.done"
            events = [self._item_event(event, name=item["name"], arguments=item["arguments"])]
        elif item["type"] == "reasoning":
            events = [
                self._part_event("response.reasoning_text.done", text=self._reasoning_part["text"]),
                self._part_event("response.content_part.done", part=self._reasoning_part),
            ]
        else:
            events = [
                self._part_event("response.output_text.done", text=self._part["text"], logprobs=self._part["logprobs"]),
                self._part_event("response.content_part.done", part=self._part),
            ]
            if audio is not None:
                item["content"].append(audio)
                empty: OutputAudio = {**audio, "data": "", "transcript": ""}
                events += [
                    self._event("response.audio.done"),
                    self._item_event("response.content_part.added", content_index=1, part=empty),
                    self._item_event("response.content_part.done", content_index=1, part=audio),
                ]
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    # --------------------------------------------------------------------------------------------------- events

    def _part_event(self, kind: str, **fields: Unpack[PartFields]) -> ResponseEvent:
        """An event of the text of the message that was opened last."""
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Unpack[ItemFields]) -> ResponseEvent:
        """An event of the item that was opened last."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Unpack[EventFields]) -> ResponseEvent:
        event: ResponseEvent = {"type": kind, "sequence_number": self._num_sent, **fields}
        self._num_sent += 1
        if self._body.obfuscates and kind.endswith(".delta"):
            pad(event)
        return event
