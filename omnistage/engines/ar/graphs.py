"""Decode under CUDA graphs: a captured step for each batch size and context length, fed through static buffers.

An optimisation beside the plain path in `runner.py`: off by one flag, same numbers. All steps are captured before
requests come: a capture stalls every request of the stage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from omnistage.engines.ar.attention import PagedContext, current
from omnistage.engines.ar.residual import ResidualStep
from omnistage.engines.ar.rows import UNREAD, SequenceRows
from omnistage.engines.ar.sampling.row_block import FIELDS, Block, Field
from omnistage.engines.ar.scheduler import ScheduledSequence
from omnistage.engines.graphs import capture, try_capture

if TYPE_CHECKING:
    from omnistage.engines.ar.runner import Runner

logger = logging.getLogger(__name__)

_LENGTHS = (1024, 4096)
"""Beside the longest. A length decides how many programs attend (`split_count`), of which short sequences leave most
idle; from 16,384 tokens on there are no more of them."""
_OPTIONAL_SECONDS = 1.0
"""For capturing steps that another one could stand in for."""

Shape = tuple[int, int]
"""Of a captured step: how many sequences, and tokens of the longest of them."""


def graph_shapes(batch_sizes: Sequence[int], max_length: int) -> tuple[list[Shape], list[Shape]]:
    """The steps to capture, in this order: those that are required, and those that are only better fits.

    Every batch fits into one of the required. The first is the largest, whose memory the others use.
    """
    sizes = sorted(set(batch_sizes))
    lengths = [length for length in _LENGTHS if length < max_length] + [max_length]
    required = [(sizes[-1], max_length), *((size, lengths[0]) for size in reversed(sizes))]
    # One long request is more likely than many, and far more expensive as one of the largest batch.
    optional = [(size, length) for length in reversed(lengths[1:]) for size in sizes]
    required = list(dict.fromkeys(required))
    return required, [shape for shape in optional if shape not in required]


def smallest_fit(shapes: Sequence[Shape], count: int, longest: int) -> Shape | None:
    """The step for `count` sequences, the longest of `longest` tokens, among ascending `shapes`."""
    return next((shape for shape in shapes if shape[0] >= count and shape[1] >= longest), None)


class StepTensors(NamedTuple):
    """What the forward of a step gives."""

    logits: torch.Tensor | None
    """`[S, V]` of the sequences that sample; None: there are none."""
    hidden: torch.Tensor | None
    """`[S, H]`: the rows that the logits were made of."""
    emitted: torch.Tensor | None
    """`[T, emit_size]`, where the component emits rows."""
    ids: torch.Tensor | None = None
    """int64 `[S]`: the tokens, where the step has sampled them."""
    codes: torch.Tensor | None = None
    """int64 `[S, count]`: their residual codes, where the step has predicted them."""


class _Captured:  # pragma: no cover  (needs CUDA; tests/gpu)
    """Static buffers and the graph for `size` sequences of at most `length` tokens."""

    def __init__(self, runner: Runner, size: int, length: int, pool: Any) -> None:
        component = runner.component
        spec, device = component.spec, component.device
        self.size = size
        dims = spec.position_dims
        num_codes = 0 if spec.residual is None else spec.residual.count
        num_fields = FIELDS if runner.sample_in_graph else 0
        num_numbers = 1 + num_codes if num_codes and num_fields else 0
        width = 3 + dims + num_codes + num_fields + num_numbers
        self.longs = torch.zeros(size * width, dtype=torch.int64, device=device)
        self.longs[size : 3 * size] = -1
        ids, slots, sources = self.longs[: 3 * size].view(3, size)
        positions = self.longs[3 * size : (3 + dims) * size].view(dims, size)
        if spec.fractional_positions:
            positions = positions.view(torch.float64)
        codes = self.longs[(3 + dims) * size : (3 + dims + num_codes) * size].view(num_codes, size).t()
        block = self.longs[(3 + dims + num_codes) * size : (width - num_numbers) * size].view(num_fields, size)
        predict: ResidualStep | None = None
        if spec.residual is not None and num_numbers:
            numbers = self.longs[(width - num_numbers) * size :].view(num_numbers, size).view(torch.float64)
            predict = ResidualStep(component, spec.residual, numbers)
        side_size = spec.side_size or spec.embed_size
        self.side = torch.zeros(size, side_size, dtype=component.dtype, device=device) if spec.side_input else None
        self.no_side_row = torch.zeros(side_size, dtype=component.dtype, device=device)
        self.attention = runner.backend.graph_plan(size, length, runner.block_size, device)
        paged = PagedContext(runner.backend, slots, self.attention.plan)
        no_media = torch.zeros(size, 1, dtype=torch.bool, device=device)
        # The graph reads their memory at every replay, and nothing else would keep it from being given away.
        self._references = no_media, predict
        trash = runner.emit_pool.shape[0] - 1 if runner.emit_pool is not None else 0

        def step() -> StepTensors:
            current.paged = paged
            # A token that nobody has read yet is where the last step left it; one that failed is never read.
            known, last = sources < 0, sources.clamp(min=0)
            tokens = torch.where(known, ids, runner.last_ids[last]).clamp(min=0)
            if runner.last_codes is None:
                embeds = component.embed(tokens)
            else:
                residual = torch.where(known[:, None], codes, runner.last_codes[last]).clamp(min=0)
                embeds = component.embed_frames(torch.cat((tokens[:, None], residual), dim=1))
            if self.side is not None:
                embeds = component.add_side(embeds, self.side)
            hidden = component.forward(embeds, positions, paged)
            rows = None
            if runner.emit_pool is not None:
                rows = component.emit(embeds, hidden, no_media)
                runner.emit_pool.index_copy_(0, torch.where(slots < 0, trash, slots), rows)
            logits = component.logits(hidden)
            if num_fields:
                from omnistage.engines.ar.sampling import triton_sample

                triton_sample.sample(logits, block, runner.last_ids)
            predicted = None
            if predict is not None and runner.last_codes is not None:
                predicted = predict(hidden, runner.last_ids[:size])
                # Only of rows that it has sampled for: another replay of the same step may still need the others.
                active = block[Field.ACTIVE, :, None] != 0
                runner.last_codes[:size] = torch.where(active, predicted, runner.last_codes[:size])
            return StepTensors(logits, hidden, rows, codes=predicted)

        self.graph, self.result = capture(step, device, pool)


class DecodeGraphs:
    """Captured steps of one stage. What could not be captured runs as a larger one, or without a graph."""

    def __init__(self, runner: Runner, batch_sizes: Sequence[int], max_length: int) -> None:
        self._runner = runner
        self._largest = max(batch_sizes)
        self._captured: dict[Shape, _Captured] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()
        required, optional = graph_shapes(batch_sizes, max_length)
        start = time.perf_counter()
        for size, length in required:
            self._capture(size, length, may_fail=length > _LENGTHS[0])
        end = time.perf_counter() + _OPTIONAL_SECONDS
        for size, length in optional:
            if time.perf_counter() >= end or not self._capture(size, length, may_fail=True):
                break
        self.shapes = sorted(self._captured)
        """Of the steps that were captured."""
        count, seconds = len(required) + len(optional), time.perf_counter() - start
        logger.info("captured %d of %d steps in %.2f s", len(self.shapes), count, seconds)

    def _capture(self, size: int, length: int, *, may_fail: bool) -> bool:
        make = partial(_Captured, self._runner, size, length, self._pool)
        what = f"CUDA graph for {size} sequences of up to {length} tokens"
        captured = try_capture(make, what, may_fail=may_fail)
        if captured is not None:
            self._captured[size, length] = captured
        return captured is not None

    def run(
        self,
        batch: Sequence[ScheduledSequence],
        sequences: Mapping[str, SequenceRows],
        block: Block | None = None,
        numbers: np.ndarray | None = None,
    ) -> StepTensors | None:
        """What a batch of generated tokens, one each, gives; None: not captured.

        With a `block` (`Sampler.block`) the step samples as well, unless the batch takes more than one replay: the
        second would look for the last step's tokens where the first has put its own. With `numbers`
        (`Sampler.residual_numbers`) it also predicts residual codes.
        """
        parts: list[StepTensors] = []
        largest = self._largest
        more = len(batch) > largest
        for first in range(0, len(batch), largest):
            part = batch[first : first + largest]
            sampling = (None, None) if more else (block, numbers)
            captured = self._replay(part, [sequences[item.key] for item in part], *sampling)
            if captured is None:
                return None
            logits, hidden, emitted, _, codes = (None if x is None else x[: len(part)] for x in captured.result)
            if more and logits is not None and hidden is not None:  # the next part may overwrite them
                logits, hidden = logits.clone(), hidden.clone()
            parts.append(StepTensors(logits, hidden, None if emitted is None else emitted.clone(), codes=codes))
        if not more:
            if block is None:  # it has sampled nothing, so its codes are of no token
                return parts[0]._replace(codes=None)
            return parts[0]._replace(ids=self._runner.last_ids[: len(batch)])
        columns = ([x for x in column if x is not None] for column in zip(*(part[:3] for part in parts), strict=True))
        return StepTensors(*(torch.cat(column) if column else None for column in columns))

    def _replay(
        self,
        part: Sequence[ScheduledSequence],
        rows: Sequence[SequenceRows],
        block: Block | None,
        numbers: np.ndarray | None,
    ) -> _Captured | None:  # pragma: no cover  (needs CUDA; tests/gpu)
        count = len(part)
        shape = smallest_fit(self.shapes, count, max(item.start for item in part) + 1)
        if shape is None:
            return None
        captured, size = self._captured[shape], shape[0]
        if self._runner.adapters is not None:
            self._runner.adapters.select([(1, row.adapters) for row in rows])
        # Fresh pinned memory: the last replay's copy may still be waiting for its turn on the device.
        host = torch.empty(captured.longs.shape, dtype=torch.int64, pin_memory=True)
        longs = host.numpy()
        longs[count:size] = 0
        longs[size : 3 * size] = -1
        longs[3 * size :] = 0
        spec = self._runner.component.spec
        last_place = (3 + spec.position_dims) * size
        places = longs[3 * size : last_place]
        if spec.fractional_positions:
            places = places.view(np.float64)
        last_code = last_place + (0 if spec.residual is None else spec.residual.count * size)
        codes = longs[last_place:last_code]
        if block is not None:  # without one, the zeros there sample and count nothing
            longs[last_code : last_code + FIELDS * size].reshape(FIELDS, size)[:, :count] = block
            if numbers is not None:
                floats = longs[last_code + FIELDS * size :].view(np.float64)
                floats.reshape(len(numbers), size)[:, :count] = numbers
        for i, (item, row) in enumerate(zip(part, rows, strict=True)):
            token = row.tokens[item.start]
            longs[i] = token
            longs[size + i] = row.slots[item.start]
            if token == UNREAD:
                longs[2 * size + i] = row.sampled_row
            elif len(codes) and item.start >= row.prompt_length:
                codes[i::size] = row.frame(item.start)
            places[i::size] = row.position(item.start)
        captured.longs.copy_(host, non_blocking=True)
        captured.attention.fill([item.start + 1 for item in part], [row.table for row in rows])
        if captured.side is not None:
            nothing = captured.no_side_row
            torch.stack(
                [
                    row.side_row(item.start) if row.payload.streaming else nothing
                    for item, row in zip(part, rows, strict=True)
                ],
                out=captured.side[:count],
            )
        captured.graph.replay()
        return captured
