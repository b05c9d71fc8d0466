"""Shared by the commands: consoles, progress bars, and how an error ends a command."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from omnistage.core.errors import (
    ConfigError,
    LimitExceededError,
    MissingDependencyError,
    OmniError,
    PromptTooLongError,
    RegistryError,
    UnsupportedModelError,
)

_P = ParamSpec("_P")
EXIT_INTERRUPTED = 130
"""As shells have it for Ctrl-C."""
DEBUG_VARIABLE = "OMNISTAGE_DEBUG"
"""Set to 1 to end a command with a traceback on an error."""
EXIT_ERROR = 2

Report = Callable[[str, float], None]
"""Takes a description and the fraction that is done."""

# The first class that fits gives the hint, so subclasses come before their bases. Other errors say what to do.
_HINTS: tuple[tuple[type[OmniError], str | None], ...] = (
    (RegistryError, "a family's package may be missing or wrong; `omnistage tiny --help` lists the families"),
    (UnsupportedModelError, "`omnistage models` lists what is supported"),
    (MissingDependencyError, "install it and run the same command again"),
    (PromptTooLongError, None),  # most often the model's own limit, which no setting changes
    (LimitExceededError, "limits are set with --set limits.KEY=VALUE"),
)
_CONFIG_HINT = "`omnistage config MODEL` prints every key with its value and where it came from"
"""For keys and values of a configuration; a port in use or a short API key has nothing to do with it."""


def out() -> Console:
    """For results: standard output, so that it can be piped."""
    return Console(highlight=False)


def err() -> Console:
    """For progress and errors: standard error."""
    return Console(stderr=True, highlight=False)


def ends_on_error(command: Callable[_P, None]) -> Callable[_P, None]:
    """The command, but an `OmniError` ends it with one line, a hint and exit code 2; an `OSError` without a hint, and
    Ctrl-C with exit code 130."""

    @functools.wraps(command)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except OmniError as error:
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            print_error(error)
            raise typer.Exit(EXIT_ERROR) from error
        except KeyboardInterrupt:
            print_interrupted("stopped")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            raise  # the reader of a pipe is gone: click ends the command silently
        except OSError as error:
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            print_line(os_reason(error))
            raise typer.Exit(EXIT_ERROR) from error

    return guarded


def print_error(error: OmniError) -> None:
    console = err()
    print_line(str(error))
    others = _others(error)
    for other in others or ():
        print_note(Text(f"also: {other}", style="red"), console)
    hint = next((text for kind, text in _HINTS if isinstance(error, kind)), None)
    if others is not None:
        hint = _CONFIG_HINT
    if hint is not None and "`omnistage " not in error.message:  # the message has its own hint
        print_note(Text(f"hint: {hint}", style="dim"), console)


def print_line(text: str) -> None:
    """An error, in one line on standard error."""
    print_note(Text.assemble(("error: ", "bold red"), (text, "red")))


def print_interrupted(what: str) -> None:
    """What Ctrl-C has ended, below the ^C that a terminal shows."""
    if err().is_terminal:
        print_note("")
    print_note(Text(what, style="red"))


def exit_interrupted(what: str) -> NoReturn:
    """End the process at once, where nothing can be raised."""
    print_interrupted(what)
    leave_bar()
    os._exit(EXIT_INTERRUPTED)


def leave_bar() -> None:
    """Before a process ends while a bar is drawn: its line goes, and the cursor is shown again."""
    console = err()
    if console.is_terminal:
        console.file.write("\r\x1b[2K\x1b[?25h")
        console.file.flush()


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Say what takes the time, on a terminal and while it lasts."""
    with err().status(Text(what, style="dim")):
        yield


def print_note(text: Text | str, console: Console | None = None) -> None:
    """A line on standard error: broken between words on a terminal, whole in a log. Plain strings are dim."""
    # Text, not markup: brackets in a message are the user's.
    to = console or err()
    with to.capture() as line:
        to.print(Text(text, style="dim") if isinstance(text, str) else text, soft_wrap=not to.is_terminal)
    # Where a bar of another console is drawn, `sys.stderr` writes above it; past that the bar would cover the line.
    file = sys.stderr if console is None else to.file
    file.write(line.get())
    file.flush()


def os_reason(error: OSError) -> str:
    """The system's reason in one line, with the file."""
    if error.filename is None or error.strerror is None:
        return (str(error) or type(error).__name__).splitlines()[0]
    return f"{error.filename}: {error.strerror}"


def _others(error: OmniError) -> tuple[str, ...] | None:
    """Further problems of an invalid configuration; None for an error of anything else."""
    if not isinstance(error, ConfigError):
        return None
    from omnistage.config import LocatedConfigError

    return error.others if isinstance(error, LocatedConfigError) else None


def progress_columns(count: ProgressColumn) -> tuple[ProgressColumn, ...]:
    return (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())


@contextmanager
def progress_bar(title: str, *, transient: bool = False) -> Iterator[Report]:
    """A bar on standard error that a `progress(what, fraction)` callback moves; a transient one leaves nothing."""
    columns = progress_columns(TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=err(), transient=transient) as bar:
        task = bar.add_task(title, total=1.0)

        def report(what: str, fraction: float) -> None:
            bar.update(task, description=what or title, completed=min(max(fraction, 0.0), 1.0))

        yield report
        bar.update(task, description=title, completed=1.0)
