"""OpenTelemetry: a span for each request to the service and one for each stage that ran for it. Never content.

Only imported where tracing is asked for.
"""

from __future__ import annotations

import os
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
    raise MissingDependencyError("tracing needs more: pip install 'omnistage[tracing]'") from error

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

_PATH = "/v1/traces"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
"""GenAI's own names; other endpoints make other things and are called so."""


class Tracing:
    """Makes spans and hands them to a provider's exporters, in a thread of theirs."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("omnistage", __version__)
        self._headers = TraceContextTextMapPropagator()

    def parent(self, headers: dict[str, str]) -> otel_context.Context:
        """What a client's `traceparent` header says; an empty context where there is none."""
        return self._headers.extract(headers, context=otel_context.Context())

    def server_span(self, scope: Scope) -> otel.Span:
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        attributes: dict[str, AttributeValue] = {
            "http.request.method": method_of(scope),
            "url.scheme": scope.get("scheme", "http"),
        }
        context = self.parent({key: headers[key] for key in ("traceparent", "tracestate") if key in headers})
        return self._tracer.start_span(method_of(scope), context, SpanKind.SERVER, attributes)

    def answered(self, span: otel.Span, scope: Scope, status: int | None, record: AuditRecord | None) -> None:
        """Say how a request ended, and end its span."""
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
            span.set_attributes(_generated(record, route))
        span.end()

    def stages(self, model: str, trace: Trace) -> None:
        """A span for each stage that ran, from the times in the request's trace."""
        # The trace counts from the request's arrival, on a clock that knows no date.
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
        """Hand out what is left; waits for the exporter, within its own timeout."""
        self._provider.shutdown()


def _generated(record: AuditRecord, route: str | None) -> dict[str, AttributeValue]:
    """GenAI's attributes of what was made."""
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


class TracedRequests:
    """ASGI middleware: a server span around each request under `/v1/`, whose context the work inside inherits."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not str(scope["path"]).startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        status: int | None = None
        complete = False

        async def noted(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        span = self._tracing.server_span(scope)
        token = otel_context.attach(otel.set_span_in_context(span, otel_context.Context()))
        try:
            await self._app(scope, receive, noted)
        finally:
            otel_context.detach(token)
            self._tracing.answered(span, scope, status if complete else None, CURRENT_RECORD.get())


def start_tracing(endpoint: str | None) -> Tracing:
    """Spans to an OTLP/HTTP collector: `endpoint`, or where the `OTEL_*` variables say."""
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"{endpoint!r} is no URL like http://collector:4318", param="--otel-endpoint")
        endpoint = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH
    name = os.environ.get("OTEL_SERVICE_NAME", "omnistage")
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
