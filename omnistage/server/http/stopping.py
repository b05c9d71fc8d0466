"""Signals that stop the service, and the moment at which the process ends whatever its threads do."""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from omnistage.pipeline.event_loop import call_soon

STOP_SECONDS = 5.0
"""From the end of the drain to the end of the process: aborting what is left, telling clients, exiting."""
EXIT_SECONDS = 1.0
"""Of these, kept for the end of the interpreter."""
_STDERR = 2


class StopSignals:
    """SIGINT and SIGTERM inside the block, in the main thread. The first lets requests drain, a second does not.

    Each sets `received`, and a timer in a thread of C that needs neither the event loop nor the interpreter's lock:
    once it is due, the process writes the stacks of all threads to standard error and exits with status 1. Leaving the
    block does not stop it, since the end of the interpreter may hang too; `cancel_exit` does.
    """

    def __init__(self, drain_seconds: float) -> None:
        self.received = asyncio.Event()
        self._drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()
        self._deadline = math.inf
        self._previous: Mapping[int, Any] = {}

    def __enter__(self) -> Self:
        # Not the event loop's handlers: those would wait for a loop that is blocked.
        self._previous = {name: signal.signal(name, self._handle) for name in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, handler in self._previous.items():
            signal.signal(name, handler)

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        first, now = math.isinf(self._deadline), time.monotonic()
        self._deadline = min(self._deadline, now + STOP_SECONDS + (self._drain_seconds if first else 0.0))
        faulthandler.dump_traceback_later(max(0.001, self._deadline - now), exit=True, file=_STDERR)
        call_soon(self._loop, self.received.set)

    @staticmethod
    def cancel_exit() -> None:
        """The process goes on, whatever signal was received."""
        faulthandler.cancel_dump_traceback_later()

    @property
    def seconds_left(self) -> float:
        """Until the process has to end; at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def drain_seconds_left(self) -> float:
        return max(0.0, self.seconds_left - STOP_SECONDS)


def end_process() -> NoReturn:
    """End with status 0 once everything is closed, without taking the interpreter apart.

    That takes 1.4 s of a processor with torch and transformers loaded, and objects that the collector leaves alone
    since `gc.freeze` would be reported as leaked by the bindings of Triton and xgrammar.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
