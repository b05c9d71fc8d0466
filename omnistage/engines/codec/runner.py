"""Runs a scheduled batch on the component and keeps each request's state. It knows no policy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from omnistage.core.errors import OmniError, StageError
from omnistage.core.failures import log_defect
from omnistage.core.params import CodecParams
from omnistage.engines.codec.component import CodecComponent, Window
from omnistage.engines.codec.scheduler import WindowPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """Each scheduled request is in exactly one of the two."""

    samples: dict[str, np.ndarray] = field(default_factory=dict)
    failed: dict[str, OmniError] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    params: CodecParams
    voice: str | None
    state: object = None
    opened: bool = False


class CodecRunner:
    """States by request id. A state is opened when the request first runs, so that waiting requests hold nothing."""

    def __init__(self, component: CodecComponent) -> None:
        self._component = component
        self._slots: dict[str, _Slot] = {}

    def add(self, request_id: str, params: CodecParams, voice: str | None) -> None:
        self._slots[request_id] = _Slot(params, voice)

    def remove(self, request_id: str) -> None:
        self._slots.pop(request_id, None)

    def run(self, plans: Sequence[WindowPlan]) -> RunnerOutput:
        """Decode the batch. Where it fails as a whole, each request gets one try alone: only the culprit fails."""
        output = RunnerOutput()
        if plans and not self._try(plans, output, final=len(plans) == 1) and len(plans) > 1:
            for plan in plans:
                self._try([plan], output, final=True)
        return output

    def _try(self, plans: Sequence[WindowPlan], output: RunnerOutput, *, final: bool) -> bool:
        try:
            decoded = self._component.decode([self._window(plan) for plan in plans])
            if len(decoded) != len(plans):
                raise StageError(f"the decoder gave {len(decoded)} results for {len(plans)} windows")
        except Exception as error:  # the step's boundary: whatever a component raises ends at most this batch
            if not final:
                logger.warning("a batch of %d failed (%s); running each alone", len(plans), type(error).__name__)
                return False
            log_defect("decoding", error)
            own = error if isinstance(error, OmniError) else StageError(f"decoding failed: {type(error).__name__}")
            own.__cause__ = error if own is not error else error.__cause__
            output.failed.update({plan.request_id: own for plan in plans})
            return False
        for plan, part in zip(plans, decoded, strict=True):
            if np.isfinite(part).all():
                output.samples[plan.request_id] = part
            else:
                output.failed[plan.request_id] = StageError("the decoder gave samples that are not numbers")
        return True

    def _window(self, plan: WindowPlan) -> Window:
        slot = self._slots[plan.request_id]
        if not slot.opened:
            slot.state = self._component.open(plan.request_id, slot.params, slot.voice)
            slot.opened = True
        return Window(slot.state, plan.codes, plan.history, plan.emit, plan.last)
