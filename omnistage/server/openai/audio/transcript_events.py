"""The events of streamed transcriptions: OpenAI's, and vLLM's where a request has its fields."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from omnistage.core.errors import CancelledRequestError, DeadlineExceededError, LimitExceededError, OmniError
from omnistage.core.types import FinishReason
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk, Usage
from omnistage.pipeline.stream import OutputStream
from omnistage.server.http.errors import ContentFilterError, ErrorBody, body_of
from omnistage.server.http.sse import DONE_EVENT
from omnistage.server.openai.audio.transcriber import TIMED_OUT
from omnistage.server.openai.response_models import TokenCounts, TokenUsage
from omnistage.server.openai.running import Running, RunningUsage, events_of, writes


class TokensUsed(TokenCounts):
    type: Literal["tokens"]


class TranscriptionEvent(TypedDict):
    """One event of a streamed transcription."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: NotRequired[str]
    text: NotRequired[str]
    usage: NotRequired[TokensUsed]


def failure_of(final: OmniRequestOutput) -> OmniError | None:
    """Why a transcription is incomplete: an error is the only way to say so."""
    if final.error is not None or final.finish_reason is FinishReason.STOP:
        return final.error
    if final.finish_reason is FinishReason.CONTENT_FILTER:
        return ContentFilterError("the content filter ended this transcription")
    if final.finish_reason is FinishReason.DEADLINE:
        return DeadlineExceededError(TIMED_OUT, param="timeout")
    if final.finish_reason is FinishReason.LENGTH:
        return LimitExceededError(
            f"the model's context ended after {final.usage.completion_tokens} tokens of the transcription; send "
            "shorter audio",
            param="file",
        )
    return CancelledRequestError("the request was cancelled")


def tokens_used(usage: Usage) -> TokensUsed:
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(slots=True)
class TranscriptEvents:
    """The events of one streamed transcription, whose deltas make up the text of the last one."""

    _started: bool = False
    _space: str = ""
    """At the end of what has come, which is no part of the text if nothing follows."""

    def write(self, item: OutputChunk) -> list[TranscriptionEvent | ErrorBody]:
        if item.final is None:
            delta = self._stripped(item.text)
            return [{"type": "transcript.text.delta", "delta": delta}] if delta else []
        if (failure := failure_of(item.final)) is not None:
            return [body_of(failure)]
        return [
            {"type": "transcript.text.done", "text": item.final.text.strip(), "usage": tokens_used(item.final.usage)}
        ]

    def _stripped(self, text: str) -> str:
        """What is ready of the text without white space around it: models begin with a space."""
        text = self._space + text if self._started else text.lstrip()
        ready = text.rstrip()
        self._space, self._started = text[len(ready) :], self._started or bool(ready)
        return ready


class TranscriptChunks:
    """vLLM's events, in the form of a chat's."""

    def __init__(self, model: str, *, include_usage: bool, continuous_usage: bool) -> None:
        self._model = model
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._so_far: RunningUsage | None = None
        self._id = f"trsc-{uuid.uuid4().hex}"
        self._events = TranscriptEvents()

    def of(self, stream: OutputStream) -> Callable[[OutputChunk], list[Mapping[str, object]]]:
        """The events of a request that runs."""
        self._so_far = RunningUsage([stream]) if self._continuous_usage else None
        return self.write

    def write(self, item: OutputChunk) -> list[Mapping[str, object]]:
        events: list[Mapping[str, object]] = []
        used_now = None if self._so_far is None else self._so_far.add(len(item.token_ids))
        for one in self._events.write(item):
            if "error" in one:
                return [one]
            if one["type"] == "transcript.text.delta":
                events.append(self._chunk(one["delta"], usage=used_now))
        if item.final is not None:
            events.append(self._chunk("", "stop", used_now))
            if self._include_usage:
                tokens = tokens_used(item.final.usage)
                counts = {
                    "prompt_tokens": tokens["input_tokens"],
                    "completion_tokens": tokens["output_tokens"],
                    "total_tokens": tokens["total_tokens"],
                }
                events.append({**self._head(), "choices": [], "usage": counts})
        return events

    def whole(self, text: str) -> list[Mapping[str, object]]:
        """Of a transcription without tokens, which comes at once."""
        return [self._chunk(text), self._chunk("", "stop")]

    def _head(self) -> dict[str, object]:
        return {"id": self._id, "object": "transcription.chunk", "created": int(time.time()), "model": self._model}

    def _chunk(self, text: str, finish: str | None = None, usage: TokenUsage | None = None) -> Mapping[str, object]:
        choice = {"delta": {"content": text}, "finish_reason": finish, "stop_reason": None}
        return {**self._head(), "choices": [choice], **({} if usage is None else {"usage": usage})}


def streamed(running: Running, chunks: TranscriptChunks | None) -> AsyncGenerator[bytes]:
    """A transcription as server-sent events."""
    if chunks is not None:
        return events_of(running, lambda stream: writes(chunks.of(stream)), last=DONE_EVENT)
    return events_of(running, lambda _: writes(TranscriptEvents().write))
