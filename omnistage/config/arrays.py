"""Declared inputs and outputs of a module, written like `float32[batch, 80, frames]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

DTYPES = (
    *("bool", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
BATCH = "batch"
"""The dimension along which inputs are batched."""
_SPEC = re.compile(r"\s*([a-z0-9]+)\s*\[([^\[\]]*)\]\s*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_MAX_CHARS = 500
_HELP = "write it like float32[batch, 80, frames]: a dtype, then names for free dimensions and numbers for fixed ones"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array's dtype and dimensions: a number is fixed, a name is free and has one size throughout a call."""

    dtype: str
    dims: tuple[int | str, ...]

    @classmethod
    def parse(cls, text: str) -> ArraySpec:
        """Raises ValueError with the accepted form."""
        match = _SPEC.fullmatch(text) if len(text) <= _MAX_CHARS else None
        if match is None:
            raise ValueError(f"{text[:40]!r} is not an array; {_HELP}")
        dtype, inside = match[1], match[2].strip()
        if dtype not in DTYPES:
            raise ValueError(f"{dtype!r} is not a dtype; use one of {', '.join(DTYPES)}")
        dims: list[int | str] = []
        for part in (part.strip() for part in inside.split(",")) if inside else ():
            if _NUMBER.fullmatch(part):
                dims.append(int(part))
            elif _NAME.fullmatch(part):
                dims.append(part)
            else:
                raise ValueError(f"{part!r} is not a dimension; {_HELP}")
        return cls(dtype, tuple(dims))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"

    @property
    def is_batched(self) -> bool:
        return bool(self.dims) and self.dims[0] == BATCH

    def problem(self, array: object, sizes: dict[str, int]) -> str | None:
        """What is wrong with an array, or None. `sizes` holds the sizes of named dimensions; new ones are added."""
        if not isinstance(array, np.ndarray):
            return f"must be an array {self}, got {type(array).__name__}"
        actual = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
        if array.dtype != np.dtype(self.dtype) or array.ndim != len(self.dims):
            return f"must be {self}, got {actual}"
        for dim, size in zip(self.dims, array.shape, strict=True):
            if isinstance(dim, int) and size != dim:
                return f"must be {self}, got {actual}"
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                return f"must be {self} with {dim} = {sizes[dim]} as elsewhere, got {actual}"
        return None


def are_batched(specs: Iterable[ArraySpec]) -> bool:
    """Whether inputs can be batched: every array has `batch` first."""
    return all(spec.is_batched for spec in specs)


def parse_specs(arrays: Mapping[str, str]) -> dict[str, ArraySpec]:
    """Arrays by name. Raises ValueError with the name of the invalid one."""
    specs: dict[str, ArraySpec] = {}
    for name, text in arrays.items():
        try:
            specs[name] = ArraySpec.parse(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return specs


def format_specs(specs: Mapping[str, object]) -> str:
    """Arrays for a message."""
    return ", ".join(f"{name}: {spec}" for name, spec in specs.items()) or "nothing"
