"""A server that a stage starts itself: its process group, its log, and its restarts."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)

RESTART_PAUSES = (1.0, 60.0)
"""Seconds before the first restart, and at most; each pause is twice the last."""
_STABLE_SECONDS = 600.0
"""A server that has run for so long is restarted at once again."""
STOP_SECONDS = 10.0
_MAX_LOG_BYTES = 16 * 2**20
"""Of the log and of the older part beside it."""
_POLL_SECONDS = 0.05
_LAST_LINES, _MAX_LINE = 5, 300
_GUARD = Path(__file__).with_name("guard.py")
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Of this process's environment: the server has a virtual environment of its own."""


class ServerProcess:
    """Runs a command until `stop`, again and again once `keep_running` was called. Thread-safe."""

    def __init__(
        self,
        stage: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log_file: str | None,
        *,
        pauses: tuple[float, float] = RESTART_PAUSES,
    ) -> None:
        self._stage = stage
        self._command = [sys.executable, "-I", "-S", str(_GUARD), str(STOP_SECONDS), *command]
        inherited = {name: value for name, value in os.environ.items() if name not in _PYTHON_VARIABLES}
        self._env = {**inherited, **env}
        self._log_path = _log_path(stage, log_file)
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._pauses = pauses
        self.restarts = 0
        self.exit_code: int | None = None
        """Of the process that ended last, while none runs."""
        self._restarting = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.on_exit: Callable[[], None] | None = None
        """Called, in a thread of its own, when the process has ended by itself."""
        self._thread = threading.Thread(target=self._run, name=f"omnistage-{stage}-server", daemon=True)

    @property
    def log_path(self) -> Path:
        return self._log_path

    @property
    def last_lines(self) -> str:
        """The end of what it wrote, in one line."""
        return " | ".join(list(self._last))

    def start(self) -> None:
        _log.info("stage %s starts its server; its log is %s", self._stage, self._log_path)
        self._thread.start()

    def keep_running(self) -> None:
        """From now on a server that ends is started again."""
        self._restarting = True

    def stop(self, timeout: float) -> None:
        """End the process group; not waited for longer than `timeout` seconds, it is ended all the same."""
        self._stopping.set()
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()  # the guard ends the group
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        pause, longest = self._pauses
        while True:
            started = time.monotonic()
            self.exit_code = self._run_once()
            if self._stopping.is_set():
                return
            _log.error(
                "the server of stage %s ended with code %s; its log is %s", self._stage, self.exit_code, self._log_path
            )
            if self.on_exit is not None:
                self.on_exit()
            while not self._restarting:  # the start has failed, and will say so, or has just succeeded
                if self._stopping.wait(_POLL_SECONDS):
                    return
            if time.monotonic() - started > _STABLE_SECONDS:
                pause = self._pauses[0]
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, longest)
            self.restarts += 1
            self.exit_code = None

    def _run_once(self) -> int | None:
        """The exit code of one run; None where it was stopped before it began."""
        with self._lock:
            if self._stopping.is_set():
                return None
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,  # Ctrl-C in a terminal is for the service, which then stops it
            )
        if process.stdout is not None:
            self._copy(process.stdout)
        code = process.wait()
        with self._lock:
            self._process = None
        if process.stdin is not None:
            process.stdin.close()
        return code

    def _copy(self, output: IO[bytes]) -> None:
        """Write the output to the log, whose older half is kept in a second file."""
        file = self._log_path.open("ab")
        try:
            for line in output:
                self._last.append(line.decode(errors="replace").strip()[:_MAX_LINE])
                if file.tell() + len(line) > _MAX_LOG_BYTES:
                    file.close()
                    os.replace(self._log_path, self._log_path.with_name(self._log_path.name + ".1"))
                    file = self._log_path.open("wb")
                file.write(line)
                file.flush()
        except OSError as error:  # a full disk must not stop the server, which waits for its output to be read
            _log.error("the log of the server of stage %s cannot be written: %s", self._stage, error.strerror)
            for _ in output:
                pass
        finally:
            file.close()


def _log_path(stage: str, log_file: str | None) -> Path:
    if log_file is not None:
        return Path(log_file).expanduser().absolute()
    handle, path = tempfile.mkstemp(prefix=f"omnistage-{stage}-", suffix=".log")
    os.close(handle)
    return Path(path)
