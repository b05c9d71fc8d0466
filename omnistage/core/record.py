"""Records that are made many times a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[_T]) -> type[_T]:
    """A dataclass with slots that the type checker keeps anyone from changing.

    A frozen dataclass does so while the program runs as well, and is more than twice as slow to make.
    """
    return dataclass(slots=True)(cls)
