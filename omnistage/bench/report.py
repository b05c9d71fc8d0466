"""A run as figures: over all requests and for each kind, with where and how they were measured."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnistage import __version__
from omnistage.bench.load import Plan, Run
from omnistage.bench.measure import Outcome, Spread, Stutter, spreads, within
from omnistage.bench.workload import Kind

SCHEMA = "omnistage.bench_serve/1"
LAG_BOUND = 0.05
"""Seconds: where requests go out later than that, figures are the generator's and not the service's."""
CPU_BOUND = 0.8


@dataclass(frozen=True, slots=True)
class Throughput:
    """A second of the run gave so much."""

    requests: float
    prompt_tokens: float
    output_tokens: float
    audio_seconds: float
    pictures: float


@dataclass(frozen=True, slots=True)
class Goodput:
    limits: dict[str, float]
    share: float
    """Of the requests that were sent."""
    requests: float
    """A second."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a group of requests."""

    sent: int
    succeeded: int
    refused: int
    failed: int
    by_status: dict[str, int]
    """`none`: there was no answer."""
    errors: dict[str, int]
    throughput: Throughput
    spreads: dict[str, Spread | None]
    """Seconds, `rtf` without a unit; None: nothing of the sort was measured."""
    rtf_overall: float | None
    """From the first request with sound to the last sound, for each second of sound of all requests."""
    stutter: Stutter | None
    goodput: Goodput | None

    @classmethod
    def of(
        cls, outcomes: Sequence[Outcome], seconds: float, buffer: float, limits: Mapping[str, float] | None
    ) -> Summary:
        good = [outcome for outcome in outcomes if outcome.ok]
        span = seconds or float("inf")
        goodput = None
        if limits:
            met = sum(within(outcome, limits) for outcome in outcomes)
            goodput = Goodput(dict(limits), met / len(outcomes) if outcomes else 0.0, met / span)
        return cls(
            sent=len(outcomes),
            succeeded=len(good),
            refused=sum(outcome.refused for outcome in outcomes),
            failed=sum(outcome.failed for outcome in outcomes),
            by_status=_counted("none" if o.status is None else str(o.status) for o in outcomes),
            errors=_counted(_named(o) for o in outcomes if not o.ok),
            throughput=Throughput(
                len(good) / span,
                sum(o.prompt_tokens for o in good) / span,
                sum(o.text_tokens for o in good) / span,
                sum(o.audio_seconds for o in good) / span,
                sum(o.pictures for o in good) / span,
            ),
            spreads=spreads(outcomes),
            rtf_overall=_rtf_overall(good),
            stutter=Stutter.of(outcomes, buffer),
            goodput=goodput,
        )


def _counted(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _named(outcome: Outcome) -> str:
    return f"{outcome.status} {outcome.error}" if outcome.status is not None else str(outcome.error)


def _rtf_overall(good: Sequence[Outcome]) -> float | None:
    heard = [outcome for outcome in good if outcome.sounds and outcome.audio_seconds]
    if not heard:
        return None
    took = max(outcome.sounds[-1][0] for outcome in heard) - min(outcome.sent for outcome in heard)
    return took / sum(outcome.audio_seconds for outcome in heard)


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """Whether the generator itself kept up."""

    lag: Spread | None
    """Seconds between the moment at which a request was due and the one at which it was sent."""
    cpu_share: float
    """Of one core."""

    def warnings(self) -> list[str]:
        found = []
        if self.lag is not None and self.lag.p99 > LAG_BOUND:
            found.append(
                f"1 of 100 requests was sent {1e3 * self.lag.p99:.0f} ms late or more: the generator did not keep up; "
                "lower the rate, or run it on another machine than the service"
            )
        if self.cpu_share > CPU_BOUND:
            found.append(
                f"the generator used {100 * self.cpu_share:.0f}% of a core: it may be the slowest part; lower the load"
            )
        return found


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
        lost = any(summary.sent and not summary.succeeded for summary in self.kinds.values())
        return 1 if self.summary.failed or not self.summary.succeeded or lost else 0

    def to_json(self, buffer: float) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "environment": self.environment,
            "settings": self.settings,
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "unfinished": self.unfinished,
            "summary": asdict(self.summary),
            "kinds": {name: asdict(summary) for name, summary in self.kinds.items()},
            "generator": {**asdict(self.generator), "warnings": self.generator.warnings()},
            "requests": [_row(outcome, buffer) for outcome in self.outcomes],
        }

    def dumps(self, buffer: float) -> str:
        """The same as text: a request a line, for each has as many moments as its answer had pieces."""
        value = self.to_json(buffer)
        rows = ",\n  ".join(json.dumps(row, separators=(",", ":"), allow_nan=False) for row in value.pop("requests"))
        head = json.dumps(value, indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "requests": [\n  {rows}\n ]\n}}\n'


def build(run: Run, plan: Plan, settings: dict[str, Any], buffer: float, limits: Mapping[str, float] | None) -> Report:
    """The figures of a run."""
    kinds = [kind for kind in Kind if any(outcome.kind is kind for outcome in run.outcomes)]
    lag = Spread.of([max(0.0, o.sent - o.due) for o in run.outcomes]) if plan.rate is not None else None
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
        "command": [Path(sys.argv[0]).name, *shown_command(sys.argv[1:])],
    }


def shown_command(arguments: Sequence[str]) -> list[str]:
    """The command line without its key: reports are passed on."""
    shown, hide = [], False
    for argument in arguments:
        option, given, _ = argument.partition("=")
        if hide or (given and option == "--api-key"):
            argument = "***" if hide else "--api-key=***"
        hide = not hide and argument == "--api-key"
        shown.append(argument)
    return shown


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"


def _row(outcome: Outcome, buffer: float) -> dict[str, Any]:
    playback = outcome.playback(buffer)
    return {
        "number": outcome.number,
        "kind": str(outcome.kind),
        "due": round(outcome.due, 6),
        "sent": round(outcome.sent, 6),
        "status": outcome.status,
        "error": outcome.error,
        "message": outcome.message,
        "latency": round(outcome.latency, 6),
        "ttft": outcome.ttft,
        "tpot": outcome.tpot,
        "ttfa": outcome.ttfa,
        "rtf": outcome.rtf,
        "prompt_tokens": outcome.prompt_tokens,
        "text_tokens": outcome.text_tokens,
        "audio_seconds": outcome.audio_seconds,
        "pictures": outcome.pictures,
        "underrun_seconds": playback.waited,
        "underruns": playback.stalls,
        # Seconds from sending: what all figures are made of.
        "token_times": [round(moment - outcome.sent, 6) for moment in outcome.token_times],
        "sounds": [[round(moment - outcome.sent, 6), size] for moment, size in outcome.sounds],
    }
