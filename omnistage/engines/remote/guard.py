"""Runs a command in a process group of its own, which ends when this process's standard input does.

Started as a script, without the package: `python guard.py SECONDS PROGRAM ARGUMENT...`. The service holds the other end
of the pipe, so that the group is stopped however the service ends. SECONDS is how long the group may take to stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main() -> int:
    grace, command = float(sys.argv[1]), sys.argv[2:]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", flush=True)
        return 127

    def stop() -> None:
        # Nothing is ever sent: its end is that of the service. Read below Python's buffers, whose locks outlast `main`.
        while os.read(0, 4096):
            pass
        _signal_group(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
        _signal_group(child.pid, signal.SIGKILL)

    threading.Thread(target=stop, daemon=True).start()
    code = child.wait()
    _signal_group(child.pid, signal.SIGKILL)  # what it has left behind
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
