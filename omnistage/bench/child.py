"""A service to be measured, in a process of its own: started, waited for, stopped."""

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
_KEPT_LINES = 20


@contextlib.contextmanager
def served(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, patience: float = 600.0
) -> Iterator[tuple[str, int]]:
    """Run `omnistage serve ARGUMENTS` on a free port; its address and its process id once its models are loaded.

    Raises `InvalidRequestError` with what it said if it ends before that, or has not come so far in `patience` seconds.
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
        # Ctrl-C is for the generator: it still has a summary to print, and then stops the service itself.
        start_new_session=True,
    )
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    address: list[str] = []
    settled = threading.Event()

    def listen() -> None:
        if child.stderr is not None:
            for line in child.stderr:
                last.append(line)
                if found := _READY.search(line):
                    address.append(found.group(1))
                    settled.set()
        settled.set()

    threading.Thread(target=listen, name="service-log", daemon=True).start()
    try:
        if not settled.wait(patience):
            raise InvalidRequestError(f"the service has not loaded its models within {patience:g} s", param="--serve")
        if not address:
            said = "".join(last).partition("error: ")[2].strip() or "".join([*last][-1:]).strip() or "it said nothing"
            raise InvalidRequestError(f"the service did not start: {said}", param="--serve")
        yield address[0], child.pid
    finally:
        child.terminate()
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
