"""A process from which workers are forked: `python -m omnistage.pipeline.fork_server MODULE [ARGUMENT...] SOCKET`.

It is started by `placement.fork_server`. It imports the modules that it is told and has `MODULE.prepare` do what the
forks need not do again, then forks a process for each request, in which `MODULE.main` runs as it would in a new
interpreter. It starts no thread, since a fork has one alone, and uses no GPU, which no fork could use after it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from omnistage.placement.fork_server import CODE_BYTES, PID_BYTES

_log = logging.getLogger(__name__)
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch ask the driver's library whether there are GPUs; the other way makes them useless in forks."""
_NOT_IMPORTED = ("torch._inductor",)
"""Starts processes and threads as it is imported."""
_UNSAFE_CODE = 3
_PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`."""


def preload(modules: Sequence[str]) -> None:
    """Import modules that a worker had imported, in its order."""
    for name in modules:
        if name.startswith(_NOT_IMPORTED):
            continue
        try:
            import_module(name)
        except Exception as error:  # the boundary to libraries: a worker that needs it imports it itself
            _log.debug("module %s is not imported: %s", name, type(error).__name__)


def prepare(work: Callable[[], None]) -> None:
    """Do it here if it leaves nothing behind that forks do not have, which a first fork finds out."""
    parent = os.getpid()
    if (child := os.fork()) == 0:
        try:
            _end_with(parent)
            work()
            os._exit(0 if is_safe() else _UNSAFE_CODE)
        finally:
            os._exit(1)
    _pid, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        work()
    else:
        _log.info("forks prepare their stages themselves: that cannot be done for them")


def _end_with(parent: int) -> None:
    """Have the system end this process with its parent: who ends that one does not know of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def is_safe() -> bool:
    """Whether a fork has all that runs here: one thread. OpenBLAS ends its threads at a fork, so there is one first."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


class Forks:
    """Forks a process for each request from the control socket, and reports its end to the one that asked."""

    def __init__(self, control: socket.socket, command: Sequence[str]) -> None:
        self._control = control
        self._command = command
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """By the handle of a process: its number, and where its end is reported."""

    def serve(self) -> None:
        """Until the service ends or closes the control socket."""
        while True:
            for key, _events in self._selector.select():
                if key.fd in self._children:
                    self._reap(key.fd)
                    continue
                data, fds, _flags, _address = socket.recv_fds(self._control, 1, 2)
                if not data:
                    return
                self._fork(*fds)

    def _fork(self, worker: int, status: int) -> None:
        if (pid := os.fork()) == 0:
            self._run(worker, status)
        os.close(worker)
        handle, reports = os.pidfd_open(pid), socket.socket(fileno=status)
        self._children[handle] = pid, reports
        self._selector.register(handle, selectors.EVENT_READ)
        try:
            socket.send_fds(reports, [pid.to_bytes(PID_BYTES)], [handle])
        except OSError:  # the requester has gone and closed the other end of the socket, so it ends
            return

    def _run(self, worker: int, status: int) -> None:
        """In the new process, which keeps nothing of this one open; does not return."""
        try:
            self._selector.close()
            self._control.close()
            os.close(status)
            for handle, (_pid, reports) in self._children.items():
                os.close(handle)
                reports.close()
            module, *arguments = (*self._command, str(worker))
            if _gpus_are_lost():
                os.set_inheritable(worker, True)
                os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
            import_module(module).main(arguments)
        finally:
            os._exit(1)

    def _reap(self, handle: int) -> None:
        pid, reports = self._children.pop(handle)
        self._selector.unregister(handle)
        os.close(handle)
        _pid, status = os.waitpid(pid, 0)
        with reports:
            try:
                reports.send(os.waitstatus_to_exitcode(status).to_bytes(CODE_BYTES, signed=True))
            except OSError:  # the requester has gone
                return


def _gpus_are_lost() -> bool:
    """Whether a module has used CUDA as it was imported, after which a fork cannot."""
    if "torch" not in sys.modules:
        return False
    import torch

    return bool(torch.cuda._is_in_bad_fork())


def main(arguments: list[str]) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to whole groups: the service decides
        signal.signal(name, signal.SIG_IGN)
    *command, number = arguments
    control = socket.socket(fileno=int(number))
    with control.makefile() as file:
        line = file.readline()
    if not line:
        return
    checked = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    task = json.loads(line)
    preload(task["modules"])
    if task["stages"]:
        prepare(partial(import_module(command[0]).prepare, task["arguments"], task["stages"]))
    if not is_safe():
        _log.error("a library starts threads as it is imported: lost processes are not forked but started anew")
        sys.exit(_UNSAFE_CODE)
    if checked is None:
        del os.environ[_NVML_CHECK]
    else:
        os.environ[_NVML_CHECK] = checked
    gc.collect()
    gc.freeze()  # the pages of what was imported stay shared
    try:
        control.sendall(b"r")
    except BrokenPipeError:  # the service has ended meanwhile
        return
    Forks(control, command).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
