"""One budget for the memory that the media of all requests take in a service: decoded media and their features.

A request reserves bytes from the sizes in its items' headers, before they are decoded, and has to wait where there are
none left. It holds them as long as anything of its media is alive.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from traceback import clear_frames

from omnistage.core.cancellation import current_cancellation
from omnistage.core.errors import LimitExceededError, QueueFullError
from omnistage.core.memory import host_memory, trim_heap
from omnistage.media.context import current_owner
from omnistage.media.limits import MIB

FREE_BYTES = 16 * MIB
"""Reserved for an item before its size is known: most are smaller, and are decoded at once."""
_COPIES = 3
"""Of an item while it is decoded: in the process that decodes it, in the file between the two, and here."""
_MIN_DEFAULT = 1024 * MIB
_DEFAULT_SHARE, _REQUEST_SHARE, _OWNER_SHARE = 4, 2, 4
MAX_WAIT_SECONDS = 20.0
"""For memory: a request that waits has a thread, which others may need."""
_DROPPED_SECONDS = 0.5
_TRIM_BYTES = 64 * MIB
_TRIM_SECONDS = 1.0


def default_media_bytes() -> int:
    """A service's budget unless told otherwise: a quarter of the machine's memory, or of the container's."""
    return max((host_memory() or 0) // _DEFAULT_SHARE, _MIN_DEFAULT)


@dataclass(eq=False, slots=True)
class _Account:
    """What one request holds."""

    owner: object
    number: int = field(default_factory=itertools.count().__next__)
    """In the order in which they were opened."""
    size: int = 0


class MediaBudget:
    """Bytes for the media of all requests. Thread-safe.

    All requests in preparation together may hold half of them. Once that is short, the one of those waiting that came
    first may use the other half too, until it is prepared: so requests which hold some and wait for more cannot wait
    for each other. An owner, set by `decode_for`, starts no further request once it holds a quarter.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError("a budget needs at least one byte")
        self.max_bytes = max_bytes
        self.max_request_bytes = max(max_bytes // _REQUEST_SHARE, 1)
        self._max_owned = max(max_bytes // _OWNER_SHARE, 1)
        self._changed = threading.Condition(threading.Lock())
        self._dropped: deque[_Account] = deque()
        """Of holds that were collected, which may happen in the middle of any call, also with the lock held."""
        self._waiting: list[_Account] = []
        self._first: _Account | None = None
        """The request in preparation that may use all that is left, until it is prepared or ends."""
        self._held_by_owner: Counter[object] = Counter()
        self._used_bytes = 0
        self._freed = 0
        """Since memory was last given back to the system; not what was reserved for decoding, in another process."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are reserved now."""
        return self._used_bytes

    @property
    def waiting(self) -> int:
        """Requests that wait for bytes."""
        return len(self._waiting)

    def reserve(self, account: _Account, nbytes: int) -> None:
        """Wait until there is room for so many more.

        Raises `LimitExceededError` where there can be none, `QueueFullError` where there is none for long, and as
        `Cancellation.check` does.
        """
        if account.size + nbytes > self.max_request_bytes:
            raise LimitExceededError(
                f"the request's media take {account.size + nbytes} bytes of memory up to here, over the limit of "
                f"{self.max_request_bytes} for one request; send fewer or smaller ones"
            )
        cancellation, end = current_cancellation(), time.monotonic() + MAX_WAIT_SECONDS
        try:
            with cancellation.on_cancel(self._wake), self._changed:
                self._waiting.append(account)
                try:
                    while not self._fits(account, nbytes):
                        cancellation.check()
                        room, remaining = end - time.monotonic(), cancellation.remaining()
                        if room <= 0:
                            raise QueueFullError(
                                "other requests hold the memory for media; send the request again later",
                                retry_after=5.0,
                            )
                        # Not for longer: a hold may be collected just before this gives the lock away.
                        self._changed.wait(min(room, _DROPPED_SECONDS, room if remaining is None else remaining))
                    cancellation.check()
                    self._add(account, nbytes)
                finally:
                    self._waiting.remove(account)
                    if not account.size and self._first is account:
                        self._first = None
                    self._changed.notify_all()
        finally:
            self._take_dropped()

    def _fits(self, account: _Account, nbytes: int) -> bool:
        self._settle_dropped()
        if self._may_grow(account) and self._used_bytes + nbytes <= self.max_bytes - self.max_request_bytes:
            return True
        # Only where memory is short does one get the rest: a request that took little would keep it from the others.
        if self._first is None:
            able = filter(self._may_grow, self._waiting)
            self._first = min(able, key=lambda waiting: waiting.number, default=None)
        return account is self._first and self._used_bytes + nbytes <= self.max_bytes

    def _may_grow(self, account: _Account) -> bool:
        return account.size > 0 or self._held_by_owner[account.owner] < self._max_owned

    def resize(self, account: _Account, nbytes: int, *, settled: bool = False) -> None:
        """Hold so many from now on, which are there already; `settled`: and never more."""
        with self._changed:
            self._resize(account, nbytes, settled)
        self._take_dropped()

    def _resize(self, account: _Account, nbytes: int, settled: bool) -> None:
        if settled:
            self._freed += max(account.size - nbytes, 0)
        self._add(account, nbytes - account.size)
        if self._first is account and (settled or not account.size):
            self._first = None
        self._changed.notify_all()

    def drop(self, account: _Account) -> None:
        """Give all of it back, from a finalizer: where the lock is taken, who has it does so next."""
        self._dropped.append(account)
        self._take_dropped()

    def _take_dropped(self) -> None:
        """Called without the lock, whenever it was given away."""
        while self._dropped and self._changed.acquire(blocking=False):
            try:
                self._settle_dropped()
            finally:
                self._changed.release()
        if self._freed >= _TRIM_BYTES:
            self._freed = 0
            _trim_soon()

    def _settle_dropped(self) -> None:
        while self._dropped:
            self._resize(self._dropped.popleft(), 0, settled=True)

    def _add(self, account: _Account, nbytes: int) -> None:
        account.size += nbytes
        self._used_bytes += nbytes
        self._held_by_owner[account.owner] += nbytes
        if not self._held_by_owner[account.owner]:
            del self._held_by_owner[account.owner]  # owners come and go

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._take_dropped()


class MediaHold:
    """The bytes of one request's media. They are given back when the last reference to it is gone, or by `close`.

    Keep a reference to it beside decoded media or their features. Used by one thread at a time.
    """

    def __init__(self, budget: MediaBudget | None, owner: str | None) -> None:
        """Without a budget nothing is counted and nothing waits."""
        self._budget = budget
        self._account = _Account(object() if owner is None else owner)
        self._counted = False
        """Whether the budget knows it: most requests have no media, and cost nothing here."""

    @property
    def size(self) -> int:
        return self._account.size

    @property
    def room(self) -> int | None:
        """How many more one request may hold; None: nothing is counted."""
        return None if self._budget is None else max(self._budget.max_request_bytes - self._account.size, 0)

    def reserve(self, nbytes: int) -> None:
        """Hold so many more, once there is room. Raises as `MediaBudget.reserve` does."""
        if self._budget is not None and nbytes > 0:
            self._count(self._budget)
            self._budget.reserve(self._account, nbytes)

    def release(self, nbytes: int) -> None:
        """Hold so many fewer."""
        if self._budget is not None and nbytes:
            self._budget.resize(self._account, self._account.size - nbytes)

    def settle(self, nbytes: int | None = None) -> None:
        """The request is prepared: hold so many from now on, or as many as before, and never more."""
        if self._budget is not None and (self._counted or nbytes):
            self._count(self._budget)
            self._budget.resize(self._account, self._account.size if nbytes is None else nbytes, settled=True)

    def close(self) -> None:
        """Give all of it back now."""
        self.settle(0)

    def _count(self, budget: MediaBudget) -> None:
        if not self._counted:
            self._counted = True
            weakref.finalize(self, budget.drop, self._account).atexit = False

    @contextmanager
    def decoding(self) -> Iterator[ItemBytes]:
        """The bytes of one item that is decoded in the block; where that fails they are given back."""
        item = ItemBytes(self)
        try:
            yield item
        except BaseException:
            item.keep(0)
            raise


@dataclass(slots=True)
class ItemBytes:
    """The bytes of one item of a request."""

    _hold: MediaHold
    _size: int = 0

    def begin(self) -> int | None:
        """Reserve what suffices for most items; the largest that may be decoded with it. None: any."""
        if (room := self._hold.room) is None:
            return None
        nbytes = min(FREE_BYTES, room // _COPIES)
        self.need(nbytes)
        return nbytes

    def need(self, nbytes: int) -> None:
        """Reserve what decoding takes for an item of so many bytes."""
        self.reserve(_COPIES * nbytes)

    @property
    def most(self) -> int:
        """How many bytes it may have at all."""
        return self._size + (self._hold.room or 0)

    def reserve(self, nbytes: int) -> None:
        """Have so many bytes in all."""
        if nbytes > self._size:
            self._hold.reserve(nbytes - self._size)
            self._size = nbytes

    def keep(self, nbytes: int) -> None:
        """It is decoded, and takes so many bytes from now on."""
        self._hold.release(self._size - nbytes)
        self._size = nbytes


_active: MediaBudget | None = None
_HOLD: ContextVar[MediaHold | None] = ContextVar("omnistage_media_hold", default=None)


@contextmanager
def media_budget(max_bytes: int) -> Iterator[MediaBudget]:
    """Count the media of this process's requests inside the block."""
    global _active
    before, _active = _active, MediaBudget(max_bytes)
    try:
        yield _active
    finally:
        _active = before


@contextmanager
def media_hold() -> Iterator[MediaHold]:
    """What is decoded inside the block is held by this one, which outlives the block unless it is left by an error."""
    hold = MediaHold(_active, current_owner())
    token = _HOLD.set(hold)
    try:
        yield hold
    except BaseException as error:
        # However long somebody keeps the error, its frames do not keep the media.
        clear_frames(error.__traceback__)
        hold.close()
        raise
    finally:
        _HOLD.reset(token)


def current_hold() -> MediaHold:
    """That of the request which this thread prepares; outside of any, a new one for the item alone."""
    return _HOLD.get() or MediaHold(_active, current_owner())


# ----------------------------------------------------------------------------------------- memory for the system

_trim_lock = threading.RLock()  # reentrant: a hold may be collected while it is held
_trimming = False


def _trim_soon() -> None:
    """Give freed memory back to the system in a moment, when what was released has really been freed.

    glibc keeps it for the next allocation otherwise. At most one thread waits to do so at a time.
    """
    global _trimming
    with _trim_lock:
        if _trimming or sys.platform != "linux":
            return
        _trimming = True
        timer = threading.Timer(_TRIM_SECONDS, _trim)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no thread can be started: the next release tries again
            _trimming = False


def _trim() -> None:
    global _trimming
    with _trim_lock:
        _trimming = False
    trim_heap()
