"""The base of everything that clients send."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.validation import field_path, is_utf8

_MOST_LEVELS = 100
"""Deeper than any schema or message is; much deeper breaks whatever walks through it."""


class WireModel(BaseModel):
    """Unknown fields are refused: one that is mistyped would otherwise be left aside in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _is_readable(cls, data: Any) -> Any:
        check_readable(data)
        return data


Place = tuple["Place", str | int] | None
"""Where a value is: the place around it and its key there."""


def check_readable(data: object) -> None:
    """Raise for JSON that is nested beyond all reason, or has strings that are no text, wherever they are."""
    left: list[tuple[object, Place, int]] = [(data, None, 0)]
    while left:
        value, place, level = left.pop()
        if isinstance(value, str):
            if not value.isascii() and not is_utf8(value):
                raise InvalidRequestError(
                    "has half of a surrogate pair, which is no text; remove it", param=_path(place)
                )
            continue
        if not isinstance(value, dict | list):
            continue
        if level == _MOST_LEVELS:
            raise InvalidRequestError(f"is nested more than {_MOST_LEVELS} deep; flatten it", param=_path(place))
        if isinstance(value, dict):
            for key, item in value.items():
                left += ((key, place, level), (item, (place, str(key)), level + 1))
        else:
            left += [(item, (place, index), level + 1) for index, item in enumerate(value)]


def _path(place: Place) -> str | None:
    keys: list[str | int] = []
    while place is not None:
        place, key = place
        keys.append(key)
    # A few are enough to find it, and keys are the client's own text.
    shown = [key if isinstance(key, int) or (is_utf8(key) and len(key) <= 40) else "..." for key in keys[::-1][:8]]
    return field_path(shown) or None
