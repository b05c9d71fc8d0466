"""A least-recently-used cache that is bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteCache(Generic[T]):
    """Values by the digest of their content, least recently used first out. Not thread-safe."""

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._entries: OrderedDict[bytes, T] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, key: bytes) -> T | None:
        value = self._entries.get(key)
        if value is None:
            self.misses += 1
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return value

    def put(self, key: bytes, value: T) -> None:
        """Keep a value, unless it is there or larger than the whole bound."""
        size = self._size_of(value)
        if size > self._max_bytes or key in self._entries:
            return
        self._entries[key] = value
        self.bytes += size
        while self.bytes > self._max_bytes:
            _key, old = self._entries.popitem(last=False)
            self.bytes -= self._size_of(old)

    def drop(self, key: bytes) -> None:
        """Forget a value, if it is there."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.bytes -= self._size_of(value)

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0
