"""A report as a plot: distributions of times, and the run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.bench.measure import FIGURES, Outcome
from omnistage.bench.report import Report
from omnistage.bench.workload import Kind
from omnistage.core.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {Kind.TEXT: "#2a6fbb", Kind.SPEECH: "#c2571a", Kind.TTS: "#8c4fa8", Kind.IMAGE: "#2f8f5b"}
_MAX_BINS = 120


def plot(report: Report, file: Path) -> None:
    """Write the plot. Raises `MissingDependencyError` where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError("the plot needs matplotlib: pip install matplotlib, or add --no-plot") from error
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for name, place in zip(("ttft", "token_gap", "latency", "ttfa", "sound_gap"), axes, strict=False):
        _distribution(place, name, report.outcomes)
    _timeline(axes[-1], report.outcomes, report.seconds)
    summary = report.summary
    figure.suptitle(
        f"{report.settings.get('load', '')}: {summary.succeeded} of {summary.sent} requests in {report.seconds:.1f} s, "
        f"{summary.throughput['requests']:.2f} a second"
    )
    figure.savefig(file, dpi=110)


def _distribution(axes: Axes, name: str, outcomes: Sequence[Outcome]) -> None:
    """The cumulative distribution of a time, by kind."""
    axes.set_title(FIGURES[name].label, loc="left")
    for kind in Kind:
        values = sorted(FIGURES[name].of(outcome for outcome in outcomes if outcome.kind is kind))
        if values:
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axes.step([1e3 * value for value in values], shares, where="post", color=_COLOURS[kind], label=str(kind))
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing measured", ha="center", va="center", color="0.5", transform=axes.transAxes)
        axes.set_axis_off()
        return
    for share in (0.5, 0.9, 0.99):
        axes.axhline(share, color="0.85", linewidth=0.8, zorder=0)
    axes.set_yticks([0, 0.5, 0.9, 0.99], ["0", "50%", "90%", "99%"])
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms")
    axes.legend(loc="lower right", frameon=False)


def _timeline(axes: Axes, outcomes: Sequence[Outcome], seconds: float) -> None:
    """Requests finished per second, and requests in flight."""
    axes.set_title("over time", loc="left")
    start = min((outcome.sent for outcome in outcomes), default=0.0)
    bins = max(1, min(_MAX_BINS, round(seconds)))
    width = seconds / bins or 1.0
    ended = [0] * bins
    changes: list[tuple[float, int]] = []
    for outcome in outcomes:
        changes += [(outcome.sent - start, 1), (outcome.ended - start, -1)]
        if outcome.ok:
            ended[min(bins - 1, int((outcome.ended - start) / width))] += 1
    edges = [width * index for index in range(bins + 1)]
    axes.stairs([count / width for count in ended], edges, fill=True, color="0.8", label="finished per second")
    times, in_flight, current = [0.0], [0], 0
    for time, change in sorted(changes):
        current += change
        times.append(time)
        in_flight.append(current)
    axes.step(times, in_flight, where="post", color="#222222", linewidth=1, label="in flight")
    axes.set_xlabel("s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", frameon=False)
