"""Functions that are imported when they are first called, so that importing the families imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

from omnistage.core.family import ComponentFactory


def lazy(module: str, name: str, package: str = "omnistage.models") -> Callable[..., Any]:
    """The function `name` of a module below a package. All are written in our code, never in a configuration."""

    def call(*args: object, **options: object) -> object:
        function: Callable[..., object] = attrgetter(name)(import_module(f"{package}.{module}"))
        return function(*args, **options)

    return call


def lazy_factory(module: str, name: str, package: str = "omnistage.models") -> ComponentFactory:
    """The same for a function that loads a component."""
    return lambda context: lazy(module, name, package)(context)
