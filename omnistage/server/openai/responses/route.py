"""`/v1/responses`: text, calls of tools and speech, whole or as OpenAI's typed events. Nothing is stored."""

from __future__ import annotations

from fastapi import Request, Response

from omnistage.core.errors import InvalidRequestError
from omnistage.core.params import StageParams
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.routing import api_router, json_response
from omnistage.server.http.sse import stream_response
from omnistage.server.openai.base import thinking_of
from omnistage.server.openai.request_models import voice_name
from omnistage.server.openai.responses.request import ResponsesRequest
from omnistage.server.openai.responses.response import ResponseEvent, ResponseObject, ResponseWriter
from omnistage.server.openai.running import events_of, final_output, require_enforceable, text_stage, writes
from omnistage.server.service import ServedModel

router = api_router()


@router.post("/v1/responses", response_model=None, responses=response_docs(ResponseObject, events=ResponseEvent))
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Respond to a text or a conversation."""
    service = service_of(request)
    holder = caller(request)
    model = service.model(body.model)
    toolbox = body.toolbox
    if toolbox is not None and "audio" in (body.modalities or ()):
        raise InvalidRequestError("a call would be spoken; leave audio out of modalities", param="tools")
    options = RequestOptions(
        body.modalities,
        voice_name(body.audio.voice) if body.audio is not None else None,
        body.priority,
        body.timeout,
        tools=toolbox.specs() if toolbox is not None else (),
        thinking=thinking_of(None if body.reasoning is None else body.reasoning.effort, None),
    )
    await require_enforceable(body.exact_schemas(), service.owner_of(holder))
    params = _params(body, model)
    running = service.run_request(holder, model, body.messages(), params, options, rename=body.path)
    if not body.stream:
        final = await final_output(running)
        writer = ResponseWriter(final.request_id, body)
        small = not (final.audio or final.images or any(answer.logprobs for answer in final.outputs))
        return await json_response(lambda: writer.response(final), small=small, owner=service.owner_of(holder))
    return await stream_response(events_of(running, lambda name: writes(ResponseWriter(name, body).events, named=True)))


def _params(body: ResponsesRequest, model: ServedModel) -> dict[str, StageParams]:
    stage = text_stage(model)
    sampling = body.sampling()
    return model.with_seed(body.seed, {} if sampling is None else {stage: sampling})
