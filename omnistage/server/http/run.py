"""Runs the application: listens at once, loads the models beside it, drains when it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from omnistage.cli.common import err, print_error
from omnistage.core.errors import ConfigError, InternalError, OmniError
from omnistage.core.failures import log_defect
from omnistage.server.http.app import create_app
from omnistage.server.http.connection import Connection
from omnistage.server.service import Service

_WRITING_SECONDS = 5
_KEEP_ALIVE_SECONDS = 75


class _Server(uvicorn.Server):
    """uvicorn's own signal handlers would cut connections at once; ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    service: Service,
    load: Callable[[Service], None],
    *,
    host: str,
    port: int,
    drain_seconds: float,
    **options: Any,
) -> None:
    """Serve until a signal. `load` adds the models, in a thread of its own; if it fails the service ends.

    `options` are those of `create_app`. A second signal stops waiting for running requests.
    """
    listening = _listen(host, port)
    # Requests are drained before the server is told to stop: what is left then is only being written out.
    server = _Server(server_config(create_app(service, **options), timeout_graceful_shutdown=_WRITING_SECONDS))
    failure: list[OmniError] = []

    def loading() -> None:
        try:
            load(service)
        except OmniError as error:
            failure.append(error)
        except Exception as error:
            log_defect("loading", error)
            failure.append(InternalError("loading failed; the log above has where"))
        if failure:
            server.should_exit = True
            return
        # What was loaded stays: without this every full collection walks through it, for half a second or more.
        gc.collect()
        gc.freeze()
        service.loading = False
        _announce(service, listening)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows has no such handlers
                loop.add_signal_handler(name, stopping.set)
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        threading.Thread(target=loading, name="loading", daemon=True).start()
        waiting = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not serving.done():
            err().print("stopping: running requests may finish", style="dim")
            stopping.clear()
            draining = asyncio.ensure_future(service.drain(drain_seconds))
            again = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
            again.cancel()
            if not draining.done():
                err().print("stopping at once", style="dim")
                await service.drain(0)
            await draining
            server.should_exit = True
        await serving

    asyncio.run(main())
    if failure:
        print_error(failure[0])
        raise SystemExit(2)


def server_config(app: FastAPI, **options: Any) -> uvicorn.Config:
    """uvicorn's settings for our application; the connection is of a kind that it can cut."""
    # Sound in base64 hardly gets smaller, and compressing it would keep the event loop from everybody else.
    sockets = {"ws_max_size": app.state.max_body_bytes, "ws_per_message_deflate": False}
    # Longer than clients keep an idle connection (OpenAI's: 5 s): the side that closes first loses no request.
    given = {"timeout_keep_alive": _KEEP_ALIVE_SECONDS, **sockets, **options}
    return uvicorn.Config(app, http=Connection, log_level="warning", lifespan="off", **given)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it each answer waits 40 ms for an
    # acknowledgement between its head and its body, and so may each event of a stream.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error
    listening.listen(1024)
    listening.set_inheritable(True)
    return listening


def _announce(service: Service, listening: socket.socket) -> None:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    err().print(f"ready: http://{shown}:{port}/v1", style="bold green")
    for model in service.models.values():
        taken = ", ".join(sorted(str(m) for m in model.omni.processor.input_modalities | {"text"}))
        err().print(f"  {model.name}: {taken} in; {', '.join(model.modalities)} out", markup=False)
    if not service.keyring.required:
        err().print("  no API key is asked for; set one with --api-key", style="yellow")
