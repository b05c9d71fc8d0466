"""What runs after sampling in a stage with a code predictor: the residual codes of each sampled token's frame.

The sampled token is the first code of a frame; the component's small autoregressive head gives the others from the row
that it was sampled from. Everything is done on the device with fixed shapes, so that it can be captured in a CUDA graph
for each batch size and the next step can be launched before anything is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from omnistage.core.errors import InternalError
from omnistage.core.params import SamplingParams
from omnistage.engines.ar.component import ARComponent, ResidualCodes
from omnistage.engines.ar.sampling.device_selection import DeviceSelector
from omnistage.engines.ar.sampling.selection import FAILED
from omnistage.engines.graphs import capture, try_capture
from omnistage.engines.streams import upload


class ResidualStep:
    """The predictor for a fixed number of rows. `numbers` keep their place."""

    def __init__(self, component: ARComponent, residual: ResidualCodes, numbers: torch.Tensor) -> None:
        """`numbers` float64 `[1 + count, S]`: temperatures, 0 for greedy rows, and a random number for each code."""
        self._component = component
        self._numbers = numbers
        params = SamplingParams(temperature=1.0, top_k=residual.top_k, top_p=residual.top_p)
        self.selector = DeviceSelector([params] * numbers.shape[1], residual.vocab_size, component.device)

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Codes `int64 [S, count]` of frames that `ids` `[S]` begin, negative ones where none could be chosen."""
        self.selector.temperature = self._numbers[0].float()
        columns: list[torch.Tensor] = []

        def choose(logits: torch.Tensor, index: int) -> torch.Tensor:
            columns.append(self.selector.select(logits, self._numbers[1 + index]))
            return columns[-1].clamp(min=0)

        codes = self._component.predict(hidden, ids.clamp(min=0), choose)
        return torch.where(torch.stack(columns).amin(0)[:, None] < 0, FAILED, codes)


class _Sized:
    """The predictor for `size` rows with inputs that keep their place; the codes do where a graph gives them."""

    def __init__(self, component: ARComponent, size: int) -> None:
        residual = component.spec.residual
        if residual is None:
            raise InternalError("this component has no code predictor")
        self._device = component.device
        self.hidden = torch.zeros(size, residual.hidden_size, dtype=component.dtype, device=self._device)
        self.ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        self.numbers = torch.zeros(1 + residual.count, size, dtype=torch.float64, device=self._device)
        self.step = ResidualStep(component, residual, self.numbers)
        self.graph: Any = None
        self.codes: torch.Tensor | None = None

    def run(self) -> torch.Tensor:
        return self.step(self.hidden, self.ids)

    def capture(self, pool: Any) -> None:  # pragma: no cover  (needs CUDA; tests/gpu)
        self.graph, self.codes = capture(self.run, self._device, pool)


def _captured(component: ARComponent, size: int, pool: Any) -> _Sized:
    sized = _Sized(component, size)
    sized.capture(pool)
    return sized


class CodePredictor:
    """Residual codes after steps that do not predict them in their own graph, for batches of any size.

    Those of up to the largest captured size replay a graph.
    """

    def __init__(self, component: ARComponent, graph_sizes: Sequence[int] = ()) -> None:
        self._component = component
        self._sized: dict[int, _Sized] = {}
        self._captured: list[int] = []
        pool: Any = torch.cuda.graph_pool_handle() if graph_sizes else None
        for size in sorted(graph_sizes, reverse=True):  # the largest first: the others use its memory
            what = f"CUDA graph for the residual codes of {size} sequences"
            sized = try_capture(partial(_captured, component, size, pool), what)
            if sized is None:  # it runs without
                break
            self._sized[size] = sized
            self._captured.insert(0, size)

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
        """Codes `int64 [S, count]` of frames that `ids` `[S]` begin, a negative one where none could be chosen.

        `numbers` `[1 + count, S]` are the rows' temperatures, then random numbers in [0, 1). The result may be
        overwritten by the next call.
        """
        count = len(hidden)
        place = bisect_left(self._captured, count)
        size = self._captured[place] if place < len(self._captured) else count
        sized = self._sized.get(size)
        if sized is None:
            sized = self._sized[size] = _Sized(self._component, size)
        sized.hidden[:count] = hidden
        sized.ids[:count] = ids
        sized.numbers[:, :count] = upload(numbers, hidden.device)
        if sized.graph is None or sized.codes is None:
            sized.step.selector.random = bool(numbers[0].any())
            return sized.run()[:count]
        sized.graph.replay()
        return sized.codes[:count]
