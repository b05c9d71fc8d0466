"""Models of what clients send over the socket.

Validation stops at the first problem: pydantic would walk all of a long list, or all unknown fields of an object, and
keep an error for each, for seconds in which no other session is served.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BeforeValidator, ValidationError

from omnistage.core.validation import first_problem
from omnistage.server.openai.base import WireModel

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object of the protocol: a client's, before it is validated, or an event for the client."""
Ignored = Annotated[None, BeforeValidator(lambda _: None)]
"""An OpenAI field without effect here: any value is accepted, and neither kept nor returned."""
_MESSAGES = {
    "extra_forbidden": "unknown field; leave it out",
    "none_required": "is not supported; leave it out, or send null",
}
ModelT = TypeVar("ModelT", bound=WireModel)


def validate(model: type[ModelT], values: JsonObject, prefix: str = "") -> ModelT:
    """Raises `InvalidRequestError` for the first problem, its path starting with `prefix`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise first_problem(error, values, words=_MESSAGES).error(prefix) from None
