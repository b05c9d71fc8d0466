"""`omnistage models`: what can be served with the libraries that are installed."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from omnistage.cli.common import err, out


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only names with this in them, such as qwen3.")
    ] = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only this state, such as exact, fallback or refused.")
    ] = None,
    pipelines: Annotated[
        bool, typer.Option("--pipelines", help="The pipelines of diffusers too; takes longer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """List families, and every type of the installed transformers (and diffusers) with its state.

    Types: `exact`, for language models on the paged engine; `fallback`: as exact, but slow, one sequence at a time;
    `family` or `elsewhere`: another family's; `refused`; `unbuilt`: no small checkpoint of it could be made to judge
    it; `not judged`: not in the table of this release, because transformers is newer. Pipelines: `family`, or
    `whole`: run as one call.

    Examples:

    ```
    omnistage models qwen3
    omnistage models --state refused --pipelines
    ```
    """
    from omnistage.hf import transformers
    from omnistage.models import catalogue
    from omnistage.models.registry import REGISTRY

    entries = [*catalogue.families(REGISTRY), *catalogue.language_models(), *catalogue.media_models()]
    if pipelines:
        entries += catalogue.pipelines(REGISTRY)
    matches = [e for e in entries if (name or "").lower() in e.name.lower() and state in (None, e.state)]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(entry) for entry in matches], indent=1))
        return
    console = out()
    for kind in dict.fromkeys(entry.kind for entry in matches):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in (kind, "state", ""):
            table.add_column(column, no_wrap=column == "state", overflow="fold")
        rows = [entry for entry in matches if entry.kind == kind]
        for entry in rows:
            table.add_row(entry.name, entry.state, entry.reason)
        console.print(table)
        counts = Counter(entry.state for entry in rows)
        console.print(", ".join(f"{count} {what}" for what, count in counts.items()) + "\n", soft_wrap=True)
    judged, installed = catalogue.judged_release(), transformers.__version__
    if judged != installed:
        err().print(f"judged with transformers {judged}; {installed} is installed", soft_wrap=True)
