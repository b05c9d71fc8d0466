"""What a chat returns in OpenAI's form: a whole completion, or the chunks of a stream."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NotRequired

import numpy as np
from pydantic_core import to_json
from typing_extensions import TypedDict

from omnistage import __version__
from omnistage.core.types import TokenLogprob, TokenLogprobs
from omnistage.media.image_output import ImageOutput
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk
from omnistage.pipeline.stream import OutputStream
from omnistage.server.http.errors import ErrorBody, body_of, rename_param
from omnistage.server.http.sse import event
from omnistage.server.openai.audio.encode import encode_audio, pcm16
from omnistage.server.openai.chat.request import ChatRequest
from omnistage.server.openai.response_models import Finish, Padded, TokenUsage, finish_of, pad, usage_of
from omnistage.server.openai.running import RunningUsage
from omnistage.server.openai.tools import CallReader, Delta, ToolCall, ToolCallDelta, read_whole

_FINGERPRINT = f"omnistage_{__version__}"

Keep = Callable[[str, str], int]
"""Keeps a spoken answer's transcript under its id; until when."""

# -------------------------------------------------------------------------------------------------------- models


class Logprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenChoice(Logprob):
    top_logprobs: list[Logprob]


class Logprobs(TypedDict):
    content: list[TokenChoice]
    refusal: None


class Audio(TypedDict):
    """`data` is base64 of a file."""

    id: str
    data: str
    expires_at: int
    transcript: str
    sample_rate: int


class AudioDelta(TypedDict):
    """`data` is base64 of pcm16."""

    id: str
    data: NotRequired[str]
    sample_rate: NotRequired[int]
    transcript: NotRequired[str]
    expires_at: NotRequired[int]


class ImageUrl(TypedDict):
    url: str


class ImageContent(TypedDict):
    type: Literal["image_url"]
    image_url: ImageUrl
    preview: NotRequired[bool]


class Steps(TypedDict):
    step: int
    steps: int


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[object]
    reasoning_content: NotRequired[str]
    audio: NotRequired[Audio]
    images: NotRequired[list[ImageContent]]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: Logprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    service_tier: NotRequired[Literal["default"]]


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    refusal: None
    audio: AudioDelta
    images: list[ImageContent]
    tool_calls: list[ToolCallDelta]
    progress: Steps


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: Logprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[int | str | None]
    """With the finish reason."""
    token_ids: NotRequired[list[int]]


class ChatChunk(Padded):
    """One event of a streamed chat; the last event is the text `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[TokenUsage | None]
    service_tier: NotRequired[Literal["default"]]


# -------------------------------------------------------------------------------------------------------- whole


def _logprob(token: TokenLogprob) -> Logprob:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.spelling)}


def tokens_by_id(entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
    """Each token as `token_id:ID`, as vLLM writes it: two tokens may have the same text."""

    def name(token: TokenLogprob) -> TokenLogprob:
        return replace(token, text=f"token_id:{token.token_id}")

    return [TokenLogprobs(name(entry.chosen), tuple(map(name, entry.top))) for entry in entries]


def token_choices(entries: Sequence[TokenLogprobs]) -> list[TokenChoice]:
    return [{**_logprob(entry.chosen), "top_logprobs": [_logprob(token) for token in entry.top]} for entry in entries]


def _logprobs(entries: Sequence[TokenLogprobs], body: ChatRequest) -> Logprobs:
    shown = tokens_by_id(entries) if body.return_tokens_as_token_ids else entries
    return {"content": token_choices(shown), "refusal": None}


def _image(image: ImageOutput) -> ImageContent:
    data = base64.b64encode(image.to_bytes("png")).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def completion(request_id: str, body: ChatRequest, final: OmniRequestOutput, keep: Keep) -> ChatCompletion:
    """The response to a request that did not ask for a stream."""
    # There is always a choice: one without text may carry audio or images.
    outputs = final.outputs or [CompletionOutput(finish_reason=final.finish_reason)]
    whole: ChatCompletion = {
        "id": f"chatcmpl-{request_id.removeprefix('req-')}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model or "",
        "system_fingerprint": _FINGERPRINT,
        "choices": [_choice(output, request_id, body, final, keep) for output in outputs],
        "usage": usage_of(final.usage),
    }
    if body.service_tier is not None:
        whole["service_tier"] = "default"
    return whole


def _choice(
    output: CompletionOutput, request_id: str, body: ChatRequest, final: OmniRequestOutput, keep: Keep
) -> ChatChoice:
    message: ChatMessage = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    finish = finish_of(output.finish_reason)
    if final.audio is not None:
        format = body.audio.format if body.audio is not None else "wav"
        audio_id = f"audio-{request_id.removeprefix('req-')}"
        message["audio"] = {
            "id": audio_id,
            "data": base64.b64encode(encode_audio(final.audio, format)).decode(),
            "expires_at": keep(audio_id, output.text),
            "transcript": output.text,
            "sample_rate": final.audio.sample_rate,
        }
    elif final.outputs:
        message["content"] = output.text
    if final.images:
        message["images"] = [_image(image) for image in final.images]
    if (toolbox := body.toolbox) is not None:
        message["content"], calls = read_whole(output.text, toolbox)
        if calls:
            message["tool_calls"] = calls
            finish = "tool_calls" if finish == "stop" else finish
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
        message["content"] = message["content"] or None
    logprobs = _logprobs(output.logprobs, body) if body.logprobs else None
    choice: ChatChoice = {
        "index": output.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": output.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = output.token_ids
    return choice


# ------------------------------------------------------------------------------------------------------- stream


def _parsed(delta: Delta) -> ChatDelta:
    return {"content": delta["content"]} if "content" in delta else {"tool_calls": delta["tool_calls"]}


class StreamWriter:
    """The events of one streamed chat. Every choice begins with its role and ends with its finish reason."""

    def __init__(self, stream: OutputStream, body: ChatRequest, keep: Keep) -> None:
        self._body = body
        request_id = stream.request_id.removeprefix("req-")
        self._audio_id = f"audio-{request_id}"
        self._head: ChatChunk = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": body.model or "",
            "system_fingerprint": _FINGERPRINT,
            "choices": [],
        }
        if body.service_tier is not None:
            self._head["service_tier"] = "default"
        self._keep = keep
        self._started: set[int] = set()
        self._speaks = body.speaks
        self._toolbox = body.toolbox
        self._readers: dict[int, CallReader] = {}
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        # Where every event has the usage so far.
        self._so_far = RunningUsage([stream]) if options is not None and options.continuous_usage_stats else None
        self._padded = options is not None and bool(options.include_obfuscation)
        # Most events differ in their text alone: for each choice, what stands before and after it.
        self._with_ids = bool(body.return_token_ids)
        self._plain = self._toolbox is None and self._so_far is None
        self._plain &= not (body.logprobs or self._speaks or self._padded or self._with_ids)
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def write(self, item: OutputChunk) -> bytes:
        """The events of an item, as they are sent."""
        if (
            item.text
            and not item.reasoning
            and item.final is None
            and (around := self._around_text.get(item.index)) is not None
        ):
            return b"%b%b%b" % (around[0], to_json(item.text), around[1])
        return b"".join(map(event, self.events(item)))

    def events(self, item: OutputChunk) -> Sequence[ChatChunk | ErrorBody]:
        if item.final is not None:
            return self._last(item.final)
        # Where one piece of text makes several deltas, the first carries its tokens.
        logprobs = _logprobs(item.logprobs, self._body) if self._body.logprobs and item.logprobs else None
        ids = list(item.token_ids) if self._with_ids and item.token_ids else None
        deltas = self._deltas(item)
        if not deltas and (logprobs is not None or ids is not None):
            deltas = [{}]  # text that is held back: part of a character, of a stop string, of a call
        usage = None if self._so_far is None else self._so_far.add(len(item.token_ids))
        chunks = [] if not deltas or item.index in self._started else [self._first(item.index)]
        for delta in deltas:
            chunks.append(self._chunk(item.index, delta, logprobs, ids))
            logprobs = ids = None
        if usage is not None:
            for chunk in chunks:
                chunk["usage"] = usage
        return chunks

    def _deltas(self, item: OutputChunk) -> list[ChatDelta]:
        if item.text or item.reasoning:
            deltas: list[ChatDelta] = [{"reasoning_content": item.reasoning}] if item.reasoning else []
            if item.text and self._toolbox is not None:
                reader = self._readers.setdefault(item.index, CallReader(self._toolbox))
                return [*deltas, *map(_parsed, reader.push(item.text))]
            if item.text:
                speech: AudioDelta = {"id": self._audio_id, "transcript": item.text}
                deltas.append({"audio": speech} if self._speaks else {"content": item.text})
            return deltas
        if item.audio is not None:
            data = base64.b64encode(pcm16(np.asarray(item.audio.samples, dtype=np.float32))).decode()
            return [{"audio": {"id": self._audio_id, "data": data, "sample_rate": item.audio.sample_rate}}]
        if item.image is not None:
            return [{"images": [{**_image(ImageOutput(item.image.pixels)), "preview": item.image.preview}]}]
        if item.progress is not None:
            return [{"progress": {"step": item.progress.step, "steps": item.progress.steps}}]
        return []

    def _first(self, index: int) -> ChatChunk:
        self._started.add(index)
        if self._plain:
            before, name, after = event(self._chunk(index, {"content": ""})).partition(b'"content":""')
            self._around_text[index] = before + name[:-2], after
        return self._chunk(index, {"role": "assistant", "content": None if self._speaks else "", "refusal": None})

    def _last(self, final: OmniRequestOutput) -> Sequence[ChatChunk | ErrorBody]:
        if final.error is not None:
            return [body_of(rename_param(final.error, self._body.error_paths()))]
        chunks: list[ChatChunk] = []
        for output in final.outputs or [CompletionOutput(finish_reason=final.finish_reason)]:
            if output.index not in self._started:
                chunks.append(self._first(output.index))
            finish = finish_of(output.finish_reason)
            if (reader := self._readers.get(output.index)) is not None:
                chunks += [self._chunk(output.index, _parsed(delta)) for delta in reader.end()]
                finish = "tool_calls" if reader.calls and finish == "stop" else finish
            if final.audio is not None:
                expires = self._keep(self._audio_id, output.text)
                chunks.append(self._chunk(output.index, {"audio": {"id": self._audio_id, "expires_at": expires}}))
            chunks.append(self._chunk(output.index, {}, finish=finish, stop=output.stop_reason))
        if self._so_far is not None:
            chunks[-1]["usage"] = usage_of(final.usage)
        if self._with_usage:
            chunks.append({**self._head, "usage": usage_of(final.usage)})
        return chunks

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: Logprobs | None = None,
        token_ids: list[int] | None = None,
        *,
        finish: Finish | None = None,
        stop: int | str | None = None,
    ) -> ChatChunk:
        choice: ChatChunkChoice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = stop
        if token_ids is not None:
            choice["token_ids"] = token_ids
        chunk: ChatChunk = {**self._head, "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        if self._padded:
            pad(chunk)
        return chunk
