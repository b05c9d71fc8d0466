"""The service for Prometheus: the engines' own counters, read when asked, and times as clients see them.

Labels are models, stages, endpoints, statuses and reasons: all of them few, none of them a client's text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from omnistage.core.stage import StageStats
from omnistage.core.types import FinishReason
from omnistage.pipeline.outputs import OmniRequestOutput, Trace
from omnistage.pipeline.timing import STEP_BUCKETS, StepSeconds
from omnistage.server.observe.audit import AuditRecord

if TYPE_CHECKING:
    from omnistage.server.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 5, 10)
_STAGE = ("model", "stage")
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class RequestMetrics:
    """What is seen of requests from outside, as it happens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = self._seconds(
            "omnistage_time_to_first_token_seconds", "From a request's arrival to its first token.", ("model",)
        )
        self.first_audio = self._seconds(
            "omnistage_time_to_first_audio_seconds", "From a request's arrival to its first sound.", ("model",)
        )
        self._queue = self._seconds(
            "omnistage_stage_queue_seconds", "From a stage taking a request to its first step on it.", _STAGE
        )
        self._request = self._seconds(
            "omnistage_request_seconds", "From a request's arrival to the end of its answer.", ("endpoint",)
        )
        self._real_time_factor = Histogram(
            "omnistage_real_time_factor",
            "Seconds that a request took for each second of sound; below 1 keeps up with a listener.",
            ["model"],
            buckets=_FACTORS,
            registry=self.registry,
        )
        self._prompt_tokens = self._count("omnistage_prompt_tokens", "Tokens of prompts that were answered.")
        self._tokens = self._count("omnistage_generated_tokens", "Tokens of answers.")
        self._audio = self._count("omnistage_generated_audio_seconds", "Seconds of sound made.")
        self._images = self._count("omnistage_generated_images", "Pictures made.")
        self._video = self._count("omnistage_generated_video_seconds", "Seconds of video made.")
        self._steps = self._count("omnistage_denoising_steps", "Denoising steps of requests.")
        self.filtered = self._count(
            "omnistage_content_filtered", "Requests that the content filter ended.", ("model", "where")
        )
        self._responses = self._count(
            "omnistage_http_responses", "Answers by status; 499: the client left.", ("endpoint", "status")
        )
        self._errors = self._count("omnistage_http_errors", "Answers of 400 and more.", ("status",))

    def _seconds(self, name: str, text: str, labels: Sequence[str]) -> Histogram:
        return Histogram(name, text, labels, buckets=_SECONDS, registry=self.registry)

    def _count(self, name: str, text: str, labels: Sequence[str] = ("model",)) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def observe_response(self, record: AuditRecord, seconds: float) -> None:
        """Count a request to the service that is over."""
        status = record.status or 500
        self._request.labels(record.endpoint).observe(seconds)
        self._responses.labels(record.endpoint, str(status)).inc()
        if status >= 400:
            self._errors.labels(str(status)).inc()

    def observe_output(self, model: str, final: OmniRequestOutput, seconds: float) -> None:
        """Count what a request has made that was read to its end."""
        usage = final.usage
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._tokens.labels(model).inc(usage.completion_tokens)
        self._audio.labels(model).inc(usage.audio_seconds)
        self._images.labels(model).inc(usage.images)
        self._video.labels(model).inc(usage.video_seconds)
        self._steps.labels(model).inc(usage.steps)
        if usage.audio_seconds and final.finish_reason in _WHOLE:
            # An answer that was cut short has taken the time of its text for a little of its sound.
            self._real_time_factor.labels(model).observe(seconds / usage.audio_seconds)
        if final.finish_reason is FinishReason.CONTENT_FILTER:
            self.filtered.labels(model, "output").inc()

    def observe_trace(self, model: str, trace: Trace) -> None:
        """Count how long a request that is over waited for each stage."""
        for name, stage in trace.stages.items():
            if stage.queue is not None:
                self._queue.labels(model, name).observe(max(0.0, stage.queue))


@dataclass(frozen=True, slots=True)
class _Reading:
    """A number of a stage's own, and the metric that shows it."""

    keys: tuple[str, ...]
    """Names among the stage's numbers, by engine."""
    name: str
    text: str
    counter: bool = True


_STAGES = (
    _Reading(("waiting",), "omnistage_stage_waiting", "Requests that wait in a stage.", counter=False),
    _Reading(("running",), "omnistage_stage_running", "Requests in a stage's batch.", counter=False),
    _Reading(("starved",), "omnistage_stage_starved", "Requests without input.", counter=False),
    _Reading(("steps",), "omnistage_stage_steps", "Steps done."),
    _Reading(("tokens",), "omnistage_stage_tokens", "Tokens, codes, denoising steps or pictures done."),
    _Reading(("preemptions",), "omnistage_stage_preemptions", "Requests put back."),
    _Reading(("forwards",), "omnistage_stage_forwards", "Passes through a denoiser's network."),
    _Reading(("windows",), "omnistage_stage_windows", "Windows of codes turned into sound."),
    _Reading(("audio_seconds",), "omnistage_stage_audio_seconds", "Seconds of sound given by a stage."),
    _Reading(("blocks",), "omnistage_kv_blocks", "Blocks for keys and values.", counter=False),
    _Reading(("blocks_free",), "omnistage_kv_blocks_free", "Those that no request holds.", counter=False),
    _Reading(("prefix_lookups",), "omnistage_prefix_cache_lookups", "Blocks of prompts that could have been there."),
    _Reading(("prefix_hits",), "omnistage_prefix_cache_hits", "Those that were."),
    _Reading(("encoder_cache_hits", "cache_hits"), "omnistage_encoder_cache_hits", "Prompts or media that were there."),
    _Reading(
        ("encoder_cache_misses", "cache_misses"), "omnistage_encoder_cache_misses", "Those that had to be encoded."
    ),
    _Reading(
        ("encoder_cache_bytes", "cache_bytes"), "omnistage_encoder_cache_bytes", "Bytes of what is kept.", counter=False
    ),
)


def _numbers(stats: StageStats) -> Mapping[str, float]:
    own = {
        "waiting": stats.waiting,
        "running": stats.running,
        "starved": stats.starved,
        "steps": stats.steps,
        "tokens": stats.tokens,
        "preemptions": stats.preemptions,
    }
    return {**stats.extra, **own}


class _Collector(Collector):
    """The engines' numbers, as they are when asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        inflight = GaugeMetricFamily("omnistage_requests_inflight", "Requests running or queued.", labels=["model"])
        capacity = GaugeMetricFamily("omnistage_requests_capacity", "Requests that are taken.", labels=["model"])
        admitted = CounterMetricFamily("omnistage_requests_admitted", "Requests taken.", labels=["model"])
        rejected = CounterMetricFamily("omnistage_requests_rejected", "Requests refused when full.", labels=["model"])
        finished = CounterMetricFamily("omnistage_requests_finished", "By reason.", labels=["model", "reason"])
        steps = HistogramMetricFamily("omnistage_stage_step_seconds", "How long steps take.", labels=_STAGE)
        stages = [
            (CounterMetricFamily if reading.counter else GaugeMetricFamily)(reading.name, reading.text, labels=_STAGE)
            for reading in _STAGES
        ]
        for name, model in list(self._service.models.items()):
            stats = model.omni.stats()
            inflight.add_metric([name], stats.inflight)
            capacity.add_metric([name], stats.max_inflight)
            admitted.add_metric([name], stats.admitted)
            rejected.add_metric([name], stats.rejected)
            for reason, count in stats.finished.items():
                finished.add_metric([name, str(reason)], count)
            for stage, own in stats.stages.items():
                numbers = _numbers(own)
                for reading, family in zip(_STAGES, stages, strict=True):
                    for key in reading.keys:
                        if key in numbers:
                            family.add_metric([name, stage], numbers[key])
            for stage, times in stats.step_seconds.items():
                steps.add_metric([name, stage], _buckets(times), times.total)
        yield from (inflight, capacity, admitted, rejected, finished, steps, *stages)
        yield InfoMetricFamily("omnistage_build", "What runs.", {"version": __version__})
        yield from _device_memory()


def _buckets(times: StepSeconds) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in STEP_BUCKETS), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(times.counts)), strict=True))


def _device_memory() -> Iterator[Metric]:
    import torch

    # Asking a device that nobody uses would start it.
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    shown = (
        GaugeMetricFamily("omnistage_cuda_memory_allocated_bytes", "Held by tensors.", labels=["device"]),
        GaugeMetricFamily("omnistage_cuda_memory_reserved_bytes", "Held by the process.", labels=["device"]),
        GaugeMetricFamily("omnistage_cuda_memory_free_bytes", "Free on the device.", labels=["device"]),
        GaugeMetricFamily("omnistage_cuda_memory_total_bytes", "Of the device.", labels=["device"]),
    )
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        values = (torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index), free, total)
        for family, value in zip(shown, values, strict=True):
            family.add_metric([str(index)], value)
    yield from shown


def render(service: Service) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(service))
    ProcessCollector(registry=registry)
    return generate_latest(registry) + generate_latest(service.metrics.registry)
