"""`/v1/chat/completions`: text, speech and pictures, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError
from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
from omnistage.pipeline.intake import RequestOptions
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.openapi import answers
from omnistage.server.http.sse import event, stream_response
from omnistage.server.openai.chat.request import NO_VIDEOS, ChatRequest
from omnistage.server.openai.chat.response import StreamWriter, finish_of, usage_of, whole
from omnistage.server.openai.response_models import ChatChunk, ChatCompletion
from omnistage.server.openai.tools import renamed
from omnistage.server.service import ServedModel, final_output

__all__ = ["finish_of", "router", "usage_of"]

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, responses=answers(ChatCompletion, events=ChatChunk))
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service, holder = service_of(request), caller(request)
    model = service.model(body.model)
    body.check()
    toolbox = body.toolbox()
    options = RequestOptions(
        _modalities(body, model),
        body.voice,
        body.priority,
        body.timeout,
        body.use_audio_in_video,
        toolbox.specs() if toolbox is not None else (),
    )
    messages = service.spoken.recalled(holder.name, body.messages)
    running = renamed(service.run_request(holder, model, messages, _params(body, model), options), body.error_paths())

    def keep(audio_id: str, transcript: str) -> int:
        return service.spoken.keep(holder.name, audio_id, transcript)

    if body.stream:

        async def items() -> AsyncIterator[bytes]:
            async with running as stream:
                writer = StreamWriter(_answer_id(stream.request_id), body, keep)
                async for item in stream:
                    for data in writer.events(item):
                        yield event(data)
                yield event("[DONE]")

        return await stream_response(items())
    async with running as stream:
        final = await final_output(stream)
        if final.error is not None:
            raise final.error
    return JSONResponse(whole(_answer_id(stream.request_id), body, final, keep))


def _answer_id(request_id: str) -> str:
    return f"chatcmpl-{request_id.removeprefix('req-')}"


def _modalities(body: ChatRequest, model: ServedModel) -> list[str] | None:
    """What to ask the model for. Speech comes with its transcript; a model without words draws without them."""
    if body.modalities is None and "text" not in model.modalities and "video" in model.modalities:
        raise UnsupportedModalityError(NO_VIDEOS, param="model")
    asked: list[str] = list(body.modalities or ())
    if "audio" in asked and "text" not in asked and "text" in model.modalities:
        return ["text", *asked]
    if "text" in asked and len(asked) > 1 and "text" not in model.modalities:
        return [modality for modality in asked if modality != "text"]
    return asked if body.modalities is not None else None


def _params(body: ChatRequest, model: ServedModel) -> Mapping[str, StageParams]:
    """What the request sets, each on the first stage that takes it; the seed on all."""
    chosen: dict[str, StageParams] = {}
    sampling = body.sampling()
    if sampling is not None:
        stage = model.stage_for_params(SamplingParams)
        if stage is None:
            of_text = {*SamplingParams.model_fields, "max_completion_tokens", "response_format", "tools"}
            given = body.model_dump(include=of_text, exclude_none=True)
            raise InvalidRequestError("this model draws and samples no text; leave it out", param=next(iter(given)))
        chosen[stage] = sampling
    if body.drawing is not None:
        stage = model.stage_for_params(DiffusionParams)
        if stage is None:
            raise InvalidRequestError("this model does not draw; leave it out", param="drawing")
        chosen[stage] = body.drawing
    if body.tools and "text" not in model.modalities:
        raise InvalidRequestError("this model gives no text and calls no tools; leave them out", param="tools")
    return model.with_seed(body.seed, chosen)
