"""One process that runs stages, seen from the service: its life from its start to its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from omnistage.core.errors import OmniError, StageUnavailableError
from omnistage.core.stage import StageStats, StepSeconds
from omnistage.placement.channel import Channel
from omnistage.placement.clock import boot_id
from omnistage.placement.device_memory import used_devices
from omnistage.placement.messages import Message, Start, Stop
from omnistage.placement.silence import FREE_SHARE, Silence

WORKER_MODULE = "omnistage.pipeline.worker"
START_SECONDS = 1800.0
"""For a process to load its stages."""
START_SILENCE = 120
"""Seconds without a sign of life after which a process that loads is taken for hung."""
_CLOSE_SECONDS = 1.0


class Host(Protocol):
    """What holds a worker: a local process here, an actor where a cluster places it."""

    socket: socket.socket
    """Connected to the worker."""
    pid: int

    def kill(self) -> None:
        """End it at once, whatever it does; from any thread, any number of times."""

    def wait(self, seconds: float) -> int | None:
        """Its exit code, the negative number of a signal; None if it has not ended within that time."""


class LocalProcess:
    """A new interpreter on this machine, never a fork of this one. It ends when its socket does."""

    def __init__(self, command: Sequence[str] = ("-m", WORKER_MODULE)) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
                process_group=0,  # Ctrl-C in a terminal is for the service, also while this imports
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Worker:
    """One life of a process that runs stages. When it is lost, it is lost for good; another one takes its place.

    `receive(worker, message)` and, once, `closed(worker)` are called from a thread of its own.
    """

    def __init__(
        self, name: str, host: Host, receive: Callable[[Worker, Message], None], closed: Callable[[Worker], None]
    ) -> None:
        self.host = host
        self.heard = time.monotonic()
        """When something last came from it."""
        self._silence = Silence(host.pid if host.socket.family == getattr(socket, "AF_UNIX", None) else None)
        self.lost = False
        self.load = 0
        """Requests that it has."""
        self.stats: Mapping[str, StageStats] = {}
        self.steps: Mapping[str, StepSeconds] = {}
        self.num_taken: dict[str, int] = {}
        """Batches of each stage that were taken, and that it has not been told of."""
        self.modules: Sequence[str] = ()
        """Those that it has imported, once it is ready."""
        self._receive = receive
        self._closed = closed
        self._started = threading.Event()
        self._error: OmniError | None = None
        self._channel = Channel(host.socket, self._take, self._end, name=name, arrived=self._arrived)
        self._channel.start()
        self.send = self._channel.send

    def _arrived(self) -> None:
        self.heard = time.monotonic()

    def hangs(self, seconds: float) -> bool:
        """Whether it has given no sign of life for so long although it could have, and it would have been read here.

        To be called every `LOOK_SECONDS` while it has work, from one thread.
        """
        sign, now = self.heard, time.monotonic()
        if now - sign < seconds * FREE_SHARE:
            return False
        silent = self._silence.look(sign, now, seconds, drained=self._channel.is_drained())
        # Looking took time, in which a sign may have come: the channel's thread reads it, then notes it.
        return silent >= seconds and self._channel.is_drained() and self.heard == sign

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            self._receive(self, message)

    def _end(self) -> None:
        self.started(StageUnavailableError(f"its process ended while it was starting ({self.ending()})"))
        self._closed(self)

    def start(self, message: Start) -> None:
        """Have it build its stages; returns once it takes requests. Raises why it cannot."""
        self.send(replace(message, devices=used_devices(), boot=boot_id(), now=time.monotonic()))
        self.wait_started()

    def wait_started(self) -> None:
        """Returns once it has started. Raises why it cannot."""
        end, last_sign, silent = time.monotonic() + START_SECONDS, self.heard, 0
        while not self._started.wait(1.0):
            # Counted, since this process may have been stopped itself.
            silent, last_sign = silent + 1 if self.heard == last_sign else 0, self.heard
            if silent >= START_SILENCE:
                self.started(StageUnavailableError(f"its process has given no sign of life for {silent} s"))
            elif time.monotonic() > end:
                self.started(StageUnavailableError(f"its process has not started within {START_SECONDS:.0f} s"))
        if self._error is not None:
            self.kill()
            raise self._error

    def started(self, error: OmniError | None = None, devices: Sequence[str] = ()) -> None:
        """Note that it has started, with the GPUs that it uses, or why it has not; the first call counts."""
        if not self._started.is_set():
            self._channel.share_devices(devices)
            self._error = error
            self._started.set()

    def ending(self) -> str:
        """How the process ended, in words; it is ended if it has not."""
        code = self.host.wait(0.2)  # its socket closes a moment before
        if code is None:
            self.kill()
        if not code:  # it ends with 0 where its end of the connection is lost
            return "the connection to it was lost"
        if code == -signal.SIGKILL:
            return f"signal {-code}, as when the system runs out of memory"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self.host.kill()
        self._channel.close()

    def stop(self) -> None:
        """Let it end by itself for a moment; then it is killed."""
        self.send(Stop())
        self.host.wait(_CLOSE_SECONDS)
        self.kill()
        self.host.wait(_CLOSE_SECONDS)
