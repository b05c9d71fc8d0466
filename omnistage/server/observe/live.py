"""What can be watched while it happens: a request's trace as a stream of events, and gauges of the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from omnistage.pipeline.outputs import Trace
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.openapi import answers
from omnistage.server.http.sse import event, stream_response
from omnistage.server.observe.memory import memory_now
from omnistage.server.observe.status import known_trace, unknown_request
from omnistage.server.openai.response_models import StatsAnswer, TraceAnswer
from omnistage.server.service import Service

router = APIRouter()

_TICK = 0.05
"""Seconds between two looks at a trace: an event is sent at most this often, and only for something new."""
_REMINDER = 1.0
"""Seconds after which a trace is sent again though nothing is new: it says how late it is now."""


@router.get(
    "/v1/requests/{request_id}/events",
    response_model=None,
    responses=answers(events=TraceAnswer),
)
async def request_events(
    request_id: str,
    request: Request,
    wait: Annotated[float, Query(ge=0, le=30, include_in_schema=False)] = 0.0,
) -> Response:
    """What runs when, as it happens: an event `trace` for each change, the last when the request has ended.

    `wait` seconds are given to a request that is still on its way in: its body is being read, its media decoded.
    """
    service, holder = service_of(request), caller(request)
    await request.body()  # there is none; only when it has been read does a client that leaves end this wait
    give_up = time.monotonic() + wait
    while (trace := known_trace(service, request_id, holder)) is None:
        if time.monotonic() >= give_up or service.draining:
            raise unknown_request(request_id)
        await asyncio.sleep(_TICK)
    return await stream_response(_events(service, trace, holder))


async def _events(service: Service, trace: Trace | None, holder: Holder) -> AsyncIterator[bytes]:
    shown: Trace | None = None
    sent = 0.0
    while trace is not None:
        now = time.monotonic()
        if trace != shown or now - sent >= _REMINDER:
            shown, sent = trace, now
            yield event({**asdict(trace), "now": _since(trace, now)}, "trace")
        if trace.finished is not None:
            return
        await asyncio.sleep(_TICK)
        trace = service.trace(trace.request_id, holder)


def _since(trace: Trace, now: float) -> float:
    """Seconds since the request came in; it stands still when the request has ended."""
    return trace.finished if trace.finished is not None else now - trace.arrival


@router.get("/v1/stats", responses=answers(StatsAnswer))
async def stats(request: Request) -> dict[str, Any]:
    """Queues, batches and memory now, of the models that this key may use."""
    service, holder = service_of(request), caller(request)
    models = {
        name: asdict(model.omni.stats())
        for name, model in service.models.items()
        if holder.models is None or name in holder.models
    }
    limits = {"max_body_bytes": request.app.state.max_body_bytes}
    return {"object": "stats", "models": models, "memory": asdict(memory_now()), "limits": limits}
