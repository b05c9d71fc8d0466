"""`/v1/responses`: text, calls of tools and speech, whole or as OpenAI's typed events; and those that were stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import Query, Request, Response
from pydantic_core import to_json
from typing_extensions import TypedDict

from omnistage.core.errors import InvalidRequestError
from omnistage.core.messages import PLAIN_TEMPLATE, TemplateOptions
from omnistage.core.params import StageParams
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import NotFoundError
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.routing import api_router, json_response
from omnistage.server.http.sse import stream_response
from omnistage.server.openai.extensions import template_variables, thinking_of
from omnistage.server.openai.request_models import voice_name
from omnistage.server.openai.responses.request import ResponsesRequest
from omnistage.server.openai.responses.response import ResponseEvent, ResponseObject, ResponseWriter
from omnistage.server.openai.running import (
    events_of,
    final_output,
    require_enforceable,
    text_stage,
    with_model_name,
    writes,
)
from omnistage.server.openai.tokenize import prompt_tokens
from omnistage.server.service import ServedModel, Service

router = api_router()
_Items = tuple[Mapping[str, object], ...]


class PreviousResponseError(InvalidRequestError, code="previous_response_not_found"):
    """The response that a request continues is not stored, or no longer."""


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(TypedDict):
    object: Literal["list"]
    data: list[Mapping[str, object]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


@router.post("/v1/responses", response_model=None, responses=response_docs(ResponseObject, events=ResponseEvent))
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Respond to a text or a conversation."""
    service = service_of(request)
    holder = caller(request)
    model = service.model(body.model)
    body = with_model_name(body, model)
    body.note_ignored()
    history, size = _history(body, service, holder)
    options = _options(body, model)
    await require_enforceable(body.exact_schemas(), service.owner_of(holder))
    params, path = _params(body, model), partial(body.path, history=history)
    running = service.run_request(holder, model, body.messages(history), params, options, rename=path)
    keep = None
    if body.store is not False:
        keep = _keeper(service, holder, (*history, *body.items()), size + len(await request.body()))
    if body.stream:
        return await stream_response(
            events_of(running, lambda stream: writes(ResponseWriter(stream.request_id, body, keep).events, named=True))
        )
    if body.wants_logprobs:  # which tokens are whose is known while they come
        async with running as stream:
            writer = ResponseWriter(stream.request_id, body, keep)
            async for item in stream:
                if item.final is not None and item.final.error is not None:
                    raise item.final.error
                events = writer.events(item)
        return await json_response(lambda: events[-1]["response"], small=False, owner=service.owner_of(holder))
    final = await final_output(running)
    writer = ResponseWriter(final.request_id, body, keep)
    small = not (final.audio or final.images)
    if keep is None:
        return await json_response(lambda: writer.response(final), small=small, owner=service.owner_of(holder))
    response = writer.response(final)  # here: the store is the event loop's
    return await json_response(lambda: response, small=small, owner=service.owner_of(holder))


@router.post("/v1/responses/input_tokens", response_model=None, responses=response_docs(InputTokens))
async def input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """How many tokens the input of such a request has."""
    service, holder = service_of(request), caller(request)
    model = service.model(body.model)
    history, _ = _history(body, service, holder)
    messages, options = body.messages(history), _options(body, model)
    tokens = await prompt_tokens(service, holder, model, messages, options, rename=partial(body.path, history=history))
    count = tokens if isinstance(tokens, int) else len(tokens)
    response: InputTokens = {"object": "response.input_tokens", "input_tokens": count}
    return await json_response(lambda: response, small=True, owner=None)


@router.get("/v1/responses/{response_id}", response_model=None, responses=response_docs(ResponseObject))
async def get_response(response_id: str, request: Request, stream: bool = False) -> Response:
    """A response that was stored, as it was when it ended."""
    if stream:
        raise InvalidRequestError("is for responses that still run, and stored ones have ended", param="stream")
    service, holder = service_of(request), caller(request)
    stored = service.responses.get(holder.name, response_id)
    return await json_response(lambda: stored.response, small=False, owner=service.owner_of(holder))


@router.get("/v1/responses/{response_id}/input_items", response_model=None, responses=response_docs(InputItems))
async def get_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The input of a stored response, with that of the responses before it; by default the last first."""
    service, holder = service_of(request), caller(request)
    stored = service.responses.get(holder.name, response_id)
    items: list[Mapping[str, object]] = [
        {"id": f"item_{i}", "type": "message", **_with_parts(item)}
        for i, item in enumerate(stored.items[: stored.inputs])
    ]
    page = _page(items if order == "asc" else items[::-1], limit, after)
    return await json_response(lambda: page, small=False, owner=service.owner_of(holder))


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> DeletedResponse:
    """Forget a stored response."""
    service_of(request).responses.delete(caller(request).name, response_id)
    return DeletedResponse(id=response_id, object="response", deleted=True)


# ------------------------------------------------------------------------------------------------------ private


def _with_parts(item: Mapping[str, object]) -> Mapping[str, object]:
    """An item as OpenAI shows it: a bare text is a part."""
    text = item.get("content")
    if not isinstance(text, str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": text}]}


def _page(items: Sequence[Mapping[str, object]], limit: int, after: str | None) -> InputItems:
    ids = [str(item["id"]) for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError("item not found; send the last_id of the page before", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page, shown_ids = list(items[start : start + limit]), ids[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": shown_ids[0] if shown_ids else None,
        "last_id": shown_ids[-1] if shown_ids else None,
        "has_more": start + limit < len(items),
    }


def _history(body: ResponsesRequest, service: Service, holder: Holder) -> tuple[_Items, int]:
    """The conversation that the request continues, and its size."""
    if body.previous_response_id is None:
        return (), 0
    try:
        stored = service.responses.get(holder.name, body.previous_response_id)
    except NotFoundError as error:
        raise PreviousResponseError(error.message, param="previous_response_id") from None
    return stored.items, stored.size


def _keeper(service: Service, holder: Holder, inputs: _Items, size: int) -> Callable[[ResponseObject], None]:
    def keep(response: ResponseObject) -> None:
        output = response["output"]
        service.responses.keep(
            holder.name,
            response,
            (*inputs, *map(_without_audio, output)),
            len(inputs),
            size + len(to_json(output)),
            shared=service.keyring.required,
        )

    return keep


def _without_audio(item: Mapping[str, object]) -> Mapping[str, object]:
    """An item of the output as a later input: speech is its text, which stands beside it."""
    parts = item.get("content")
    if item.get("type") != "message" or not isinstance(parts, list):
        return item
    return {**item, "content": [part for part in parts if part["type"] != "output_audio"]}


def _options(body: ResponsesRequest, model: ServedModel) -> RequestOptions:
    toolbox = body.toolbox
    if toolbox is not None and "audio" in (body.modalities or ()):
        raise InvalidRequestError("a call would be spoken; leave audio out of modalities", param="tools")
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = template_variables(model, effort, param="reasoning.effort")
    return RequestOptions(
        body.modalities,
        voice_name(body.audio.voice) if body.audio is not None else None,
        body.priority,
        body.timeout,
        tools=toolbox.specs() if toolbox is not None else (),
        thinking=thinking_of(effort),
        template=TemplateOptions(variables) if variables else PLAIN_TEMPLATE,
    )


def _params(body: ResponsesRequest, model: ServedModel) -> Mapping[str, StageParams]:
    stage = text_stage(model)
    sampling = body.sampling()
    return model.with_seed(body.seed, {} if sampling is None else {stage: sampling})
