"""`/v1/completions`: plain prompts continued, without a chat template."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, NotRequired

from fastapi import Request, Response
from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError
from omnistage.core.params import SamplingParams, StageParams, StructuredOutput
from omnistage.core.types import Modality, OmniTokensPrompt, TokenLogprobs
from omnistage.pipeline.intake import Prompt, RequestOptions
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk, Usage
from omnistage.pipeline.stream import OutputStream
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import ErrorBody, body_of
from omnistage.server.http.json_body import run_json
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.routing import api_router, json_response
from omnistage.server.http.sse import DONE_EVENT, LastPiece, event, stream_response
from omnistage.server.openai.base import only
from omnistage.server.openai.chat.request import FORMAT_PATHS, ResponseFormat
from omnistage.server.openai.chat.response import tokens_by_id
from omnistage.server.openai.request_models import SamplingFields, StreamOptions
from omnistage.server.openai.response_models import Finish, TokenUsage, finish_of, usage_of
from omnistage.server.openai.running import RunningUsage, text_stage, with_model_name
from omnistage.server.openai.tokenize import decoded, text_tokens
from omnistage.server.service import ServedModel, Service

router = api_router()
_MAX_PROMPTS = 64


_Prompt = str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...]


def _parse_prompt(value: object) -> _Prompt:
    """By the types of a list's items: pydantic would try every kind of prompt on every one of many thousand items."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))
        if kinds != {int} and len(value) > _MAX_PROMPTS:
            raise LimitExceededError(f"{len(value)} prompts exceed the limit of {_MAX_PROMPTS}", param="prompt")
        if kinds <= {list, tuple} and all(set(map(type, ids)) <= {int} for ids in value):
            return tuple(map(tuple, value))
        if kinds in ({int}, {str}):
            return tuple(value)
    raise ValueError("must be a text, token ids, or a list of either")


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    derived: ClassVar[frozenset[str]] = frozenset({"structured"})

    prompt: Annotated[_Prompt, PlainValidator(_parse_prompt), WithJsonSchema(TypeAdapter(_Prompt).json_schema())]
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = Field(default=None, description="Begin each text with its prompt.")
    response_format: ResponseFormat | None = Field(default=None, description="As with vLLM, as in a chat.")
    suffix: Annotated[str | None, only("", why="text is not filled in before a suffix; leave it out")] = None
    best_of: int | None = Field(default=None, description="Must be n: every answer is returned.")
    # Of a chat the template writes them, of a text the tokenizer
    add_special_tokens: Annotated[bool | None, only(True, why="is the model's own choice; leave it out")] = None
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        description="Keep the last tokens of each prompt, this many; -1: as many as fit beside max_tokens.",
    )
    prompt_embeds: Annotated[None, only(why="embeddings as a prompt are for the Python API; send text")] = None

    def check(self) -> None:
        """Raise `InvalidRequestError` where fields do not fit together."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"must be n, which is {self.n or 1}: more candidates than answers are not supported; leave it out",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "log probabilities of the prompt are not computed; leave echo or logprobs out", param="echo"
            )
        if (constraint := self.constraint_field) is not None and self.response_format is not None:
            raise InvalidRequestError("cannot be combined with response_format; send one of them", param=constraint)

    def structured(self) -> StructuredOutput | None:
        if self.constraint_field is not None:
            return self.constraint()
        return self.response_format.structured() if self.response_format is not None else None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Also each event of a streamed completion; the last event is the text `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[TokenUsage]


@router.post("/v1/completions", response_model=None, responses=response_docs(Completion, events=Completion))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    service, holder = service_of(request), caller(request)
    model = service.model(body.model)
    body = with_model_name(body, model)
    body.check()
    body.note_ignored()
    prompts = _prompts(body)
    if body.truncate_prompt_tokens is not None:
        count = _kept_tokens(body.truncate_prompt_tokens, body.max_tokens or 1, model)
        prompts = [await _truncated(service, holder, model, prompts, place, count) for place in range(len(prompts))]
    echoes = await _echoes(prompts, model, service.owner_of(holder)) if body.echo else []
    running = _running(service, holder, model, prompts, body)
    if body.stream:

        async def events() -> AsyncGenerator[bytes]:
            each = _choices_each(body, model)
            async with running as streams, aclosing(_events(body, streams, each, echoes)) as chunks:
                async for chunk in chunks:
                    yield event(chunk)
            yield LastPiece(DONE_EVENT)

        return await stream_response(events())
    finals: dict[int, OmniRequestOutput] = {}
    async with running as streams, aclosing(_merged(streams)) as items:
        async for place, item in items:
            if item.final is not None:
                if item.final.error is not None:
                    raise item.final.error
                finals[place] = item.final
    completion = _empty(streams, body)
    outputs = [output for place in sorted(finals) for output in finals[place].outputs]
    for place, echo in enumerate(echoes):
        for output in finals[place].outputs:
            output.text = echo + output.text
    completion["usage"] = usage_of(_total(final.usage for final in finals.values()))

    def build() -> Completion:
        return {**completion, "choices": [_choice(body, *each) for each in enumerate(outputs)]}

    return await json_response(build, small=body.logprobs is None, owner=service.owner_of(holder))


@asynccontextmanager
async def _running(
    service: Service, holder: Holder, model: ServedModel, prompts: Sequence[Prompt], body: CompletionRequest
) -> AsyncIterator[list[OutputStream]]:
    """All prompts at once. They are one request at the key's rate, and as many running ones as they have answers."""
    sampling = body.sampling_params("max_tokens", structured=body.structured())
    paths = body.constraint_paths() or FORMAT_PATHS
    stage = text_stage(model)
    params: dict[str, StageParams] = {stage: sampling} if sampling is not None else {}
    options = RequestOptions(["text"], None, body.priority, body.timeout)
    async with AsyncExitStack() as stack:
        streams = []
        for place, prompt in enumerate(prompts):
            name = f"prompt[{place}]" if len(prompts) > 1 else "prompt"
            names = {"prompt": name, "prompt_token_ids": name, "prompts": "prompt", **paths}
            num_prompts = 0 if place else len(prompts)  # the first counts for all
            one = service.run_request(holder, model, prompt, params, options, prompts=num_prompts, rename=names)
            streams.append(await stack.enter_async_context(one))
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
                if (chunk := task.result()) is not None:
                    waiting[asyncio.ensure_future(_next(streams[place]))] = place
                    yield place, chunk
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: OutputStream) -> OutputChunk | None:
    return await anext(stream, None)


def _prompts(body: CompletionRequest) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("is empty; send a text", param="prompt")
    if isinstance(prompt[0], int):
        return [OmniTokensPrompt(tuple(prompt))]
    return [OmniTokensPrompt(one) if isinstance(one, tuple) else one for one in prompt]


def _kept_tokens(count: int, answer: int, model: ServedModel) -> int | None:
    """To how many tokens prompts are cut where the request says `count`; None: to none. -1 leaves room for `answer`."""
    limit = model.omni.orchestrator.stages[text_stage(model)].max_model_len
    if count == 0 or (limit is not None and count > limit):
        raise InvalidRequestError(
            f"must be -1 or between 1 and {limit}, which the model may read", param="truncate_prompt_tokens"
        )
    if count > 0 or limit is None:
        return count if count > 0 else None
    if answer >= limit:
        raise InvalidRequestError(
            f"leaves no room for a prompt, since the model holds {limit} tokens; send a smaller one", param="max_tokens"
        )
    return limit - answer


async def _truncated(
    service: Service, holder: Holder, model: ServedModel, prompts: Sequence[Prompt], place: int, count: int | None
) -> Prompt:
    """The last `count` tokens of a prompt, which may be longer than the model holds."""
    prompt = prompts[place]
    if isinstance(prompt, OmniTokensPrompt):
        ids = prompt.prompt_token_ids
    elif isinstance(prompt, str):
        name = f"prompt[{place}]" if len(prompts) > 1 else "prompt"
        ids = tuple(await text_tokens(service, holder, model, prompt, {"prompt": name}))
    else:
        raise InvalidRequestError("is for a text or tokens; leave it out", param="truncate_prompt_tokens")
    return OmniTokensPrompt(ids if count is None else ids[-count:])


async def _echoes(prompts: Sequence[Prompt], model: ServedModel, owner: str | None) -> list[str]:
    """The text of each prompt."""
    processor = model.omni.processor

    def texts() -> list[str]:
        return [prompt if isinstance(prompt, str) else decoded(processor, prompt) for prompt in prompts]

    return await run_json(texts, small=all(isinstance(prompt, str) for prompt in prompts), owner=owner)


def _choices_each(body: CompletionRequest, model: ServedModel) -> int:
    """The number of choices for each prompt: as the request says, or else the model's configuration."""
    default = model.omni.orchestrator.default_params[text_stage(model)]
    return body.n or (default.n if isinstance(default, SamplingParams) else 1)


def _empty(streams: Sequence[OutputStream], body: CompletionRequest) -> Completion:
    completion_id = f"cmpl-{streams[0].request_id.removeprefix('req-')}"
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or "",
        "choices": [],
    }


def _choice(body: CompletionRequest, index: int, output: CompletionOutput, offset: int = 0) -> CompletionChoice:
    choice: CompletionChoice = {
        "index": index,
        "text": output.text,
        "logprobs": _logprobs(output.logprobs, offset, body) if output.logprobs else None,
        "finish_reason": finish_of(output.finish_reason),
        "stop_reason": output.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = output.token_ids
    return choice


def _logprobs(entries: Sequence[TokenLogprobs], offset: int, body: CompletionRequest) -> CompletionLogprobs:
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.chosen.text)
    shown = tokens_by_id(entries) if body.return_tokens_as_token_ids else entries
    return {
        "tokens": [entry.chosen.text for entry in shown],
        "token_logprobs": [entry.chosen.logprob for entry in shown],
        "top_logprobs": [{token.text: token.logprob for token in entry.top} for entry in shown],
        "text_offset": offsets,
    }


def _total(usages: Iterable[Usage]) -> Usage:
    """The sum over the prompts of one request; prompts and completions are text."""
    total, stages, media = Usage(), Counter[str](), Counter[Modality]()
    for usage in usages:
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        total.cached_tokens += usage.cached_tokens
        stages.update(usage.stage_tokens)
        media.update(usage.prompt_media)
    return replace(total, stage_tokens=dict(stages), prompt_media=dict(media))


def _new_outputs(item: OutputChunk, *, with_ids: bool) -> list[CompletionOutput]:
    """What an item adds to the completions: a piece of one, or at last how each ended."""
    if item.final is not None:
        return [
            CompletionOutput(output.index, finish_reason=output.finish_reason, stop_reason=output.stop_reason)
            for output in item.final.outputs
        ]
    if not item.text and not item.logprobs and not (with_ids and item.token_ids):
        return []
    return [CompletionOutput(item.index, item.text, list(item.token_ids), list(item.logprobs))]


async def _events(
    body: CompletionRequest, streams: Sequence[OutputStream], choices_each: int, echoes: Sequence[str] = ()
) -> AsyncGenerator[Completion | ErrorBody]:
    """The events of a stream. Completion i of the n for prompt p is choice p * n + i, with offsets of its own."""
    head = _empty(streams, body)
    offsets: Counter[int] = Counter()
    usages: list[Usage] = []
    started = False
    options = body.stream_options or StreamOptions()
    so_far = RunningUsage(streams) if options.continuous_usage_stats else None
    try:
        async with aclosing(_merged(streams)) as items:
            async for place, item in items:
                final = item.final
                if final is not None and final.error is not None:
                    raise final.error
                for output in _new_outputs(item, with_ids=bool(body.return_token_ids)):
                    index = place * choices_each + output.index
                    if echoes and not started:
                        for i, echo in enumerate(one for one in echoes for _ in range(choices_each)):
                            yield {**head, "choices": [_choice(body, i, CompletionOutput(text=echo))]}
                    started = True
                    chunk: Completion = {**head, "choices": [_choice(body, index, output, offsets[index])]}
                    if so_far is not None:
                        chunk["usage"] = so_far.add(len(output.token_ids))
                    yield chunk
                    offsets[index] += sum(len(entry.chosen.text) for entry in output.logprobs)
                usages += [final.usage] if final is not None else []
    except OmniError as error:
        if not started:  # it can still have its HTTP status
            raise
        yield body_of(error)
        return
    if options.include_usage:
        yield {**head, "usage": usage_of(_total(usages))}
