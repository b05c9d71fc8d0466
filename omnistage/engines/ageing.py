"""One order for requests that compete: priority, which waiting makes up for, so that nothing starves. Pure Python.

Lower priorities run earlier. Every `steps` steps that a request waits while others run are worth one level. Schedulers
whose requests take turns (codec, diffusion) ask `Turns`; there the wait restarts with every turn. The autoregressive
scheduler needs an order that never changes and counts the wait from arrival: `arrival_rank`.
"""

from __future__ import annotations

from dataclasses import dataclass

AGEING_STEPS = 16
"""For stages whose budget does not set it."""


@dataclass(slots=True)
class Turn:
    """One request's place in the order."""

    priority: int
    number: int
    """When it last ran, or arrived: the smallest has waited longest."""
    age: int = 0
    """Steps since then in which it could have run and did not."""


class Turns:
    """Hands out turns and ranks them."""

    def __init__(self, steps: int = AGEING_STEPS) -> None:
        self._steps = steps
        self._count = 0

    def new(self, priority: int) -> Turn:
        self._count += 1
        return Turn(priority, self._count)

    def rank(self, turn: Turn) -> tuple[int, int]:
        """Smaller runs first: the level of urgency, then the longest wait."""
        return turn.priority - turn.age // self._steps, turn.number

    def take(self, turn: Turn) -> None:
        """It runs now: its wait restarts, after its equals."""
        self._count += 1
        turn.number, turn.age = self._count, 0


def arrival_rank(priority: int, step: int, arrival: int, steps: int) -> float:
    """A rank for life, smaller first, of a request that comes at `step` of the scheduler as its `arrival`-th."""
    return priority + step / steps + arrival * 1e-9  # the arrival breaks ties, far below the weight of one step
