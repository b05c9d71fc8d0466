"""Checks of the `Host` and `Origin` headers, which protect a service without keys from web pages of other sites.

A page can resolve a domain of its own to 127.0.0.1 (DNS rebinding) and is then same-origin with whatever listens
there; only the `Host` header tells. Starlette's `TrustedHostMiddleware` has no hook for the error body and cannot match
the loopback network.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Awaitable, Iterable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omnistage.core.validation import short_repr
from omnistage.server.access.denial import deny
from omnistage.server.http.errors import PermissionDeniedError

_DEFAULT_PORTS = {"http": 80, "https": 443}


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class HostMiddleware:
    """ASGI middleware: refuses requests whose `Host` is neither a loopback address nor one of `allowed_hosts`.

    It returns the application's awaitable itself: no chunk of a response passes through here.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._allowed_hosts = frozenset(name.lower() for name in allowed_hosts)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] not in ("http", "websocket"):
            return self._app(scope, receive, send)
        header = Headers(scope=scope).get("host", "").lower()
        # `name:8000` and `[::1]:8000` without the port.
        name, colon, port = header.rpartition(":")
        host = name if colon and port.isdecimal() and not name.endswith(":") else header
        if is_loopback(host) or host in self._allowed_hosts:
            return self._app(scope, receive, send)
        error = PermissionDeniedError(
            f"the host {short_repr(header)} is not allowed: without API keys only localhost is; "
            "start the server with --allow-host NAME, or with keys"
        )
        return deny(error, scope, receive, send)


def origin_allowed(origin: str, host: str, allowed: Sequence[str]) -> bool:
    """Whether a page of `origin` may use the service: one that came from `host` itself, or one of the CORS list.

    Browsers send forms and open WebSockets without a preflight request, so CORS alone does not stop them.
    """
    if "*" in allowed or origin in allowed:
        return True
    try:
        page, site = urlsplit(origin), urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        return (page.hostname, page.port or default) == (site.hostname, site.port or default) and bool(page.hostname)
    except ValueError:  # not a valid port
        return False
