"""Public functions: types and documentation."""

from __future__ import annotations

import ast

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import Function, ParsedFile, decorator_names, parameters

MIN_LINES = 12  # a shorter function is read as fast as its documentation


def _is_interface(file: ParsedFile, function: Function) -> bool:
    if not file.is_shipped or not file.is_public(function):
        return False
    names = {name.rpartition(".")[2] for name in decorator_names(file, function)}
    return not names & {"overload", "override", "setter", "jit", "fixture"}


@rule(
    "API01",
    "Public function without types",
    "low",
    "tests",
    why="Callers and type checkers cannot know what goes in and out; a tensor and its shape are confused with a list.",
    fix="Annotate every parameter and the result.",
)
def no_types(file: ParsedFile) -> Hits:
    for function in file.functions():
        if not _is_interface(file, function):
            continue
        bare = [
            item.arg for item in parameters(function) if item.annotation is None and item.arg not in ("self", "cls")
        ]
        if bare:
            yield function, f"`{function.name}` has no type for {', '.join(f'`{name}`' for name in bare[:4])}"
        elif function.returns is None:
            yield function, f"`{function.name}` has no return type"


@rule(
    "API02",
    "Public function without a docstring",
    "low",
    "tests",
    why="What it promises, and which shapes it takes, can only be guessed from its code.",
    fix="Write one sentence on what it does, then the contract: shapes, units, errors.",
)
def no_docstring(file: ParsedFile) -> Hits:
    for function in file.functions():
        lines = (function.end_lineno or function.lineno) - function.lineno
        owner = file.class_of(function)
        inherited = owner is not None and bool(owner.bases)  # may be documented where it is declared
        if (
            lines >= MIN_LINES
            and not inherited
            and _is_interface(file, function)
            and ast.get_docstring(function) is None
        ):
            yield function, f"`{function.name}` has {lines} lines and no docstring"
