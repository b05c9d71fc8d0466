"""Who may come in, decided from the headers: no body of a stranger is read, none while nobody could answer it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omnistage.core.errors import OmniError
from omnistage.server.access.origins import is_welcome
from omnistage.server.http.errors import PermissionDeniedError, response_of
from omnistage.server.observe.audit import CURRENT
from omnistage.server.service import Service

_GUARDED = "/v1/"


_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Gate:
    """ASGI middleware: a key for everything under `/v1/`, 503 for new work while the service loads or drains.

    Without keys, pages of other origins than `origins` and our own may not send anything.
    """

    def __init__(self, app: ASGIApp, service: Service, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._service = service
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The same text that the router matches, so no spelling of a path gets past one and not the other.
        if scope["type"] != "http" or not str(scope["path"]).startswith(_GUARDED):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_origin(scope["method"], headers)
            holder = self._service.keyring.authenticate(headers.get("authorization"))
            record = CURRENT.get()
            if record is not None:
                record.who = holder.name
            if scope["method"] == "POST":
                self._service.check_ready()
        except OmniError as error:
            await response_of(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["holder"] = holder
        await self._app(scope, receive, send)

    def _check_origin(self, method: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or method in _READING or self._service.keyring.required:
            return
        if not is_welcome(origin, headers.get("host", ""), self._origins):
            raise PermissionDeniedError("pages of this origin may not call; allow it with --cors")
