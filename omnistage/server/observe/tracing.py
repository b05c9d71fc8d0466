"""OpenTelemetry: a span for each HTTP request and one for each stage that ran for it. Never content.

Only imported where tracing is on.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage import __version__
from omnistage.core.errors import ConfigError, MissingDependencyError
from omnistage.pipeline.outputs import Trace
from omnistage.server.http.connection import method_of
from omnistage.server.observe.audit import CURRENT_RECORD, AuditRecord

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace as otel
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise MissingDependencyError("tracing needs more packages: pip install 'omnistage[tracing]'") from error

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

_PATH = "/v1/traces"
_CLOSE_SECONDS = 1.0
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
"""Operation names of the GenAI conventions; other endpoints are `generate_content`."""


class Tracing:
    """Creates spans; the provider exports them in its own thread."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("omnistage", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def server_span(self, scope: Scope) -> otel.Span:
        """A span for a request, child of the client's `traceparent` where it sends one."""
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        parent = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        context = self._propagator.extract(parent, context=otel_context.Context())
        attributes: dict[str, AttributeValue] = {
            "http.request.method": method_of(scope),
            "url.scheme": scope.get("scheme", "http"),
        }
        return self._tracer.start_span(method_of(scope), context, SpanKind.SERVER, attributes)

    def end_server_span(self, span: otel.Span, scope: Scope, status: int | None, record: AuditRecord | None) -> None:
        """End a request's span with its outcome."""
        route = getattr(scope.get("route"), "path", None)
        if route is not None:
            span.update_name(f"{method_of(scope)} {route}")
            span.set_attribute("http.route", route)
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if status is None or status >= 500:
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", "cancelled" if status is None else str(status))
        if record is not None and record.model is not None:
            span.set_attributes(_genai_attributes(record, route))
        span.end()

    def stages(self, model: str, trace: Trace) -> None:
        """A span for each stage that ran, from the times in the request's trace."""
        # The trace counts from the request's arrival, on a monotonic clock.
        arrival = time.time_ns() - int((time.monotonic() - trace.arrival) * 1e9)
        now = trace.finished if trace.finished is not None else time.monotonic() - trace.arrival

        def at(seconds: float) -> int:
            return arrival + int(seconds * 1e9)

        for stage in trace.stages.values():
            if stage.submitted is None:
                continue
            attributes: dict[str, AttributeValue] = {
                "gen_ai.request.model": model,
                "omnistage.request.id": trace.request_id,
                "omnistage.stage": stage.stage,
                "omnistage.stage.chunks": stage.chunks,
                "omnistage.stage.tokens": stage.tokens,
            }
            if stage.queue is not None:
                attributes["omnistage.stage.queue_seconds"] = stage.queue
            if stage.finish is not None:
                attributes["omnistage.stage.finish_reason"] = str(stage.finish)
            span = self._tracer.start_span(
                f"stage {stage.stage}", kind=SpanKind.INTERNAL, attributes=attributes, start_time=at(stage.submitted)
            )
            if stage.started is not None:
                span.add_event("started", timestamp=at(stage.started))
            if stage.first_chunk is not None:
                span.add_event("first_chunk", timestamp=at(stage.first_chunk))
            span.end(at(max(stage.submitted, stage.last_chunk or now)))

    def close(self) -> None:
        """Export what is left, within a second: the exporter would wait longer for a collector that is away."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def _genai_attributes(record: AuditRecord, route: str | None) -> dict[str, AttributeValue]:
    """Attributes of the GenAI conventions."""
    operation = _OPERATIONS.get(route or "", "generate_content")
    values: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "omnistage",
        "gen_ai.request.model": record.model or "",
        "gen_ai.usage.input_tokens": record.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": record.usage.completion_tokens,
        "omnistage.audio_seconds": record.usage.audio_seconds,
        "omnistage.images": record.usage.images,
        "omnistage.video_seconds": record.usage.video_seconds,
    }
    if record.requests:
        values["gen_ai.response.id"] = record.requests[0]
    if record.ended is not None:
        values["gen_ai.response.finish_reasons"] = [record.ended]
    if record.who is not None:
        values["enduser.id"] = record.who
    return values


class TracingMiddleware:
    """ASGI middleware: a server span around each request under `/v1/`; the context of the work inside has it."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not str(scope["path"]).startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        status: int | None = None
        complete = False

        async def watch_status(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        span = self._tracing.server_span(scope)
        token = otel_context.attach(otel.set_span_in_context(span, otel_context.Context()))
        try:
            await self._app(scope, receive, watch_status)
        finally:
            otel_context.detach(token)
            self._tracing.end_server_span(span, scope, status if complete else None, CURRENT_RECORD.get())


def start_tracing(endpoint: str | None) -> Tracing:
    """Export spans to an OTLP/HTTP collector: `endpoint`, or the one of the `OTEL_*` variables."""
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"{endpoint!r} is not a URL like http://collector:4318", param="--otel-endpoint")
        endpoint = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH
    name = os.environ.get("OTEL_SERVICE_NAME", "omnistage")
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
