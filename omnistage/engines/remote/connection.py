"""The connection to one server: an event loop in a thread of its own, which sends requests and watches the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from omnistage.config.remote import RemoteStageConfig
from omnistage.core.errors import ConfigError, OmniError
from omnistage.core.failures import log_defect, stage_failure
from omnistage.core.http_client import Address, BrokenResponseError, Client, EventReader
from omnistage.engines.remote.failures import broken_response, status_error, too_slow, unreachable
from omnistage.engines.remote.server_process import STOP_SECONDS, ServerProcess

_log = logging.getLogger(__name__)

AWAY = "runs on a server that does not answer"
_MAX_EVENT_BYTES = 16 * 2**20
_AWAY_CHECK_SECONDS = 1.0
"""Between two checks of a server that is away."""
_MAX_UNANSWERED = 2
"""Checks in a row that get no answer in time before the server counts as away: a busy one may be slow."""
_START_CHECK_SECONDS = 0.5
_START_SCALE = 60.0
"""Seconds after which a start is shown as two thirds done: how long it takes is unknown."""
_CLOSE_SECONDS = 1.5

Progress = Callable[[str, float], None]


class RemoteConnection:
    """Sends requests to a server and knows whether it is there. `on_change` is called from its thread."""

    def __init__(self, stage: str, config: RemoteStageConfig, on_change: Callable[[], None]) -> None:
        self._stage = stage
        self._config = config
        self._on_change = on_change
        self.away = False
        self.max_length: int | None = None
        """The server's longest sequence, where it tells."""
        budget = config.budget
        self._client = Client(
            Address.parse(config.url), _api_key(stage, config), connect_seconds=budget.connect_seconds
        )
        self.process: ServerProcess | None = None
        if config.command is not None:
            self.process = ServerProcess(stage, config.command, config.env, config.log_file)
        self._loop = asyncio.new_event_loop()
        self._check_now = asyncio.Event()
        self._watching: Future[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"omnistage-{stage}-http", daemon=True)

    def start(self, progress: Progress | None = None) -> None:
        """Start the server where it is ours, look for it, and begin to watch it.

        A server that is somebody else's may be away; one that does not have the model raises `ConfigError`.
        """
        self._thread.start()
        if self.process is not None:
            self._await_free()
            self.process.on_exit = self.check_soon
            self.process.start()
            self._await_ready(self.process, progress)
            self.process.keep_running()
        else:
            self._set_away(not self._run(self._is_there()))
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def send(self, path: str, body: dict[str, object], deliver: Callable[[object], None]) -> Future[None]:
        """Send a request: `deliver` gets each event, then None, or else the error that ended it.

        Cancelling the result closes the connection; nothing is delivered after that.
        """
        return asyncio.run_coroutine_threadsafe(self._send(path, body, deliver), self._loop)

    def check_soon(self) -> None:
        """Look for the server now, from any thread."""
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._check_now.set)

    def close(self) -> None:
        end = time.monotonic() + _CLOSE_SECONDS
        if self._thread.is_alive():
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            with contextlib.suppress(TimeoutError):
                ending.result(_CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(max(end - time.monotonic(), 0.1))
        if not self._thread.is_alive():
            self._loop.close()
        if self.process is not None:
            self.process.stop(max(end - time.monotonic(), 0.1))

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()

    # -------------------------------------------------------------------------------------------- requests

    async def _send(self, path: str, body: dict[str, object], deliver: Callable[[object], None]) -> None:
        try:
            async with contextlib.aclosing(self._events(path, json.dumps(body).encode())) as events:
                async for event in events:
                    deliver(event)
            deliver(None)
        except OmniError as error:
            deliver(error)
        except BaseException as error:  # the boundary of a request: whatever breaks ends it alone
            if isinstance(error, asyncio.CancelledError):
                raise
            deliver(stage_failure(error, f"a request of stage {self._stage!r}"))

    async def _events(self, path: str, body: bytes) -> AsyncGenerator[object]:
        """The events of a response. Raises what the request is told."""
        budget, loop, started = self._config.budget, asyncio.get_running_loop(), False
        try:
            async with (
                asyncio.timeout(budget.first_token_seconds) as limit,
                self._client.request(path, body) as response,
            ):
                if response.status != 200:
                    error = await response.read_json()
                    raise status_error(self._stage, response.status, response.headers, error)
                reader = EventReader(_MAX_EVENT_BYTES)
                async with contextlib.aclosing(response.stream()) as parts:
                    async for _, data in parts:
                        for event in reader.push(data):
                            started = True
                            limit.reschedule(loop.time() + budget.idle_seconds)
                            yield event
        except TimeoutError:
            seconds = budget.idle_seconds if started else budget.first_token_seconds
            raise too_slow(self._stage, seconds, started=started) from None
        except BrokenResponseError:
            self._check_now.set()
            raise broken_response(self._stage) from None
        except OSError:  # there is no connection; whether the server is away, the check will say
            self._check_now.set()
            raise unreachable(self._stage) from None

    # -------------------------------------------------------------------------------------------- watching

    async def _watch(self) -> None:
        unanswered = 0
        while True:
            seconds = _AWAY_CHECK_SECONDS if self.away else self._config.budget.check_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._check_now.wait()
            self._check_now.clear()
            try:
                there = await self._is_there()
                unanswered = unanswered + 1 if there is None else 0
                if there is not None or unanswered >= _MAX_UNANSWERED:
                    self._set_away(not there)
            except ConfigError as error:
                _log.error("%s", error)
                self._set_away(True)
            except Exception as error:  # the boundary of this task: without it nobody notices that the server is back
                log_defect(f"the check of the server of stage {self._stage!r}", error)

    async def _is_there(self) -> bool | None:
        """Whether the server answers; None: not in time. Raises `ConfigError` where it does and cannot be used."""
        path = f"pipeline.stages.{self._stage}"
        try:
            async with asyncio.timeout(self._config.budget.connect_seconds):
                status, models = await self._client.get("/v1/models")
        except TimeoutError:
            return None
        except (OSError, BrokenResponseError):
            return False
        if status in (401, 403):
            raise ConfigError(
                f"the server refused the API key (status {status}); name the variable that holds it",
                param=f"{path}.api_key_env",
            )
        cards = models.get("data") if isinstance(models, dict) else None
        if status == 200 and isinstance(cards, list):
            cards_by_id = {card.get("id"): card for card in cards if isinstance(card, dict)}
            if self._config.model not in cards_by_id:
                names = ", ".join(str(name) for name in list(cards_by_id)[:5]) or "none"
                raise ConfigError(
                    f"the server has no model {self._config.model!r}; it has {names}", param=f"{path}.model"
                )
            length = cards_by_id[self._config.model].get("max_model_len")
            self.max_length = length if isinstance(length, int) else None
        return status < 500

    def _set_away(self, away: bool) -> None:
        if away != self.away:
            self.away = away
            words = "does not answer" if away else "is back"
            _log.warning("the server of stage %s at %s %s", self._stage, self._config.url, words)
            self._on_change()

    def _await_free(self) -> None:
        """Wait for a server of an earlier start to end; raises where the address stays taken."""
        give_up, pause = time.monotonic() + STOP_SECONDS + 5.0, threading.Event()
        while self._run(self._answers()):
            if time.monotonic() > give_up:
                raise ConfigError(
                    "another server answers at its url; stop that, use another port, or remove command",
                    param=f"pipeline.stages.{self._stage}.command",
                )
            pause.wait(_START_CHECK_SECONDS)

    async def _answers(self) -> bool:
        try:
            return bool(await self._is_there())
        except ConfigError:
            return True

    def _run(self, work: Coroutine[Any, Any, bool | None]) -> bool | None:
        """Run it in the connection's thread and wait for the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _await_ready(self, process: ServerProcess, progress: Progress | None) -> None:
        started, path = time.monotonic(), f"pipeline.stages.{self._stage}.command"
        pause = threading.Event()
        while not self._run(self._is_there()):
            if process.exit_code is not None:
                raise ConfigError(
                    f"ended with code {process.exit_code} before its server was ready; its log is {process.log_path}, "
                    f"and ends with: {process.last_lines}",
                    param=path,
                )
            seconds = time.monotonic() - started
            if seconds > self._config.budget.start_seconds:
                raise ConfigError(
                    f"its server was not ready within {self._config.budget.start_seconds:g} s; its log is "
                    f"{process.log_path}; raise {self._stage}.budget.start_seconds if it only needs longer",
                    param=path,
                )
            if progress is not None:
                progress("starting the server", seconds / (seconds + _START_SCALE / 2))
            pause.wait(_START_CHECK_SECONDS)


def _api_key(stage: str, config: RemoteStageConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "")
    if not key.isascii() or not key.isprintable() or not key.strip():
        raise ConfigError(
            f"the environment variable {config.api_key_env} is not set or not a key; set it to the server's API key",
            param=f"pipeline.stages.{stage}.api_key_env",
        )
    return key.strip()
