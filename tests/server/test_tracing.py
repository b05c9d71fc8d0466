"""Spans: one a request, one a stage, none of them with content, and none at all unless they are asked for."""

from __future__ import annotations

import gzip
import http.server
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from omnistage.cli.serve_options import otel_in_environment
from omnistage.core.errors import ConfigError
from omnistage.omni import AsyncOmni
from omnistage.server.observe.tracing import Tracing, start_tracing
from omnistage.server.service import Service
from tests.hang_guard import until
from tests.server.harness import Running, serving

MARKER = "xq7marker"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: dict[str, Any] = {"model": "lm", "prompt": f"Once {MARKER}", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(models: dict[str, AsyncOmni], spans: InMemorySpanExporter) -> Iterator[Running]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield from _serving(models, Tracing(provider))


def _serving(models: dict[str, AsyncOmni], tracing: Tracing | None) -> Iterator[Running]:
    service = Service(tracing=tracing)
    for name, omni in models.items():
        service.add(name, omni)
    service.loading = False
    with serving(service) as running:
        yield running


def until_spans(spans: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    """The spans by name, once there are as many: the server's is ended just behind its answer."""
    until(lambda: len(spans.get_finished_spans()) >= count, f"the end of {count} spans")
    found = spans.get_finished_spans()
    assert len(found) == count, [span.name for span in found]
    return {span.name: span for span in found}


def test_a_request_and_its_stages_are_one_trace(traced: Running, spans: InMemorySpanExporter) -> None:
    begun = time.time_ns()
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = httpx.post(f"{traced.url}/v1/completions", json=BODY, headers=header, timeout=60)
    assert answer.status_code == 200
    ended = time.time_ns()
    found = until_spans(spans, 2)
    (stage_name,) = found.keys() - {"POST /v1/completions"}
    server, stage = found["POST /v1/completions"], found[stage_name]
    assert server.kind is SpanKind.SERVER
    assert server.parent is not None
    assert (f"{server.context.trace_id:032x}", f"{server.parent.span_id:016x}") == (TRACE, PARENT)
    assert stage.parent is not None
    assert (stage.context.trace_id, stage.parent.span_id) == (server.context.trace_id, server.context.span_id)
    attributes = dict(server.attributes or {})
    usage = answer.json()["usage"]
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "omnistage",
        "gen_ai.request.model": "lm",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "enduser.id": "anonymous",
    }
    assert expected.items() <= attributes.items()
    assert dict(stage.attributes or {})["omnistage.stage.tokens"] == 4
    assert dict(stage.attributes or {})["omnistage.stage.finish_reason"] == "length"
    # The stage ran within the request, by the wall clock.
    slack = int(5e6)
    times = [server.start_time, stage.start_time, *(e.timestamp for e in stage.events), stage.end_time, server.end_time]
    assert [event.name for event in stage.events] == ["started", "first_chunk"]
    assert all(begun - slack <= at <= ended + slack for at in times if at is not None)
    for at, after in itertools.pairwise(times):
        assert at is not None
        assert after is not None
        assert at <= after + slack
    assert MARKER not in str([span.to_json() for span in found.values()])


def test_every_stage_of_a_pipeline_has_its_span(traced: Running, spans: InMemorySpanExporter) -> None:
    body = {
        "model": "omni",
        "messages": [{"role": "user", "content": MARKER}],
        "max_tokens": 3,
        "modalities": ["text", "audio"],
        "stream": True,
    }
    assert httpx.post(f"{traced.url}/v1/chat/completions", json=body, timeout=120).status_code == 200
    found = until_spans(spans, 4)
    stages = {f"stage {name}" for name in traced.service.models["omni"].omni.stats().stages}
    assert found.keys() == stages | {"POST /v1/chat/completions"}
    server = found["POST /v1/chat/completions"]
    assert all(found[name].parent == server.context for name in stages)
    assert dict(server.attributes or {})["gen_ai.operation.name"] == "chat"
    assert dict(server.attributes or {})["omnistage.audio_seconds"] > 0  # type: ignore[operator]
    assert MARKER not in str([span.to_json() for span in found.values()])


def test_failures_are_seen_and_strangers_named_nothing(traced: Running, spans: InMemorySpanExporter) -> None:
    httpx.get(f"{traced.url}/v1/{MARKER}")
    httpx.post(f"{traced.url}/v1/completions", json={**BODY, "model": MARKER})
    httpx.get(f"{traced.url}/health")
    httpx.request(MARKER.upper(), f"{traced.url}/v1/models")
    found = until_spans(spans, 3)
    assert [dict(span.attributes or {})["http.response.status_code"] for span in found.values()] == [404, 404, 405]
    assert all(span.status.status_code is StatusCode.UNSET for span in found.values())  # the client's fault
    assert all(span.parent is None for span in found.values())
    assert MARKER not in str([span.to_json() for span in found.values()]).lower()


def test_a_client_that_leaves_is_seen(traced: Running, spans: InMemorySpanExporter) -> None:
    body = {**BODY, "max_tokens": 500, "stream": True}
    with httpx.stream("POST", f"{traced.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: without it the connection is closed at once
        next(lines)
    found = until_spans(spans, 2)
    server = found.pop("POST /v1/completions")
    assert server.status.status_code is StatusCode.ERROR
    (stage,) = found.values()
    assert dict(stage.attributes or {})["omnistage.stage.finish_reason"] == "abort"


# --------------------------------------------------------------------------------------------- a collector


class _Collector(http.server.BaseHTTPRequestHandler):
    received: list[tuple[str, ExportTraceServiceRequest]]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        self.received.append((self.path, ExportTraceServiceRequest.FromString(data)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_spans_reach_a_collector(models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[str, ExportTraceServiceRequest]] = []
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (_Collector,), {"received": received}))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "tested")
    tracing = start_tracing(f"http://127.0.0.1:{httpd.server_address[1]}")
    for running in _serving(models, tracing):
        assert httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=60).status_code == 200
    tracing.close()  # hands out what is left
    httpd.shutdown()
    thread.join()
    httpd.server_close()
    assert {path for path, _ in received} == {"/v1/traces"}
    groups = [group for _, request in received for group in request.resource_spans]
    names = [span.name for group in groups for scope in group.scope_spans for span in scope.spans]
    assert "POST /v1/completions" in names
    assert any(name.startswith("stage ") for name in names)
    resource = {a.key: a.value.string_value for a in groups[0].resource.attributes}
    assert resource["service.name"] == "tested"
    assert MARKER not in str(received)


def test_a_collector_is_a_url() -> None:
    for endpoint in ("collector:4318", "file:///tmp/x", ""):
        with pytest.raises(ConfigError, match="not a URL"):
            start_tracing(endpoint)


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_standard_variables_ask_for_it(
    variables: dict[str, str], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert otel_in_environment() is asked


def test_off_means_that_nothing_is_imported() -> None:
    code = (
        "import sys, omnistage.server.http.app, omnistage.server.service as s; s.Service();"
        "names = ('opentelemetry.sdk', 'opentelemetry.exporter', 'omnistage.server.observe.tracing', 'jwt');"
        "print([m for m in sys.modules if m.startswith(names)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
