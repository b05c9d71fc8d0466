"""`omnistage plan`: what a model takes of a device's memory, before it is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from omnistage.cli.common import out
from omnistage.cli.options import ModelArgument, ModelOptions
from omnistage.core.errors import MissingDependencyError
from omnistage.core.stage_memory import GIB, gib

if TYPE_CHECKING:
    from omnistage.placement.memory_plan import MemoryPlan, PlannedDevice

_PARTS = (
    ("weights", "weights", "blue"),
    ("kv_cache", "KV", "green"),
    ("activations", "steps", "yellow"),
    ("media", "media", "red"),
    ("graphs", "graphs", "magenta"),
    ("caches", "caches", "cyan"),
)
_BAR_COLUMNS = 56


def plan(
    model: ModelArgument,
    settings: ModelOptions,
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="Requests at once; default: 16.", min=1)] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of each request; default: 8192.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the picture to a PNG file too.", metavar="FILE")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the small files of a model on the hub.")] = False,
) -> None:
    """Print what MODEL takes of memory: by stage, and what fits, without reading a weight.

    `--gpu-memory` plans for a GPU that need not be in this machine. Ends with exit code 1 if the model does not fit.

    Examples:

    ```
    omnistage plan out/tiny
    omnistage plan Qwen/Qwen2.5-Omni-7B --download --gpu-memory 24GiB --concurrency 4 --context 4096
    ```
    """
    from omnistage.pipeline.build import plan_memory

    limits = {"concurrency": concurrency, "context": context}
    overrides = [f"deployment.{key}={value}" for key, value in limits.items() if value is not None]
    resolved = settings.resolve(model, overrides=overrides, weights=False, download=download)
    memory = plan_memory(resolved, anywhere=True)
    if as_json:
        typer.echo(json.dumps(as_dict(memory), indent=2))
    else:
        for part in describe(memory):
            out().print(part, soft_wrap=not isinstance(part, Table))
    if plot is not None:
        _plot(memory, plot)
    if not memory.fits:
        raise typer.Exit(1)


def as_dict(plan: MemoryPlan) -> dict[str, object]:
    """The plan as JSON: sizes in bytes."""
    values = dataclasses.asdict(plan)
    for device, planned in zip(values["devices"], plan.devices, strict=True):
        device |= {"needed": planned.bytes_needed, "fits": planned.fits}
    return {**values, "fits": plan.fits}


def describe(plan: MemoryPlan) -> Iterator[Table | Text]:
    """The tables, the pictures and the verdict."""
    for device in plan.devices:
        yield _table(plan, device)
        yield from _bar(device)
    for name, url in plan.remote.items():
        yield Text(f"{name}: on the server at {url}, which plans its own memory", style="dim")
    yield from _verdict(plan)


def _table(plan: MemoryPlan, device: PlannedDevice) -> Table:
    where = "host memory" if device.name == "cpu" else device.name
    unit, name = (GIB, "GiB") if device.bytes_needed >= GIB else (2**20, "MiB")

    def cell(size: int) -> str:
        return f"{size / unit:.2f}" if size else "-"

    # Narrow enough for a terminal of 80 columns.
    table = Table(title=f"{plan.model} on {where}, {name}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("dtype")
    columns_shown = [part for part in _PARTS if any(getattr(stage.memory, part[0]) for stage in device.stages)]
    for _, title, colour in columns_shown:
        table.add_column(title, justify="right", style=colour)
    table.add_column("all", justify="right")
    for stage in device.stages:
        cells = [cell(getattr(stage.memory, part)) for part, *_ in columns_shown]
        estimated = " (estimated)" if stage.estimated else ""
        table.add_row(stage.name + estimated, stage.dtype, *cells, cell(stage.memory.total))
    if device.context:
        empty = [""] * len(columns_shown)
        table.add_row("CUDA context", "", *empty, cell(device.context))
        table.add_row("reserve", "", *empty, cell(device.reserve))
    totals = [cell(sum(getattr(stage.memory, part) for stage in device.stages)) for part, *_ in columns_shown]
    table.add_section()
    table.add_row("all", "", *totals, cell(device.bytes_needed))
    return table


def _bar(device: PlannedDevice) -> Iterator[Text]:
    """One line: what is taken, by what it is for, out of what is there."""
    whole = max(device.available or 0, device.bytes_needed, 1)
    pieces = [(sum(getattr(stage.memory, name) for stage in device.stages), colour) for name, _, colour in _PARTS]
    pieces.append((device.context + device.reserve, "white"))
    bar, end, columns_drawn = Text(), 0, 0
    for size, colour in pieces:
        end += size
        columns = round(end / whole * _BAR_COLUMNS) - columns_drawn
        bar.append("█" * columns, style=colour)
        columns_drawn += columns
    bar.append("░" * (_BAR_COLUMNS - columns_drawn), style="dim")
    bar.append(
        f" {gib(device.bytes_needed)}" + (f" of {gib(device.available)}" if device.available is not None else "")
    )
    yield bar


def _verdict(plan: MemoryPlan) -> Iterator[Text]:
    count, length = plan.concurrency, plan.context
    size = f" of {length:,} tokens each" if plan.has_context else ""
    if plan.fits:
        asked_count, asked_length = plan.request
        fewer = (count, length) != plan.request
        text = f"fits: {count} request{'s' if count > 1 else ''} at once{size}"
        if fewer:
            asked_size = f" of {asked_length:,} tokens" if plan.has_context else ""
            text += f"; there is no room for {asked_count}{asked_size}"
        yield Text(text, style="yellow" if fewer else "green")
        for stage in plan.stages.values():
            if stage.kv_tokens is not None:
                yield Text(
                    f"  {stage.name}: {stage.kv_tokens:,} tokens in the KV cache; the longest request has "
                    f"{stage.max_length:,}",
                    style="dim",
                )
        return
    yield Text(f"does not fit, not even one request{size.removesuffix(' each')}. What would help:", style="bold red")
    for line in plan.advice:
        yield Text(f"  - {line}")


def _plot(plan: MemoryPlan, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("the picture needs matplotlib: pip install matplotlib") from error
    stages: Sequence[tuple[str, object]] = [(s.name, s.memory) for s in plan.stages.values()]
    figure = Figure(figsize=(8, 1 + 0.5 * len(stages)), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(stages)
    for name, title, colour in _PARTS:
        sizes = [getattr(memory, name) / 2**30 for _, memory in stages]
        axes.barh([n for n, _ in stages], sizes, left=bottoms, label=title, color=colour)
        bottoms = [a + b for a, b in zip(bottoms, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.legend()
    figure.savefig(path, format="png")
