"""How long a batch of windows takes and how fast codes come, learned from those that did. Pure Python."""

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


@dataclass(slots=True)
class Pace:
    """How codes come while the codec is idle, and beside its batches: what makes them may share its device."""

    free_codes: float = 0.0
    free_seconds: float = 0.0
    beside_codes: float = 0.0
    beside_seconds: float = 0.0

    def observe(self, codes: int, seconds: float, *, beside_batch: bool) -> None:
        """So many codes came within this time, in which a batch ran or did not."""
        if beside_batch:
            self.beside_codes += codes
            self.beside_seconds += seconds
        else:
            self.free_codes += codes
            self.free_seconds += seconds

    def learn(self, utterance: Pace) -> None:
        """The pace of utterances, the last ones above all."""
        for name in ("free_codes", "free_seconds", "beside_codes", "beside_seconds"):
            setattr(self, name, _DECAY * getattr(self, name) + getattr(utterance, name))

    @property
    def known(self) -> bool:
        """Whether codes have come while the codec was idle."""
        return self.free_codes > 0

    @property
    def free(self) -> float:
        """Seconds of a code while the codec is idle."""
        return self.free_seconds / self.free_codes if self.free_codes else 0.0

    @property
    def beside(self) -> float:
        """Codes in a second in which a batch runs."""
        return self.beside_codes / self.beside_seconds if self.beside_seconds else 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long codes take beside a batch; 1 where nothing is known."""
        if not self.free_codes or not self.beside_codes:
            return 1.0
        return self.beside_seconds / self.beside_codes / max(self.free, 1e-9)

    def between(self, other: Pace) -> Pace:
        """The mean of two paces."""
        return Pace(2.0, self.free + other.free, self.beside + other.beside, 2.0)

    def wait(self, codes: float, busy: float) -> float:
        """How long it takes until so many codes have come, where batches run for this share of the time."""
        return codes * self.free / max(1 - busy + busy * self.beside * self.free, 1e-9)
