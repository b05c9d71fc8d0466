"""The figures of a run: over all requests and by kind, with where and how they were measured."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnistage import __version__
from omnistage.bench.load import Load, Run
from omnistage.bench.measure import RATES, Outcome, Spread, Stutter, spreads, within
from omnistage.bench.workload import Kind

SCHEMA = "omnistage.bench_serve/1"
MAX_LAG = 0.05
"""Seconds: where requests are sent later than that, the generator limits the figures and not the service."""
MAX_CPU_SHARE = 0.8
_ROW = (
    *("number", "kind", "status", "error", "message", "ttft", "tpot", "ttfa", "rtf"),
    *("prompt_tokens", "text_tokens", "audio_seconds", "pictures"),
)
"""Fields of an outcome that the report has as they are."""


@dataclass(frozen=True, slots=True)
class Goodput:
    limits: dict[str, float]
    share: float
    """Of the requests that were sent."""
    requests: float
    """Per second."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a group of requests."""

    sent: int
    succeeded: int
    refused: int
    failed: int
    by_status: dict[str, int]
    """`none`: without a response."""
    errors: dict[str, int]
    throughput: dict[str, float]
    """Per second of the run, by `RATES`."""
    spreads: dict[str, Spread | None]
    """Seconds, `rtf` without a unit; None: not measured."""
    rtf_overall: float | None
    """From the first request with audio to the last audio chunk, per second of audio of all requests."""
    stutter: Stutter | None
    goodput: Goodput | None

    @classmethod
    def of(
        cls, outcomes: Sequence[Outcome], seconds: float, buffer: float, limits: Mapping[str, float] | None
    ) -> Summary:
        succeeded = [outcome for outcome in outcomes if outcome.ok]
        span = seconds or float("inf")
        goodput = None
        if limits:
            num_within = sum(within(outcome, limits) for outcome in outcomes)
            goodput = Goodput(dict(limits), num_within / len(outcomes) if outcomes else 0.0, num_within / span)
        return cls(
            sent=len(outcomes),
            succeeded=len(succeeded),
            refused=sum(outcome.refused for outcome in outcomes),
            failed=sum(outcome.failed for outcome in outcomes),
            by_status=_count("none" if o.status is None else str(o.status) for o in outcomes),
            errors=_count(_error_name(o) for o in outcomes if not o.ok),
            throughput={name: sum(rate.of(outcomes)) / span for name, rate in RATES.items()},
            spreads=spreads(outcomes),
            rtf_overall=_rtf_overall(succeeded),
            stutter=Stutter.of(outcomes, buffer),
            goodput=goodput,
        )


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _error_name(outcome: Outcome) -> str:
    return f"{outcome.status} {outcome.error}" if outcome.status is not None else str(outcome.error)


def _rtf_overall(succeeded: Sequence[Outcome]) -> float | None:
    with_audio = [outcome for outcome in succeeded if outcome.audio_chunks and outcome.audio_seconds]
    if not with_audio:
        return None
    seconds = max(outcome.audio_chunks[-1][0] for outcome in with_audio) - min(outcome.sent for outcome in with_audio)
    return seconds / sum(outcome.audio_seconds for outcome in with_audio)


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """Whether the generator itself kept up."""

    lag: Spread | None
    """Seconds by which requests were sent late."""
    cpu_share: float
    """Of one core."""

    def warnings(self) -> list[str]:
        warnings = []
        if self.lag is not None and self.lag.p99 > MAX_LAG:
            warnings.append(
                f"1 of 100 requests was sent {1e3 * self.lag.p99:.0f} ms late or more: the generator did not keep up; "
                "lower the rate, or run it on another machine"
            )
        if self.cpu_share > MAX_CPU_SHARE:
            warnings.append(
                f"the generator used {100 * self.cpu_share:.0f}% of a core and may be the bottleneck; lower the load"
            )
        return warnings


@dataclass(frozen=True, slots=True)
class Report:
    settings: dict[str, Any]
    environment: dict[str, Any]
    seconds: float
    summary: Summary
    kinds: dict[str, Summary]
    generator: GeneratorLoad
    interrupted: bool = False
    unfinished: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1 where the service failed, or nothing of a kind succeeded; a refusal (429) is no failure. 130: Ctrl-C."""
        if self.interrupted:
            return 130
        none_succeeded = any(summary.sent and not summary.succeeded for summary in self.kinds.values())
        return 1 if self.summary.failed or not self.summary.succeeded or none_succeeded else 0

    def to_json(self, buffer: float) -> dict[str, Any]:
        value = asdict(replace(self, outcomes=[]))
        del value["outcomes"]
        value["generator"]["warnings"] = self.generator.warnings()
        return {"schema": SCHEMA, **value, "requests": [_row(outcome, buffer) for outcome in self.outcomes]}

    def dumps(self, buffer: float) -> str:
        """The same as text, one request per line."""
        value = self.to_json(buffer)
        rows = ",\n  ".join(json.dumps(row, separators=(",", ":"), allow_nan=False) for row in value.pop("requests"))
        head = json.dumps(value, indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "requests": [\n  {rows}\n ]\n}}\n'


def build(run: Run, load: Load, settings: dict[str, Any], buffer: float, limits: Mapping[str, float] | None) -> Report:
    """The figures of a run."""
    kinds = [kind for kind in Kind if any(outcome.kind is kind for outcome in run.outcomes)]
    lag = Spread.of([max(0.0, o.sent - o.due) for o in run.outcomes]) if load.rate is not None else None
    return Report(
        settings=settings,
        environment=environment(),
        seconds=run.seconds,
        summary=Summary.of(run.outcomes, run.seconds, buffer, limits),
        kinds={
            str(kind): Summary.of([o for o in run.outcomes if o.kind is kind], run.seconds, buffer, limits)
            for kind in kinds
        },
        generator=GeneratorLoad(lag, run.cpu_seconds / run.seconds if run.seconds else 0.0),
        interrupted=run.interrupted,
        unfinished=run.unfinished,
        outcomes=run.outcomes,
    )


def environment() -> dict[str, Any]:
    """Where and when it was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "omnistage": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "command": [Path(sys.argv[0]).name, *redact_key(sys.argv[1:])],
    }


def redact_key(arguments: Sequence[str]) -> list[str]:
    """The command line without the API key, for reports are shared."""
    redacted, hide = [], False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if hide or (equals and option == "--api-key"):
            argument = "***" if hide else "--api-key=***"
        hide = not hide and argument == "--api-key"
        redacted.append(argument)
    return redacted


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"


def _row(outcome: Outcome, buffer: float) -> dict[str, Any]:
    playback = outcome.playback(buffer)
    return {
        **{name: getattr(outcome, name) for name in _ROW},
        **{name: round(getattr(outcome, name), 6) for name in ("due", "sent", "latency")},
        "underrun_seconds": playback.wait,
        "underruns": playback.stalls,
        # Seconds from sending.
        "token_times": [round(arrival - outcome.sent, 6) for arrival in outcome.token_times],
        "sounds": [[round(arrival - outcome.sent, 6), size] for arrival, size in outcome.audio_chunks],
    }
