"""Which web pages may use the service from a browser."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


def is_welcome(origin: str, host: str, allowed: Sequence[str]) -> bool:
    """Whether a page of this origin may: one of our own, which came from `host`, or of the list that CORS has.

    Browsers ask nobody before they open a WebSocket or send a form, so that without this any page that somebody looks
    at could use a service without keys.
    """
    if "*" in allowed or origin in allowed:
        return True
    try:
        page, own = urlsplit(origin), urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        return (page.hostname, page.port or default) == (own.hostname, own.port or default) and bool(page.hostname)
    except ValueError:  # a port that is none
        return False
