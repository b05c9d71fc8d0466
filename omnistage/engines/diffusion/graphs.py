"""CUDA graphs of forwards over few patches, where launching kernels takes longer than running them.

All are captured at the start, for the sizes that it expects, and for exactly as many rows as they run: nothing is
padded, so a picture is the same with graphs and without. Other forwards run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from omnistage.config.scalars import picture_size
from omnistage.config.schema import DiffusionBudget
from omnistage.core.params import DiffusionParams
from omnistage.engines.diffusion.component import Denoiser, Row, Tensors
from omnistage.engines.graphs import GraphCache

logger = logging.getLogger(__name__)

_MAX_ROW_TOKENS = 1024
"""Patches of a picture that is small: 512 by 512 pixels in most families."""
_MAX_TOKENS = 4096
"""Patches of a forward; more of them keep the device busy for longer than launching takes."""
_MAX_GRAPHS = 64
_GRAPH_BYTES = 8 << 20
"""Of one graph: its kernels' parameters in the driver, its inputs and output."""

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def warm_sizes(denoiser: Denoiser, budget: DiffusionBudget, params: DiffusionParams) -> list[tuple[int, int, int]]:
    """(width, height, frames) that a start prepares for, the largest first: as configured, else the default."""
    width, height, frames = denoiser.planned_size()
    default = (params.width or width, params.height or height, frames)
    sizes = [picture_size(text) for text in budget.warm_sizes] or [default]
    fitting = [size for size in sizes if denoiser.tokens(*size) <= budget.max_batch_tokens]
    return sorted(fitting, key=lambda size: -denoiser.tokens(*size))


def graph_bytes(denoiser: Denoiser, budget: DiffusionBudget, params: DiffusionParams) -> int:
    """Memory of the graphs that a start on CUDA captures: they share that of the largest. Asked on the meta device."""
    if not budget.cuda_graphs or budget.cache is not None or not denoiser.capturable:
        return 0
    sizes = warm_sizes(denoiser, budget, params)
    rows = [captured_rows(denoiser.tokens(*size), budget.max_batch) for size in sizes]
    peaks = [denoiser.step_bytes(count, *size) for count, size in zip(rows, sizes, strict=True) if count]
    return max(peaks, default=0) + min(sum(rows), _MAX_GRAPHS) * _GRAPH_BYTES


def captured_rows(tokens: int, max_rows: int) -> int:
    """Forwards of up to this many rows of so many patches are captured; 0: none."""
    return min(max_rows, _MAX_TOKENS // max(tokens, 1)) if tokens <= _MAX_ROW_TOKENS else 0


class StepGraphs:
    """Runs a denoiser's forwards, those that were captured as graphs. Without CUDA nothing is captured."""

    def __init__(self, denoiser: Denoiser, *, enabled: bool) -> None:
        self._denoiser = denoiser
        self._graphs = GraphCache(enabled=enabled, capacity=_MAX_GRAPHS)
        self._planned: set[_Shapes] = set()

    def capture(self, rows: Sequence[Row]) -> None:
        """Run these rows, and from now on all of the same shapes and number, as a graph."""
        if not self._denoiser.capturable:
            logger.debug("%s cannot be captured in CUDA graphs", type(self._denoiser).__name__)
        elif self._graphs.enabled and len(self._planned) < _MAX_GRAPHS:
            self._planned.add(_shapes(self._denoiser.stacked(rows)))
            self.forward(rows)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """`denoiser.forward(rows)`."""
        if not self._planned:
            return self._denoiser.forward(rows)
        inputs = self._denoiser.stacked(rows)
        shapes = _shapes(inputs)
        if shapes not in self._planned:
            return self._denoiser.unstacked(rows, self._denoiser.predict(inputs))

        def predict(*tensors: Tensor) -> tuple[Tensor, ...]:
            return (self._denoiser.predict(dict(zip(inputs, tensors, strict=True))),)

        (predicted,) = self._graphs(shapes, predict, *inputs.values())
        # The next replay overwrites it, and that may come before this step's predictions are used.
        return self._denoiser.unstacked(rows, predicted.clone())

    def close(self) -> None:
        self._planned.clear()
        self._graphs.clear()


def _shapes(inputs: Tensors) -> _Shapes:
    return tuple((name, tuple(tensor.shape)) for name, tensor in inputs.items())
