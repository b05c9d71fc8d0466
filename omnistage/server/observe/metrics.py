"""Prometheus metrics: the engines' counters, read at each scrape, and latencies as clients see them.

Labels are models, stages, endpoints, statuses and reasons: few values, none of them a client's text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from omnistage import __version__
from omnistage.core.stage import STEP_BUCKETS, StageState, StepSeconds
from omnistage.core.types import FinishReason
from omnistage.pipeline.outputs import OmniRequestOutput, Trace
from omnistage.server.observe.audit import AuditRecord

if TYPE_CHECKING:
    from omnistage.server.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 5, 10)
_MODEL, _STAGE, _REPLICA = ("model",), ("model", "stage"), ("model", "group", "replica")


class RequestMetrics:
    """Metrics of requests as seen from outside, updated as they happen."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        # By labels: prometheus_client looks a metric up under a lock, after a walk through its labels.
        def seconds(
            name: str, help_text: str, labels: Sequence[str] = _MODEL, buckets: Sequence[float] = _SECONDS
        ) -> Callable[..., Histogram]:
            return cache(Histogram(name, help_text, labels, buckets=buckets, registry=self.registry).labels)

        def count(name: str, help_text: str, labels: Sequence[str] = _MODEL) -> Callable[..., Counter]:
            return cache(Counter(name, help_text, labels, registry=self.registry).labels)

        self.first_token = seconds(
            "omnistage_time_to_first_token_seconds", "Time from a request's arrival to its first token."
        )
        self.first_audio = seconds(
            "omnistage_time_to_first_audio_seconds", "Time from a request's arrival to its first audio."
        )
        self._queue = seconds("omnistage_stage_queue_seconds", "Time that requests wait in a stage's queue.", _STAGE)
        self._request = seconds("omnistage_request_seconds", "Request duration by endpoint.", ("endpoint",))
        self._real_time_factor = seconds(
            "omnistage_real_time_factor",
            "Request duration over the duration of its audio; below 1 is faster than real time.",
            buckets=_FACTORS,
        )
        self._prompt_tokens = count("omnistage_prompt_tokens", "Prompt tokens of finished requests.")
        self._tokens = count("omnistage_generated_tokens", "Generated tokens.")
        self._audio = count("omnistage_generated_audio_seconds", "Duration of generated audio.")
        self._images = count("omnistage_generated_images", "Generated images.")
        self._video = count("omnistage_generated_video_seconds", "Duration of generated video.")
        self._steps = count("omnistage_denoising_steps", "Denoising steps of finished requests.")
        self.filtered = count("omnistage_content_filtered", "Requests ended by the content filter.", ("model", "where"))
        self._responses = count(
            "omnistage_http_responses", "Responses by status; 499: the client disconnected.", ("endpoint", "status")
        )
        self._errors = count("omnistage_http_errors", "Responses with status 400 and above.", ("status",))

    def observe_response(self, record: AuditRecord, seconds: float) -> None:
        """Count a finished HTTP request or WebSocket connection."""
        status = record.status or 500
        self._request(record.endpoint).observe(seconds)
        self._responses(record.endpoint, str(status)).inc()
        if status >= 400:
            self._errors(str(status)).inc()

    def observe_output(self, model: str, final: OmniRequestOutput, seconds: float) -> None:
        """Count the output of a request that was read to its end."""
        usage = final.usage
        self._prompt_tokens(model).inc(usage.prompt_tokens)
        self._tokens(model).inc(usage.completion_tokens)
        self._audio(model).inc(usage.audio_seconds)
        self._images(model).inc(usage.images)
        self._video(model).inc(usage.video_seconds)
        self._steps(model).inc(usage.steps)
        # Only complete outputs: one that was cut short took the time of its text for a little audio.
        if usage.audio_seconds and final.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._real_time_factor(model).observe(seconds / usage.audio_seconds)
        if final.finish_reason is FinishReason.CONTENT_FILTER:
            self.filtered(model, "output").inc()

    def observe_trace(self, model: str, trace: Trace) -> None:
        """Count how long a finished request waited for each stage."""
        for name, stage in trace.stages.items():
            if stage.queue is not None:
                self._queue(model, name).observe(max(0.0, stage.queue))


_STAGE_GAUGES = {
    "waiting": ("omnistage_stage_waiting", "Requests waiting in a stage's queue."),
    "running": ("omnistage_stage_running", "Requests in a stage's batch."),
    "starved": ("omnistage_stage_starved", "Requests that wait for input from upstream."),
    "capacity": ("omnistage_stage_capacity", "Requests that a stage runs at once."),
    "blocks": ("omnistage_kv_blocks", "KV cache blocks."),
    "blocks_free": ("omnistage_kv_blocks_free", "KV cache blocks that no request holds."),
    "encoder_cache_bytes": ("omnistage_encoder_cache_bytes", "Size of the encoder cache."),
    "masks_awaited": (
        "omnistage_grammar_masks_awaited",
        "Answers left out of steps until their grammar is worked out.",
    ),
    "up": ("omnistage_stage_up", "1 while a stage runs, 0 once it has failed or while its server is away."),
    "overdue": ("omnistage_step_overdue", "1 while a stage is in a step that takes too long."),
}
_STAGE_COUNTERS = {
    "steps": ("omnistage_stage_steps", "Steps of a stage."),
    "tokens": ("omnistage_stage_tokens", "Tokens, codes, denoising steps or images of a stage."),
    "preemptions": ("omnistage_stage_preemptions", "Preempted requests."),
    "forwards": ("omnistage_stage_forwards", "Forward passes of a denoiser."),
    "windows": ("omnistage_stage_windows", "Windows of codes decoded to audio."),
    "audio_seconds": ("omnistage_stage_audio_seconds", "Duration of a stage's audio."),
    "prefix_lookups": ("omnistage_prefix_cache_lookups", "Prefix cache lookups."),
    "prefix_hits": ("omnistage_prefix_cache_hits", "Prefix cache hits."),
    "encoder_cache_hits": ("omnistage_encoder_cache_hits", "Encoder cache hits."),
    "encoder_cache_misses": ("omnistage_encoder_cache_misses", "Encoder cache misses."),
    "failures": ("omnistage_stage_failures", "Failures of a stage."),
    "rebuilds": ("omnistage_stage_rebuilds", "Rebuilds of a failed stage."),
    "remote_errors": ("omnistage_remote_errors", "Requests that a stage's server failed."),
    "server_restarts": ("omnistage_server_restarts", "Restarts of a server that a stage started itself."),
    "masks_late": ("omnistage_grammar_masks_late", "Tokens that were not sampled because their grammar was not ready."),
}
"""A stage's statistics by their names in `StageStats`, its `extra` and `StageHealth`; diffusion's caches leave out
`encoder_`."""


_REPLICAS: dict[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str]] = {
    "up": (GaugeMetricFamily, "omnistage_replica_up", "1 while a process of a group of stages takes requests."),
    "running": (GaugeMetricFamily, "omnistage_replica_running", "Requests in a process."),
    "requests": (CounterMetricFamily, "omnistage_replica_requests", "Requests that were given to a process."),
    "failures": (CounterMetricFamily, "omnistage_replica_failures", "Times that a process was lost or did not start."),
    "restarts": (CounterMetricFamily, "omnistage_replica_restarts", "Restarts of a process."),
}
"""A process's statistics by their names in `ReplicaStats`."""


class _Collector(Collector):
    """The engines' statistics, read at each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily("omnistage_requests_inflight", "Requests running or queued.", labels=_MODEL)
        capacity = GaugeMetricFamily("omnistage_requests_capacity", "Maximum of requests in flight.", labels=_MODEL)
        waiting = GaugeMetricFamily("omnistage_requests_waiting", "Requests in the queues of stages.", labels=_MODEL)
        utilization = GaugeMetricFamily(
            "omnistage_utilization",
            "Share of its places that the busiest stage has taken; above 1 requests wait.",
            labels=_MODEL,
        )
        admitted = CounterMetricFamily("omnistage_requests_admitted", "Admitted requests.", labels=_MODEL)
        rejected = CounterMetricFamily("omnistage_requests_rejected", "Requests rejected when full.", labels=_MODEL)
        finished = CounterMetricFamily(
            "omnistage_requests_finished", "Finished requests by reason.", labels=("model", "reason")
        )
        steps = HistogramMetricFamily("omnistage_stage_step_seconds", "Duration of a stage's steps.", labels=_STAGE)
        gauges = {key: GaugeMetricFamily(*names, labels=_STAGE) for key, names in _STAGE_GAUGES.items()}
        counters = {key: CounterMetricFamily(*names, labels=_STAGE) for key, names in _STAGE_COUNTERS.items()}
        by_stage: dict[str, GaugeMetricFamily | CounterMetricFamily] = {**gauges, **counters}
        by_replica = {key: kind(name, text, labels=_REPLICA) for key, (kind, name, text) in _REPLICAS.items()}
        for name, model in list(self._service.models.items()):
            stats = model.omni.stats()
            inflight.add_metric([name], stats.inflight)
            capacity.add_metric([name], stats.max_inflight)
            waiting.add_metric([name], stats.waiting)
            utilization.add_metric([name], stats.utilization)
            admitted.add_metric([name], stats.admitted)
            rejected.add_metric([name], stats.rejected)
            for reason, number in stats.finished.items():
                finished.add_metric([name, str(reason)], number)
            for stage, stage_stats in stats.stages.items():
                health = stats.health[stage]
                up = health.state is StageState.UP and health.unavailable is None
                condition = {"up": up, "overdue": health.overdue is not None}
                counts = {"failures": health.failures, "rebuilds": health.rebuilds}
                for key, value in {**stage_stats.extra, **asdict(stage_stats), **condition, **counts}.items():
                    key = f"encoder_{key}" if key.startswith("cache_") else key
                    if key in by_stage:
                        by_stage[key].add_metric([name, stage], value)
            for replica in stats.replicas:
                for key, value in {**asdict(replica), "up": replica.state is StageState.UP}.items():
                    if key in by_replica:
                        by_replica[key].add_metric([name, replica.group, str(replica.number)], value)
            for stage, times in stats.step_seconds.items():
                steps.add_metric([name, stage], _buckets(times), times.total)
        by_model = (inflight, capacity, waiting, utilization, admitted, rejected, finished)
        yield from (*by_model, steps, *by_stage.values(), *by_replica.values())
        audit = self._service.audit_file
        yield CounterMetricFamily(
            "omnistage_audit_lost_lines",
            "Lines of the audit log that could not be written.",
            value=0 if audit is None else audit.lost_lines,
        )
        yield InfoMetricFamily("omnistage_build", "The running version.", {"version": __version__})
        yield from _device_memory()


def _buckets(times: StepSeconds) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in STEP_BUCKETS), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(times.counts)), strict=True))


def _device_memory() -> Iterator[Metric]:
    import torch

    # A query would initialise a device that nothing uses.
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    families = [
        GaugeMetricFamily(f"omnistage_cuda_memory_{name}_bytes", f"CUDA memory: {meaning}.", labels=["device"])
        for name, meaning in (
            ("allocated", "held by tensors"),
            ("reserved", "held by the process"),
            ("free", "free on the device"),
            ("total", "of the device"),
        )
    ]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        values = (torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index), free, total)
        for family, value in zip(families, values, strict=True):
            family.add_metric([str(index)], value)
    yield from families


def render(service: Service) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(service))
    ProcessCollector(registry=registry)
    return generate_latest(registry) + generate_latest(service.metrics.registry)
