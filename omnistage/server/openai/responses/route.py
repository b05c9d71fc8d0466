"""`/v1/responses`: text, calls of tools and speech, whole or as OpenAI's typed events. Nothing is stored."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from omnistage.core.errors import InvalidRequestError, OmniError
from omnistage.core.params import SamplingParams, StageParams
from omnistage.core.types import FinishReason
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk, Usage
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import body_of
from omnistage.server.http.openapi import answers
from omnistage.server.http.sse import event, stream_response
from omnistage.server.openai.audio.encode import encode_audio, pcm16
from omnistage.server.openai.chat.response import obfuscated, spoken_tokens
from omnistage.server.openai.response_models import ResponseEvent, ResponseObject
from omnistage.server.openai.responses.request import ResponsesRequest
from omnistage.server.openai.responses.tools import ToolOutput, whole_output
from omnistage.server.openai.tools import as_known, renamed
from omnistage.server.service import ServedModel, final_output

router = APIRouter()
_CUT_SHORT = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.DEADLINE: "timeout",
    FinishReason.CONTENT_FILTER: "content_filter",
}


@router.post("/v1/responses", response_model=None, responses=answers(ResponseObject, events=ResponseEvent))
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a text or a conversation."""
    service = service_of(request)
    holder = caller(request)
    model = service.model(body.model)
    toolbox = body.toolbox()
    if toolbox is not None and "audio" in (body.modalities or ()):
        raise InvalidRequestError("a call would be spoken aloud; leave audio out of modalities", param="tools")
    options = RequestOptions(
        body.modalities,
        body.audio.voice_name if body.audio is not None else None,
        body.priority,
        body.timeout,
        tools=toolbox.specs() if toolbox is not None else (),
    )
    running = renamed(service.run_request(holder, model, body.messages(), _params(body, model), options), body.path)
    if body.stream:

        async def items() -> AsyncIterator[bytes]:
            async with running as stream:
                writer = Writer(Answer(stream.request_id, body))
                async for item in stream:
                    for data in writer.events(item):
                        yield event(data, data["type"])

        return await stream_response(items())
    async with running as stream:
        answer = Answer(stream.request_id, body)
        final = await final_output(stream)
        if final.error is not None:
            raise final.error
    return JSONResponse(answer.ended(final))


def _params(body: ResponsesRequest, model: ServedModel) -> dict[str, StageParams]:
    stage = model.stage_for_params(SamplingParams)
    if stage is None or "text" not in model.modalities:
        raise InvalidRequestError("this model gives no text; use the images or videos endpoint", param="model")
    sampling = body.sampling()
    return model.with_seed(body.seed, {} if sampling is None else {stage: sampling})


class Answer:
    """The response object of one request, as it is when it begins and when it has ended."""

    def __init__(self, request_id: str, body: ResponsesRequest) -> None:
        own = request_id.removeprefix("req-")
        self.id, self.item_id = f"resp_{own}", f"msg_{own}"
        self.body = body
        self.toolbox = body.toolbox()
        self._created = int(time.time())

    def state(self, status: str, **more: object) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self.body.told(),
            **more,
        }

    def ended(self, final: OmniRequestOutput, output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """With `output`, the items that a stream has sent already."""
        reason = None if final.finish_reason is None else _CUT_SHORT.get(final.finish_reason)
        status = "incomplete" if reason is not None else "completed"
        if output is None:
            output = [self.item(status, self.parts(final))]
            if self.toolbox is not None:
                output = whole_output(self.item_id.removeprefix("msg_"), self.toolbox, final.text, status)
        return self.state(
            status,
            incomplete_details=None if reason is None else {"reason": reason},
            output=output,
            usage=_usage(final.usage),
        )

    def failed(self, error: OmniError) -> dict[str, Any]:
        told = body_of(as_known(error, self.body.path))["error"]
        return self.state("failed", error={"code": told["code"], "message": told["message"]})

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}

    def parts(self, final: OmniRequestOutput) -> list[dict[str, Any]]:
        made = [text_part(final.text)]
        if final.audio is not None:
            # A stream has sent pcm16 already; its last event says the same again, for those who read only that.
            format = "pcm16" if self.body.stream else (self.body.audio.format if self.body.audio else "wav")
            data = base64.b64encode(encode_audio(final.audio, format)).decode()
            made.append({"type": "output_audio", "data": data, "transcript": final.text})
        return made


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    """As a chat counts: the tokens of speech are tokens of the output."""
    spoken = spoken_tokens(usage)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens + spoken,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "text_tokens": usage.completion_tokens,
            "audio_tokens": spoken,
            "audio_seconds": usage.audio_seconds,
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens + spoken,
    }


class Writer:
    """The typed events of one streamed answer, numbered in their order."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._sent = 0
        self._tools: ToolOutput | None = None
        if answer.toolbox is not None:
            self._tools = ToolOutput(answer.item_id.removeprefix("msg_"), answer.toolbox, self._event)

    def _begin(self) -> list[dict[str, Any]]:
        response = self._answer.state("in_progress")
        begun = [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]
        if self._tools is not None:  # what the first item is, is not known yet
            return begun
        return [
            *begun,
            self._event("response.output_item.added", output_index=0, item=self._answer.item("in_progress", [])),
            self._part_event("response.content_part.added", 0, part=text_part("")),
        ]

    def events(self, item: OutputChunk) -> list[dict[str, Any]]:
        # Not before the first item: what fails until then is answered with a status.
        return [*([] if self._sent else self._begin()), *self._events(item)]

    def _events(self, item: OutputChunk) -> list[dict[str, Any]]:
        if item.final is not None:
            return self._last(item.final)
        if item.text and self._tools is not None:
            return self._tools.push(item.text)
        if item.text:
            return [self._part_event("response.output_text.delta", 0, delta=item.text, logprobs=[])]
        if item.audio is not None:
            samples = pcm16(np.asarray(item.audio.samples, dtype=np.float32))
            return [self._event("response.audio.delta", delta=base64.b64encode(samples).decode())]
        return []

    def _last(self, final: OmniRequestOutput) -> list[dict[str, Any]]:
        if final.error is not None:
            return [self._event("response.failed", response=self._answer.failed(final.error))]
        if self._tools is not None:
            made = self._tools.end("incomplete" if final.finish_reason in _CUT_SHORT else "completed")
            ended = self._answer.ended(final, self._tools.items)
            return [*made, self._event(f"response.{ended['status']}", response=ended)]
        ended = self._answer.ended(final)
        item = ended["output"][0]
        text, *sound = item["content"]
        made = [
            self._part_event("response.output_text.done", 0, text=text["text"], logprobs=[]),
            self._part_event("response.content_part.done", 0, part=text),
        ]
        for part in sound:
            made += [
                self._event("response.audio.done"),
                self._part_event("response.content_part.added", 1, part={**part, "data": "", "transcript": ""}),
                self._part_event("response.content_part.done", 1, part=part),
            ]
        made.append(self._event("response.output_item.done", output_index=0, item=item))
        made.append(self._event(f"response.{ended['status']}", response=ended))
        return made

    def _part_event(self, kind: str, index: int, **values: object) -> dict[str, Any]:
        return self._event(kind, item_id=self._answer.item_id, output_index=0, content_index=index, **values)

    def _event(self, kind: str, **values: object) -> dict[str, Any]:
        self._sent += 1
        made = {"type": kind, "sequence_number": self._sent - 1, **values}
        return obfuscated(made) if self._answer.body.obfuscates and kind.endswith(".delta") else made
