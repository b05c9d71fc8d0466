"""What a codec scheduler knows of a request, and what it plans for one. Pure Python."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from omnistage.core.types import Code
from omnistage.engines.ageing import Turn
from omnistage.engines.codec.costs import Pace

INF = float("inf")


class Shape(NamedTuple):
    """A window: `history` old codes, `emit` new ones, then look-ahead, `length` in all."""

    history: int
    length: int
    emit: int
    last: bool


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """A window of one request: `codes` is `history` old codes, `emit` new ones, then look-ahead."""

    request_id: str
    codes: tuple[Code, ...]
    history: int
    emit: int
    last: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. `empty` names utterances without a single code, which end without running."""

    windows: tuple[WindowPlan, ...] = ()
    started: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


@dataclass(slots=True)
class CodecRequest:
    request_id: str
    group: Hashable
    turn: Turn
    streaming: bool
    first_code: float = 0.0
    """When the first codes came."""
    last_code: float = 0.0
    """When the last codes came."""
    batches_seen: int = 0
    """Batches that had begun then."""
    beside_batch: bool = False
    """The last codes came while a batch ran."""
    ready_at: float = INF
    """Since when its next window could run."""
    pace: Pace = field(default_factory=Pace)
    batch_windows: int = 0
    """Windows in the last batch that had one of its own."""
    others: float = 0.0
    """Seconds of batches without it since its first code."""
    others_count: int = 0
    codes: list[Code] = field(default_factory=list)
    final: bool = False
    num_decoded: int = 0
    windows: int = 0
    """How many have run."""
    started: bool = False
    unsent_seconds: float = 0.0
    """Seconds of sound that have not gone out yet."""
    dry_at: float | None = None
    """When its player has played all that it got; None before the first sound."""

    @property
    def empty(self) -> bool:
        """An utterance without a single code."""
        return self.final and not self.codes
