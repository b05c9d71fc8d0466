"""Routes whose bodies are bounded, and parsed and validated outside the event loop where they are large."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.params import Form
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from omnistage.server.http.errors import invalid_body
from omnistage.server.http.json_body import JsonLimits, is_small, parse_json, run_json

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRequest(Request):
    """A request whose `json()` is bounded by `app.state.json_limits`, and an instance of `model` where there is one.

    FastAPI validates what `json()` returns: an instance of the model passes as it is.
    """

    def __init__(self, request: Request, model: type[BaseModel] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """Raises `InvalidRequestError`, which FastAPI passes on as the cause of its own."""
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await run_json(partial(self._values, body), small=is_small(body))
        return self._json

    def _values(self, body: bytes) -> Any:
        limits: JsonLimits = self.app.state.json_limits
        values = parse_json(body, limits)
        if self._model is None:
            return values
        try:
            return self._model.model_validate(values)
        except ValidationError as error:
            raise invalid_body(error, values) from None


class BodyRoute(APIRoute):
    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()
        field = self.body_field
        annotation = None if field is None or isinstance(field.field_info, Form) else field.field_info.annotation
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None

        async def handle(request: Request) -> Response:
            return await handler(BodyRequest(request, model))

        return handle


def api_router() -> APIRouter:
    """A router for endpoints that take bodies."""
    return APIRouter(route_class=BodyRoute)
