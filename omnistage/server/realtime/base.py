"""How what clients send is checked: it stops at the first problem, and names it as the client knows it.

pydantic would go through all of a list or of an object's unknown fields, and keep an error for each: seconds for one
message, in which nobody else is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError, model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.validation import SHOWN_CHARS, field_error_path, field_path, message_of
from omnistage.server.openai.base import WireModel

Ignored = Annotated[None, BeforeValidator(lambda _: None)]
"""A field of OpenAI's without effect here: whatever comes is taken, and neither kept nor shown."""
_SAID = {
    "extra_forbidden": "there is no such field here; leave it out",
    "none_required": "is not offered; leave it out, or give null",
    "tuple_type": "must be a list",
}
"""Where pydantic's own words speak of Python."""


class Fields(WireModel):
    """The base of what clients send over the socket."""

    @model_validator(mode="before")
    @classmethod
    def _is_readable(cls, data: Any) -> Any:
        """Instead of going through all the data again, for each model in it: `events.parse` has done so, once."""
        known = cls.model_fields
        if not isinstance(data, dict) or len(data) <= len(known):
            return data
        unknown = next(name for name in data if name not in known)  # one is enough to refuse them all
        return {name: data[name] for name in (*known, unknown) if name in data}


def first_problem(error: ValidationError, values: Mapping[str, Any], prefix: str = "") -> InvalidRequestError:
    """Our error for the first problem that pydantic found in `values`."""
    first = error.errors(include_url=False)[0]
    steps = [*_steps(first["loc"], values, missing=first["type"] == "missing"), *field_error_path(first)]
    path = field_path([*([prefix] if prefix else []), *steps])[:SHOWN_CHARS]
    return InvalidRequestError(_SAID.get(first["type"]) or message_of(first), param=path or None)


def _steps(where: Sequence[int | str], values: object, *, missing: bool) -> list[int | str]:
    """The steps that lead somewhere in `values`: between them pydantic names the types that it has tried."""
    made: list[int | str] = []
    here: Any = values
    for index, step in enumerate(where):
        if step in here if isinstance(here, Mapping) else isinstance(here, list | tuple) and isinstance(step, int):
            here = here[step]
        elif not missing or index < len(where) - 1:
            continue
        made.append(step)
    return made
