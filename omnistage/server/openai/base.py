"""The base of everything that clients send."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, model_validator

MAX_METADATA = 16
"""As with OpenAI."""
MAX_MODALITIES = 8
_MAX_OPTIONS = 64


class WireModel(BaseModel):
    """Unknown fields are refused: a mistyped one would otherwise be ignored in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, data: object) -> object:
        """Drop all unknown fields but one, which is enough to refuse them: pydantic would keep an error for each."""
        if not isinstance(data, dict) or len(data) <= len(fields := _field_names(cls)):
            return data
        unknown = next(name for name in data if name not in fields)
        return {name: data[name] for name in (*fields, unknown) if name in data}


@cache
def _field_names(model: type[BaseModel]) -> tuple[str, ...]:
    """As clients write them."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


def only(*values: object, why: str) -> BeforeValidator:
    """For fields of OpenAI's that this service lacks: null and `values`, which ask for nothing, are accepted."""

    def check(value: object) -> object:
        if value is not None and value not in values:
            raise ValueError(why)
        return value

    return BeforeValidator(check)


def max_items(limit: int) -> BeforeValidator:
    """For lists and objects: counted before pydantic visits the items, as it would keep an error for each."""

    def check(value: object) -> object:
        if isinstance(value, (list, tuple, dict)) and len(value) > limit:
            raise ValueError(too_many(len(value), limit))
        return value

    return BeforeValidator(check)


def too_many(count: int, limit: int) -> str:
    return f"has {count} items, and may have {limit}; send fewer"


Metadata = Annotated[dict[str, str], max_items(MAX_METADATA)]
IgnoredOptions = Annotated[dict[str, JsonValue], max_items(_MAX_OPTIONS)]
"""Of an object without effect."""
