"""The web page at `/`: a chat with live views. Static files of this package."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request, Response

from omnistage.server.http.errors import NotFoundError

router = APIRouter(include_in_schema=False)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page shows output of models: it may run no scripts but its own and reach no other host.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "worker-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    # Revalidated each time (304): an upgrade takes effect at once.
    "Cache-Control": "no-cache",
}


@cache
def _files() -> dict[str, bytes]:
    """Every file of the page by name, read once: no client text becomes a path."""
    entries = files("omnistage.server.page").iterdir()
    return {entry.name: entry.read_bytes() for entry in entries if PurePath(entry.name).suffix in _TYPES}


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _response("index.html", request)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def page_file(name: str, request: Request) -> Response:
    return _response(name, request)


def _response(name: str, request: Request) -> Response:
    data = _files().get(name)
    if data is None:
        raise NotFoundError("page file not found")
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if etag in tags:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=_TYPES[PurePath(name).suffix], headers=headers)
