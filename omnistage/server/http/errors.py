"""Errors as OpenAI's clients read them: a status, and a body that says what to change and nothing of our insides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException

from omnistage.core.errors import InternalError, InvalidRequestError, OmniError, QueueFullError
from omnistage.core.failures import log_defect
from omnistage.core.validation import field_error_path, field_path, message_of

CLIENT_CLOSED = 499
"""nginx's number for a client that left, and ours for a request that was cancelled."""
RETRY_SECONDS = 5
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    416: "invalid_request_error",
    429: "rate_limit_error",
    CLIENT_CLOSED: "request_cancelled",
    503: "service_unavailable_error",
}


class AuthenticationError(OmniError):
    """No key, or one that is not known."""

    status = 401
    code = "invalid_api_key"


class PermissionDeniedError(OmniError):
    """A key that is known and may not do this."""

    status = 403
    code = "permission_denied"


class NotFoundError(OmniError):
    """There is no such model, request or file."""

    status = 404
    code = "not_found"


class RangeError(InvalidRequestError):
    """A part of a file that it does not have."""

    status = 416
    code = "range_not_satisfiable"


class RateLimitError(QueueFullError):
    """A key has used up what it may use now."""

    code = "rate_limit_exceeded"


class CancelledRequestError(OmniError):
    """Someone ended the request before it gave anything."""

    status = CLIENT_CLOSED
    code = "cancelled"


class ContentFilterError(InvalidRequestError):
    """The content filter refuses it."""

    code = "content_filter"
    where = "prompt"
    """What it was that is refused, for the metrics."""


class AnswerFilteredError(ContentFilterError):
    """The content filter refuses what was made."""

    where = "output"


class BodyTimeoutError(OmniError):
    """The client stopped in the middle of its body."""

    status = 408
    code = "body_timeout"


class LoadingError(OmniError):
    """The models are not ready yet."""

    status = 503
    code = "loading"


def body_of(error: OmniError) -> dict[str, Any]:
    """OpenAI's error body. Defects of ours are named, never described."""
    message = "an internal error; the service's log has it" if isinstance(error, InternalError) else error.message
    return {
        "error": {
            "message": f"{error.param}: {message}" if error.param else message,
            "type": _TYPES.get(error.status, "server_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def response_of(error: OmniError) -> JSONResponse:
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return JSONResponse(body_of(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Answer every failure of every route in one form."""

    @app.exception_handler(OmniError)
    async def ours(_request: Request, error: OmniError) -> JSONResponse:
        return response_of(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return response_of(_first_problem(error.errors(), error.body, request.headers.get("content-type")))

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> JSONResponse:
        kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
        content = {"error": {"message": str(error.detail), "type": kind, "param": None, "code": None}}
        return JSONResponse(content, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def defect(_request: Request, error: Exception) -> JSONResponse:
        log_defect("a route", error)
        return response_of(InternalError("a defect"))


def announced(content_type: str | None) -> Literal["json", "form"] | None:
    """What a body says that it is."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return "json"
    return "form" if kind in ("multipart/form-data", "application/x-www-form-urlencoded") else None


def _first_problem(
    problems: Sequence[Mapping[str, Any]], body: object, content_type: str | None
) -> InvalidRequestError:
    """400 with the field's path for the first thing that pydantic found."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError("the body is not valid JSON; check it", param=None)
    if isinstance(body, FormData) and not body and announced(content_type) != "form":
        return InvalidRequestError("the body is not sent as a form; send Content-Type: multipart/form-data")
    if first["loc"] == ("body",) and first["type"] not in _OF_FIELDS:
        return InvalidRequestError(_whole_body(body, content_type))
    message = message_of(first)
    if first["type"] == "extra_forbidden":
        message = "there is no such field; leave it out"
    elif message.startswith("Expected UploadFile"):  # FastAPI's, with the names of our classes
        message = "must be a file; send it as a part of multipart/form-data that has a file name"
    return InvalidRequestError(message, param=field_path(_path(first, body)) or None)


_OF_FIELDS = ("value_error", "field_error")
"""Problems that are named at a whole body and are about some of its fields."""


def _whole_body(body: object, content_type: str | None) -> str:
    """What is wrong with a body that has no fields at all. Nothing of it is repeated: it may be anything."""
    if body is None or body == b"":
        return "the body is missing; send a JSON object, with Content-Type: application/json"
    if announced(content_type) != "json":
        return "the body is not sent as JSON; send Content-Type: application/json"
    return "the body must be a JSON object; send one with the fields that this endpoint takes"


def _path(problem: Mapping[str, Any], body: object) -> list[str | int]:
    """The steps that lead somewhere in the body: between them pydantic names the types that it has tried."""
    place, *parts = problem["loc"]
    if place != "body":
        return [str(part)[:80] for part in parts]
    found: list[str | int] = []
    here = body
    for index, part in enumerate(parts):
        there = (isinstance(here, Mapping) and part in here) or (isinstance(here, list) and isinstance(part, int))
        if there:
            # A number that is a key is no place in a list.
            found.append(part if isinstance(here, list) else str(part)[:80])
            here = here[part]  # type: ignore[index]
        elif problem["type"] == "missing" and index == len(parts) - 1:
            found.append(str(part)[:80])
    return [*found, *field_error_path(problem)]
