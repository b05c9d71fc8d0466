"""Errors as OpenAI's clients read them: a status, and a body that says what to change and nothing internal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from omnistage.core.errors import InternalError, InvalidRequestError, OmniError, QueueFullError
from omnistage.core.failures import log_defect
from omnistage.core.storage import is_storage_full, storage_full
from omnistage.core.validation import Problem, first_problem

_NO_UPLOAD = "send the request again later"
CLIENT_CLOSED = 499
"""nginx's number for a client that left, and ours for a request that was cancelled."""
RETRY_SECONDS = 5
_SHOWN_PATH = 80
"""Characters of a path that an error repeats."""
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


class ErrorDetail(TypedDict):
    message: str
    """What to change."""
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """OpenAI's error. `param` is the path of the field at fault."""

    error: ErrorDetail


class AuthenticationError(OmniError, status=401, code="invalid_api_key"):
    """No key, or one that is not known."""


class PermissionDeniedError(OmniError, status=403, code="permission_denied"):
    """A key that is known and may not do this."""


class NotFoundError(OmniError, status=404, code="not_found"):
    """There is no such model, request or file."""


class ModelNotFoundError(NotFoundError, code="model_not_found"):
    """There is no such model, for this key."""


class UnknownPathError(NotFoundError, code="unknown_url"):
    """There is nothing at this path."""


class RangeError(InvalidRequestError, status=416, code="range_not_satisfiable"):
    """A part of a file that it does not have."""


class RateLimitError(QueueFullError, code="rate_limit_exceeded"):
    """A key has used up what it may use now."""


class ContentFilterError(InvalidRequestError, code="content_filter"):
    """The content filter refuses it."""

    where = "prompt"
    """What is refused, for the metrics."""


class AnswerFilteredError(ContentFilterError):
    """The content filter refuses the output."""

    where = "output"


class BodyTimeoutError(OmniError, status=408, code="body_timeout"):
    """The client stopped sending in the middle of its request."""


class AuditError(OmniError, status=503, code="audit_unavailable"):
    """Requests must be audited, and cannot be now."""


class LoadingError(OmniError, status=503, code="loading"):
    """The models are not ready yet."""


def error_for_client(error: BaseException) -> OmniError:
    """What a client is told of an error that no handler has. A defect is logged."""
    if isinstance(error, OmniError):
        return error
    if is_storage_full(error):
        return storage_full(_NO_UPLOAD)
    if not isinstance(error.__cause__, OmniError):
        log_defect("a route", error)
    return InternalError("a defect")


def body_of(error: OmniError) -> ErrorBody:
    """OpenAI's error body. Internal errors are named, never described."""
    message = "an internal error; the service's log has it" if isinstance(error, InternalError) else error.message
    return {
        "error": {
            "message": f"{error.param}: {message}" if error.param else message,
            "type": _TYPES.get(error.status, "server_error"),
            "param": error.param,
            "code": error.code,
        }
    }


Rename = Callable[[str], str] | Mapping[str, str]
"""From the names that engines have for fields to those that clients know."""


def rename_param(error: OmniError, rename: Rename | None) -> OmniError:
    """The error, with its field named as the client knows it."""
    if error.param is None or rename is None:
        return error
    if isinstance(rename, Mapping):
        head = error.param.partition(".")[0]
        error.param = rename.get(error.param) or rename.get(head) or error.param
    else:
        error.param = rename(error.param)
    return error


def response_of(error: OmniError) -> JSONResponse:
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, BodyTimeoutError):
        headers["Connection"] = "close"  # else the client could go on sending slowly, to no purpose
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return JSONResponse(body_of(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Respond to every failure of every route in one form."""

    @app.exception_handler(OmniError)
    async def ours(_request: Request, error: OmniError) -> JSONResponse:
        return response_of(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return response_of(_invalid_request(error, request.headers.get("content-type")))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, OmniError):  # raised while FastAPI read the body
            return response_of(error.__cause__)
        if is_storage_full(error.__cause__):  # large files of a form go to disk
            return response_of(storage_full(_NO_UPLOAD))
        if error.status_code == 404 and error.detail == "Not Found":
            method, path = request.method[:10], request.url.path[:_SHOWN_PATH]
            return response_of(UnknownPathError(f"there is no {method} {path}; the paths are in /openapi.json"))
        if error.status_code == 405:
            return _not_allowed(request, error.headers or {})
        kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
        body: ErrorBody = {"error": {"message": str(error.detail), "type": kind, "param": None, "code": None}}
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def defect(_request: Request, error: Exception) -> JSONResponse:
        log_defect("a route", error)
        return response_of(InternalError("a defect"))


def _not_allowed(request: Request, headers: Mapping[str, str]) -> JSONResponse:
    path, allowed = request.url.path[:_SHOWN_PATH], headers.get("Allow", "")
    message = f"{request.method[:10]} is not possible at {path}; send {allowed}"
    body: ErrorBody = {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": "method_not_allowed"}
    }
    return JSONResponse(body, status_code=405, headers=dict(headers))


def body_kind(content_type: str | None) -> Literal["json", "form"] | None:
    """What a body is according to its header."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return "json"
    return "form" if kind in ("multipart/form-data", "application/x-www-form-urlencoded") else None


NOT_JSON = "the body is not valid JSON; check it"
FIELD_WORDS = {"extra_forbidden": "unknown field; leave it out"}
_NOT_AN_OBJECT = "the body must be a JSON object; send one with the fields that this endpoint takes"
_ABOUT_FIELDS = ("value_error", "field_error")
"""Problems that pydantic reports for a whole body and that are about some of its fields."""


def invalid_body(error: ValidationError, values: object) -> InvalidRequestError:
    """400 with the field's path for the first problem that pydantic found in the values of a JSON body."""
    problem = first_problem(error, values, words=FIELD_WORDS)
    if not isinstance(values, dict):
        return InvalidRequestError(_NOT_AN_OBJECT)
    return problem.error()


def _invalid_request(error: RequestValidationError, content_type: str | None) -> InvalidRequestError:
    """The same for what FastAPI validates: forms, parameters in path and query, bodies that are not JSON."""
    problems, body = error.errors(), error.body
    kind, (place, *steps) = problems[0]["type"], problems[0]["loc"]
    if isinstance(body, FormData) and not body and body_kind(content_type) != "form":
        return InvalidRequestError("the body is not sent as a form; send Content-Type: multipart/form-data")
    if place == "body" and not steps and kind not in _ABOUT_FIELDS:
        return InvalidRequestError(whole_body_problem(body, content_type))
    problem = first_problem(problems, {"body": body} if place == "body" else None, words=FIELD_WORDS)
    message = problem.message
    if message.startswith("Expected UploadFile"):  # FastAPI's, with the names of our classes
        message = "must be a file; send it as a part of multipart/form-data that has a file name"
    return Problem(kind, problem.path[1:], message).error()


def whole_body_problem(body: object, content_type: str | None) -> str:
    """What is wrong with a body that has no fields at all. Nothing of it is repeated: it may be anything."""
    if body is None or body == b"":
        return "the body is missing; send a JSON object, with Content-Type: application/json"
    if body_kind(content_type) != "json":
        return "the body is not sent as JSON; send Content-Type: application/json"
    return _NOT_AN_OBJECT
