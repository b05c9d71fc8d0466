"""Adapters of served models: which a request uses by its model's name, and whether its key may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnistage.core.errors import InternalError, InvalidRequestError
from omnistage.core.params import AdapterWeight, DiffusionParams, SamplingParams, StageParams
from omnistage.pipeline.intake import ParamsLike
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import PermissionDeniedError

if TYPE_CHECKING:
    from omnistage.server.service import ServedModel


def plan_adapters(model: ServedModel, holder: Holder, params: ParamsLike) -> ParamsLike:
    """The parameters with the adapter that the request's `model` names. Raises where the key may not use one."""
    overrides: Mapping[str, StageParams | Mapping[str, object]]
    overrides = {model.omni.orchestrator.graph.lead: params} if isinstance(params, StageParams) else params or {}
    if model.adapter is not None:
        overrides = _with_adapter(model, model.adapter, dict(overrides))
    for each in overrides.values():
        for adapter in each.lora if isinstance(each, SamplingParams | DiffusionParams) else ():
            if holder.models is not None and adapter.name not in holder.models:
                raise PermissionDeniedError(f"this key may not use {adapter.name!r}", param="lora")
    return params if model.adapter is None else overrides


def _with_adapter(
    model: ServedModel, name: str, params: dict[str, StageParams | Mapping[str, object]]
) -> dict[str, StageParams | Mapping[str, object]]:
    adapters = model.omni.adapters.names().get(name)
    if adapters is None:  # unloaded a moment ago
        raise InvalidRequestError("this adapter has just been unloaded", param="model")
    stage = adapters[0]
    kind = model.omni.orchestrator.stages[stage].params_type
    if kind.shared:  # one set for all stages, under the name of the first
        stage = model.stage_for_params(kind) or stage
    current = params.get(stage)
    if isinstance(current, SamplingParams | DiffusionParams):
        if current.lora:
            raise InvalidRequestError("`model` names an adapter already; name the base in model", param="lora")
        params[stage] = current.model_copy(update={"lora": (AdapterWeight(name=name),)})
    elif current is None:
        params[stage] = kind.parse({"lora": name})
    else:
        raise InternalError(f"parameters of stage {stage!r} are not parsed")
    return params
