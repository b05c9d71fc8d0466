"""The context of one request's media: fetches that end with the request, and an inspector of decoded items.

Media are read and decoded in worker threads, which inherit these context variables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from PIL.Image import Image

    from omnistage.core.clips import AudioClip, VideoClip

    Decoded: TypeAlias = Image | AudioClip | VideoClip
    Inspector: TypeAlias = Callable[[Decoded], None]

_INSPECTOR: ContextVar[Inspector | None] = ContextVar("omnistage_media_inspector", default=None)


class Fetches:
    """The open connections of a request, which can be aborted from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._aborts: list[Callable[[], None]] = []
        self._aborted = False

    @contextmanager
    def register(self, abort: Callable[[], None]) -> Iterator[None]:
        """Inside the block `abort` ends the connection; it is called at once if the request has ended already."""
        with self._lock:
            self._aborts.append(abort)
            aborted = self._aborted
        if aborted:
            abort()
        try:
            yield
        finally:
            with self._lock:
                self._aborts.remove(abort)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            aborts = list(self._aborts)
        for abort in aborts:
            abort()


_FETCHES: ContextVar[Fetches | None] = ContextVar("omnistage_fetches", default=None)


def current_fetches() -> Fetches:
    return _FETCHES.get() or Fetches()


@contextmanager
def abort_fetches_on_exit() -> Iterator[None]:
    """Fetches that start inside the block, in any thread, end with it: a cancelled request waits for no host."""
    fetches = Fetches()
    token = _FETCHES.set(fetches)
    try:
        yield
    finally:
        _FETCHES.reset(token)
        fetches.abort()


@contextmanager
def inspect_media(inspector: Inspector | None) -> Iterator[None]:
    """Call `inspector`, which may raise, with every image, audio clip and video that is decoded in the block."""
    token = _INSPECTOR.set(inspector)
    try:
        yield
    finally:
        _INSPECTOR.reset(token)


def notify_inspector(decoded: Decoded) -> None:
    """Call the request's inspector, if it has one, with a decoded item."""
    inspector = _INSPECTOR.get()
    if inspector is not None:
        inspector(decoded)
