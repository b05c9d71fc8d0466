"""What a route gets from its request: the service, and the holder of the key."""

from __future__ import annotations

from fastapi import Request

from omnistage.core.errors import InternalError
from omnistage.server.access.keys import Holder
from omnistage.server.service import Service


def service_of(request: Request) -> Service:
    service = request.app.state.service
    if not isinstance(service, Service):
        raise InternalError("the application has no service")
    return service


def caller(request: Request) -> Holder:
    """The holder of the request's key, as the gate found it. Raises `AuthenticationError`."""
    holder = getattr(request.state, "holder", None)
    if isinstance(holder, Holder):
        return holder
    return service_of(request).keyring.authenticate(request.headers.get("authorization"))
