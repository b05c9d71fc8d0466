"""A comparison with the reference library: what a family's `verify` is given, and the rows that it returns.

What loads stages and runs the pipeline lies above the families, so `verify` is handed a `ModelRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from omnistage.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from omnistage.core.family import Bridge
    from omnistage.core.params import DiffusionParams, StageParams
    from omnistage.core.stage import Stage
    from omnistage.core.types import DiffusionInput

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of the work that is done."""


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One quantity of one case, compared with the reference. `ok` is False for a difference that is not finite."""

    case: str
    quantity: str
    difference: float
    tolerance: float
    ok: bool

    @classmethod
    def judge(cls, case: str, quantity: str, difference: float, tolerance: float) -> Self:
        """A row whose `ok` says that the difference is within the tolerance."""
        # NaN compares false with everything, so it can never pass.
        return cls(case, quantity, difference, tolerance, ok=0.0 <= difference <= tolerance)

    def judged_by(self, tolerance: float) -> VerifyRow:
        """The same comparison under another tolerance."""
        return VerifyRow.judge(self.case, self.quantity, self.difference, tolerance)


@dataclass(frozen=True, slots=True, eq=False)
class ChatOutput:
    """The output of one chat. `samples` is float32, None where there is no speech."""

    request_id: str
    token_ids: list[int]
    samples: np.ndarray | None


class ModelRunner(Protocol):
    """One checkpoint and what loads and runs it, in float32. A failed request raises its error."""

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""

    @property
    def stage_names(self) -> Sequence[str]:
        """The pipeline's stages, upstream ones first."""

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The stages of the last `chat` or `draw`, closed; empty before."""

    def load_component(self, stage: str, *, device: str = "cpu") -> object:
        """A stage's network, on no engine. `device` may be "auto"."""

    def build_stage(self, stage: str) -> Stage:
        """A stage on its engine, on the CPU."""

    def chat(
        self,
        chats: Sequence[Sequence[Mapping[str, object]]],
        params: Sequence[Mapping[str, StageParams]],
        *,
        bridges: Mapping[str, Bridge] | None = None,
    ) -> list[ChatOutput]:
        """Run all chats at once on the whole pipeline, with the audio of their videos.

        `params` are by stage; `bridges`, by downstream stage, replace those of the pipeline.
        """

    def draw(self, requests: Sequence[tuple[DiffusionInput, DiffusionParams]]) -> list[np.ndarray]:
        """Run all requests at once on the whole pipeline: `uint8 [h, w, 3]` each, `[frames, h, w, 3]` for a video."""


def check_cases(cases: int) -> None:
    """Refuse an empty comparison."""
    if cases < 1:
        raise ConfigError(f"cases is {cases}; compare at least one", param="cases")


def count_differences(ours: Sequence[object], theirs: Sequence[object]) -> float:
    """How many tokens differ; missing ones count."""
    return float(sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs)))
