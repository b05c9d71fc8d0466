"""The application: routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from omnistage import __version__
from omnistage.server.access.hosts import HostMiddleware
from omnistage.server.access.middleware import AccessMiddleware
from omnistage.server.http import errors, openapi
from omnistage.server.http.body_limits import BodyLimit
from omnistage.server.http.connection import Exchange
from omnistage.server.http.json_body import JsonLimits
from omnistage.server.http.limits import MAX_HELD_BYTES, MAX_MESSAGE_BYTES, HeldBytes, TransportLimits
from omnistage.server.http.routing import JsonRoutes
from omnistage.server.observe import live, status
from omnistage.server.openai import adapters, completions, embeddings, images, tokenize
from omnistage.server.openai.audio import speech, transcriptions
from omnistage.server.openai.chat import route as chat
from omnistage.server.openai.responses import route as responses
from omnistage.server.openai.videos import route as videos
from omnistage.server.page import route as page
from omnistage.server.realtime import route as realtime
from omnistage.server.service import Service

DEFAULT_MAX_BODY = 64 * 2**20
DEFAULT_JSON_LIMITS = JsonLimits()
DEFAULT_STALL_SECONDS = 60.0


def create_app(
    service: Service,
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY,
    json_limits: JsonLimits = DEFAULT_JSON_LIMITS,
    max_held_bytes: int = MAX_HELD_BYTES,
    max_connections: int | None = None,
    stall_seconds: float = DEFAULT_STALL_SECONDS,
    cors: Sequence[str] = (),
    allowed_hosts: Sequence[str] | None = None,
    public_url: str | None = None,
) -> FastAPI:
    """The HTTP application over a service whose models may still be loading.

    With `allowed_hosts`, even an empty list, only requests to this machine's own names and these are served.
    """
    # No Swagger page: FastAPI's loads its scripts from another host.
    app = FastAPI(title="Omnistage", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.max_body_bytes = max_body_bytes
    app.state.public_url = public_url
    app.state.checks_host = allowed_hosts is not None
    app.state.json_limits = json_limits
    held_bytes = HeldBytes(max_held_bytes, max_item=max_body_bytes, shared=service.keyring.required)
    app.state.transport = TransportLimits(held_bytes, stall_seconds, max_connections)
    app.state.realtime = realtime.Options(min(max_body_bytes, MAX_MESSAGE_BYTES), stall_seconds, tuple(cors))
    errors.install(app)
    openapi.install(app)

    modules = (
        *(chat, completions, responses, embeddings, tokenize, speech, transcriptions, images, videos, adapters),
        *(status, live, page, realtime),
    )
    for module in modules:
        app.include_router(module.router)
    # From the inside out: a request passes the last of these first.
    app.add_middleware(JsonRoutes, routers=[module.router for module in modules])
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, held_bytes=held_bytes, stall_seconds=stall_seconds)
    app.add_middleware(AccessMiddleware, service=service, origins=tuple(cors))
    if cors:
        # Outside the gate: a browser's preflight request carries no key.
        app.add_middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"])
    if allowed_hosts is not None:
        app.add_middleware(HostMiddleware, allowed_hosts=allowed_hosts)
    if service.tracing is not None:
        from omnistage.server.observe.tracing import TracingMiddleware

        app.add_middleware(TracingMiddleware, tracing=service.tracing)
    app.add_middleware(Exchange, metrics=service.metrics, stall_seconds=stall_seconds)
    return app
