"""Models, health, readiness, metrics, traces and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NotRequired, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import JsonValue
from typing_extensions import TypedDict

from omnistage import __version__
from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
from omnistage.core.stage import StageState
from omnistage.core.threads import DaemonThreads
from omnistage.core.validation import short_repr
from omnistage.pipeline.health import StageHealth
from omnistage.pipeline.outputs import Trace
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import RETRY_SECONDS, ModelNotFoundError, NotFoundError
from omnistage.server.http.openapi import response_docs
from omnistage.server.observe.model_features import clones_voices, transcribes, unsupported_drawing
from omnistage.server.service import ServedModel, Service

router = APIRouter()
_readers = DaemonThreads(4, "omnistage-stats")
_Result = TypeVar("_Result")

_DEFAULTS: dict[str, type[StageParams]] = {"sampling": SamplingParams, "drawing": DiffusionParams}


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["omnistage"]
    modalities: dict[str, list[str]]
    max_model_len: int | None
    """Tokens of prompt and answer together, of the stage that samples text; null: not known."""
    voices: list[str]
    voice_aliases: dict[str, str | None]
    """Other names that `voice` may have, and the voice that each means; null: the only one, which has no name."""
    stages: list[str]
    transcribes: bool
    """Whether it recognises speech by itself, without a chat model that is asked to."""
    clones_voices: bool
    """Whether `/v1/audio/speech` can speak with the voice of a clip, `ref_audio`."""
    unsupported: list[str]
    """Parameters of pictures that it refuses, among `size` and `negative_prompt`."""
    defaults: dict[str, dict[str, JsonValue]]
    parent: NotRequired[str]
    """Of an adapter: the model that it changes."""
    root: NotRequired[str]
    """Of an adapter: the name of its folder."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class UnavailableStage(TypedDict):
    model: str
    stage: str
    state: Literal["rebuilding", "failed", "overdue", "unreachable"]


class Readiness(TypedDict):
    status: Literal["ready", "loading", "draining", "unavailable"]
    step: NotRequired[str]
    """What is being loaded, and how much of it is."""
    stages: NotRequired[list[UnavailableStage]]
    """Those because of which it is `unavailable`."""


class Version(TypedDict):
    version: str


class ServerLoad(TypedDict):
    server_load: int


class Health(TypedDict):
    status: Literal["ok", "failed"]


class CancelledRequest(TypedDict):
    id: str
    object: Literal["request"]
    cancelled: Literal[True]


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """The models that this key may use."""
    allowed = caller(request).models
    models = [
        each
        for model in service_of(request).models.values()
        for each in (model, *(replace(model, adapter=name) for name in model.omni.adapters.names()))
    ]
    cards = [_card(model) for model in models if allowed is None or model.requested_name in allowed]
    return ModelList(object="list", data=cards)


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> ModelCard:
    allowed = caller(request).models
    if allowed is not None and name not in allowed:
        raise ModelNotFoundError(f"there is no model {short_repr(name)} for this key", param="model")
    return _card(service_of(request).model(name))


def _card(model: ServedModel) -> ModelCard:
    omni = model.omni
    text = model.stage_for_params(SamplingParams)
    stages = {name: stage for name, kind in _DEFAULTS.items() if (stage := model.stage_for_params(kind)) is not None}
    card = ModelCard(
        id=model.requested_name,
        object="model",
        created=model.created,
        owned_by="omnistage",
        modalities={"input": sorted(omni.processor.input_modalities | {"text"}), "output": list(model.omni.modalities)},
        max_model_len=None if text is None else omni.orchestrator.stages[text].max_model_len,
        voices=list(omni.voices.voices),
        voice_aliases=dict(omni.voices.aliases),
        stages=list(omni.orchestrator.graph.order),
        transcribes=transcribes(model),
        clones_voices=clones_voices(model),
        unsupported=unsupported_drawing(model),
        defaults={
            name: omni.orchestrator.default_params[stage].model_dump(mode="json", exclude_none=True)
            for name, stage in stages.items()
        },
    )
    if model.adapter is not None:
        card["parent"] = model.name
        card["root"] = omni.adapters.names()[model.adapter][1].name
    return card


@router.get("/health", responses={**response_docs(Health), 503: {"model": Health}})
async def health(request: Request) -> JSONResponse:
    """Whether the process is alive: 503 once a stage has failed or hangs that only a restart brings back."""
    failed = any(health.needs_restart for _, health in service_of(request).unavailable_stages())
    return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)


@router.get("/ping", responses={**response_docs(Health), 503: {"model": Health}})
@router.post("/ping", operation_id="ping_post", responses={**response_docs(Health), 503: {"model": Health}})
async def ping(request: Request) -> JSONResponse:
    """`/health`, by the name that vLLM's users and SageMaker know."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> ServerLoad:
    """How many requests run or wait, as vLLM has it."""
    models = list(service_of(request).models.values())
    return ServerLoad(server_load=await read_stats(lambda: sum(model.omni.stats().inflight for model in models)))


@router.get("/ready", responses={**response_docs(Readiness), 503: {"model": Readiness}})
async def ready(request: Request) -> JSONResponse:
    """Whether requests are accepted, by every stage of every model."""
    service = service_of(request)
    state: Readiness
    if not service.ready:
        state = {"status": "loading" if service.loading else "draining"}
        if service.loading and service.loading_step:
            state["step"] = service.loading_step
    elif stages := service.unavailable_stages():
        state = {"status": "unavailable", "stages": [_unavailable(model, health) for model, health in stages]}
    else:
        return JSONResponse({"status": "ready"})
    return JSONResponse(state, status_code=503, headers={"Retry-After": str(RETRY_SECONDS)})


def _unavailable(model: str, health: StageHealth) -> UnavailableStage:
    state: Literal["rebuilding", "failed", "overdue", "unreachable"] = "overdue"
    if health.overdue is None:
        state = "unreachable"
    if health.state is not StageState.UP:
        state = "rebuilding" if health.state is StageState.REBUILDING else "failed"
    return UnavailableStage(model=model, stage=health.name, state=state)


async def read_stats(read: Callable[[], _Result]) -> _Result:
    """Read statistics, not in the event loop: they come from the stages' own code."""
    return await asyncio.wrap_future(_readers.submit(read))


@router.get("/version")
async def version() -> Version:
    """The service's version."""
    return Version(version=__version__)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    from omnistage.server.observe.metrics import CONTENT_TYPE, render

    service = service_of(request)
    return Response(await read_stats(lambda: render(service)), media_type=CONTENT_TYPE)


@router.get("/v1/requests/{request_id}")
async def get_request(request_id: str, request: Request) -> Trace:
    """What ran when, for a running or recent request."""
    trace = find_trace(service_of(request), request_id, caller(request))
    if trace is None:
        raise unknown_request(request_id)
    return trace


@router.delete("/v1/requests/{request_id}")
async def cancel_request(request_id: str, request: Request) -> CancelledRequest:
    """End a running request."""
    service, holder = service_of(request), caller(request)
    if not service.abort(_engine_id(service, request_id, holder), holder):
        raise NotFoundError(f"no request {short_repr(request_id)} is running")
    return CancelledRequest(id=request_id, object="request", cancelled=True)


def find_trace(service: Service, request_id: str, holder: Holder) -> Trace | None:
    """The trace of a holder's request by any of its ids."""
    return service.trace(_engine_id(service, request_id, holder), holder)


def unknown_request(request_id: str) -> NotFoundError:
    return NotFoundError(f"there is no request {short_repr(request_id)}, or its trace has been dropped")


def _engine_id(service: Service, request_id: str, holder: Holder) -> str:
    """The engine's id of a request, from that id, the id of a response or the client's own."""
    if (tagged := service.tagged(holder, request_id)) is not None:
        return tagged
    head, _, tail = request_id.replace("resp_", "resp-", 1).partition("-")
    return f"req-{tail}" if head in ("chatcmpl", "cmpl", "resp") else request_id
