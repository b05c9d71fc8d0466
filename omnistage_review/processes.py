"""Runs git and gh with bounds on time and output."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 120.0
KILLED = -9  # the exit status of a command that took longer


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed. `cut` says that there was more than the limit."""

    code: int
    data: bytes
    error: str
    cut: bool


def run(command: list[str], *, cwd: Path | None = None, limit: int = 64 * 1024 * 1024) -> Output:
    """Runs a command without a terminal. Raises FileNotFoundError where it is not installed."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        timer = threading.Timer(TIMEOUT, process.kill)
        timer.start()
        try:
            stream = process.stdout
            data = b"" if stream is None else stream.read(limit + 1)
            cut = len(data) > limit
            if cut:
                process.kill()
            if stream is not None:
                stream.close()
            code = process.wait()
        finally:
            timer.cancel()
        errors.seek(0)
        text = errors.read(65536).decode("utf-8", "replace").strip()
    return Output(0 if cut else code, data[:limit], text, cut)
