"""A process that has imported and prepared what the processes of a group need and runs nothing itself, seen from the
service: where one of the group is lost, the next is forked from it and has that already.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omnistage.placement.channel import readable
from omnistage.placement.messages import Start
from omnistage.placement.worker_process import WORKER_MODULE, LocalProcess

_MODULE = "omnistage.pipeline.fork_server"
_FORK_SECONDS = 5.0
"""For a fork, which takes milliseconds; then the fork server is taken for hung."""
_CLOSE_SECONDS = 1.0
PID_BYTES = 8
CODE_BYTES = 2


def supports_forks() -> bool:
    """Whether this system has what a fork server needs: handles of processes, and a list of a process's threads."""
    return hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal") and Path("/proc/self/task").exists()


class ForkServer:
    """All methods are called from one thread, `close` from any."""

    def __init__(
        self, modules: Sequence[str], start: Start | None = None, command: Sequence[str] = (WORKER_MODULE,)
    ) -> None:
        """`modules` are imported first; `start` is what forked processes will be told, for which all that can be is
        prepared; `command` is the module that they run, with its arguments."""
        self._process = LocalProcess(("-m", _MODULE, *command))
        self._socket, self.pid = self._process.socket, self._process.pid
        self._ready = False
        with self._socket.makefile("w") as file:
            arguments, stages = (start.arguments, start.stages) if start is not None else ("", ())
            file.write(json.dumps({"modules": list(modules), "arguments": arguments, "stages": stages}) + "\n")

    @property
    def ready(self) -> bool:
        """It has imported and prepared everything."""
        if not self._ready:
            try:
                self._ready = self._socket.recv(1, socket.MSG_DONTWAIT) != b""
            except OSError:  # not yet, or never
                return False
        return self._ready

    def ended(self) -> bool:
        return self._process.wait(0) is not None

    def fork(self) -> ForkedProcess | None:
        """A new process; None where it still imports, and where it has ended or does not answer."""
        if not self.ready:
            return None
        ours, theirs = socket.socketpair()
        status, their_status = socket.socketpair()
        with theirs, their_status:
            try:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno(), their_status.fileno()])
                status.settimeout(_FORK_SECONDS)
                pid, handles, _flags, _address = socket.recv_fds(status, PID_BYTES, 1)
            except OSError:
                pid, handles = b"", []
        if len(pid) != PID_BYTES or len(handles) != 1:
            self.close()
            ours.close()
            status.close()
            return None
        return ForkedProcess(int.from_bytes(pid), handles[0], ours, status)

    def close(self) -> None:
        """End it; processes that were forked from it go on."""
        self._process.kill()
        self._process.wait(_CLOSE_SECONDS)
        self._socket.close()


class ForkedProcess:
    """A process that the fork server is the parent of. Its number may be another's once it has ended; `handle`, which
    the kernel keeps for it, never is."""

    def __init__(self, pid: int, handle: int, sock: socket.socket, status: socket.socket) -> None:
        self.pid, self.socket = pid, sock
        self._status = status
        self._code: int | None = None
        self._lock = threading.Lock()
        self._handle = handle
        self._close = weakref.finalize(self, os.close, handle)

    def kill(self) -> None:
        with self._lock:
            if self._close.alive:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                self._close()

    def wait(self, seconds: float) -> int | None:
        """None as well where the fork server has ended before and cannot tell."""
        with self._lock:
            if self._status.fileno() >= 0 and readable(self._status, seconds):
                data = self._status.recv(CODE_BYTES)
                self._code = int.from_bytes(data, signed=True) if data else None
                self._status.close()
                if data:
                    self._close()
            return self._code
