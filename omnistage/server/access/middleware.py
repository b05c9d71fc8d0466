"""Access control from the headers alone: authenticates before the body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omnistage.core.errors import OmniError
from omnistage.server.access.hosts import origin_allowed
from omnistage.server.http.errors import PermissionDeniedError, response_of
from omnistage.server.observe.audit import CURRENT_RECORD
from omnistage.server.service import Service

PROTECTED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AccessMiddleware:
    """ASGI middleware: a key for everything under `/v1/` and for what runs models beside it, 503 for new work while the
    service loads or drains.

    Without keys, pages of other origins than `origins` and the service's own may only read. It returns the
    application's awaitable itself: no chunk of a response passes through here.
    """

    def __init__(self, app: ASGIApp, service: Service, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._service = service
        self._origins = origins

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # The path as the router matches it: no spelling passes one of the two and not the other.
        if scope["type"] != "http" or not str(scope["path"]).startswith(PROTECTED_PREFIXES):
            return self._app(scope, receive, send)
        headers, method, keyring = Headers(scope=scope), scope["method"], self._service.keyring
        origin = headers.get("origin")
        try:
            unsafe = origin is not None and method not in _SAFE_METHODS and not keyring.required
            if unsafe and not origin_allowed(origin or "", headers.get("host", ""), self._origins):
                raise PermissionDeniedError("requests from this origin are not allowed; allow it with --cors")
            record = CURRENT_RECORD.get()
            holder = keyring.authenticate(headers.get("authorization"), None if record is None else record.client)
            if record is not None:
                record.who = holder.name
            self._service.check_ready(new_work=method == "POST")
        except OmniError as error:
            return response_of(error)(scope, receive, send)
        scope.setdefault("state", {})["holder"] = holder
        return self._app(scope, receive, send)
