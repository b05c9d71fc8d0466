"""Runs the application: listens at once, loads the models in a thread, drains on a signal and ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from omnistage.core.errors import ConfigError, InternalError, OmniError
from omnistage.core.failures import log_defect
from omnistage.core.threads import DaemonThreadPool
from omnistage.server.http.connection import Connection
from omnistage.server.http.listening import Episode, ListeningSocket
from omnistage.server.http.stopping import EXIT_SECONDS, STOP_SECONDS, StopSignals
from omnistage.server.http.websocket import WebSocketConnection
from omnistage.server.service import Service

WRITE_SECONDS = 5
"""For responses that are still being written once all requests have ended."""
_ABORT_SECONDS = 2.5
"""For ending what the drain has left: stages in a step, sessions, jobs."""
_KEEP_ALIVE_SECONDS = 75
_YOUNG_OBJECTS = 10_000
"""New containers until Python looks for cycles among them. Its default of 700 takes 5% of a request's processor time,
and finds none: requests end by reference counts."""

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
    certificate: tuple[Path, Path] | None = None,
    exits: bool = False,
) -> bool:
    """Serve until a signal, and return True; a second signal stops waiting for running requests.

    It returns within `drain_seconds` and `STOP_SECONDS` of the signal, or the process ends then, also where a thread
    does not. `exits`: the process ends when it has returned, and within that time too.
    `load` adds the models, in a thread of its own. If it fails the service ends and its error is raised.
    """
    listening = _listen(host, port)
    # Requests are drained before the server is told to stop: what is left then is only being written.
    server = _Server(server_config(app, timeout_graceful_shutdown=WRITE_SECONDS, certificate=certificate))
    failures: list[OmniError] = []

    def loading() -> None:
        try:
            load(service)
        except OmniError as error:
            failures.append(error)
        except BaseException as error:  # the boundary of this thread: the service must not appear to load for ever
            log_defect("loading", error)
            failures.append(InternalError("loading failed; see the log above"))
        if failures:
            server.should_exit = True
            return
        # What was loaded stays: without this every full collection visits it, for half a second or more.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
        service.loading = False
        _announce(service, listening, notify, "http" if certificate is None else "https")

    async def main() -> None:
        # Work that does not return is not waited for: not by asyncio when it closes, not when the interpreter exits.
        asyncio.get_running_loop().set_default_executor(DaemonThreadPool("omnistage-worker"))
        with StopSignals(drain_seconds) as signals:
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            threading.Thread(target=loading, name="loading", daemon=True).start()
            if not await _done_before(serving, signals.received):
                await _drain(service, signals, notify)
                seconds = signals.seconds_left - EXIT_SECONDS
                server.config.timeout_graceful_shutdown = max(1, min(WRITE_SECONDS, int(seconds)))
                server.should_exit = True
            await serving

    try:
        asyncio.run(main())
    finally:
        if not exits:
            StopSignals.cancel_exit()
    if failures:
        raise failures[0]
    return True


async def _drain(service: Service, signals: StopSignals, notify: Notify) -> None:
    """Let running requests finish, until there is another signal; then end what is left."""
    if service.loading:
        notify(f"stopped while loading{f' ({service.loading_step})' if service.loading_step else ''}", "dim")
    else:
        notify("stopping: running requests may finish", "dim")
    signals.received.clear()
    tasks = [asyncio.create_task(service.drain(signals.drain_seconds_left))]
    drained = await _done_before(tasks[0], signals.received, signals.drain_seconds_left + _ABORT_SECONDS)
    if not drained and signals.received.is_set():
        notify("stopping at once", "dim")
        tasks.append(asyncio.create_task(service.drain(0)))
        await asyncio.wait(tasks, timeout=max(0.0, signals.seconds_left - STOP_SECONDS + _ABORT_SECONDS))
    if not all(task.done() for task in tasks):
        notify("some work did not end in time; stopping without it", "yellow")
    for task in tasks:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception):  # a defect, which must not keep the process from ending
            log_defect("stopping", error)


async def _done_before(work: asyncio.Task[None], event: asyncio.Event, timeout: float | None = None) -> bool:
    """Wait for either, at most `timeout` seconds; whether the work is done."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({work, waiting}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return work.done()


class _InvalidRequests(logging.Filter):
    """Lets one of uvicorn's lines about invalid requests pass a minute: a client can cause any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._episodes = {
            text: Episode() for text in ("Invalid HTTP request received.", "Unsupported upgrade request.")
        }

    def filter(self, record: logging.LogRecord) -> bool:
        episode = self._episodes.get(str(record.msg))
        return episode is None or episode.begins()


_invalid_requests = _InvalidRequests()


def server_config(
    app: FastAPI, *, timeout_graceful_shutdown: int | None = None, certificate: tuple[Path, Path] | None = None
) -> uvicorn.Config:
    """uvicorn's settings for our application, with connections that it can abort; https with a certificate."""
    logging.getLogger("uvicorn.error").addFilter(_invalid_requests)  # once, however often it is called
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of every form that is not well-formed
    return uvicorn.Config(
        app,
        http=Connection,
        log_level="warning",
        access_log=False,  # else each line is formatted, and dropped for its level
        lifespan="off",
        # Longer than clients keep an idle connection (OpenAI's: 5 s): the side that closes first loses no request.
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=timeout_graceful_shutdown,
        ssl_certfile=None if certificate is None else certificate[0],
        ssl_keyfile=None if certificate is None else certificate[1],
        ws=WebSocketConnection,
        ws_max_size=app.state.realtime.max_message_bytes,
        # Audio in base64 hardly gets smaller, and compressing it would block the event loop.
        ws_per_message_deflate=False,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is given; with it each response waits 40 ms for an
    # acknowledgement between its head and its body, and so may each event of a stream.
    listening = ListeningSocket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


def _announce(service: Service, listening: socket.socket, notify: Notify, scheme: str) -> None:
    host, port = listening.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    notify(f"ready: {scheme}://{address}:{port}/v1", "bold green")
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(address, address)  # every network is no address to open
    notify(f"  web page: {scheme}://{here}:{port}/", "")
    for model in service.models.values():
        inputs = ", ".join(sorted(str(m) for m in model.omni.processor.input_modalities | {"text"}))
        notify(f"  {model.name}: {inputs} in; {', '.join(model.omni.modalities)} out", "")
    if not service.keyring.required:
        notify("  no API key is required; set one with --api-key", "yellow")
