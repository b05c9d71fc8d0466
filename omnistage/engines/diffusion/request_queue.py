"""A queue of work items by urgency, for the stages that run each item once. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from omnistage.engines.ageing import Turn, Turns

T = TypeVar("T")


@dataclass(slots=True)
class _Waiting(Generic[T]):
    request_id: str
    item: T
    turn: Turn


class RequestQueue(Generic[T]):
    """First come, first served within a priority; waiting makes up for priority (`Turns`)."""

    def __init__(self, ageing_steps: int) -> None:
        self._waiting: list[_Waiting[T]] = []
        self._turns = Turns(ageing_steps)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(entry.request_id == request_id for entry in self._waiting)

    def put(self, request_id: str, item: T, priority: int) -> None:
        self._waiting.append(_Waiting(request_id, item, self._turns.new(priority)))

    def remove(self, request_id: str) -> None:
        self._waiting = [entry for entry in self._waiting if entry.request_id != request_id]

    def drop(self, request_id: str, unwanted: Callable[[T], bool]) -> int:
        """Remove items of a request; how many there were."""
        remaining = [entry for entry in self._waiting if entry.request_id != request_id or not unwanted(entry.item)]
        dropped = len(self._waiting) - len(remaining)
        self._waiting = remaining
        return dropped

    def take(self, max_items: int, group: Callable[[T], Hashable]) -> list[tuple[str, T]]:
        """The most urgent item and those that agree with it in `group`, at most `max_items`."""
        ranked = sorted(self._waiting, key=lambda entry: self._turns.rank(entry.turn))
        if not ranked:
            return []
        leader = group(ranked[0].item)
        batch = [entry for entry in ranked if group(entry.item) == leader][:max_items]
        ids = {id(entry) for entry in batch}
        self._waiting = [entry for entry in self._waiting if id(entry) not in ids]
        for entry in self._waiting:
            entry.turn.age += 1
        return [(entry.request_id, entry.item) for entry in batch]
