"""`omnistage bench`: compare speed with the reference library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnistage.cli.common import err


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller sizes and fewer repeats: minutes become seconds.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Also write results here.")] = None,
) -> None:
    """Run the same requests through Omnistage and the reference library, and print both speeds.

    Examples:

    ```
    omnistage bench --quick
    omnistage bench --out out/bench
    ```
    """
    from omnistage.bench import run

    raise typer.Exit(run(quick=quick, out=folder, console=err()))
