"""Old module paths of public names, kept for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module


def forward_names(old: str, *new: str, renamed: Mapping[str, str] | None = None) -> Callable[[str], object]:
    """A module's `__getattr__` that finds its names in the modules that they moved to, with a warning.

    `renamed` has the new names of those that moved under another one.
    """

    def get(name: str) -> object:
        new_name = (renamed or {}).get(name, name)
        for module in new:
            value = getattr(import_module(module), new_name, _MISSING)
            if value is not _MISSING:
                place = module if new_name == name else f"{module}.{new_name}"
                warnings.warn(
                    f"{old}.{name} has moved to {place}; the old path goes in 0.3", DeprecationWarning, stacklevel=2
                )
                return value
        raise AttributeError(f"module {old!r} has no attribute {name!r}; its names are in {', '.join(new)}")

    return get


_MISSING = object()
