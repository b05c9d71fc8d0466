"""The base of everything that clients send."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.validation import field_path, is_utf8

_MAX_DEPTH = 100
"""Deeper than any schema or message is; much deeper breaks every function that walks through it."""


class WireModel(BaseModel):
    """Unknown fields are refused: a mistyped one would otherwise be ignored in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _is_readable(cls, data: object) -> object:
        check_readable(data)
        return data


def only(*values: object, why: str) -> BeforeValidator:
    """For fields of OpenAI's that this service lacks: null and `values`, which ask for nothing, are accepted."""

    def check(value: object) -> object:
        if value is not None and value not in values:
            raise ValueError(why)
        return value

    return BeforeValidator(check)


_Place = tuple["_Place", str | int] | None
"""Where a value is: the place around it and its key there."""


def check_readable(data: object) -> None:
    """Raise for JSON that is nested too deeply, or has strings that are not text, wherever they are."""
    left: list[tuple[object, _Place, int]] = [(data, None, 0)]
    while left:
        value, place, depth = left.pop()
        if isinstance(value, str):
            if not value.isascii() and not is_utf8(value):
                raise InvalidRequestError(
                    "contains half of a surrogate pair, which is not text; remove it", param=_path(place)
                )
            continue
        if not isinstance(value, dict | list):
            continue
        if depth == _MAX_DEPTH:
            raise InvalidRequestError(f"is nested more than {_MAX_DEPTH} levels deep; flatten it", param=_path(place))
        if isinstance(value, dict):
            for key, item in value.items():
                left += ((key, place, depth), (item, (place, str(key)), depth + 1))
        else:
            left += [(item, (place, index), depth + 1) for index, item in enumerate(value)]


def _path(place: _Place) -> str | None:
    keys: list[str | int] = []
    while place is not None:
        place, key = place
        keys.append(key)
    # A few are enough to find it, and keys are the client's text.
    shown = [key if isinstance(key, int) or (is_utf8(key) and len(key) <= 40) else "..." for key in keys[::-1][:8]]
    return field_path(shown) or None
