"""`omnistage config`: print or check the configuration of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from omnistage.cli.common import out
from omnistage.cli.options import ModelArgument, ModelOptions


def config(
    model: ModelArgument,
    settings: ModelOptions,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the configuration is valid.")] = False,
) -> None:
    """Print the whole configuration of MODEL as YAML, with the origin of every value beside it.

    Layers, later over earlier: the family's defaults, `--config`, `--device` and `--dtype`,
    `--set`. What is printed can be saved, edited and given back with `--config`.

    Examples:

    ```
    omnistage config out/tiny > my.yaml
    omnistage config out/tiny --config my.yaml --set talker.temperature=0 --check
    ```
    """
    from omnistage.config import to_yaml

    resolved = settings.resolve(model)
    console = out()
    if check:
        stages = " -> ".join(resolved.graph.order)
        outputs = ", ".join(resolved.graph.outputs)
        console.print(f"valid: family {resolved.model.family}, stages {stages}, outputs {outputs}", soft_wrap=True)
        return
    text = to_yaml(resolved)
    if console.is_terminal:
        from rich.syntax import Syntax

        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)
