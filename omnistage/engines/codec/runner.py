"""Runs a scheduled batch on the component and keeps each request's state. It knows no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from omnistage.core.errors import OmniError, StageError
from omnistage.core.failures import isolate
from omnistage.core.params import CodecParams
from omnistage.engines.codec.component import CodecComponent, Window
from omnistage.engines.codec.requests import WindowPlan


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
        """Decode the batch; only the requests at fault fail."""
        output = RunnerOutput()
        for plan, result in isolate(plans, self._decode, "decoding"):
            if isinstance(result, OmniError):
                output.failed[plan.request_id] = result
            elif np.isfinite(result).all():
                output.samples[plan.request_id] = result
            else:
                output.failed[plan.request_id] = StageError("the decoder returned samples that are not finite")
        return output

    def _decode(self, plans: Sequence[WindowPlan]) -> list[np.ndarray]:
        windows = []
        for plan in plans:
            slot = self._slots[plan.request_id]
            if not slot.opened:
                slot.state = self._component.open(plan.request_id, slot.params, slot.voice)
                slot.opened = True
            windows.append(Window(slot.state, plan.codes, plan.history, plan.emit, plan.last))
        return self._component.decode(windows)
