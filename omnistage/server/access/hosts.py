"""Names by which a service on this machine's own address may be called.

A web page of a stranger can point a name of its own at 127.0.0.1 and is then of one origin with whatever listens
there: a browser would hand it every answer. The name that it called by gives it away.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from omnistage.core.validation import short_repr
from omnistage.server.access.denial import deny
from omnistage.server.http.errors import PermissionDeniedError

_OWN_NAMES = frozenset({"localhost"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in _OWN_NAMES


class LocalNames:
    """ASGI middleware: refuses whoever calls by a name that is neither this machine's own nor one of `names`."""

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        called = HTTPConnection(scope).headers.get("host", "")
        name = _without_port(called)
        if is_loopback(name) or name in self._names:
            await self._app(scope, receive, send)
            return
        error = PermissionDeniedError(
            f"the service was called by the name {short_repr(called)}, which is not this machine's; without keys it "
            "answers to its own names only. Start it with --allow-host NAME, or with keys"
        )
        await deny(error, scope, receive, send)


def _without_port(host: str) -> str:
    """`name:8000` and `[::1]:8000` without the port, in lower case."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() and not name.endswith(":") else host.lower()
