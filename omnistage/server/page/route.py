"""The page at `/`: a chat that shows what the service can do. Plain files of this package, nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
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
# Answers of models are shown on this page: whatever they say, it runs no script but its own and sends nothing away.
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
    # Asked for again each time and answered with 304: an upgrade is seen at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    kind: str
    etag: str


@cache
def _files() -> dict[str, _File]:
    """Every file of the page by its name, read once: there is no path from a client's text to the disk."""
    found = {}
    for entry in files("omnistage.server.page").iterdir():
        kind = _TYPES.get(PurePath(entry.name).suffix)
        if kind is not None:
            data = entry.read_bytes()
            found[entry.name] = _File(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return found


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _answer("index.html", request)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def page_file(name: str, request: Request) -> Response:
    return _answer(name, request)


def _answer(name: str, request: Request) -> Response:
    found = _files().get(name)
    if found is None:
        raise NotFoundError("the page has no such file")
    headers = {**_HEADERS, "ETag": found.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if found.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(found.data, media_type=found.kind, headers=headers)
