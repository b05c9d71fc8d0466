"""Validation errors of a configuration: the path, the line, and the fix."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omnistage.config.located import KeyPath, LocatedConfigError, Sources, dotted, nearest_source
from omnistage.config.schema import STAGE_TYPES, OmniConfig
from omnistage.core.graph import did_you_mean
from omnistage.core.validation import data_path

_ENGINES = " or ".join((", ".join(list(STAGE_TYPES)[:-1]), list(STAGE_TYPES)[-1]))


def to_config_error(error: ValidationError, data: Mapping[str, object], sources: Sources) -> LocatedConfigError:
    """One error for the first problem, with the others as text."""
    problems: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False):
        path = tuple(str(step) for step in data_path(detail, data))
        problems.setdefault(path, _explain(detail, path, data))
    located = [
        LocatedConfigError(message, param=dotted(path) or None, where=nearest_source(path, sources))
        for path, message in problems.items()
    ]
    first = located[0]
    return LocatedConfigError(
        first.message, param=first.param, where=first.where, others=tuple(str(other) for other in located[1:])
    )


def _explain(detail: ErrorDetails, path: KeyPath, data: Mapping[str, object]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key; {_suggest(path, data)}"
    if kind == "missing":
        return f"this key is missing; add `{path[-1]}: ...`"
    if kind == "union_tag_not_found":
        return f"the key `engine` is missing; add `engine: {_ENGINES}`"
    if kind == "union_tag_invalid":
        engine = value.get("engine") if isinstance(value, Mapping) else value
        return f"there is no engine {engine!r}; use {_ENGINES}"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if value is None:
        return f"is empty; set a value or remove the key ({message})"
    if kind == "value_error":
        return message
    text = repr(value)
    return f"{message}, got {text if len(text) <= 60 else text[:57] + '...'}"


def _suggest(path: KeyPath, data: Mapping[str, object]) -> str:
    """For an unknown key: the near one, here or one level down, else all keys of its section."""
    model = model_at(path[:-1], data)
    if model is None:
        return "remove it"
    key, keys = path[-1], keys_of(model)
    for name in keys:
        inner = model_at((*path[:-1], name), data)
        if inner is not None and key in keys_of(inner):
            return f"did you mean {name}.{key}?"
    return did_you_mean(key, keys)


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys of a section as a file spells them."""
    return [field.serialization_alias or name for name, field in model.model_fields.items()]


def model_at(path: KeyPath, data: Mapping[str, object]) -> type[BaseModel] | None:
    """The model of the section at `path`; None where there is none. `data` tells which engine a stage has."""
    model: type[BaseModel] | None = OmniConfig
    here: object = data
    for depth, part in enumerate(path):
        here = here.get(part) if isinstance(here, Mapping) else None
        if depth == 2 and path[:2] == ("pipeline", "stages"):
            engine = here.get("engine") if isinstance(here, Mapping) else None
            model = STAGE_TYPES.get(str(engine))
        elif depth == 2 and path[:2] == ("deployment", "placement"):
            continue  # a group's name
        elif model is not None and not part.isdecimal():  # an index stays in the model of the list's items
            field = next((f for n, f in model.model_fields.items() if part in (n, f.serialization_alias)), None)
            models = [] if field is None else list(_models_in(field.annotation))
            model = models[0] if len(models) == 1 else None
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
