"""Flow matching over a window of an utterance: the solver, with the rows left of the window pinned.

A decoder that attends in blocks sees a bounded number of blocks to each side in one evaluation. Over the solver's
evaluations this spreads, so no finite context makes a window exact by itself. To the left it can be: the blocks there
were solved before, so their state at every evaluation is known. It is recorded when they are solved and put back in
the evaluations of the next window, which then sees on its left what a solve of the whole would show it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

EVALUATIONS_PER_INTERVAL = 4

Field = Callable[[Tensor, Tensor], Tensor]
"""`field(x [B, n, C], t []) -> velocity [B, n, C]`."""


def time_grid(num_steps: int, sway: float) -> Tensor:
    """Time points from 0 to 1 (`float32 [num_steps]`, CPU), moved towards the noise side by a negative `sway`."""
    grid = torch.linspace(0, 1, num_steps, dtype=torch.float32)
    return grid + sway * (torch.cos(torch.pi / 2 * grid) - 1 + grid)


def evaluations(num_steps: int) -> int:
    """How often `integrate` evaluates the field."""
    return EVALUATIONS_PER_INTERVAL * (num_steps - 1)


def integrate(field: Field, x: Tensor, pinned: Tensor, times: Tensor, record: slice) -> tuple[Tensor, Tensor]:
    """Solve `dx/dt = field` over `times` by the Runge-Kutta 3/8 rule (the arithmetic of transformers' solver).

    `x` is `[B, n, C]`, the window's initial state. `pinned` is `[E, B, h, C]` with E `evaluations(len(times))`: the
    state of the h rows left of the window at each evaluation. Returns the window's state at the last time point, and
    the rows `record` of `[pinned | x]` at each evaluation (`[E, B, r, C]`), to pin in the next window.
    """
    h = pinned.shape[2]
    seen: list[Tensor] = []

    def velocity(t: Tensor, state: Tensor) -> Tensor:
        full = torch.cat((pinned[len(seen)], state), dim=1) if h else state
        seen.append(full[:, record].clone())
        return field(full, t)[:, h:]

    third = 1 / 3
    for start, end in itertools.pairwise(times):
        step = end - start
        # Each velocity is cloned: the field may hand out one buffer for all its answers (a captured graph does).
        k1 = velocity(start, x).clone()
        k2 = velocity(start + step * third, x + step * k1 * third).clone()
        k3 = velocity(start + step * (2 / 3), x + step * (k2 - k1 * third)).clone()
        k4 = velocity(end, x + step * (k1 - k2 + k3))
        x = x + (k1 + 3 * (k2 + k3) + k4) * step / 8
    if not seen:  # one time point: nothing to solve, the noise is the answer
        rows = len(range(h + x.shape[1])[record])
        return x, x.new_empty(0, x.shape[0], rows, x.shape[2])
    return x, torch.stack(seen)
