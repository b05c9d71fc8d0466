"""Old module paths of public names, kept for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module


def moved(old: str, *new: str) -> Callable[[str], object]:
    """A module's `__getattr__` that finds its names in the modules that they moved to, with a warning."""

    def get(name: str) -> object:
        for module in new:
            value = getattr(import_module(module), name, _MISSING)
            if value is not _MISSING:
                warnings.warn(
                    f"{old}.{name} has moved to {module}; the old path goes in 0.3", DeprecationWarning, stacklevel=2
                )
                return value
        raise AttributeError(f"module {old!r} has no attribute {name!r}; its names are in {_listed(new)}")

    return get


_MISSING = object()


def _listed(modules: Sequence[str]) -> str:
    return ", ".join(modules)
