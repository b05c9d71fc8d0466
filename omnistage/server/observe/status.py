"""Models, health, traces and cancelling."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
from omnistage.core.validation import short_repr
from omnistage.pipeline.outputs import Trace
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import RETRY_SECONDS, NotFoundError
from omnistage.server.http.openapi import answers
from omnistage.server.openai.response_models import Cancelled, ModelCard, ModelList, Readiness, TraceAnswer
from omnistage.server.service import ServedModel, Service

router = APIRouter()


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(request: Request) -> dict[str, Any]:
    """The models that this key may use."""
    holder = caller(request)
    models = [
        _described(model)
        for model in service_of(request).models.values()
        if holder.models is None or model.name in holder.models
    ]
    return {"object": "list", "data": models}


@router.get("/v1/models/{name:path}", responses=answers(ModelCard))
async def get_model(name: str, request: Request) -> dict[str, Any]:
    holder = caller(request)
    if holder.models is not None and name not in holder.models:
        raise NotFoundError(f"there is no model {short_repr(name)} for this key", param="model")
    return _described(service_of(request).model(name))


def _described(model: ServedModel) -> dict[str, Any]:
    taken = sorted(model.omni.processor.input_modalities | {"text"})
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "omnistage",
        "modalities": {"input": taken, "output": list(model.modalities)},
        "voices": list(model.omni.processor.voices()),
        "stages": list(model.omni.orchestrator.graph.order),
        "defaults": _defaults(model),
    }


def _defaults(model: ServedModel) -> dict[str, Any]:
    """What is used where a request says nothing, under the names that requests have for it."""
    found = {}
    kinds: tuple[tuple[str, type[StageParams]], ...] = (("sampling", SamplingParams), ("drawing", DiffusionParams))
    for name, kind in kinds:
        stage = model.stage_for_params(kind)
        if stage is not None:
            params = model.omni.orchestrator.default_params(stage)
            found[name] = params.model_dump(mode="json", exclude_none=True)
    return found


@router.get("/health", include_in_schema=True)
async def health() -> dict[str, str]:
    """Whether the process lives."""
    return {"status": "ok"}


@router.get("/ready", responses={**answers(Readiness), 503: {"model": Readiness}})
async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken."""
    service = service_of(request)
    state = "ready" if service.ready else ("loading" if service.loading else "draining")
    if service.ready:
        return JSONResponse({"status": state})
    return JSONResponse({"status": state}, status_code=503, headers={"Retry-After": str(RETRY_SECONDS)})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counters and gauges for Prometheus."""
    from omnistage.server.observe.metrics import CONTENT_TYPE, render

    return Response(render(service_of(request)), media_type=CONTENT_TYPE)


@router.get("/v1/requests/{request_id}", responses=answers(TraceAnswer))
async def get_request(request_id: str, request: Request) -> dict[str, Any]:
    """What ran when, for a running or recent request."""
    trace = known_trace(service_of(request), request_id, caller(request))
    if trace is None:
        raise unknown_request(request_id)
    return asdict(trace)


@router.delete("/v1/requests/{request_id}", responses=answers(Cancelled))
async def cancel_request(request_id: str, request: Request) -> dict[str, Any]:
    """End a running request."""
    service, holder = service_of(request), caller(request)
    if not service.abort(_engine_id(service, request_id, holder), holder):
        raise NotFoundError(f"no request {short_repr(request_id)} is running")
    return {"id": request_id, "object": "request", "cancelled": True}


def known_trace(service: Service, given: str, holder: Holder) -> Trace | None:
    """The trace of a holder's request by any of its names; None where it has no such request."""
    return service.trace(_engine_id(service, given, holder), holder)


def unknown_request(given: str) -> NotFoundError:
    return NotFoundError(f"there is no request {short_repr(given)}, or it is long gone")


def _engine_id(service: Service, given: str, holder: Holder) -> str:
    """The engine's id of a request, from it, from the id of an answer or from the client's own name for it."""
    if (tagged := service.tagged(holder, given)) is not None:
        return tagged
    head, _, tail = given.replace("resp_", "resp-", 1).partition("-")
    return f"req-{tail}" if head in ("chatcmpl", "cmpl", "resp") else given
