"""How long a batch of windows takes, learned from those that ran. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.9
"""Weight of an observation after the next one."""
_MAX_SURPRISE = 4.0
"""A batch that takes longer than so many times what was expected (a graph was captured) counts as this much longer."""


@dataclass(slots=True)
class CostModel:
    """Seconds of a batch as a line over its blocks: a fixed part and a part for each block, by decaying averages."""

    _weight: float = 0.0
    _blocks: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def observe(self, blocks: int, seconds: float) -> None:
        """A batch of this many blocks took this long."""
        if self._weight:
            seconds = min(seconds, _MAX_SURPRISE * max(self.seconds(blocks), 1e-3))
        self._weight = _DECAY * self._weight + 1
        share = 1 / self._weight
        self._blocks += share * (blocks - self._blocks)
        self._seconds += share * (seconds - self._seconds)
        self._squares += share * (blocks * blocks - self._squares)
        self._products += share * (blocks * seconds - self._products)

    def seconds(self, blocks: int) -> float:
        """Expected time of a batch of this many blocks; 0 before the first one."""
        if not self._blocks:
            return 0.0
        most = self._seconds / self._blocks
        spread = self._squares - self._blocks**2
        slope = most
        if spread > 1e-6 * self._squares:
            slope = min(max((self._products - self._blocks * self._seconds) / spread, 0.0), most)
        return self._seconds + slope * (blocks - self._blocks)
