"""What the commands share: consoles, options, and how an error ends a command."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from omnistage.core.errors import (
    CheckpointError,
    ConfigError,
    LimitExceededError,
    MissingDependencyError,
    OmniError,
    PromptTooLongError,
    RegistryError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from omnistage.config import ResolvedConfig

_P = ParamSpec("_P")
DEBUG_VARIABLE = "OMNISTAGE_DEBUG"
"""Set to 1, an error ends a command with its traceback."""
EXIT_ERROR = 2

Report = Callable[[str, float], None]
"""Takes what is being done and the fraction of it that is done."""

# The first class that fits gives the hint, so subclasses come before their bases.
_HINTS: tuple[tuple[type[OmniError], str | None], ...] = (
    (RegistryError, "a family's package may be missing or wrong; `omnistage tiny --help` lists the families"),
    (ConfigError, "`omnistage config MODEL` prints every key with its value and where it came from"),
    (UnsupportedModelError, "CONTRIBUTING.md says how to add a family"),
    (
        CheckpointError,
        "`omnistage pull starter` mends the starter; `omnistage tiny FAMILY DIR` makes a small checkpoint",
    ),
    (MissingDependencyError, "install it and run the same command again"),
    (PromptTooLongError, None),  # most often the model itself holds no more, and no setting changes that
    (LimitExceededError, "limits are set with --set limits.KEY=VALUE"),
)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a name in the local hub cache.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML laid over the family's defaults.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One value over all else, like thinker.max_running=4. Repeatable."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps; short for deployment.device.")
]
DTypeOption = Annotated[
    str | None, typer.Option("--dtype", help="auto, float32, float16 or bfloat16; short for deployment.dtype.")
]


def out() -> Console:
    """For results: standard output, so that it can be piped."""
    return Console(highlight=False)


def err() -> Console:
    """For progress and errors: standard error."""
    return Console(stderr=True, highlight=False)


def ends_on_error(command: Callable[_P, None]) -> Callable[_P, None]:
    """The command, but an `OmniError` ends it with one line, a hint and exit code 2; an `OSError` without a hint."""

    @functools.wraps(command)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except OmniError as error:
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            print_error(error)
            raise typer.Exit(EXIT_ERROR) from error
        except BrokenPipeError:
            raise  # the reader of a pipe has left: click ends the command without a word
        except OSError as error:
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            print_line(_os_reason(error))
            raise typer.Exit(EXIT_ERROR) from error

    return guarded


def print_error(error: OmniError) -> None:
    console = err()
    print_line(str(error))
    for other in _others(error):
        console.print(Text(f"also: {other}", style="red"), soft_wrap=True)
    hint = next((text for kind, text in _HINTS if isinstance(error, kind)), None)
    if hint is not None and "`omnistage " not in error.message:  # one way out is enough
        console.print(Text(f"hint: {hint}", style="dim"), soft_wrap=True)


def print_line(text: str) -> None:
    """An error, in one line on standard error."""
    # Text, not markup: brackets in a message are the user's. Soft wrap keeps it on one line in a log.
    err().print(Text.assemble(("error: ", "bold red"), (text, "red")), soft_wrap=True)


def _os_reason(error: OSError) -> str:
    """One line of what the system refused, and for which file."""
    if error.filename is None or error.strerror is None:
        return (str(error) or type(error).__name__).splitlines()[0]
    return f"{error.filename}: {error.strerror}"


def _others(error: OmniError) -> tuple[str, ...]:
    """Further problems of a configuration that was refused."""
    if not isinstance(error, ConfigError):
        return ()
    from omnistage.config import LocatedConfigError

    return error.others if isinstance(error, LocatedConfigError) else ()


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """A bar on standard error that a `progress(what, fraction)` callback moves."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err()) as bar:
        task = bar.add_task(title, total=1.0)

        def report(what: str, fraction: float) -> None:
            bar.update(task, description=what or title, completed=min(max(fraction, 0.0), 1.0))

        yield report
        bar.update(task, description=title, completed=1.0)


def resolve_model(
    model: str,
    *,
    config: Path | None = None,
    overrides: list[str] | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> ResolvedConfig:
    from omnistage.config import OmniEngineArgs, resolve
    from omnistage.models.registry import REGISTRY

    values = {"model": model, "config": config, "overrides": overrides or (), "device": device, "dtype": dtype}
    return resolve(OmniEngineArgs.parse(values), registry=REGISTRY)
