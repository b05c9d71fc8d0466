"""The items of a conversation in their order, and the messages that the model gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omnistage.core.errors import InvalidRequestError, LimitExceededError
from omnistage.core.validation import short_repr
from omnistage.server.http.errors import NotFoundError
from omnistage.server.realtime.base import JsonObject
from omnistage.server.realtime.items import FunctionCall, Item, Message, Speech, new_id


class Conversation:
    """Items in their order, bounded in number and in bytes."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.id = new_id("conv")
        self._items: list[Item] = []
        self._context_start: Item | None = None
        """Items before this one are no longer part of the model's context."""
        self._max_items = max_items
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def context(self) -> list[Item]:
        """The items that the model gets."""
        start = next((i for i, item in enumerate(self._items) if item is self._context_start), 0)
        return [item for i, item in enumerate(self._items) if i >= start or item.role == "system"]

    def start_context_at(self, items: Sequence[Item]) -> None:
        """Limit the model's context to these items and those after them; clients still see all."""
        self._context_start = next((item for item in items if item.role != "system"), None)

    @property
    def nbytes(self) -> int:
        return sum(item.size for item in self._items)

    def has_room(self, size: int) -> bool:
        """Whether an item of this size fits."""
        return len(self._items) < self._max_items and self.nbytes + size <= self._max_bytes

    def check_room(self, size: int) -> None:
        if not self.has_room(size):
            raise LimitExceededError(
                f"the conversation holds {len(self._items)} items of {self.nbytes} bytes, and may hold "
                f"{self._max_items} of {self._max_bytes}; delete some",
                param="item",
            )

    def oldest(self) -> Item | None:
        """The first item that may be dropped to make room."""
        return next((i for i in self._items if i.role != "system" and i.status != "in_progress"), None)

    def add(self, item: Item, after: str | None = None, *, bounded: bool = True) -> str | None:
        """Insert an item after another ("root": at the start), by default at the end; return the id before it.

        Output of the model is not bounded: there was room when its response started.
        """
        if any(item.id == other.id for other in self._items):
            raise InvalidRequestError(f"there is already an item {short_repr(item.id)}", param="item.id")
        if bounded:
            self.check_room(item.size)
        index = len(self._items)
        if after == "root":
            index = 0
        elif after is not None:
            index = self._items.index(self.get(after, "previous_item_id")) + 1
        self._items.insert(index, item)
        return self.id_before(item)

    def id_before(self, item: Item) -> str | None:
        """The id of the item before one; None for the first, and for one that was deleted."""
        index = next((i for i, other in enumerate(self._items) if other is item), 0)
        return self._items[index - 1].id if index else None

    def get(self, item_id: str, param: str = "item_id") -> Item:
        item = next((item for item in self._items if item.id == item_id), None)
        if item is None:
            raise NotFoundError(f"there is no item {short_repr(item_id)} in the conversation", param=param)
        return item

    def delete(self, item_id: str) -> None:
        self._items.remove(self.get(item_id))

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Drop the part of a spoken item that was not heard."""
        item = self.get(item_id)
        parts = item.parts if isinstance(item, Message) and item.role == "assistant" else []
        part = parts[content_index] if 0 <= content_index < len(parts) else None
        if not isinstance(part, Speech):
            raise InvalidRequestError("only audio of the assistant can be truncated", param="content_index")
        if item.status == "in_progress":
            raise InvalidRequestError("is still being generated; send response.cancel first", param="item_id")
        if audio_end_ms > part.ms:
            raise InvalidRequestError(f"the audio has only {part.ms} ms; send less", param="audio_end_ms")
        part.truncate(audio_end_ms)


def later_half(items: Sequence[Item]) -> list[Item]:
    """Without the older half of the items; system messages are kept, and so is a single item."""
    others = [item for item in items if item.role != "system"]
    dropped = {item.id for item in others[: len(others) // 2]}
    return [item for item in items if item.id not in dropped]


def to_messages(items: Sequence[Item], instructions: str) -> list[JsonObject]:
    """The chat messages of these items. Calls join an assistant message before them."""
    messages: list[JsonObject] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        message = item.to_prompt() if item.status != "in_progress" else None
        if message is None:
            continue
        if isinstance(item, FunctionCall) and messages and messages[-1]["role"] == "assistant":
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]}
        else:
            messages.append(message)
    return messages
