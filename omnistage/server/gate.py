"""Who may come in, decided from the headers: no body of a stranger is read, none while nobody could answer it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from omnistage.errors import OmniError
from omnistage.server.audit import CURRENT
from omnistage.server.errors import response_of
from omnistage.server.service import Service

_GUARDED = "/v1/"


class Gate:
    """ASGI middleware: a key for everything under `/v1/`, 503 for new work while the service loads or drains."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The same text that the router matches, so no spelling of a path gets past one and not the other.
        if scope["type"] != "http" or not str(scope["path"]).startswith(_GUARDED):
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"authorization")
        try:
            holder = self._service.keyring.authenticate(None if header is None else header.decode("latin-1"))
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
