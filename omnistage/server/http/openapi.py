"""The OpenAPI document: what each route gives, whole or as a stream, and the errors that all of them share."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.server.openai.chat.messages import MESSAGE_SCHEMAS
from omnistage.server.openai.response_models import (
    ChatChunk,
    Completion,
    ErrorBody,
    PictureEvent,
    ResponseEvent,
    SpeechEvent,
    TranscriptionEvent,
)

_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_OWN_BOUNDS = frozenset({"seed"})
"""OpenAI's may be any number."""
_STREAMED = (ChatChunk, Completion, ErrorBody, PictureEvent, ResponseEvent, SpeechEvent, TranscriptionEvent)
_REFERENCE = "#/components/schemas/{model}"
_BEARER = {"type": "http", "scheme": "bearer", "description": "An API key, where the service asks for one."}
_ERRORS = {
    400: "The request cannot be run as written; `param` is the path of the field at fault.",
    401: "No key, or one that is not known.",
    403: "This key may not use this model.",
    404: "No such model, request, job or file.",
    408: "The time was over before anything was made, or the body stopped coming.",
    413: "Larger than a limit.",
    429: "The model's queue, the key's rate or its concurrency is full; `Retry-After` says when to come again.",
    499: "The request was cancelled before it gave anything.",
    500: "A defect of the service; the answer names it and describes nothing.",
    503: "Loading or draining; `Retry-After` says when to come again.",
}
_OF_WORK = (403, 408, 429, 499)
"""Only where something is run."""
_WAIT = {"Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 1}}}


def answers(
    model: type[BaseModel] | None = None, *, events: type[BaseModel] | None = None, files: tuple[str, ...] = ()
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: a JSON body, a stream of events, bytes of these media types, or several of them."""
    content: dict[str, Any] = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in files}
    if events is not None:
        content["text/event-stream"] = {"itemSchema": _event_schema(events)}
    made: dict[str, Any] = {"description": "As asked.", "content": content}
    return {200: made if model is None else {**made, "model": model}}


def _event_schema(model: type[BaseModel]) -> dict[str, Any]:
    either = [{"$ref": _REFERENCE.format(model=one.__name__)} for one in (model, ErrorBody)]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": either}}
    return {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}


def install(app: FastAPI) -> None:
    """Complete the document that FastAPI makes of the routes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(operation, path, method)
    parts = document.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _, made = models_json_schema([(one, "serialization") for one in _STREAMED], ref_template=_REFERENCE)
    for name, schema in made["$defs"].items():
        schemas.setdefault(name, schema)
    parts["securitySchemes"] = {"key": _BEARER}
    _describe_requests(schemas)
    return document


def _complete(operation: dict[str, Any], path: str, method: str) -> None:
    responses = operation["responses"]
    # FastAPI's own form of an error, which nobody gets: what does not validate is 400.
    responses.pop("422", None)
    content = responses.get("200", {}).get("content", {})
    if len(content) > 1 and content.get("application/json") == {"schema": {}}:
        del content["application/json"]  # what FastAPI takes any route to give
    guarded = path.startswith("/v1/")
    if guarded:
        operation["security"] = [{"key": []}, {}]
    for status, text in _ERRORS.items():
        if (status in _OF_WORK and method != "post") or (status in (401, 503) and not guarded):
            continue
        schema = {"$ref": _REFERENCE.format(model=ErrorBody.__name__)}
        told: dict[str, Any] = {"description": text, "content": {"application/json": {"schema": schema}}}
        if status in (429, 503):
            told["headers"] = _WAIT
        responses.setdefault(str(status), told)


def _describe_requests(schemas: dict[str, Any]) -> None:
    """What is checked behind the wire models: bounds of parameters, the form of messages."""
    schemas.update(MESSAGE_SCHEMAS)
    for name, field in (("ChatRequest", "messages"), ("ResponsesRequest", "input")):
        _list_of(schemas[name]["properties"][field], {"$ref": _REFERENCE.format(model="Message")})
    sampling = SamplingParams.model_json_schema()["properties"]
    sampling["max_completion_tokens"] = sampling["max_output_tokens"] = sampling["max_tokens"]
    drawing = DiffusionParams.model_json_schema()["properties"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        _bound(schemas[name]["properties"], sampling)
    for name in ("ImageRequest", "ImageEditForm"):
        _bound(schemas[name]["properties"], drawing)


def _list_of(schema: dict[str, Any], item: dict[str, Any]) -> None:
    for one in schema.get("anyOf", [schema]):
        if one.get("type") == "array":
            one.update(items=item, minItems=1)


def _bound(fields: dict[str, Any], known: dict[str, Any]) -> None:
    """Give fields the bounds and the descriptions of the parameters that they become."""
    for name in fields.keys() & (known.keys() - _OWN_BOUNDS):
        if "description" in known[name]:
            fields[name].setdefault("description", known[name]["description"])
        told = {key: value for one in _branches(known[name]) for key, value in one.items() if key in _BOUNDS}
        for one in _branches(fields[name]):
            if one.get("type") in ("integer", "number"):
                one.update({key: value for key, value in told.items() if key not in one})


def _branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return found
