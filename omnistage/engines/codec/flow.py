"""Flow matching: the solvers. A window's left context is the field's own matter, evaluation by evaluation.

A decoder that attends in blocks sees a bounded number of blocks to each side in one evaluation. Over the solver's
evaluations this spreads, so no finite context makes a window exact by itself. To the left it can be: the blocks there
were solved before, so what later blocks see of them is known for every evaluation, and need not be solved again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from omnistage.core.params import SpeechQuality

Field = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""`field(x, t [], guided)`: the velocity with the condition alone, and what guidance adds to it where asked for."""


@dataclass(frozen=True, slots=True)
class Solver:
    """How often an interval between two time points evaluates the field, and which of these with guidance.

    Four evaluations are the Runge-Kutta 3/8 rule (the arithmetic of transformers' solver), two the midpoint rule. What
    guidance adds is computed at the first evaluation of an interval; without `guide_all` the others take it from there.
    """

    evaluations: int
    guide_all: bool

    def guided(self, num_points: int) -> list[bool]:
        """For each evaluation over so many time points, whether it is asked for guidance."""
        interval = [self.guide_all or i == 0 for i in range(self.evaluations)]
        return interval * (num_points - 1)


SOLVERS: dict[SpeechQuality, Solver] = {
    "full": Solver(4, guide_all=True),
    "balanced": Solver(4, guide_all=False),
    "fast": Solver(2, guide_all=False),
}


def time_grid(num_steps: int, sway: float) -> Tensor:
    """Time points from 0 to 1 (`float32 [num_steps]`, CPU), moved towards the noise side by a negative `sway`."""
    grid = torch.linspace(0, 1, num_steps, dtype=torch.float32)
    return grid + sway * (torch.cos(torch.pi / 2 * grid) - 1 + grid)


def integrate(field: Field, x: Tensor, times: Tensor, solver: Solver = SOLVERS["full"]) -> Tensor:
    """Solve `dx/dt = field` over `times` from the state `x`; the state at the last time point."""
    third = 1 / 3
    for start, end in itertools.pairwise(times):
        step = end - start
        velocity = _Interval(field, solver)
        k1 = velocity(x, start)
        if solver.evaluations == 2:
            x = x + step * velocity(x + step * k1 / 2, start + step / 2)
            continue
        k2 = velocity(x + step * k1 * third, start + step * third)
        k3 = velocity(x + step * (k2 - k1 * third), start + step * (2 / 3))
        k4 = velocity(x + step * (k1 - k2 + k3), end)
        x = x + (k1 + 3 * (k2 + k3) + k4) * step / 8
    return x


class _Interval:
    """The field over one interval, with the guidance of its first evaluation where the solver asks for no more."""

    def __init__(self, field: Field, solver: Solver) -> None:
        self._field = field
        self._guide_all = solver.guide_all
        self._guidance: Tensor | None = None
        self._first = True

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        guided = self._first or self._guide_all
        plain, guidance = self._field(x, t, guided)
        if self._guide_all and guidance is not None:
            return plain + guidance
        if guided:
            # Cloned: the field may hand out one buffer for all its answers (a captured graph does).
            self._guidance = None if guidance is None else guidance.clone()
        self._first = False
        return plain.clone() if self._guidance is None else plain + self._guidance
