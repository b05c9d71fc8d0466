"""Users' values in messages, and one translation of pydantic's errors into ours.

`first_problem` picks the first problem that pydantic found and gives its path in the data and a message that says what
to change. Callers that need another error class or other words build on it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from omnistage.core.errors import InvalidRequestError

SHOWN_CHARS = 80
"""Longest piece of a user's value, or of a path, that a message repeats."""
_FIELD_ERROR = "field_error"
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = SHOWN_CHARS


def short_repr(value: object) -> str:
    """A user's value for a message: at most about 80 characters, whatever its size."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def is_utf8(text: str) -> bool:
    """Whether text can be encoded; half of a surrogate pair, as broken JSON escapes leave it, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def field_path(steps: Iterable[str | int]) -> str:
    """The path to a field as clients read it: `tools[0].function.name`."""
    return "".join(f".{step}" if isinstance(step, str) else f"[{short_repr(step)}]" for step in steps).removeprefix(".")


def field_error(field: str, message: str) -> PydanticCustomError:
    """What a model's validator raises about one of its fields: pydantic itself would name the model only."""
    return PydanticCustomError(_FIELD_ERROR, "{message}", {"message": message, "field": field})


def field_error_path(problem: Mapping[str, Any]) -> tuple[str, ...]:
    """The steps from what pydantic names to the field that `field_error` names."""
    return tuple(str(problem["ctx"]["field"]).split(".")) if problem["type"] == _FIELD_ERROR else ()


def message_of(problem: Mapping[str, Any]) -> str:
    """What is wrong, in words about the data rather than about Python."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] in ("value_error", _FIELD_ERROR):
        return message
    if problem["type"] == "missing":
        return "is missing; give it"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):  # pydantic's has our classes' names
        return "must be an object with named fields"
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        kinds = problem.get("ctx", {}).get("expected_tags")
        return f"must have a `type` that is one of {kinds}" if kinds else "must have a `type`"
    if problem["type"] == "tuple_type":
        return "must be a list"
    return f"{message} (got {short_repr(problem['input'])})" if "input" in problem else message


def data_path(problem: Mapping[str, Any], data: object) -> list[str | int]:
    """The steps of a problem that lead somewhere in `data`: between them pydantic names the types that it has tried."""
    steps: list[str | int] = []
    here: Any = data
    location: Sequence[str | int] = problem["loc"]
    for index, step in enumerate(location):
        if isinstance(here, Mapping) and step in here:
            here = here[step]
            steps.append(str(step))  # a number that is a key is no place in a list
        elif isinstance(here, list | tuple) and isinstance(step, int):
            here = here[step]
            steps.append(step)
        elif problem["type"] == "missing" and index == len(location) - 1:
            steps.append(str(step))
    return steps


@dataclass(frozen=True, slots=True)
class Problem:
    """The first problem of a `ValidationError`: where it is and what to say."""

    kind: str
    """pydantic's name for it."""
    path: tuple[str | int, ...]
    message: str

    def error(self, prefix: str = "") -> InvalidRequestError:
        """For a client; `param` is the path, behind `prefix` where there is one."""
        path = field_path([*([prefix] if prefix else []), *self.path])
        return InvalidRequestError(self.message, param=path[: SHOWN_CHARS + len(prefix) + bool(prefix)] or None)


def first_problem(
    error: ValidationError | Sequence[Mapping[str, Any]], data: object = None, *, words: Mapping[str, str] | None = None
) -> Problem:
    """The first problem that pydantic found.

    With `data`, its path holds only steps that lead somewhere in there. `words` has messages by pydantic's kinds, in
    place of the usual ones.
    """
    problems = error.errors(include_url=False) if isinstance(error, ValidationError) else error
    first: Mapping[str, Any] = problems[0]
    steps = list(first["loc"]) if data is None else data_path(first, data)
    message = (words or {}).get(first["type"]) or message_of(first)
    readable = [step[:SHOWN_CHARS] if isinstance(step, str) else step for step in steps]
    return Problem(first["type"], (*readable, *field_error_path(first)), message)


_NO_PARAMETER = {"extra_forbidden": "unknown parameter; see the class for those that exist"}


def invalid_params(error: ValidationError, prefix: str = "") -> InvalidRequestError:
    """Our error for the first problem with a stage's parameters."""
    problem = first_problem(error, words=_NO_PARAMETER)
    *steps, last = problem.path or ("",)
    # What is unknown is a key, even where it is a number; other numbers count the items of a list.
    if isinstance(last, int) and problem.kind in ("extra_forbidden", "invalid_key"):
        last = short_repr(last)
    return Problem(problem.kind, tuple(step for step in (*steps, last) if step != ""), problem.message).error(prefix)
