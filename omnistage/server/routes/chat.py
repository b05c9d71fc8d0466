"""`/v1/chat/completions`: text, speech and pictures, whole or as a stream."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from omnistage.errors import InvalidRequestError
from omnistage.params import DiffusionParams, SamplingParams, StageParams
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.context import caller, service_of
from omnistage.server.encode import encode_audio, pcm16
from omnistage.server.schemas import ChatRequest
from omnistage.server.service import ServedModel, collect
from omnistage.server.sse import event, stream_response
from omnistage.server.tools import CallReader, conversation, read_whole, renamed, shifted
from omnistage.types import (
    CompletionOutput,
    FinishReason,
    OmniRequestOutput,
    OutputChunk,
    TokenLogprobs,
    Usage,
)

router = APIRouter()

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.DEADLINE: "length"}


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    model = service.model(body.model)
    holder = caller(request)
    options = RequestOptions(
        body.modalities,
        body.audio.voice if body.audio is not None else None,
        body.priority,
        body.timeout,
        body.use_audio_in_video,
    )
    _check_audio(body)
    messages, added = conversation(body.messages, body.toolbox())
    running = renamed(service.running(holder, model, messages, _params(body, model), options), shifted(added))
    answer_id = ""
    if body.stream:

        async def items() -> AsyncIterator[bytes]:
            async with running as stream:
                writer = _StreamWriter(f"chatcmpl-{stream.request_id.removeprefix('req-')}", body)
                async for item in stream:
                    for data in writer.events(item):
                        yield event(data)
                yield event("[DONE]")

        return await stream_response(items())
    async with running as stream:
        answer_id = f"chatcmpl-{stream.request_id.removeprefix('req-')}"
        chunks = await collect(stream, request)
    final = chunks[-1].final
    if final is None or final.error is not None:
        raise final.error if final is not None and final.error is not None else InvalidRequestError("no answer came")
    return JSONResponse(_whole(answer_id, body, final))


def _params(body: ChatRequest, model: ServedModel) -> Mapping[str, StageParams]:
    """What the request sets, each on the first stage that takes it."""
    chosen: dict[str, StageParams] = {}
    for name, params in (("sampling", body.sampling()), ("drawing", body.drawing)):
        if params is None:
            continue
        stage = model.stage_taking(SamplingParams if name == "sampling" else DiffusionParams)
        if stage is None:
            what = "draws and samples no text" if name == "sampling" else "does not draw"
            raise InvalidRequestError(f"this model {what}; leave these parameters out", param=name)
        chosen[stage] = params
    return chosen


def _check_audio(body: ChatRequest) -> None:
    wanted = "audio" in (body.modalities or ())
    if body.audio is not None and not wanted:
        raise InvalidRequestError("is for spoken answers; add audio to modalities", param="audio")
    if body.stream and body.audio is not None and body.audio.format not in ("pcm16", "wav"):
        raise InvalidRequestError("a stream carries pcm16; ask for that", param="audio.format")


# ------------------------------------------------------------------------------------------------------ whole


def _whole(answer_id: str, body: ChatRequest, final: OmniRequestOutput) -> dict[str, Any]:
    answers = final.outputs or [CompletionOutput(finish_reason=final.finish_reason)]
    choices = [_choice(answer, answer_id, body, final) for answer in answers]
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
        "choices": choices,
        "usage": usage_of(final.usage),
        "system_fingerprint": None,
    }


def _choice(answer: CompletionOutput, answer_id: str, body: ChatRequest, final: OmniRequestOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if final.audio is not None:
        format = body.audio.format if body.audio is not None else "wav"
        message["audio"] = {
            "id": f"audio-{answer_id.removeprefix('chatcmpl-')}",
            "data": base64.b64encode(encode_audio(final.audio, format)).decode(),
            "expires_at": int(time.time()),
            "transcript": answer.text,
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
    return {
        "index": answer.index,
        "message": message,
        "logprobs": {"content": [_logprob(entry) for entry in answer.logprobs]} if body.logprobs else None,
        "finish_reason": finish,
    }


def finish_of(reason: FinishReason | None) -> str | None:
    return None if reason is None else _FINISH.get(reason, "stop")


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, with what we count besides."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": {
            "audio_seconds": usage.audio_seconds,
            "images": usage.images,
            "video_seconds": usage.video_seconds,
            "denoising_steps": usage.steps,
            "stage_tokens": usage.stage_tokens,
        },
    }


def _logprob(entry: TokenLogprobs) -> dict[str, Any]:
    def one(token: Any) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}

    return {**one(entry.chosen), "top_logprobs": [one(token) for token in entry.top]}


def _data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# ----------------------------------------------------------------------------------------------------- stream


class _StreamWriter:
    """The events of one streamed answer. Every choice begins with its role and ends with its reason."""

    def __init__(self, answer_id: str, body: ChatRequest) -> None:
        self._id = answer_id
        self._body = body
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._toolbox = body.toolbox()
        self._readers: dict[int, CallReader] = {}

    def events(self, item: OutputChunk) -> list[dict[str, Any]]:
        if item.final is not None:
            return self._last(item.final)
        made: list[dict[str, Any]] = []
        for delta in self._deltas(item):
            logprobs = None
            # Where one piece of text makes several deltas, the first carries its tokens.
            if self._body.logprobs and item.logprobs and not made:
                logprobs = {"content": [_logprob(entry) for entry in item.logprobs]}
            made += self._begin(item.index)
            made.append(self._event([self._choice(item.index, delta, logprobs=logprobs)]))
        return made

    def _deltas(self, item: OutputChunk) -> list[dict[str, Any]]:
        if item.text and self._toolbox is not None:
            reader = self._readers.setdefault(item.index, CallReader(self._toolbox))
            # Text that is held back until a call is whole leaves its logprobs behind otherwise.
            return reader.push(item.text) or ([{}] if self._body.logprobs else [])
        delta = self._delta(item)
        return [delta] if delta else []

    def _delta(self, item: OutputChunk) -> dict[str, Any]:
        if item.text:
            speaks = "audio" in (self._body.modalities or ())
            return {"audio": {"transcript": item.text}} if speaks else {"content": item.text}
        if item.audio is not None:
            samples = np.asarray(item.audio.samples, dtype=np.float32)
            return {"audio": {"id": f"audio-{self._id}", "data": base64.b64encode(pcm16(samples)).decode()}}
        if item.image is not None:
            from omnistage.media.image_output import ImageOutput

            url = _data_url(ImageOutput(item.image.pixels).to_bytes("png"))
            return {"images": [{"type": "image_url", "image_url": {"url": url}, "preview": item.image.preview}]}
        if item.progress is not None:
            return {"progress": {"step": item.progress.step, "steps": item.progress.steps}}
        return {}

    def _begin(self, index: int) -> list[dict[str, Any]]:
        if index in self._begun:
            return []
        self._begun.add(index)
        return [self._event([self._choice(index, {"role": "assistant", "content": ""})])]

    def _last(self, final: OmniRequestOutput) -> list[dict[str, Any]]:
        if final.error is not None:
            from omnistage.server.errors import body_of

            return [body_of(final.error)]
        made: list[dict[str, Any]] = []
        for answer in final.outputs or [CompletionOutput(finish_reason=final.finish_reason)]:
            made += self._begin(answer.index)
            finish = finish_of(answer.finish_reason)
            if (reader := self._readers.get(answer.index)) is not None:
                made += [self._event([self._choice(answer.index, delta)]) for delta in reader.end()]
                finish = "tool_calls" if reader.calls and finish == "stop" else finish
            made.append(self._event([self._choice(answer.index, {}, finish=finish)]))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            made.append({**self._event([]), "usage": usage_of(final.usage)})
        return made

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    @staticmethod
    def _choice(
        index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
