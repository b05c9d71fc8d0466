"""Models, health, traces and cancelling."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from omnistage.server.context import caller, service_of
from omnistage.server.errors import NotFoundError
from omnistage.server.service import ServedModel, names_of
from omnistage.types import short_repr

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models that this key may use."""
    holder = caller(request)
    models = [
        _described(model)
        for model in service_of(request).models.values()
        if holder.models is None or model.name in holder.models
    ]
    return {"object": "list", "data": models}


@router.get("/v1/models/{name:path}")
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
        "modalities": {"input": taken, "output": names_of(model.modalities)},
        "voices": list(model.omni.processor.voices()),
    }


@router.get("/health", include_in_schema=True)
async def health() -> dict[str, str]:
    """Whether the process lives."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken."""
    service = service_of(request)
    state = "ready" if service.ready else ("loading" if service.loading else "draining")
    return JSONResponse({"status": state}, status_code=200 if service.ready else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counters and gauges for Prometheus."""
    from omnistage.server.metrics import CONTENT_TYPE, render

    return Response(render(service_of(request)), media_type=CONTENT_TYPE)


@router.get("/v1/requests/{request_id}")
async def get_request(request_id: str, request: Request) -> dict[str, Any]:
    """What ran when, for a running or recent request."""
    trace = service_of(request).trace(_engine_id(request_id), caller(request))
    if trace is None:
        raise NotFoundError(f"there is no request {short_repr(request_id)}, or it is long gone")
    return asdict(trace)


@router.delete("/v1/requests/{request_id}")
async def cancel_request(request_id: str, request: Request) -> dict[str, Any]:
    """End a running request."""
    if not service_of(request).abort(_engine_id(request_id), caller(request)):
        raise NotFoundError(f"no request {short_repr(request_id)} is running")
    return {"id": request_id, "object": "request", "cancelled": True}


def _engine_id(given: str) -> str:
    """The engine's id of a request, from it or from the id of an answer."""
    head, _, tail = given.replace("resp_", "resp-", 1).partition("-")
    return f"req-{tail}" if head in ("chatcmpl", "cmpl", "img", "resp", "speech") else given
