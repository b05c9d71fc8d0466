"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM names them: off without `--adapter-folder`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Annotated

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field, StringConstraints

from omnistage.config.deployment import AdapterName
from omnistage.core.errors import InvalidRequestError
from omnistage.core.validation import short_repr
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import NotFoundError, PermissionDeniedError
from omnistage.server.http.routing import api_router
from omnistage.server.openai.base import WireModel
from omnistage.server.service import ServedModel, Service

router = api_router()


class UnloadAdapterRequest(WireModel):
    lora_name: AdapterName
    lora_int_id: int | None = Field(default=None, description="vLLM's, without effect.")


class LoadAdapterRequest(UnloadAdapterRequest):
    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = Field(
        description="A folder within one of --adapter-folder."
    )
    scale: float = Field(default=1.0, ge=-100.0, le=100.0, allow_inf_nan=False)
    model: str | None = Field(default=None, description="Whose adapter it is; for services with several models.")


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Load a LoRA adapter, which then is a model's name."""
    service = _administered(request)
    model = _only_model(service, body.model)
    if body.lora_name in service.models or service.adapted(body.lora_name) is not None:
        raise InvalidRequestError(
            f"{short_repr(body.lora_name)} is the name of a model or adapter already; choose another", param="lora_name"
        )
    await _run(service, partial(model.omni.adapters.load, body.lora_name, body.lora_path, body.scale))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """Forget a LoRA adapter. Requests that use it finish."""
    service = _administered(request)
    model = service.adapted(body.lora_name)
    if model is None:
        raise NotFoundError(f"there is no adapter {short_repr(body.lora_name)}", param="lora_name")
    await _run(service, partial(model.omni.adapters.unload, body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _administered(request: Request) -> Service:
    """The service, for a key that may use all of it. A key with a list of models changes nothing for others."""
    service, holder = service_of(request), caller(request)
    service.check_ready()
    if holder.models is not None:
        raise PermissionDeniedError("this key is for some models only, and may not load or unload adapters")
    if not any(model.omni.adapters.at_run_time for model in service.models.values()):
        raise NotFoundError("adapters cannot be loaded at run time; start the service with --adapter-folder")
    return service


def _only_model(service: Service, name: str | None) -> ServedModel:
    if name is not None:
        return service.model(name)
    if len(service.models) > 1:
        raise InvalidRequestError(f"is missing; models: {', '.join(service.models)}", param="model")
    return next(iter(service.models.values()))


async def _run(service: Service, work: Callable[[], None]) -> None:
    """In a thread: it reads a file, which must not block the event loop."""
    with ExitStack() as resources:
        place = service.adapter_workers.reserve(resources)
        await service.adapter_workers.run(lambda _over: work(), place, resources)
