"""Prints a report, by itself and compared with an older one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from omnistage.bench.measure import FIGURES, RATES, Spread
from omnistage.bench.report import SCHEMA, Report, Summary
from omnistage.core.errors import InvalidRequestError

_NOTABLE = 0.05


def print_report(report: Report, console: Console) -> None:
    """Print the figures."""
    console.print(_counts(report))
    for name, summary in report.kinds.items():
        console.print(_spreads(name, summary))
    _print_stutter(report, console)
    _print_errors(report, console)
    generator = report.generator
    lag = "" if generator.lag is None else f", requests sent {1e3 * generator.lag.p99:.1f} ms late (p99)"
    console.print(f"generator: {100 * generator.cpu_share:.0f}% of a core{lag}", style="dim")
    for warning in generator.warnings():
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if report.interrupted:
        console.print(f"interrupted: {report.unfinished} requests were cancelled and are not counted", style="yellow")


def _counts(report: Report) -> Table:
    table = _table(f"{report.seconds:.1f} s of load")
    table.add_column("kind")
    for heading in ("sent", "ok", "429", "failed", "req/s", "tokens/s", "audio s/s", "img/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    if report.summary.goodput is not None:
        table.add_column("good", justify="right", no_wrap=True)
    groups = dict(report.kinds)
    if len(groups) != 1:
        groups["all"] = report.summary
    for name, summary in groups.items():
        rates = summary.throughput
        row = [str(n) for n in (summary.sent, summary.succeeded, summary.refused)]
        row.append(f"[red]{summary.failed}[/]" if summary.failed else "0")
        row += [_rate(rates[name]) for name in ("requests", "output_tokens", "audio_seconds", "pictures")]
        if summary.goodput is not None:
            row.append(f"{100 * summary.goodput.share:.0f}%")
        table.add_row(name, *row)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _rate(value: float) -> str:
    return f"{value:.2f}" if value else "-"


def _spreads(name: str, summary: Summary) -> Table:
    table = _table(name)
    table.add_column("", no_wrap=True)
    for heading in ("p50", "p90", "p99", "mean", "max", "count"):
        table.add_column(heading, justify="right", no_wrap=True)
    for key, spread in summary.spreads.items():
        if spread is not None:
            values = (spread.p50, spread.p90, spread.p99, spread.mean, spread.largest)
            table.add_row(FIGURES[key].label, *(_format(key, value) for value in values), str(spread.count))
    return table


def _format(key: str, value: float) -> str:
    if key == "rtf":
        return f"{value:.3f}"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.0f} ms" if value >= 0.1 else f"{1e3 * value:.1f} ms"


def _print_stutter(report: Report, console: Console) -> None:
    for name, summary in report.kinds.items():
        if (stutter := summary.stutter) is not None:
            buffer = report.settings.get("player_buffer", 0.0)
            start = f"{buffer:g} s after" if buffer else "with"
            console.print(
                f"{name}: a player that starts {start} the first audio waits for "
                f"{100 * stutter.underrun_share:.1f}% of the audio's duration; "
                f"{100 * stutter.requests_share:.0f}% of requests stutter; "
                f"overall real-time factor {summary.rtf_overall or 0.0:.3f}",
                soft_wrap=True,
            )


def _print_errors(report: Report, console: Console) -> None:
    if not report.summary.errors:
        return
    table = _table("errors")
    for heading in ("status and reason", "count", "message"):
        table.add_column(heading, justify="right" if heading == "count" else "left")
    for name, count in report.summary.errors.items():
        message = next((o.message for o in report.outcomes if o.message and name.endswith(str(o.error))), "")
        table.add_row(name, str(count), (message or "")[:120].replace("[", "\\["))
    console.print(table)


# ----------------------------------------------------------------------------------------------- comparison


def read_report(file: Path) -> dict[str, Any]:
    """An older report. Raises `InvalidRequestError` for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InvalidRequestError(f"{file} cannot be read as JSON: {error}", param="--compare") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise InvalidRequestError(
            f"{file} is not a report of this version ({SCHEMA}); measure again with this version", param="--compare"
        )
    return value


def compare(old: Mapping[str, Any], report: Report, console: Console) -> None:
    """Print what changed since `old`, kind by kind."""
    table = _table("compared with the older report")
    for heading in ("kind", "figure", "older", "now", "ratio"):
        table.add_column(heading, justify="left" if heading in ("kind", "figure") else "right")
    for name, summary in report.kinds.items():
        before = old.get("kinds", {}).get(name)
        if before is None:
            continue
        for key, now in summary.throughput.items():
            then = before["throughput"][key]
            if then and now:
                table.add_row(
                    name, RATES[key].label, f"{then:.2f}", f"{now:.2f}", _ratio(now / then, higher_is_better=True)
                )
        for key, spread in summary.spreads.items():
            older = before["spreads"].get(key)
            if spread is not None and older is not None:
                _add_spread(table, name, key, Spread(**older), spread)
    settings = {k for k in report.settings if k not in ("url", "command")}
    changed = sorted(k for k in settings if old.get("settings", {}).get(k) != report.settings[k])
    console.print(table)
    if changed:
        console.print(f"the two runs differ in: {', '.join(changed)}", style="yellow", soft_wrap=True)


def _add_spread(table: Table, name: str, key: str, then: Spread, now: Spread) -> None:
    for quantile in ("p50", "p99"):
        older, newer = getattr(then, quantile), getattr(now, quantile)
        if older and newer:
            ratio = _ratio(newer / older, higher_is_better=False)
            table.add_row(name, f"{FIGURES[key].label}, {quantile}", _format(key, older), _format(key, newer), ratio)


def _ratio(value: float, *, higher_is_better: bool) -> str:
    if abs(value - 1) < _NOTABLE:
        return f"{value:.2f}"
    return f"[{'green' if (value > 1) == higher_is_better else 'red'}]{value:.2f}[/]"
