"""Options that are declared as dataclasses, as typer sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer
from typer.testing import CliRunner

from omnistage.cli.options import ModelOptions, expand_options, option, set_values


@dataclass(frozen=True, slots=True)
class Plain:
    size: int = option(3, "How large.", "--how-large", min=1)
    names: list[str] = option([], "A name. Repeatable.", "--name")


@dataclass(frozen=True, slots=True)
class Grouped:
    PANEL: ClassVar[str] = "Observability"
    log: str | None = option(None, "Where to log.")


def app() -> tuple[typer.Typer, list[tuple[object, ...]]]:
    calls: list[tuple[object, ...]] = []

    def command(
        plain: Plain,
        word: Annotated[str, typer.Argument()],
        grouped: Grouped,
        loud: Annotated[bool, typer.Option()] = False,
    ) -> None:
        """Does it."""
        calls.append((plain, word, grouped, loud))

    application = typer.Typer()
    application.command()(expand_options(command))
    return application, calls


def test_a_group_is_given_with_its_defaults_or_what_was_set() -> None:
    application, calls = app()
    assert CliRunner().invoke(application, ["hi"]).exit_code == 0
    line = ["hi", "--how-large", "5", "--name", "a", "--name", "b", "--log", "x", "--loud"]
    assert CliRunner().invoke(application, line).exit_code == 0
    assert calls == [(Plain(), "hi", Grouped(), False), (Plain(5, ["a", "b"]), "hi", Grouped("x"), True)]


def test_settings_of_an_option_hold_and_its_panel_is_named_in_the_help() -> None:
    application, calls = app()
    assert CliRunner().invoke(application, ["hi", "--how-large", "0"]).exit_code == 2
    assert CliRunner().invoke(application, ["hi", "--size", "2"]).exit_code == 2
    printed = CliRunner().invoke(application, ["--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    assert "Observability" in printed
    assert printed.index("--how-large") < printed.index("--log")
    assert calls == []


def test_only_what_is_set_counts() -> None:
    assert set_values(ModelOptions()) == {}
    assert set_values(ModelOptions(overrides=["a=b"], device="cpu")) == {"overrides": ["a=b"], "device": "cpu"}


def test_lists_of_two_commands_are_not_shared() -> None:
    ModelOptions().overrides.append("a=b")
    assert ModelOptions().overrides == []
