"""The command line: `omnistage`. Heavy modules are imported inside the commands, so that help is quick."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from omnistage import __version__
from omnistage.cli.bench import app as bench
from omnistage.cli.chat import chat
from omnistage.cli.common import ends_on_error
from omnistage.cli.config import config
from omnistage.cli.generate import generate
from omnistage.cli.help import Command, Group, print_first_steps
from omnistage.cli.models import models
from omnistage.cli.options import expand_options
from omnistage.cli.plan import plan
from omnistage.cli.pull import list_bundles, pull
from omnistage.cli.quantize import quantize
from omnistage.cli.serve import serve
from omnistage.cli.tiny import tiny
from omnistage.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="omnistage",
    cls=Group,
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Run any-to-any models as pipelines of stages: text, images, audio and video in; text, speech, images and "
    "video out.",
    epilog="Start with `omnistage pull starter` and `omnistage chat starter`: real weights, no GPU. Without a network: "
    "`omnistage tiny qwen2_5_omni out/tiny` and `omnistage generate out/tiny 'Hello'`.",
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"omnistage {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    # Our own progress and errors say what matters; a user who sets these gets the libraries' notes and bars back.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    if context.invoked_subcommand is None:
        print_first_steps()


# In the order in which the help lists them: what a new user needs comes first.
app.command("pull", cls=Command)(ends_on_error(pull))
app.command("list", cls=Command)(ends_on_error(list_bundles))
for _command in (chat, serve, generate, plan, config, tiny, verify, quantize):
    app.command(cls=Command)(ends_on_error(expand_options(_command)))
app.command("models", cls=Command)(ends_on_error(models))
app.add_typer(bench, name="bench")
