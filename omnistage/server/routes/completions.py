"""`/v1/completions`: plain prompts continued, without a chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from omnistage.errors import InvalidRequestError, LimitExceededError
from omnistage.params import SamplingParams, StageParams
from omnistage.pipeline.intake import Prompt, RequestOptions
from omnistage.server.answers import Completion
from omnistage.server.context import caller, service_of
from omnistage.server.documented import answers
from omnistage.server.errors import body_of
from omnistage.server.routes.chat import finish_of, usage_of
from omnistage.server.schemas import CompletionRequest
from omnistage.server.service import ServedModel, collect
from omnistage.server.sse import event, stream_response
from omnistage.types import CompletionOutput, OmniRequestOutput, OmniTokensPrompt, OutputChunk, TokenLogprobs, Usage

router = APIRouter()
_MOST_PROMPTS = 64


@router.post("/v1/completions", response_model=None, responses=answers(Completion, events=Completion))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service = service_of(request)
    model = service.model(body.model)
    holder = caller(request)
    prompts = _prompts(body)
    params = _params(body, model)
    options = RequestOptions(["text"], None, body.priority, body.timeout)
    if body.stream:
        if len(prompts) > 1:
            raise InvalidRequestError("a stream takes one prompt; send the others by themselves", param="prompt")

        async def items() -> AsyncIterator[bytes]:
            async with service.running(holder, model, prompts[0], params, options) as stream:
                answer_id = _answer_id(stream.request_id)
                async for item in stream:
                    for data in _events(answer_id, body, item):
                        yield event(data)
                yield event("[DONE]")

        return await stream_response(items())
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(service.running(holder, model, prompt, params, options))
            for prompt in prompts
        ]
        answer_id = _answer_id(streams[0].request_id)
        # Only the first watches for the client: when it leaves, the stack aborts them all.
        others = [asyncio.ensure_future(_final(stream)) for stream in streams[1:]]
        try:
            first = (await collect(streams[0], request))[-1].final
            finals = [first, *(await asyncio.gather(*others))]
        finally:
            for task in others:
                task.cancel()
    done = [final for final in finals if final is not None]
    for final in done:
        if final.error is not None:
            raise final.error
    return JSONResponse(_whole(answer_id, body, done))


async def _final(stream: AsyncIterator[OutputChunk]) -> OmniRequestOutput | None:
    last = None
    async for item in stream:
        last = item.final
    return last


def _answer_id(request_id: str) -> str:
    return f"cmpl-{request_id.removeprefix('req-')}"


def _prompts(body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("is empty; give a text", param="prompt")
    if len(given) > _MOST_PROMPTS and not isinstance(given[0], int):
        raise LimitExceededError(f"{len(given)} prompts exceed the limit of {_MOST_PROMPTS}", param="prompt")
    if isinstance(given[0], int):
        return [OmniTokensPrompt(tuple(given))]
    return [OmniTokensPrompt(one) if isinstance(one, tuple) else one for one in given]


def _params(body: CompletionRequest, model: ServedModel) -> dict[str, StageParams]:
    sampling = body.sampling()
    stage = model.stage_taking(SamplingParams)
    if stage is None or "text" not in model.modalities:
        raise InvalidRequestError("this model gives no text; use the images endpoint", param="model")
    return {} if sampling is None else {stage: sampling}


def _whole(answer_id: str, body: CompletionRequest, finals: Sequence[OmniRequestOutput]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    total = Usage()
    for final in finals:
        total.prompt_tokens += final.usage.prompt_tokens
        total.completion_tokens += final.usage.completion_tokens
        choices += [_choice(len(choices) + i, answer) for i, answer in enumerate(final.outputs)]
    return {**_head(answer_id, body), "choices": choices, "usage": usage_of(total)}


def _head(answer_id: str, body: CompletionRequest) -> dict[str, Any]:
    return {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": body.model}


def _choice(index: int, answer: CompletionOutput) -> dict[str, Any]:
    return {
        "index": index,
        "text": answer.text,
        "logprobs": _logprobs(answer.logprobs) if answer.logprobs else None,
        "finish_reason": finish_of(answer.finish_reason),
    }


def _logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    offsets, position = [], 0
    for entry in entries:
        offsets.append(position)
        position += len(entry.chosen.text)
    return {
        "tokens": [entry.chosen.text for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": [{token.text: token.logprob for token in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _events(answer_id: str, body: CompletionRequest, item: OutputChunk) -> list[dict[str, Any]]:
    head = _head(answer_id, body)
    if item.final is None:
        if not item.text and not item.logprobs:
            return []
        answer = CompletionOutput(item.index, item.text, list(item.token_ids), list(item.logprobs))
        return [{**head, "choices": [_choice(item.index, answer)]}]
    if item.final.error is not None:
        return [body_of(item.final.error)]
    ends = [
        {"index": answer.index, "text": "", "logprobs": None, "finish_reason": finish_of(answer.finish_reason)}
        for answer in item.final.outputs
    ]
    made: list[dict[str, Any]] = [{**head, "choices": [end]} for end in ends]
    if body.stream_options is not None and body.stream_options.include_usage:
        made.append({**head, "choices": [], "usage": usage_of(item.final.usage)})
    return made
