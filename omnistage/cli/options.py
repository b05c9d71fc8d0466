"""Options of a command as dataclasses: each is declared once, with its default, its help and its panel.

A command takes such dataclasses as its parameters; `expand_options` gives typer one parameter for each field.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnistage.cli.common import EXIT_INTERRUPTED, err, exit_interrupted, print_interrupted, print_note, spinner
from omnistage.cli.interrupts import ends_imports
from omnistage.core.errors import InvalidRequestError
from omnistage.quantisation.schemes import NAMES_IN_WORDS

if TYPE_CHECKING:
    from omnistage.config import ResolvedConfig
    from omnistage.omni import Omni

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, starter, or a name in the local hub cache.")
]


def option(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """A field of a class of options. `names` replace the option's name, `settings` are those of `typer.Option`."""
    metadata = {"names": names, "settings": {"help": help, **settings}}
    if isinstance(default, list):
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter that is a dataclass of options becomes one for each of its fields.

    The class attribute `PANEL`, where there is one, names the panel of the help.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        arguments = {
            name: group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**arguments, **values)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _type_word(hint: Any) -> str | None:
    """What stands for a value in the help: short, for at 80 columns the descriptions need the room."""
    for kind, word in ((int, "N"), (float, "X"), (str, "TEXT")):
        if hint in (kind, kind | None, list[kind]):  # type: ignore[valid-type]
            return word
    return None


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group)
    panel = getattr(group, "PANEL", None)
    parameters = []
    for field in dataclasses.fields(group):
        default: Any = [] if field.default is dataclasses.MISSING else field.default
        settings = {"metavar": _type_word(hints[field.name]), **field.metadata["settings"]}
        info = typer.Option(default, *field.metadata["names"], rich_help_panel=panel, **settings)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, kind, default=info, annotation=hints[field.name]))
    return parameters


def set_values(group: Any) -> dict[str, object]:
    """The options of a group that are neither None nor an empty list, by field."""
    values = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    return {name: value for name, value in values.items() if value is not None and value != []}


@dataclasses.dataclass(frozen=True, slots=True)
class ModelOptions:
    """What changes a model's configuration."""

    config: Path | None = option(None, "YAML laid over the family's defaults.", metavar="FILE")
    overrides: list[str] = option(
        [], "One value over all else, like thinker.max_running=4. Repeatable.", "--set", metavar="KEY=VALUE"
    )
    device: str | None = option(None, "auto, cpu, cuda, cuda:N or mps; short for deployment.device.")
    dtype: str | None = option(None, "auto, float32, float16 or bfloat16; short for deployment.dtype.")

    gpu_memory: str | None = option(
        None, "Memory of a GPU to take at most, like 24GiB; short for deployment.gpu_memory.", metavar="SIZE"
    )

    quantize: str | None = option(
        None,
        f"{NAMES_IN_WORDS}: quantised weights in all stages that the scheme suits; short for their quantize.",
        metavar="SCHEME",
    )

    adapter: list[str] = option(
        [],
        "A LoRA adapter by the name that requests use; short for deployment.adapters. Repeatable.",
        metavar="NAME=FOLDER",
    )

    ray: str | None = option(
        None,
        "Ray cluster on which the groups of deployment.placement run, all stages as one without any: auto, or its "
        "address. Needs omnistage[ray].",
        metavar="ADDRESS",
    )

    def resolve(
        self, model: str, *, overrides: Sequence[str] = (), weights: bool = True, download: bool = False
    ) -> ResolvedConfig:
        """The configuration of a model; `overrides` come before those of `--set`.

        Without `weights` only the small files must be there.
        """
        from omnistage.config import OmniEngineArgs, resolve
        from omnistage.models.registry import REGISTRY

        values = {name: value for name, value in set_values(self).items() if name != "adapter"}
        values |= {"adapters": self.adapter, "overrides": (*overrides, *self.overrides), "allow_download": download}
        return resolve(OmniEngineArgs.parse({"model": model, **values}), registry=REGISTRY, weights=weights)

    def load(self, model: str, *, overrides: Sequence[str] = (), progress: bool = True) -> Omni:
        """The model with these options; `overrides` come after those of `--set`."""
        # On a terminal `Omni` shows progress bars instead; in a log this line says what takes the time.
        if not (progress and err().is_terminal):
            print_note(f"loading {model}")
        interrupted = f"stopped while {model} was loading; nothing was generated"
        try:
            with ends_imports(lambda: exit_interrupted(interrupted)):
                with spinner(f"loading {model}"):  # importing torch and transformers takes seconds
                    from omnistage.omni import Omni
                return Omni(
                    model,
                    config=self.config,
                    overrides=(*self.overrides, *overrides),
                    device=self.device,
                    dtype=self.dtype,
                    gpu_memory=self.gpu_memory,
                    quantize=self.quantize,
                    ray=self.ray,
                    adapters=adapter_folders(self.adapter),
                    progress=progress,
                )
        except KeyboardInterrupt:
            print_interrupted(interrupted)
            raise typer.Exit(EXIT_INTERRUPTED) from None


def adapter_folders(entries: Sequence[str]) -> dict[str, str]:
    """The folders of `--adapter` by name."""
    folders = {}
    for entry in entries:
        name, _, folder = entry.partition("=")
        if not name or not folder:
            raise InvalidRequestError(f"{entry!r} is not NAME=FOLDER, like french=out/french", param="--adapter")
        if name in folders:
            raise InvalidRequestError(f"{name!r} is named twice; give each adapter its own name", param="--adapter")
        folders[name] = folder
    return folders
