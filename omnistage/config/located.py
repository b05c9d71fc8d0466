"""The source of a configuration value, and errors that name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omnistage.core.errors import ConfigError

KeyPath = tuple[str, ...]
"""Keys from the top of the configuration down to a value; list items by their index."""


def dotted(path: KeyPath) -> str:
    return ".".join(path)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from: `default`, a file and line, or an option."""

    label: str
    line: int | None = None

    def __str__(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"


DEFAULT = Source("default")
Sources = Mapping[KeyPath, Source]


class LocatedConfigError(ConfigError):
    """A `ConfigError` that knows the file and line at fault (`where`) and any further problems (`others`)."""

    def __init__(
        self, message: str, *, param: str | None = None, where: Source | None = None, others: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, param=param)
        self.where = where
        self.others = others

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.where is None else f"{self.where}: {text}"


def nearest_source(path: KeyPath, sources: Sources) -> Source | None:
    """The source of `path`, or of the closest section around it that has one."""
    for end in range(len(path), 0, -1):
        if path[:end] in sources:
            return sources[path[:end]]
    return None
