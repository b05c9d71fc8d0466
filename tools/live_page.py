"""The page at `/` with models behind it and a browser before it, for the scripts that picture it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping

import uvicorn

from omnistage.omni import AsyncOmni
from omnistage.server.http.app import create_app
from omnistage.server.http.run import server_config
from omnistage.server.service import Service

WAIT = 120_000
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]


def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("OMNISTAGE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise SystemExit("no Chromium: install one or set OMNISTAGE_CHROMIUM")
    return found


@contextlib.contextmanager
def serving(models: Mapping[str, AsyncOmni]) -> Iterator[str]:
    """The service over these models, which are shut down afterwards; its address."""
    service = Service()
    for name, omni in models.items():
        service.add(name, omni)
    service.loading = False
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(create_app(service)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    for model in service.models.values():
        asyncio.run(model.omni.shutdown(drain=False))
