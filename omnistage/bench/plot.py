"""A report as a picture: how long things took, and how the run went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.bench.measure import Outcome
from omnistage.bench.report import Report
from omnistage.bench.workload import Kind
from omnistage.core.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {Kind.TEXT: "#2a6fbb", Kind.SPEECH: "#c2571a", Kind.TTS: "#8c4fa8", Kind.IMAGE: "#2f8f5b"}
_MOST_BINS = 120


def plot(report: Report, file: Path) -> None:
    """Write the picture. Raises `MissingDependencyError` where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError("the plot needs matplotlib: pip install matplotlib, or add --no-plot") from error
    good = [outcome for outcome in report.outcomes if outcome.ok]
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    axes = figure.subplots(2, 3)
    _distribution(axes[0, 0], "time to first token", good, lambda o: [] if o.ttft is None else [o.ttft])
    _distribution(axes[0, 1], "gap between tokens", good, Outcome.token_gaps)
    _distribution(axes[0, 2], "whole request", good, lambda o: [o.latency])
    _distribution(axes[1, 0], "time to first audio", good, lambda o: [] if o.ttfa is None else [o.ttfa])
    _distribution(axes[1, 1], "gap between audio chunks", good, Outcome.sound_gaps)
    _timeline(axes[1, 2], report.outcomes, report.seconds)
    summary = report.summary
    figure.suptitle(
        f"{report.settings.get('load', '')}: {summary.succeeded} of {summary.sent} requests in {report.seconds:.1f} s, "
        f"{summary.throughput.requests:.2f} a second"
    )
    figure.savefig(file, dpi=110)


def _distribution(
    axes: Axes, title: str, outcomes: Sequence[Outcome], values_of: Callable[[Outcome], list[float]]
) -> None:
    """The share of samples that took no longer, for each kind."""
    axes.set_title(title, loc="left")
    drawn = False
    for kind in Kind:
        values = sorted(value for outcome in outcomes if outcome.kind is kind for value in values_of(outcome))
        if values:
            drawn = True
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axes.step([1e3 * value for value in values], shares, where="post", color=_COLOURS[kind], label=str(kind))
    if not drawn:
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
    """Requests answered a second, and how many were under way."""
    axes.set_title("over time", loc="left")
    begin = min((outcome.sent for outcome in outcomes), default=0.0)
    bins = max(1, min(_MOST_BINS, round(seconds)))
    width = seconds / bins or 1.0
    ended = [0] * bins
    moves: list[tuple[float, int]] = []
    for outcome in outcomes:
        moves += [(outcome.sent - begin, 1), (outcome.ended - begin, -1)]
        if outcome.ok:
            ended[min(bins - 1, int((outcome.ended - begin) / width))] += 1
    edges = [width * index for index in range(bins + 1)]
    axes.stairs([count / width for count in ended], edges, fill=True, color="0.8", label="answered a second")
    moments, under_way, current = [0.0], [0], 0
    for moment, change in sorted(moves):
        current += change
        moments.append(moment)
        under_way.append(current)
    axes.step(moments, under_way, where="post", color="#222222", linewidth=1, label="under way")
    axes.set_xlabel("s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", frameon=False)
