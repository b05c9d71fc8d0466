"""What one request's media do on their way in: fetches that end with the request, and who looks at each item.

Media are read and decoded in worker threads, deep inside; the context that started the work is all that they share.
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
    """The connections that a request has open, so that they can be cut from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cuts: list[Callable[[], None]] = []
        self._over = False

    @contextmanager
    def holding(self, cut: Callable[[], None]) -> Iterator[None]:
        """While this lasts `cut` ends the connection; at once where the request is gone already."""
        with self._lock:
            self._cuts.append(cut)
            over = self._over
        if over:
            cut()
        try:
            yield
        finally:
            with self._lock:
                self._cuts.remove(cut)

    def cut(self) -> None:
        with self._lock:
            self._over = True
            cuts = list(self._cuts)
        for cut in cuts:
            cut()


_FETCHES: ContextVar[Fetches | None] = ContextVar("omnistage_fetches", default=None)


def current_fetches() -> Fetches:
    return _FETCHES.get() or Fetches()


@contextmanager
def abort_fetches_on_exit() -> Iterator[None]:
    """Fetches that the block starts, in whatever thread, end with it: a cancelled request waits for no host."""
    fetches = Fetches()
    token = _FETCHES.set(fetches)
    try:
        yield
    finally:
        _FETCHES.reset(token)
        fetches.cut()


@contextmanager
def inspect_media(inspector: Inspector | None) -> Iterator[None]:
    """Show every picture, sound and video that is decoded for the block to `inspector`, which may raise."""
    token = _INSPECTOR.set(inspector)
    try:
        yield
    finally:
        _INSPECTOR.reset(token)


def notify_inspector(decoded: Decoded) -> None:
    """Called where an item has been decoded."""
    inspector = _INSPECTOR.get()
    if inspector is not None:
        inspector(decoded)
