"""Routes whose bodies are bounded. JSON is parsed and validated outside the event loop where it is large."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.params import Form
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.types import ASGIApp, Receive, Scope, Send

from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError
from omnistage.server.http.body_limits import BODY_HOLD
from omnistage.server.http.errors import body_kind, invalid_body, response_of, whole_body_problem
from omnistage.server.http.json_body import MAX_SMALL_DIGITS, JsonLimits, PartialBody, is_small, parse_json, run_json
from omnistage.server.http.limits import Hold

if TYPE_CHECKING:
    from starlette._utils import AwaitableOrContextManager

    from omnistage.server.access.keys import Holder
    from omnistage.server.service import Service

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
MAX_FORM_FIELDS = 256
MAX_FORM_FILES = 32
MAX_FIELD_BYTES = 2**20
"""Of a form's field that is not a file."""
MAX_URL_ENCODED_BYTES = 2**19
"""Of a form without files: its bytes are parsed one by one."""
VALUE_BYTES = 100
"""Memory of a JSON value, about."""
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii", b"iso-8859-1")


class BodyRequest(Request):
    """A request whose `json()` is bounded by `app.state.json_limits`, and an instance of `model` where there is one."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """Raises `InvalidRequestError`."""
        if not hasattr(self, "_json"):
            body = await self.body()
            if self._model is not None and (not body or body_kind(self.headers.get("content-type")) != "json"):
                raise InvalidRequestError(whole_body_problem(body, self.headers.get("content-type")))
            if is_small(body):
                self._json, _ = self._parsed(body)
            else:
                self._json, count = await run_json(partial(self._parsed, body), small=False, owner=self._owner())
                self._hold(len(body), count)
        return self._json

    async def body(self) -> bytes:
        """Raises `LimitExceededError` for too much JSON before all of it is there."""
        if hasattr(self, "_body"):
            return self._body
        length = self.headers.get("content-length", "")
        is_short = len(length) <= MAX_SMALL_DIGITS and length.isdecimal()
        if self._model is not None and not is_short:
            body = PartialBody(self.app.state.json_limits)
            async for chunk in self.stream():
                if body.add(chunk):
                    await run_json(body.check, small=False, owner=self._owner())
            self._body = body.join()  # where Starlette keeps it
        return await super().body()

    def _owner(self) -> str | None:
        holder: Holder | None = self.scope["state"].get("holder")
        service: Service = self.app.state.service
        return None if holder is None else service.owner_of(holder)

    def _parsed(self, body: bytes) -> tuple[Any, int]:
        limits: JsonLimits = self.app.state.json_limits
        values, count = parse_json(body, limits)
        if self._model is None:
            return values, count
        try:
            return self._model.model_validate(values), count
        except ValidationError as error:
            raise invalid_body(error, values) from None

    def _hold(self, size: int, values: int) -> None:
        """Count the memory of many values beside that of their text. Raises where it is not to be had."""
        hold = self.scope["state"].get(BODY_HOLD)
        if isinstance(hold, Hold):
            # A single body always fits.
            hold.resize(max(size, min(size + values * VALUE_BYTES, self.app.state.max_body_bytes)))

    def form(
        self,
        *,
        max_files: int | float = MAX_FORM_FILES,
        max_fields: int | float = MAX_FORM_FIELDS,
        max_part_size: int = MAX_FIELD_BYTES,
    ) -> AwaitableOrContextManager[FormData]:
        """Starlette's, with our limits: it parses what has arrived, piece by piece, up to a limit."""
        return super().form(max_files=max_files, max_fields=max_fields, max_part_size=max_part_size)

    async def check_form(self) -> None:
        """Raise for a form that would take long to parse."""
        kind, options = parse_options_header(self.headers.get("content-type"))
        if kind == b"multipart/form-data" and options.get(b"charset", b"utf-8").lower() not in _CHARSETS:
            # Any codec of Python's would be used; some take minutes for a megabyte.
            raise InvalidRequestError("the form's charset is not supported; send it as utf-8")
        if kind == b"application/x-www-form-urlencoded" and (size := len(await self.body())) > MAX_URL_ENCODED_BYTES:
            raise LimitExceededError(
                f"the form has {size} bytes, over the limit of {MAX_URL_ENCODED_BYTES}; send it as multipart/form-data"
            )


class BodyRoute(APIRoute):
    """An endpoint `(body: Model, request: Request)` is called as soon as its JSON is validated.

    For forms and parameters in path and query FastAPI does that.
    """

    @cached_property
    def model(self) -> type[BaseModel] | None:
        """Of the JSON body, where it has one."""
        field = self.body_field
        annotation = None if field is None or isinstance(field.field_info, Form) else field.field_info.annotation
        return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await self.call(request.scope, request.receive)

        async def handle(request: Request) -> Response:
            bounded = BodyRequest(request.scope, request.receive, None)
            if request.method == "POST":
                await bounded.check_form()
            return await handler(bounded)

        return handle if self.model is None else handle_json

    async def call(self, scope: Scope, receive: Receive) -> Response:
        """Where it has a `model`: what the endpoint returns for the request's body."""
        request = BodyRequest(scope, receive, self.model)
        response: Response = await self.endpoint(body=await request.json(), request=request)
        return response


class JsonRoutes:
    """ASGI middleware: calls the endpoints of `routers` that have a `model` by their paths.

    What FastAPI does between a request and its endpoint takes longer than the endpoint.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        routes = [route for router in routers for route in router.routes if isinstance(route, BodyRoute)]
        self._app = app
        self._routes = {route.path: route for route in routes if route.model is not None}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._routes:
            return self._app(scope, receive, send)
        return self._respond(self._routes[scope["path"]], scope, receive, send)

    async def _respond(self, route: BodyRoute, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        try:
            response = await route.call(scope, receive)
        except OmniError as error:
            response = response_of(error)
        await response(scope, receive, send)


async def json_response(build: Callable[[], Mapping[str, object]], *, small: bool, owner: str | None) -> Response:
    """A response of what `build` returns; a large one is built and written outside the event loop."""

    def respond() -> Response:
        return Response(to_json(build(), inf_nan_mode="null"), media_type="application/json")

    return await run_json(respond, small=small, owner=owner)


def api_router() -> APIRouter:
    """A router for endpoints that take bodies."""
    return APIRouter(route_class=BodyRoute)
