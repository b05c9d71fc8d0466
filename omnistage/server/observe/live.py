"""Live views: a request's trace as a stream of events, and gauges of the service."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from typing_extensions import TypedDict

from omnistage.core.memory import host_memory, resident_memory
from omnistage.pipeline.outputs import Trace
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.sse import event, stream_response
from omnistage.server.observe.status import find_trace, read_stats, unknown_request
from omnistage.server.service import Service

router = APIRouter()
_POLL_SECONDS = 0.05
"""Between two reads of a trace: changes are sent at most this often."""
_REPEAT_SECONDS = 1.0
"""After this time an unchanged trace is sent again, for its clock."""


class TraceEvent(TypedDict):
    """What ran when: seconds since the request came in."""

    request_id: str
    arrival: float
    admitted: float | None
    finished: float | None
    stages: dict[str, dict[str, object]]
    now: float


class Stats(TypedDict):
    """Gauges: by model its counters and those of its stages; memory in bytes, null where it is unknown."""

    object: Literal["stats"]
    models: dict[str, dict[str, object]]
    memory: dict[str, int | None]
    limits: dict[str, int]


@router.get("/v1/requests/{request_id}/events", response_model=None, responses=response_docs(events=TraceEvent))
async def request_events(
    request_id: str,
    request: Request,
    wait: Annotated[float, Query(ge=0, le=30, include_in_schema=False)] = 0.0,
) -> Response:
    """What runs when, as it happens: an event `trace` for each change, the last when the request has ended.

    A request that is not admitted yet (its body is being read, its media decoded) is awaited for `wait` seconds.
    """
    service, holder = service_of(request), caller(request)
    await request.body()  # there is none, but only a body that has been read lets a disconnect cancel this wait
    deadline = time.monotonic() + wait
    while (trace := find_trace(service, request_id, holder)) is None:
        if time.monotonic() >= deadline or service.draining:
            raise unknown_request(request_id)
        await asyncio.sleep(_POLL_SECONDS)
    return await stream_response(_events(service, trace, holder))


async def _events(service: Service, trace: Trace | None, holder: Holder) -> AsyncGenerator[bytes]:
    last: Trace | None = None
    sent_at = 0.0
    while trace is not None:
        now = time.monotonic()
        if trace != last or now - sent_at >= _REPEAT_SECONDS:
            last, sent_at = trace, now
            clock = trace.finished if trace.finished is not None else now - trace.arrival
            yield event({**asdict(trace), "now": clock}, "trace")
        if trace.finished is not None:
            return
        await asyncio.sleep(_POLL_SECONDS)
        trace = service.trace(trace.request_id, holder)


@router.get("/v1/stats")
async def stats(request: Request) -> Stats:
    """Queues, batches and memory now, of the models that this key may use."""
    service, allowed = service_of(request), caller(request).models
    models = {name: model.omni for name, model in service.models.items() if allowed is None or name in allowed}
    return Stats(
        object="stats",
        models=await read_stats(lambda: {name: asdict(omni.stats()) for name, omni in models.items()}),
        memory=_memory(),
        limits={"max_body_bytes": request.app.state.max_body_bytes},
    )


def _memory() -> dict[str, int | None]:
    """Of this process, of the machine or the container, and of the current CUDA device, used by all processes."""
    torch = sys.modules.get("torch")
    used_bytes = total = None
    if torch is not None and torch.cuda.is_initialized():  # the query must not initialise CUDA
        free, total = torch.cuda.mem_get_info()
        used_bytes = total - free
    return {"process": resident_memory(), "host": host_memory(), "device": used_bytes, "device_total": total}
