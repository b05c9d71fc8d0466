"""`omnistage verify`: compare a checkpoint's output with the reference library's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from omnistage.cli.common import err, out, progress_bar
from omnistage.core.errors import InternalError, UnsupportedModelError
from omnistage.core.verification import VerifyRow


def verify(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint's folder, or starter.")],
    cases: Annotated[int, typer.Option(metavar="N", help="How many prompts to compare.", min=1)] = 4,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the prompts.", min=0)] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="X", help="Largest difference that passes; default: the family's, by quantity.", min=0.0),
    ] = None,
) -> None:
    """Run the same prompts through Omnistage and the reference library, and print the largest differences.

    Ends with exit code 1 if any quantity differs by more than its tolerance. Of a checkpoint of `omnistage quantize` it
    checks that its files are those that were measured, and prints the report.

    Examples:

    ```
    omnistage verify out/tiny
    omnistage verify out/tiny --cases 16 --seed 3 --tolerance 1e-4
    omnistage verify starter
    ```
    """
    from omnistage.cli.model_runner import OmniRunner
    from omnistage.cli.quantize import quantised_table
    from omnistage.config import detect_family
    from omnistage.config.checkpoint import find_model, read_model_config
    from omnistage.config.quantize import RECIPE_FILE
    from omnistage.models.registry import REGISTRY

    folder = find_model(model, REGISTRY)
    if (folder / RECIPE_FILE).is_file():
        out().print(quantised_table(folder))
        return
    family = detect_family(read_model_config(folder), REGISTRY)
    if family.verify is None:
        raise UnsupportedModelError(f"the family {family.name} has no comparison with a reference")
    with progress_bar(f"comparing {cases} cases") as report:
        rows = checked_rows(family.name, family.verify(OmniRunner(folder), cases=cases, seed=seed, progress=report))
    if tolerance is not None:
        rows = [row.judged_by(tolerance) for row in rows]
    failed = sum(not row.ok for row in rows)
    out().print(_table(rows))
    if failed:
        err().print(f"{failed} of {len(rows)} quantities differ by more than their tolerance", style="bold red")
        raise typer.Exit(1)
    out().print(f"all {len(rows)} quantities agree with the reference", style="green")


def checked_rows(family: str, result: object) -> list[VerifyRow]:
    """What a family's `verify` gave, if it is what it must give: an empty comparison must not look like success."""
    if not isinstance(result, Sequence) or not result or not all(isinstance(row, VerifyRow) for row in result):
        raise InternalError(f"the family {family} compared nothing; its verify() must return VerifyRow objects")
    return list(result)


def _table(rows: Sequence[VerifyRow]) -> Table:
    table = Table(title="largest difference from the reference")
    table.add_column("case")
    table.add_column("quantity")
    table.add_column("difference", justify="right")
    table.add_column("tolerance", justify="right")
    table.add_column("")
    for row in rows:
        verdict = "[green]ok[/]" if row.ok else "[bold red]FAIL[/]"
        table.add_row(row.case, row.quantity, f"{row.difference:.2e}", f"{row.tolerance:.2e}", verdict)
    return table
