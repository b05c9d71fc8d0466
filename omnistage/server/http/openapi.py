"""The OpenAPI document: what each route returns, whole or as a stream, and the errors that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from omnistage.server.access.middleware import PROTECTED_PREFIXES
from omnistage.server.http.errors import ErrorBody

Json = dict[str, Any]
"""A JSON schema, or a piece of the document."""
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_REFERENCE = "#/components/schemas/{model}"
_BEARER = {"type": "http", "scheme": "bearer", "description": "An API key, where the service requires one."}
_ERRORS = {
    400: "The request cannot be run as written; `param` is the path of the field at fault.",
    401: "No key, or an unknown one.",
    403: "This key may not use this model.",
    404: "No such model, request, job or file.",
    408: "The timeout passed before there was any output, or the body stopped arriving.",
    413: "Larger than a limit.",
    429: "The model's queue, the key's rate or its concurrency is full; `Retry-After` says when to try again.",
    499: "The request was cancelled before it had any output.",
    500: "A defect of the service; the response names it and describes nothing.",
    503: "Loading or draining; `Retry-After` says when to try again.",
}
_ONLY_POST = (403, 408, 429, 499)
_RETRY = {"Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 1}}}
_event_types: dict[str, type] = {ErrorBody.__name__: ErrorBody}
"""Data of events by name. FastAPI adds the types of whole responses to the document by itself, these are added here."""


def response_docs(
    model: type | None = None, *, events: type | None = None, files: tuple[str, ...] = ()
) -> dict[int | str, Json]:
    """`responses` of a route: a JSON body, a stream of events, bytes of these media types, or several of them."""
    content: Json = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in files}
    if events is not None:
        _event_types[events.__name__] = events
        content["text/event-stream"] = {"itemSchema": _event_schema(events)}
    success: Json = {"description": "Success.", "content": content}
    return {200: success if model is None else {**success, "model": model}}


def _event_schema(model: type) -> Json:
    either = [{"$ref": _REFERENCE.format(model=one.__name__)} for one in (model, ErrorBody)]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": either}}
    return {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}


def bounds_of(params: type[BaseModel], **aliases: str) -> Callable[[Json], None]:
    """A `json_schema_extra` for requests: their fields get the bounds and descriptions of the parameters they become.

    The parameters check these bounds; a request repeats them for its readers. `aliases` are fields of a request under
    the names of the parameters.
    """
    properties: Json = params.model_json_schema()["properties"]
    properties |= {alias: properties[name] for alias, name in aliases.items()}
    properties.pop("seed")  # OpenAI's may be any number

    def extend(schema: Json) -> None:
        fields = schema.get("properties", {})
        for name in fields.keys() & properties.keys():
            if "description" in properties[name]:
                fields[name].setdefault("description", properties[name]["description"])
            bounds = {key: value for one in _branches(properties[name]) for key, value in one.items() if key in _BOUNDS}
            for branch in _branches(fields[name]):
                if branch.get("type") in ("integer", "number"):
                    branch.update({key: value for key, value in bounds.items() if key not in branch})

    return extend


def _branches(schema: Json) -> list[Json]:
    branches: list[Json] = schema.get("anyOf", [schema])
    return branches


def install(app: FastAPI) -> None:
    """Complete the document that FastAPI makes of the routes."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _complete(document: Json) -> Json:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete_operation(operation, path, method)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[object]]]
    adapters = [(name, "serialization", TypeAdapter(kind)) for name, kind in _event_types.items()]
    _, events = TypeAdapter.json_schemas(adapters, ref_template=_REFERENCE)
    for name, schema in events["$defs"].items():
        schemas.setdefault(name, schema)
    components["securitySchemes"] = {"key": _BEARER}
    return document


def _complete_operation(operation: Json, path: str, method: str) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's form of an error, which is never sent: invalid requests are 400
    content = responses.get("200", {}).get("content", {})
    if len(content) > 1 and content.get("application/json") == {"schema": {}}:
        del content["application/json"]  # FastAPI's guess
    guarded = path.startswith(PROTECTED_PREFIXES)
    if guarded:
        operation["security"] = [{"key": []}, {}]
    for status, text in _ERRORS.items():
        if (status in _ONLY_POST and method != "post") or (status in (401, 503) and not guarded):
            continue
        schema = {"$ref": _REFERENCE.format(model=ErrorBody.__name__)}
        response: Json = {"description": text, "content": {"application/json": {"schema": schema}}}
        if status in (429, 503):
            response["headers"] = _RETRY
        responses.setdefault(str(status), response)
