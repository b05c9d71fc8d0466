"""`omnistage serve` as a process, and what it writes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.hang_guard import HANG_SECONDS


class Command:
    """The running command, and what it has written so far."""

    def __init__(self, *arguments: str, script: str = "from omnistage.cli import app; app()") -> None:
        command = [sys.executable, "-c", script, "serve", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._lines.append("[end]")
            self._changed.notify_all()

    def line(self, pattern: str, timeout: float = HANG_SECONDS) -> re.Match[str]:
        """Wait for a line."""

        def found() -> re.Match[str] | None:
            return next((match for line in self._lines if (match := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._lines[-1:] == ["[end]"], timeout)
            match = found()
        assert match is not None, "".join(self._lines)
        return match

    def lines(self, pattern: str, count: int, timeout: float = HANG_SECONDS) -> None:
        """Wait for a number of lines."""

        def found() -> bool:
            return sum(bool(re.search(pattern, line)) for line in self._lines) >= count

        with self._changed:
            assert self._changed.wait_for(found, timeout), "".join(self._lines)

    def end(self, timeout: float = HANG_SECONDS) -> int:
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    @property
    def text(self) -> str:
        return "".join(self._lines)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Command]:
    made = Command(*arguments)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.end()
