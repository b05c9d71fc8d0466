"""What a chat gives in OpenAI's form: the whole answer, or the events of a stream."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from omnistage import __version__
from omnistage.core.types import FinishReason, Modality, TokenLogprob, TokenLogprobs
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk, Usage
from omnistage.server.http.errors import body_of
from omnistage.server.openai.audio.encode import encode_audio, pcm16
from omnistage.server.openai.chat.request import ChatRequest
from omnistage.server.openai.tools import CallReader, as_known, read_whole

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.CONTENT_FILTER: "content_filter",
}
_FINGERPRINT = f"omnistage_{__version__}"
_EVEN = 64
"""Characters: with obfuscation every event's length is a multiple of this."""

Keep = Callable[[str, str], int]
"""Keeps a spoken answer's transcript under its id; until when."""


def finish_of(reason: FinishReason | None) -> str | None:
    return None if reason is None else _FINISH.get(reason, "stop")


def spoken_tokens(usage: Usage) -> int:
    """The tokens of speech: those of all stages but the words and the steps of a picture, where anything was spoken."""
    if not usage.audio_seconds:
        return 0
    return sum(usage.stage_tokens.values()) - usage.completion_tokens - usage.steps


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, with what we count besides. As there, the tokens of speech count as completion tokens."""
    spoken = spoken_tokens(usage)
    media = {kind: usage.prompt_media.get(kind, 0) for kind in (Modality.AUDIO, Modality.IMAGE, Modality.VIDEO)}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens + spoken,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens + spoken,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "text_tokens": usage.prompt_tokens - sum(media.values()),
            **{f"{kind}_tokens": count for kind, count in media.items()},
        },
        "completion_tokens_details": {
            "text_tokens": usage.completion_tokens,
            "audio_tokens": spoken,
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "audio_seconds": usage.audio_seconds,
            "images": usage.images,
            "video_seconds": usage.video_seconds,
            "denoising_steps": usage.steps,
            "stage_tokens": usage.stage_tokens,
        },
    }


def obfuscated(made: dict[str, Any]) -> dict[str, Any]:
    """An event, padded: its length no longer tells the length of what it carries."""
    bare = {**made, "obfuscation": ""}
    missing = -len(json.dumps(bare, ensure_ascii=False, separators=(",", ":"))) % _EVEN
    return {**bare, "obfuscation": secrets.token_hex(_EVEN)[:missing]}


def _head(answer_id: str, body: ChatRequest, kind: str, created: int) -> dict[str, Any]:
    head = {"id": answer_id, "object": kind, "created": created, "model": body.model}
    tier = {"service_tier": "default"} if body.service_tier is not None else {}
    return {**head, **tier, "system_fingerprint": _FINGERPRINT}


def _audio_id(answer_id: str) -> str:
    return f"audio-{answer_id.removeprefix('chatcmpl-')}"


def _logprobs(entries: tuple[TokenLogprobs, ...] | list[TokenLogprobs]) -> dict[str, Any]:
    def one(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.spelling)}

    content = [{**one(entry.chosen), "top_logprobs": [one(token) for token in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# ------------------------------------------------------------------------------------------------------ whole


def whole(answer_id: str, body: ChatRequest, final: OmniRequestOutput, keep: Keep) -> dict[str, Any]:
    """The answer to a request that did not ask for a stream."""
    answers = final.outputs or [CompletionOutput(finish_reason=final.finish_reason)]
    return {
        **_head(answer_id, body, "chat.completion", int(time.time())),
        "choices": [_choice(answer, answer_id, body, final, keep) for answer in answers],
        "usage": usage_of(final.usage),
    }


def _choice(
    answer: CompletionOutput, answer_id: str, body: ChatRequest, final: OmniRequestOutput, keep: Keep
) -> dict[str, Any]:
    content = answer.text if final.outputs else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if final.audio is not None:
        format = body.audio.format if body.audio is not None else "wav"
        message["audio"] = {
            "id": _audio_id(answer_id),
            "data": base64.b64encode(encode_audio(final.audio, format)).decode(),
            "expires_at": keep(_audio_id(answer_id), answer.text),
            "transcript": answer.text,
            "sample_rate": final.audio.sample_rate,
        }
        message["content"] = None
    if final.images:
        message["images"] = [
            {"type": "image_url", "image_url": {"url": _data_url(picture.to_bytes("png"))}} for picture in final.images
        ]
    finish = finish_of(answer.finish_reason)
    if (toolbox := body.toolbox()) is not None:
        message["content"], calls = read_whole(answer.text, toolbox)
        if calls:
            message["tool_calls"] = calls
            finish = "tool_calls" if finish == "stop" else finish
    logprobs = _logprobs(answer.logprobs) if body.logprobs else None
    return {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": finish}


# ----------------------------------------------------------------------------------------------------- stream


class StreamWriter:
    """The events of one streamed answer. Every choice begins with its role and ends with its reason."""

    def __init__(self, answer_id: str, body: ChatRequest, keep: Keep) -> None:
        self._body = body
        self._audio_id = _audio_id(answer_id)
        self._head = _head(answer_id, body, "chat.completion.chunk", int(time.time()))
        self._keep = keep
        self._begun: set[int] = set()
        self._toolbox = body.toolbox()
        self._readers: dict[int, CallReader] = {}

    def events(self, item: OutputChunk) -> list[dict[str, Any]]:
        if item.final is not None:
            return self._last(item.final)
        made: list[dict[str, Any]] = []
        # Where one piece of text makes several deltas, the first carries its tokens.
        logprobs = _logprobs(item.logprobs) if self._body.logprobs and item.logprobs else None
        for delta in self._deltas(item):
            made += self._begin(item.index)
            made.append(self._event(item.index, delta, logprobs=logprobs))
            logprobs = None
        return made

    def _deltas(self, item: OutputChunk) -> list[dict[str, Any]]:
        if item.text and self._toolbox is not None:
            made = self._readers.setdefault(item.index, CallReader(self._toolbox)).push(item.text)
        else:
            made = self._plain(item)
        # Text that is held back leaves its tokens behind otherwise: part of a character, of a stop string, of a call.
        return made or ([{}] if self._body.logprobs and item.logprobs else [])

    def _plain(self, item: OutputChunk) -> list[dict[str, Any]]:
        if item.text:
            spoken = {"audio": {"id": self._audio_id, "transcript": item.text}}
            return [spoken if self._body.speaks else {"content": item.text}]
        if item.audio is not None:
            data = base64.b64encode(pcm16(np.asarray(item.audio.samples, dtype=np.float32))).decode()
            return [{"audio": {"id": self._audio_id, "data": data, "sample_rate": item.audio.sample_rate}}]
        if item.image is not None:
            from omnistage.media.image_output import ImageOutput

            url = _data_url(ImageOutput(item.image.pixels).to_bytes("png"))
            return [{"images": [{"type": "image_url", "image_url": {"url": url}, "preview": item.image.preview}]}]
        if item.progress is not None:
            return [{"progress": {"step": item.progress.step, "steps": item.progress.steps}}]
        return []

    def _begin(self, index: int) -> list[dict[str, Any]]:
        if index in self._begun:
            return []
        self._begun.add(index)
        return [
            self._event(index, {"role": "assistant", "content": None if self._body.speaks else "", "refusal": None})
        ]

    def _last(self, final: OmniRequestOutput) -> list[dict[str, Any]]:
        if final.error is not None:
            return [body_of(as_known(final.error, self._body.error_paths()))]
        made: list[dict[str, Any]] = []
        for answer in final.outputs or [CompletionOutput(finish_reason=final.finish_reason)]:
            made += self._begin(answer.index)
            finish = finish_of(answer.finish_reason)
            if (reader := self._readers.get(answer.index)) is not None:
                made += [self._event(answer.index, delta) for delta in reader.end()]
                finish = "tool_calls" if reader.calls and finish == "stop" else finish
            if final.audio is not None:
                expires = self._keep(self._audio_id, answer.text)
                made.append(self._event(answer.index, {"audio": {"id": self._audio_id, "expires_at": expires}}))
            made.append(self._event(answer.index, {}, finish=finish))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            made.append({**self._head, "choices": [], "usage": usage_of(final.usage)})
        return made

    def _event(
        self, index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        made = {**self._head, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            made["usage"] = None
        return obfuscated(made) if options is not None and options.include_obfuscation else made
