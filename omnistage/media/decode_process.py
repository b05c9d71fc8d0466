"""One process that decodes media, seen from the service: it can be killed at any time."""

from __future__ import annotations

import array
import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack

from pydantic import ValidationError

from omnistage.media import decode_protocol as protocol
from omnistage.media.limits import MIB

MAX_ITEMS = 5_000
"""A process is replaced after so many, whatever libraries have leaked by then."""
_KEEP_BYTES = 16 * MIB
"""A file keeps its pages up to here for the next item: writing to new ones takes five times as long."""
_ENVIRONMENT = ("LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")


class ProcessEndedError(Exception):
    """The process ended without an answer; `code` is its exit code, the negative number of a signal."""

    def __init__(self, code: int, *, began: bool = True) -> None:
        super().__init__(f"the decoding process ended with code {code}")
        self.code = code
        self.began = began
        """Whether it had read its task."""


class DecodeProcess:
    """Used by one thread at a time, except for `kill`."""

    def __init__(self) -> None:
        self._items = 0
        with ExitStack() as ends, ExitStack() as files:
            self._input, self._output = (
                files.enter_context(protocol.memory_file()),
                files.enter_context(protocol.memory_file()),
            )
            shared = (self._input.fileno(), self._output.fileno())
            task_end, self._tasks = os.pipe()
            ends.callback(os.close, task_end)
            files.callback(os.close, self._tasks)
            self._answers, answer_end = os.pipe()
            ends.callback(os.close, answer_end)
            files.callback(os.close, self._answers)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "omnistage.media.decode_worker", *map(str, shared)],
                stdin=task_end,
                stdout=answer_end,
                pass_fds=shared,
                env=_environment(),
                cwd="/",
                process_group=0,  # Ctrl-C in a terminal is for the service, also while this imports
            )
            self._close_files = files.pop_all().close

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def reusable(self) -> bool:
        """Whether it can decode another item."""
        return self._process.poll() is None and self._items < MAX_ITEMS

    def decode(self, task: protocol.Task, data: bytes, seconds: float) -> protocol.Answer:
        """What the process answers; what it decoded is read by `read`, then `release` gives back its memory.

        Raises `ProcessEndedError` where it ended, `TimeoutError` where there is no answer within `seconds`; it can only
        be closed then.
        """
        self._items += 1
        try:
            self._input.seek(0)
            protocol.write_all(self._input, memoryview(data))
            os.write(self._tasks, task.model_dump_json().encode() + b"\n")  # far less than a pipe holds
        except BrokenPipeError:
            raise ProcessEndedError(self._process.wait(), began=False) from None
        line = self._read_line(seconds)
        if not line:
            raise ProcessEndedError(self._process.wait(), began=not self._is_unread())
        self._output.seek(0)
        try:
            return protocol.ANSWERS.validate_json(line)
        except ValidationError:  # whatever wrote this is not our code any longer
            self.kill()
            raise ProcessEndedError(0) from None

    def _is_unread(self) -> bool:
        """Whether the task is still in its pipe."""
        import fcntl
        import termios

        count = array.array("i", [0])
        fcntl.ioctl(self._tasks, termios.FIONREAD, count)
        return count[0] > 0

    def _read_line(self, seconds: float) -> bytes:
        """The line that answers a task; empty where the process ended."""
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(end - time.monotonic(), 0.0) * 1000):
                raise TimeoutError
            piece = os.read(self._answers, protocol.MAX_LINE_BYTES)
            if not piece or len(line) + len(piece) > protocol.MAX_LINE_BYTES:
                self.kill()
                return b""
            line += piece
        return line

    def read(self, nbytes: int, skip: int = 0) -> bytearray:
        """The next bytes of what was decoded. Raises `ProcessEndedError` where there are fewer."""
        self._output.seek(skip, os.SEEK_CUR)
        if nbytes > os.fstat(self._output.fileno()).st_size - self._output.tell():  # before memory is taken for it
            raise ProcessEndedError(0)
        buffer = bytearray(nbytes)
        if not protocol.read_all(self._output, memoryview(buffer)):
            raise ProcessEndedError(0)
        return buffer

    def release(self) -> None:
        """Give back the memory of a large item."""
        for file in (self._input, self._output):
            if os.fstat(file.fileno()).st_size > _KEEP_BYTES:
                file.truncate(0)

    def kill(self) -> None:
        """End it, from any thread; `decode` raises then."""
        self._process.kill()

    def close(self) -> None:
        """End it and free all that it held."""
        self._process.kill()
        self._process.wait()
        self._close_files()


def _environment() -> dict[str, str]:
    """Nothing of the service's own variables, which may hold keys, but what an interpreter needs to start."""
    return {
        **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        # Memory of ordinary items is kept for the next one: taking it from the system takes longer than decoding.
        "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
        "MALLOC_TRIM_THRESHOLD_": str(64 * MIB),
        "PILLOW_BLOCKS_MAX": "2",
    }
