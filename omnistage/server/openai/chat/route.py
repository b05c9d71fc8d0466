"""`/v1/chat/completions`: text, speech and pictures, whole or as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fastapi import Request, Response

from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError
from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.routing import api_router, json_response
from omnistage.server.http.sse import DONE_EVENT, stream_response
from omnistage.server.openai.chat.request import NO_VIDEOS, ChatRequest
from omnistage.server.openai.chat.response import ChatChunk, ChatCompletion, StreamWriter, completion
from omnistage.server.openai.extensions import thinking_of
from omnistage.server.openai.request_models import voice_name
from omnistage.server.openai.running import events_of, final_output, require_enforceable, with_model_name
from omnistage.server.service import ServedModel

router = api_router()


@router.post("/v1/chat/completions", response_model=None, responses=response_docs(ChatCompletion, events=ChatChunk))
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Continue a conversation."""
    service, holder = service_of(request), caller(request)
    model = service.model(body.model)
    if body.model is None:
        body = with_model_name(body, model)
    body.check()
    toolbox = body.toolbox
    options = RequestOptions(
        _modalities(body, model),
        voice_name(body.audio.voice) if body.audio is not None else None,
        body.priority,
        body.timeout,
        body.use_audio_in_video,
        toolbox.specs() if toolbox is not None else (),
        thinking_of(body.reasoning_effort, body.chat_template_kwargs),
        body.template(model),
    )
    if toolbox is not None:
        await require_enforceable(body.exact_schemas(), service.owner_of(holder))
    messages = service.spoken_answers.recalled(holder.name, body.messages)
    params, paths = _params(body, model), body.error_paths()
    running = service.run_request(holder, model, messages, params, options, rename=paths)
    keep = partial(service.spoken_answers.keep, holder.name)
    if not body.stream:
        final = await final_output(running)
        small = not (body.logprobs or final.audio or final.images)
        return await json_response(
            lambda: completion(final.request_id, body, final, keep), small=small, owner=service.owner_of(holder)
        )

    return await stream_response(
        events_of(running, lambda stream: StreamWriter(stream, body, keep).write, last=DONE_EVENT)
    )


def _modalities(body: ChatRequest, model: ServedModel) -> list[str] | None:
    """What to request of the model: speech comes with its transcript, and a model without text draws without it."""
    if body.modalities is None:
        if "text" not in model.omni.modalities and "video" in model.omni.modalities:
            raise UnsupportedModalityError(NO_VIDEOS, param="model")
        return None
    modalities: list[str] = list(body.modalities)
    if "audio" in modalities and "text" not in modalities and "text" in model.omni.modalities:
        return ["text", *modalities]
    if "text" in modalities and len(modalities) > 1 and "text" not in model.omni.modalities:
        return [modality for modality in modalities if modality != "text"]
    return modalities


def _params(body: ChatRequest, model: ServedModel) -> Mapping[str, StageParams]:
    """What the request sets, each on the first stage that takes it; the seed on all."""
    params: dict[str, StageParams] = {}
    sampling = body.sampling()
    if sampling is not None:
        stage = model.stage_for_params(SamplingParams)
        if stage is None:
            of_text = {*SamplingParams.model_fields, "max_completion_tokens", "response_format", "tools"}
            values = body.model_dump(include=of_text, exclude_none=True)
            raise InvalidRequestError(
                "is not supported by a model without text output; leave it out", param=next(iter(values))
            )
        params[stage] = sampling
    if body.drawing is not None:
        stage = model.stage_for_params(DiffusionParams)
        if stage is None:
            raise InvalidRequestError("is not supported by a model without image output; leave it out", param="drawing")
        params[stage] = body.drawing
    if body.tools and "text" not in model.omni.modalities:
        raise InvalidRequestError("this model has no text output and calls no tools; leave them out", param="tools")
    return model.with_seed(body.seed, params)
