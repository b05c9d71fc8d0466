"""What Ctrl-C does in a conversation: it discards the line that is typed, or stops the reply, and never the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Self

from omnistage.core.cancellation import Cancellation, cancellation_scope

_IMPORTS = "<frozen importlib._bootstrap>"


@contextmanager
def ends_imports(end: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C inside the block: during an import it calls `end`, which must end the process; elsewhere it raises.

    Modules in C++ call Python while they are imported, and an exception that is raised there aborts the process.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == _IMPORTS:
                end()
            frame = frame.f_back
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupts:
    """Ctrl-C inside the block. Python would raise an exception wherever the main thread is then: half-way into a lock,
    which is given back without being held (a `RuntimeError`), or between two lines, where nothing catches it.

    Here it is raised only at the prompt. Elsewhere the first one cancels what runs, from a thread of its own, because
    a handler must not wait for a lock that its own thread holds; a second one is raised as usual. Nothing changes
    where Ctrl-C does not raise (another handler, or ignored), outside of the main thread, and without the block.
    """

    def __init__(self) -> None:
        self._reading = False
        self._work: Cancellation | None = None
        self._stopping: Cancellation | None = None
        self._requests: SimpleQueue[Cancellation | None] = SimpleQueue()  # may be put to while it is being put to
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._thread = threading.Thread(target=self._cancel_each, name="interrupts", daemon=True)
            self._thread.start()
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._requests.put(None)
            self._thread.join()
            self._thread = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._work is not None:
            self._requests.put(self._work)
            self._work, self._stopping = None, self._work
        elif self._reading or self._stopping is not None:
            raise KeyboardInterrupt

    def _cancel_each(self) -> None:
        for work in iter(self._requests.get, None):
            work.cancel()

    def read(self, read: Callable[[], str]) -> str:
        """A line, while which is waited for Ctrl-C raises."""
        self._reading = True
        try:
            return read()
        finally:
            self._reading = False

    @contextmanager
    def cancelling(self) -> Iterator[Cancellation]:
        """A scope that Ctrl-C cancels; a second one inside the block raises."""
        with cancellation_scope(Cancellation()) as cancellation:
            self._work = cancellation
            try:
                yield cancellation
            finally:
                self._work = self._stopping = None
