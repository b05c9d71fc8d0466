"""What a half-denoised latent is heading for, and whether that still changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omnistage.core.errors import InvalidRequestError
from omnistage.engines.diffusion.component import Lane


def can_expect(scheduler: Any) -> bool:
    """Whether a scheduler's steps are along straight lines to the picture: flow matching's are."""
    return "FlowMatch" in type(scheduler).__name__


def check_early_stop(scheduler: Any) -> None:
    if not can_expect(scheduler):
        raise InvalidRequestError(
            f"is not supported with {type(scheduler).__name__}; leave it out, or use a flow-matching scheduler",
            param="early_stop",
        )


def expected_picture(lane: Lane) -> Tensor:
    """Where the lane's last step points to; its latents themselves where that is not known."""
    expected: Tensor = lane.context.get("expected", lane.latents)
    return expected


def remember_expected(lane: Lane, before: Tensor) -> None:
    """After a step: follow its direction to the end, where there is no noise left."""
    if not can_expect(lane.scheduler):
        return
    sigmas = lane.scheduler.sigmas
    at = len(sigmas) - 1 - lane.steps + lane.step  # of the latents as they are now
    now, last = float(sigmas[at]), float(sigmas[at - 1])
    if now == last:
        return
    velocity = (lane.latents.float() - before.float()) / (now - last)
    lane.context["expected"] = (lane.latents.float() - now * velocity).to(lane.latents.dtype)


class Convergence:
    """Watches the expected picture of one lane; two steps in a row that hardly change it end the lane."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last: Tensor | None = None
        self._quiet = 0

    def reached(self, lane: Lane) -> bool:
        """Asked once after every step, after `remember_expected`."""
        expected, last = expected_picture(lane), self._last
        self._last = expected
        if last is None:
            return False
        change = torch.linalg.vector_norm(expected.float() - last.float())
        self._quiet = self._quiet + 1 if bool(change < self._limit * torch.linalg.vector_norm(last.float())) else 0
        return self._quiet >= 2 and not lane.done
