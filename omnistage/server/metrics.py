"""The service for Prometheus: the engines' own counters, read when asked, and times as clients see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from omnistage.server.audit import Record

if TYPE_CHECKING:
    from omnistage.server.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 5, 10)


class Measures:
    """What is seen of requests from outside, as it happens."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.first_token = Histogram(
            "omnistage_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_audio = Histogram(
            "omnistage_time_to_first_audio_seconds",
            "From a request's arrival to its first sound.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.real_time_factor = Histogram(
            "omnistage_real_time_factor",
            "Seconds that a request took for each second of sound; below 1 keeps up with a listener.",
            ["model"],
            buckets=_FACTORS,
            registry=registry,
        )
        self._seconds = Histogram(
            "omnistage_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._responses = Counter(
            "omnistage_http_responses",
            "Answers by status; 499: the client left.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._errors = Counter("omnistage_http_errors", "Answers of 400 and more.", ["status"], registry=registry)

    def answered(self, record: Record, seconds: float) -> None:
        """Count a request to the service that is over."""
        status = record.status or 500
        self._seconds.labels(record.endpoint).observe(seconds)
        self._responses.labels(record.endpoint, str(status)).inc()
        if status >= 400:
            self._errors.labels(str(status)).inc()


class _Collector:
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily("omnistage_requests_inflight", "Requests running or queued.", labels=["model"])
        capacity = GaugeMetricFamily("omnistage_requests_capacity", "Requests that are taken.", labels=["model"])
        admitted = CounterMetricFamily("omnistage_requests_admitted", "Requests taken.", labels=["model"])
        rejected = CounterMetricFamily("omnistage_requests_rejected", "Requests refused when full.", labels=["model"])
        finished = CounterMetricFamily("omnistage_requests_finished", "By reason.", labels=["model", "reason"])
        labels = ["model", "stage"]
        stages: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            "waiting": GaugeMetricFamily("omnistage_stage_waiting", "Requests that wait in a stage.", labels=labels),
            "running": GaugeMetricFamily("omnistage_stage_running", "Requests in a stage's batch.", labels=labels),
            "starved": GaugeMetricFamily("omnistage_stage_starved", "Requests without input.", labels=labels),
            "steps": CounterMetricFamily("omnistage_stage_steps", "Steps done.", labels=labels),
            "tokens": CounterMetricFamily("omnistage_stage_tokens", "Tokens, codes or rows done.", labels=labels),
            "preemptions": CounterMetricFamily("omnistage_stage_preemptions", "Requests put back.", labels=labels),
        }
        for name, model in self._service.models.items():
            stats = model.omni.stats()
            inflight.add_metric([name], stats.inflight)
            capacity.add_metric([name], stats.max_inflight)
            admitted.add_metric([name], stats.admitted)
            rejected.add_metric([name], stats.rejected)
            for reason, count in stats.finished.items():
                finished.add_metric([name, str(reason)], count)
            for stage, own in stats.stages.items():
                for key, family in stages.items():
                    family.add_metric([name, stage], getattr(own, key))
        yield from (inflight, capacity, admitted, rejected, finished, *stages.values())


def render(service: Service) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(service))
    return generate_latest(registry) + generate_latest(service.measures.registry)
