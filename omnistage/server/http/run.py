"""Runs the application: listens at once, loads the models in a thread, drains on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from omnistage.core.errors import ConfigError, InternalError, OmniError
from omnistage.core.failures import log_defect
from omnistage.server.http.connection import Connection
from omnistage.server.service import Service

WRITE_SECONDS = 5
"""For responses that are still being written once all requests have ended."""
_KEEP_ALIVE_SECONDS = 75

Notify = Callable[[str, str], None]
"""Shows a line to the operator, in a style of `rich`; an empty one is plain."""


class _Server(uvicorn.Server):
    """uvicorn's signal handlers would close connections at once; ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    app: FastAPI,
    service: Service,
    load: Callable[[Service], None],
    *,
    host: str,
    port: int,
    drain_seconds: float,
    notify: Notify,
) -> None:
    """Serve until a signal; a second signal stops waiting for running requests.

    `load` adds the models, in a thread of its own. If it fails the service ends and its error is raised.
    """
    listening = _listen(host, port)
    # Requests are drained before the server is told to stop: what is left then is only being written.
    server = _Server(server_config(app, timeout_graceful_shutdown=WRITE_SECONDS))
    failures: list[OmniError] = []

    def loading() -> None:
        try:
            load(service)
        except OmniError as error:
            failures.append(error)
        except Exception as error:
            log_defect("loading", error)
            failures.append(InternalError("loading failed; see the log above"))
        if failures:
            server.should_exit = True
            return
        # What was loaded stays: without this every full collection visits it, for half a second or more.
        gc.collect()
        gc.freeze()
        service.loading = False
        _announce(service, listening, notify)

    async def main() -> None:
        stop = asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows has no such handlers
                asyncio.get_running_loop().add_signal_handler(name, stop.set)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        threading.Thread(target=loading, name="loading", daemon=True).start()
        if not await _done_before(serving, stop):
            await _drain(service, drain_seconds, stop, notify)
            server.should_exit = True
        await serving

    asyncio.run(main())
    if failures:
        raise failures[0]


async def _drain(service: Service, seconds: float, stop: asyncio.Event, notify: Notify) -> None:
    """Let running requests finish, until `stop` is set once more."""
    notify("stopping: running requests may finish", "dim")
    stop.clear()
    draining = asyncio.create_task(service.drain(seconds))
    if not await _done_before(draining, stop):
        notify("stopping at once", "dim")
        await service.drain(0)
    await draining


async def _done_before(work: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Wait for either; whether the work is done."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return work.done()


def server_config(app: FastAPI, *, timeout_graceful_shutdown: int | None = None) -> uvicorn.Config:
    """uvicorn's settings for our application, with connections that it can abort."""
    return uvicorn.Config(
        app,
        http=Connection,
        log_level="warning",
        lifespan="off",
        # Longer than clients keep an idle connection (OpenAI's: 5 s): the side that closes first loses no request.
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=timeout_graceful_shutdown,
        ws_max_size=app.state.max_body_bytes,
        # Audio in base64 hardly gets smaller, and compressing it would block the event loop.
        ws_per_message_deflate=False,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is given; with it each response waits 40 ms for an
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


def _announce(service: Service, listening: socket.socket, notify: Notify) -> None:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    notify(f"ready: http://{shown}:{port}/v1", "bold green")
    for model in service.models.values():
        inputs = ", ".join(sorted(str(m) for m in model.omni.processor.input_modalities | {"text"}))
        notify(f"  {model.name}: {inputs} in; {', '.join(model.modalities)} out", "")
    if not service.keyring.required:
        notify("  no API key is required; set one with --api-key", "yellow")
