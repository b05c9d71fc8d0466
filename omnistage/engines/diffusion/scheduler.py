"""Which pictures take their next denoising step together. Pure Python: it knows counters and shapes, not tensors.

A lane is one picture on its way. Lanes whose rows agree in shape share a forward, at whatever step each of them is;
new ones join at the next step, aborted ones leave. Every step is led by the lane that has waited longest among the
most urgent, so shapes that never agree take turns and nothing starves. Places that come free are shared out evenly
among the requests that wait.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from omnistage.config.schema import DiffusionBudget
from omnistage.engines.ageing import Turn, Turns


@dataclass(frozen=True, slots=True)
class LaneKey:
    """Picture `index` of a request."""

    request_id: str
    index: int


@dataclass(slots=True)
class _Lane:
    key: LaneKey
    turn: Turn
    groups: tuple[Hashable, ...] = ()
    """Of its rows; empty until it is opened."""
    tokens: int = 0
    """Of one row."""
    running: bool = False

    @property
    def cost(self) -> int:
        return self.tokens * len(self.groups)


class DiffusionScheduler:
    """Picks lanes for one step at a time, within a budget of latent patches and rows."""

    def __init__(self, limits: DiffusionBudget) -> None:
        self._limits = limits
        self._lanes: dict[LaneKey, _Lane] = {}
        self._turns = Turns(limits.ageing_steps)

    def add(self, request_id: str, count: int, *, priority: int = 0) -> None:
        """Queue `count` pictures of a request."""
        for index in range(count):
            key = LaneKey(request_id, index)
            self._lanes[key] = _Lane(key, self._turns.new(priority))

    def set_next(self, key: LaneKey, groups: Sequence[Hashable], tokens: int) -> None:
        """After a lane was opened, or has gone a step: the groups of its next rows, and what one of them costs."""
        lane = self._lanes[key]
        lane.groups, lane.tokens = tuple(groups), tokens

    def remove(self, request_id: str) -> None:
        """Forget all lanes of a request."""
        for key in [key for key in self._lanes if key.request_id == request_id]:
            del self._lanes[key]

    def finish(self, keys: Collection[LaneKey]) -> None:
        """Forget lanes that are done."""
        for key in keys:
            self._lanes.pop(key, None)

    def __contains__(self, request_id: str) -> bool:
        return any(key.request_id == request_id for key in self._lanes)

    def has_work(self) -> bool:
        return bool(self._lanes)

    @property
    def running(self) -> int:
        return sum(lane.running for lane in list(self._lanes.values()))

    @property
    def waiting(self) -> int:
        return len(self._lanes) - self.running

    def admit(self) -> tuple[LaneKey, ...]:
        """Lanes to open now: the most urgent of those that wait, as many as may run. The caller says `opened`.

        Equally urgent requests get equally many places, so one of many pictures does not keep the others out.
        """
        places = Counter(lane.key.request_id for lane in self._lanes.values() if lane.running)
        free = self._limits.max_running - places.total()
        if free <= 0:
            return ()
        waiting = sorted((lane for lane in self._lanes.values() if not lane.running), key=self._rank)
        ranked: list[tuple[int, int, int, _Lane]] = []
        for lane in waiting:
            level, number = self._rank(lane)
            ranked.append((level, places[lane.key.request_id], number, lane))
            places[lane.key.request_id] += 1
        admitted = [lane for *_, lane in heapq.nsmallest(free, ranked)]
        for lane in admitted:
            lane.running = True
        return tuple(lane.key for lane in admitted)

    def schedule(self) -> tuple[LaneKey, ...]:
        """The lanes of the next step. All of them agree with the first, the leader, in the groups of their rows."""
        ready = sorted((lane for lane in self._lanes.values() if lane.groups), key=self._rank)
        if not ready:
            return ()
        leader = ready[0]
        picks: list[_Lane] = []
        rows = tokens = 0
        for lane in ready:
            fits = (
                rows + len(lane.groups) <= self._limits.max_batch
                and tokens + lane.cost <= self._limits.max_batch_tokens
                and set(lane.groups) <= set(leader.groups)
            )
            # The leader runs even if its rows are too many for one forward: the runner splits them.
            if lane is leader or fits:
                picks.append(lane)
                rows, tokens = rows + len(lane.groups), tokens + lane.cost
        keys = {lane.key for lane in picks}
        request_ids = {lane.key.request_id for lane in picks}
        for lane in self._lanes.values():
            # Pictures that wait to be opened do not age while others of their request go on.
            waits = lane.running or lane.key.request_id not in request_ids
            lane.turn.age = lane.turn.age + 1 if lane.key not in keys and waits else 0
        for lane in picks:
            self._turns.take(lane.turn)
        return tuple(lane.key for lane in picks)

    def _rank(self, lane: _Lane) -> tuple[int, int]:
        return self._turns.rank(lane.turn)
