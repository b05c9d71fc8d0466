"""Flow matching: the solvers. A window's left context is the field's own matter, evaluation by evaluation.

A decoder that attends in blocks sees a bounded number of blocks to each side in one evaluation. Over the solver's
evaluations this spreads, so no finite context makes a window exact by itself. To the left it can be: the blocks there
were solved before, so what later blocks see of them is known for every evaluation, and need not be solved again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from omnistage.core.params import SpeechQuality

_THIRD = 1 / 3

Field = Callable[[Tensor, int, bool], tuple[Tensor, Tensor | None]]
"""`field(x, i, guided)`: the velocity at an interval's evaluation `i`, with the condition alone, and what guidance adds
to it where asked for."""


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

    def counts(self) -> dict[bool, int]:
        """An interval's evaluations with guidance and without, as far as there are any."""
        return {True: self.evaluations} if self.guide_all else {True: 1, False: self.evaluations - 1}

    def times(self, start: Tensor, end: Tensor) -> list[float]:
        """When an interval's evaluations are; its ends are `float32 []` on the CPU."""
        step = end - start
        if self.evaluations == 2:
            points = [start, start + step / 2]
        else:
            points = [start, start + step * _THIRD, start + step * (2 / 3), end]
        return [float(point) for point in points]

    def advance(self, field: Field, x: Tensor, step: Tensor) -> Tensor:
        """Solve `dx/dt = field` over one interval of length `step []`: the state at its end.

        Reads nothing back, so that an interval can be captured as one CUDA graph, with `step` as an input.
        """
        guidance: Tensor | None = None

        def velocity(i: int, x: Tensor) -> Tensor:
            nonlocal guidance
            guided = self.guide_all or i == 0
            plain, more = field(x, i, guided)
            if guided:
                guidance = more
            return plain if guidance is None else plain + guidance

        k1 = velocity(0, x)
        if self.evaluations == 2:
            return x + step * velocity(1, x + step * k1 / 2)
        k2 = velocity(1, x + step * k1 * _THIRD)
        k3 = velocity(2, x + step * (k2 - k1 * _THIRD))
        k4 = velocity(3, x + step * (k1 - k2 + k3))
        return x + (k1 + 3 * (k2 + k3) + k4) * step / 8


SOLVERS: dict[SpeechQuality, Solver] = {
    "full": Solver(4, guide_all=True),
    "balanced": Solver(4, guide_all=False),
    "fast": Solver(2, guide_all=False),
}


def time_grid(num_steps: int, sway: float) -> Tensor:
    """Time points from 0 to 1 (`float32 [num_steps]`, CPU), moved towards the noise side by a negative `sway`."""
    grid = torch.linspace(0, 1, num_steps, dtype=torch.float32)
    return grid + sway * (torch.cos(torch.pi / 2 * grid) - 1 + grid)
