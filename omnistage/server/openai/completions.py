"""`/v1/completions`: plain prompts continued, without a chat template."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError
from omnistage.core.params import SamplingParams, StageParams
from omnistage.core.types import Modality, OmniTokensPrompt, TokenLogprobs
from omnistage.omni import OutputStream
from omnistage.pipeline.intake import Prompt, RequestOptions
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk, Usage
from omnistage.server.access.keys import Holder, HolderUsage
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import body_of
from omnistage.server.http.openapi import answers
from omnistage.server.http.sse import event, stream_response
from omnistage.server.openai.chat.response import finish_of, usage_of
from omnistage.server.openai.request_models import CompletionRequest
from omnistage.server.openai.response_models import Completion
from omnistage.server.openai.tools import renamed
from omnistage.server.service import ServedModel, Service

router = APIRouter()
_MOST_PROMPTS = 64


@router.post("/v1/completions", response_model=None, responses=answers(Completion, events=Completion))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service, holder = service_of(request), caller(request)
    model = service.model(body.model)
    prompts = _prompts(body)
    running = _running(service, holder, model, prompts, body)
    if body.stream:

        async def items() -> AsyncIterator[bytes]:
            async with running as streams, aclosing(_events(body, streams, _answers_each(body, model))) as events:
                async for data in events:
                    yield event(data)
                yield event("[DONE]")

        return await stream_response(items())
    finals: dict[int, OmniRequestOutput] = {}
    async with running as streams, aclosing(_merged(streams)) as items_of_all:
        async for place, item in items_of_all:
            if item.final is not None:
                if item.final.error is not None:
                    raise item.final.error
                finals[place] = item.final
    return JSONResponse(_whole(_answer_id(streams), body, [finals[place] for place in sorted(finals)]))


@asynccontextmanager
async def _running(
    service: Service, holder: Holder, model: ServedModel, prompts: Sequence[Prompt], body: CompletionRequest
) -> AsyncIterator[list[OutputStream]]:
    """All prompts at once. To the key they are the one request that they came in, whatever their number."""
    params = _params(body, model)
    options = RequestOptions(["text"], None, body.priority, body.timeout)
    uncounted = replace(holder, rate=None, max_concurrent=None, use=HolderUsage())
    async with AsyncExitStack() as stack:
        streams = []
        for place, prompt in enumerate(prompts):
            one = service.run_request(uncounted if place else holder, model, prompt, params, options)
            name = f"prompt[{place}]" if len(prompts) > 1 else "prompt"
            streams.append(await stack.enter_async_context(renamed(one, {"prompt": name, "prompt_token_ids": name})))
        yield streams


async def _merged(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, OutputChunk]]:
    """The items of all streams as they come, each with the place of its stream."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    waiting = {asyncio.ensure_future(_next(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ready, key=waiting.__getitem__):
                place = waiting.pop(task)
                if (came := task.result()) is not None:
                    waiting[asyncio.ensure_future(_next(streams[place]))] = place
                    yield place, came
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: OutputStream) -> OutputChunk | None:
    return await anext(stream, None)


def _news(item: OutputChunk) -> list[CompletionOutput]:
    """What an item adds to its answers: a piece of one, or at last how each ended."""
    if item.final is not None:
        return [CompletionOutput(answer.index, finish_reason=answer.finish_reason) for answer in item.final.outputs]
    if not item.text and not item.logprobs:
        return []
    return [CompletionOutput(item.index, item.text, logprobs=list(item.logprobs))]


def _answer_id(streams: Sequence[OutputStream]) -> str:
    return f"cmpl-{streams[0].request_id.removeprefix('req-')}"


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
    stage = model.stage_for_params(SamplingParams)
    if stage is None or "text" not in model.modalities:
        raise InvalidRequestError("this model gives no text; use the images or videos endpoint", param="model")
    return {} if sampling is None else {stage: sampling}


def _answers_each(body: CompletionRequest, model: ServedModel) -> int:
    """How many answers each prompt gets: as the request says, or else the model's own configuration."""
    stage = model.stage_for_params(SamplingParams)
    own = model.omni.orchestrator.default_params(stage) if stage is not None else None
    return body.n or (own.n if isinstance(own, SamplingParams) else 1)


def _head(answer_id: str, body: CompletionRequest, created: int) -> dict[str, Any]:
    return {"id": answer_id, "object": "text_completion", "created": created, "model": body.model}


def _choice(index: int, answer: CompletionOutput, offset: int = 0) -> dict[str, Any]:
    return {
        "index": index,
        "text": answer.text,
        "logprobs": _logprobs(answer.logprobs, offset) if answer.logprobs else None,
        "finish_reason": finish_of(answer.finish_reason),
    }


def _logprobs(entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.chosen.text)
    return {
        "tokens": [entry.chosen.text for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": [{token.text: token.logprob for token in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _total(usages: Iterable[Usage]) -> Usage:
    """All that the prompts of one request took; they are of text, and so are their answers."""
    total, stages, media = Usage(), Counter[str](), Counter[Modality]()
    for usage in usages:
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        total.cached_tokens += usage.cached_tokens
        stages.update(usage.stage_tokens)
        media.update(usage.prompt_media)
    return replace(total, stage_tokens=dict(stages), prompt_media=dict(media))


def _whole(answer_id: str, body: CompletionRequest, finals: Sequence[OmniRequestOutput]) -> dict[str, Any]:
    found = [answer for final in finals for answer in final.outputs]
    return {
        **_head(answer_id, body, int(time.time())),
        "choices": [_choice(index, answer) for index, answer in enumerate(found)],
        "usage": usage_of(_total(final.usage for final in finals)),
    }


async def _events(
    body: CompletionRequest, streams: Sequence[OutputStream], answers_each: int
) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream. Answer i of the n to prompt p is choice p * n + i; each goes on at its own offset."""
    head = _head(_answer_id(streams), body, int(time.time()))
    offsets: Counter[int] = Counter()
    usages: list[Usage] = []
    begun = False
    try:
        async with aclosing(_merged(streams)) as items:
            async for place, item in items:
                final = item.final
                if final is not None and final.error is not None:
                    raise final.error
                for answer in _news(item):
                    begun = True
                    index = place * answers_each + answer.index
                    yield {**head, "choices": [_choice(index, answer, offsets[index])]}
                    offsets[index] += sum(len(entry.chosen.text) for entry in answer.logprobs)
                usages += [final.usage] if final is not None else []
    except OmniError as error:
        if not begun:  # it can still have its status
            raise
        yield body_of(error)
        return
    if body.stream_options is not None and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage_of(_total(usages))}
