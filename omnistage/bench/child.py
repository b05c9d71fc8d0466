"""A service to be measured, in a child process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from omnistage.core.errors import InvalidRequestError

_READY = re.compile(r"ready: (https?://\S+)/v1")
_STOP_SECONDS = 15.0
_LOG_LINES = 20


@contextlib.contextmanager
def serve_models(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 600.0
) -> Iterator[tuple[str, int]]:
    """Run `omnistage serve ARGUMENTS` on a free port; its address and its process id once its models are loaded.

    Raises `InvalidRequestError` with its message if it ends before that, or has not loaded within `timeout` seconds.
    """
    command = [sys.executable, "-c", "from omnistage.cli import app; app()", "serve", *arguments, "--port", "0"]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # One line a message, and no colours in the middle of an address.
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(environment or {})},
        # Ctrl-C must reach the generator only: it prints its summary and then stops the service.
        start_new_session=True,
    )
    log: deque[str] = deque(maxlen=_LOG_LINES)
    address: list[str] = []
    started = threading.Event()

    def read_log() -> None:
        if child.stderr is not None:
            for line in child.stderr:
                log.append(line)
                if match := _READY.search(line):
                    address.append(match.group(1))
                    started.set()
        started.set()

    threading.Thread(target=read_log, name="service-log", daemon=True).start()
    try:
        if not started.wait(timeout):
            raise InvalidRequestError(f"the service has not loaded its models within {timeout:g} s", param="--serve")
        if not address:
            message = "".join(log).partition("error: ")[2].strip() or "".join([*log][-1:]).strip() or "no message"
            raise InvalidRequestError(f"the service did not start: {message}", param="--serve")
        yield address[0], child.pid
    finally:
        child.terminate()
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
