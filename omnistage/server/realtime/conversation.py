"""The items of a conversation in their order, and what of them the model is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omnistage.core.errors import InvalidRequestError, LimitExceededError
from omnistage.core.validation import short_repr
from omnistage.server.http.errors import NotFoundError
from omnistage.server.realtime.items import Call, Item, Message, Spoken, new_id


class Conversation:
    """Items in their order, bounded in number and in bytes."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.id = new_id("conv")
        self._items: list[Item] = []
        self._first: Item | None = None
        """The model has no room for what was said before this item."""
        self._max_items = max_items
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def context(self) -> list[Item]:
        """The items that the model is to see."""
        start = next((i for i, item in enumerate(self._items) if item is self._first), 0)
        return [item for i, item in enumerate(self._items) if i >= start or item.role == "system"]

    def forget_before(self, items: Sequence[Item]) -> None:
        """Show the model only these from here on, and what follows them; the others are still here for the client."""
        self._first = next((item for item in items if item.role != "system"), None)

    def has_room(self, size: int) -> bool:
        """Whether an item of this size fits."""
        return len(self._items) < self._max_items and self._bytes + size <= self._max_bytes

    @property
    def _bytes(self) -> int:
        return sum(item.size for item in self._items)

    def check_room(self, size: int) -> None:
        if not self.has_room(size):
            raise LimitExceededError(
                f"the conversation holds {len(self._items)} items of {self._bytes} bytes, and may hold "
                f"{self._max_items} of {self._max_bytes}; delete some",
                param="item",
            )

    def oldest(self) -> Item | None:
        """The first item that may go to make room for others."""
        return next((i for i in self._items if i.role != "system" and i.status != "in_progress"), None)

    def add(self, item: Item, after: str | None = None, *, bounded: bool = True) -> str | None:
        """Put an item behind another, or at the end; the id of the one before it. `after` "root": at the beginning.

        What the model answers is not bounded here: there was room when it was asked.
        """
        if any(item.id == other.id for other in self._items):
            raise InvalidRequestError(f"there is an item {short_repr(item.id)} already", param="item.id")
        if bounded:
            self.check_room(item.size)
        index = len(self._items)
        if after == "root":
            index = 0
        elif after is not None:
            index = self._items.index(self.get(after, "previous_item_id")) + 1
        self._items.insert(index, item)
        return self.before(item)

    def before(self, item: Item) -> str | None:
        """The id of the item before one; None for the first, and for one that was deleted."""
        index = next((i for i, other in enumerate(self._items) if other is item), 0)
        return self._items[index - 1].id if index else None

    def get(self, item_id: str, param: str = "item_id") -> Item:
        found = next((item for item in self._items if item.id == item_id), None)
        if found is None:
            raise NotFoundError(f"there is no item {short_repr(item_id)} in the conversation", param=param)
        return found

    def delete(self, item_id: str) -> None:
        self._items.remove(self.get(item_id))

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Forget what of a spoken item was not heard."""
        item = self.get(item_id)
        if not isinstance(item, Message) or item.role != "assistant" or not 0 <= content_index < len(item.parts):
            raise InvalidRequestError("only spoken parts of the assistant can be cut", param="content_index")
        part = item.parts[content_index]
        if not isinstance(part, Spoken):
            raise InvalidRequestError("only spoken parts of the assistant can be cut", param="content_index")
        if item.status == "in_progress":
            raise InvalidRequestError("is still being spoken; send response.cancel first", param="item_id")
        if audio_end_ms > part.ms:
            raise InvalidRequestError(f"the sound has only {part.ms} ms; name less", param="audio_end_ms")
        part.cut(audio_end_ms)


def later_half(items: Sequence[Item]) -> list[Item]:
    """What was said last, with all that the system said; as many as before where there is nothing to leave out."""
    said = [item for item in items if item.role != "system"]
    left_out = {item.id for item in said[: len(said) // 2]}
    return [item for item in items if item.id not in left_out]


def messages_of(items: Sequence[Item], instructions: str) -> list[Mapping[str, Any]]:
    """What the model is shown. Calls are part of the message before them, where that is the assistant's too."""
    made: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        message = item.for_model() if item.status != "in_progress" else None
        if message is None:
            continue
        if isinstance(item, Call) and made and made[-1]["role"] == "assistant":
            made[-1] = {**made[-1], "tool_calls": [*made[-1].get("tool_calls", ()), *message["tool_calls"]]}
        else:
            made.append(dict(message))
    return list(made)
