"""The context of one request's media: an inspector of decoded items, and whose request it is.

Media are read and decoded in worker threads, which inherit these context variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from PIL.Image import Image

    from omnistage.core.clips import AudioClip, VideoClip

    Decoded: TypeAlias = Image | AudioClip | VideoClip
    Inspector: TypeAlias = Callable[[Decoded], None]

_T = TypeVar("_T")
_INSPECTOR: ContextVar[Inspector | None] = ContextVar("omnistage_media_inspector", default=None)


@contextmanager
def _set(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def inspect_media(inspector: Inspector | None) -> AbstractContextManager[None]:
    """Call `inspector`, which may raise, with every image, audio clip and video that is decoded in the block."""
    return _set(_INSPECTOR, inspector)


def notify_inspector(decoded: Decoded) -> None:
    """Call the request's inspector, if it has one, with a decoded item."""
    inspector = _INSPECTOR.get()
    if inspector is not None:
        inspector(decoded)


_OWNER: ContextVar[str | None] = ContextVar("omnistage_media_owner", default=None)


def decode_for(owner: str | None) -> AbstractContextManager[None]:
    """Media that are decoded in the block belong to this owner, who gets no more than a share of the processes."""
    return _set(_OWNER, owner)


def current_owner() -> str | None:
    return _OWNER.get()
