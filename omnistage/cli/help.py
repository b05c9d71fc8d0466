"""What help looks like: switches without a type, and the first steps where no command is given."""

from __future__ import annotations

from typing import Any

from rich.padding import Padding
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from omnistage.cli.common import out

_FIRST_STEPS = (
    ("omnistage pull starter", "fetch real weights once: 150 MB, no GPU needed"),
    ("omnistage chat starter", "talk to a model here, in the terminal"),
    ("omnistage serve starter", "a web page and OpenAI's API at http://127.0.0.1:8000/"),
    ("omnistage generate starter 'A red apple' --modalities text,image --out out", "one request, written to files"),
    ("omnistage plan MODEL", "what a model of yours takes of memory, before it is loaded"),
)


def print_first_steps() -> None:
    """The five things that people do."""
    console = out()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 0, 0, 0))
    for command, text in _FIRST_STEPS:
        table.add_row(f"[bold]{command}[/]")
        table.add_row(Padding(text, (0, 0, 1, 4)))
    console.print("Any-to-any models as pipelines of stages: text, images, audio and video in and out.\n")
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print("omnistage --help lists all commands, omnistage COMMAND --help the options of one.")


class _Switches:
    """A command whose help shows no type for options that take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_Switches, TyperCommand):
    """One command."""


class Group(_Switches, TyperGroup):
    """Several commands."""
