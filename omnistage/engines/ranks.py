"""A stage whose steps several processes (ranks) compute together; this one is rank 0, which schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from omnistage.core.errors import StageLostError
from omnistage.core.stage import Stage
from omnistage.core.types import StageChunk
from omnistage.engines.ar.step_plan import Forward, Logits
from omnistage.engines.diffusion.step_plan import TransformerCall

if TYPE_CHECKING:
    import torch


class ComputeGroup(Protocol):
    """The ranks of a stage, as those that compute see it."""

    size: int

    def connect(self, backend: str, store: str, device: torch.device) -> None:
        """Meet the others through a file that all of them name, which is not needed once this returns."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor with rank 0's."""

    def abort(self) -> None:
        """End what waits for a rank that is gone; from any thread."""

    def close(self) -> None: ...


class OtherRanks(Protocol):
    """The other ranks of a stage, as rank 0 sees them."""

    failure: StageLostError | None
    """Why no step can be computed any more."""

    @property
    def group(self) -> ComputeGroup: ...

    def serve(self, kv_blocks: int = 0) -> None:
        """Meet them, and have them allocate their KV pools."""

    def send(self, step: Forward | Logits | TransformerCall) -> None:
        """Tell them what is computed next."""

    def fail(self, error: BaseException) -> StageLostError:
        """Give them up after a step that rank 0 could not finish; what requests are told."""

    def close(self) -> None: ...


class FollowingRank(Protocol):
    """What one of the other ranks computes."""

    @property
    def group(self) -> ComputeGroup: ...

    def serve(self, kv_blocks: int) -> None:
        """Once all ranks have met."""

    def run(self, step: Any) -> None:
        """What rank 0 has sent, one of its engine's."""


class RankedStage(Stage):
    """Comes before a stage's class among the bases: the stage fails as a whole with any of its ranks."""

    _ranks: OtherRanks

    def has_work(self) -> bool:
        return self._ranks.failure is not None or super().has_work()  # type: ignore[safe-super]

    def step(self) -> list[StageChunk]:
        chunks = [] if self._ranks.failure is not None else super().step()  # type: ignore[safe-super]
        if self._ranks.failure is not None:  # what was computed without a rank is not passed on
            raise self._ranks.failure
        return chunks

    def close(self) -> None:
        self._ranks.close()
        super().close()
