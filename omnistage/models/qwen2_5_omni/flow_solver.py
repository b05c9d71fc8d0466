"""Flow matching over batches of blocks, one interval of the solver at a time.

An interval is one function of tensors: its evaluations of the field, their guidance and the solver's arithmetic. With
CUDA graphs it is one graph, so that a batch is as many replays as the solver has intervals. Calls in between are few:
each gives the interpreter away, and other stages' threads want it. The time is among a graph's inputs, so that one
serves all intervals of all batches of its size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from omnistage.core.params import CodecParams, SpeechQuality
from omnistage.engines.codec.flow import SOLVERS, Solver, time_grid
from omnistage.engines.graphs import GraphCache
from omnistage.engines.peak_memory import META, peak_bytes
from omnistage.models.qwen2_5_omni.blocks import BlockBatch, Solution
from omnistage.models.qwen2_5_omni.dit import half_copy, look_back_layers, modulation, velocity
from omnistage.models.qwen2_5_omni.fused_dit import FusedLayers

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

_MAX_MODULATIONS = 128
_NO_GUIDANCE = 1e-5  # transformers' threshold


class Interval(NamedTuple):
    """Where on the time axis an interval of the solver is."""

    step: Tensor
    """`[]`: its length."""
    times: Tensor
    """`[evaluations, 6 * layers + 2, hidden]`: what the time of each evaluation does, as `modulation` gives it."""


class FlowSolver:
    """Solves the flow of a DiT over the blocks of many windows. Not thread-safe.

    `half` adds a copy in half precision, `fused` runs the layers on Triton kernels.
    """

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel, *, half: bool, fused: bool) -> None:
        self._networks = {False: dit, **({True: half_copy(dit)} if half else {})}
        self._fused = {key: FusedLayers(network) for key, network in self._networks.items()} if fused else {}
        self._schedules: dict[tuple[int, float, Solver], list[Interval]] = {}

    @property
    def networks(self) -> tuple[Qwen2_5OmniToken2WavDiTModel, ...]:
        return tuple(self._networks.values())

    @property
    def has_half(self) -> bool:
        return True in self._networks

    @property
    def fused(self) -> FusedLayers | None:
        """The layers in full precision on Triton kernels, where they run on these."""
        return self._fused.get(False)

    def solve(self, batch: BlockBatch, params: CodecParams, *, half: bool, graphs: GraphCache | None) -> list[Solution]:
        """Each window's mel, and what the next window needs; plainly where `graphs` is None."""
        solver, weight = SOLVERS[params.quality], self._networks[False].proj_out.weight
        guided = params.guidance_scale >= _NO_GUIDANCE
        # An empty tensor asks for no guidance, which is another graph.
        scale = weight.new_full((int(guided),), params.guidance_scale)
        constants = (batch.codes, batch.cond, batch.reference, scale, *batch.neighbours, batch.keep)
        function = functools.partial(self.advance, solver, half)
        key = ("dit", batch.size, solver, guided, half)
        x = batch.noise.to(weight.device, weight.dtype)
        previous: list[Iterator[Tensor]] = []
        block_states: dict[bool, Tensor] = {}
        total = params.num_steps - 1
        for kind, count in solver.counts().items():
            empty = weight.new_empty(0, count, *self._kept_shape(1 + (kind and guided)))
            previous.append(batch.contexts(kind, total, empty))
            if batch.keepers and total:
                block_states[kind] = empty.new_empty(batch.keepers, total, *empty.shape[1:])
        for i, interval in enumerate(self.intervals(params)):
            inputs = (x, *interval, *map(next, previous))
            if graphs is None:
                x, *states = function(*inputs, *constants)
            else:
                x, *states = graphs(key, function, *inputs, constants=constants)
            if block_states:
                targets = [rows[:, i] for rows in block_states.values()]
                torch._foreach_copy_(targets, [rows[: batch.keepers] for rows in states])
        return batch.solutions(x if graphs is None else x.clone(), block_states)

    def _kept_shape(self, g: int) -> tuple[int, ...]:
        """`[look-back layers, g, frames, hidden]`: of what is kept of a block in one evaluation."""
        dit = self._networks[False]
        return look_back_layers(dit), g, dit.config.block_size, dit.config.hidden_size

    def advance(
        self, solver: Solver, half: bool, x: Tensor, step: Tensor, times: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """One interval. `rest` is what was kept, `[windows, evaluations, look-back layers, g, frames, hidden]`, for
        each kind of evaluation (`solver.counts`), then what `velocity` takes between `times` and `kept`.

        Gives the state at its end and, for each kind of evaluation, what is to be kept, in the same order.
        """
        block_states: dict[bool, list[Tensor]] = {kind: [] for kind in solver.counts()}
        previous = dict(zip(block_states, rest, strict=False))
        codes, cond, reference, scale, *places, keep = rest[len(block_states) :]

        def field(x: Tensor, i: int, guided: bool) -> tuple[Tensor, Tensor | None]:
            # From windows first to `[look-back layers, g × windows, frames, hidden]`, and back.
            own = previous[guided][:, len(block_states[guided])].permute(1, 2, 0, 3, 4).flatten(1, 2).contiguous()
            condition = (codes, cond, reference, scale if guided else scale[:0])
            plain, guidance, states = self._evaluate(half, x, times[i], *condition, *places, keep, own)
            block_states[guided].append(
                states.view(len(states), previous[guided].shape[3], len(keep), *states.shape[2:])
            )
            return plain, guidance if len(guidance) else None

        x = solver.advance(field, x, step)
        return (x, *(torch.stack(rows).permute(3, 0, 1, 2, 4, 5) for rows in block_states.values()))

    def _evaluate(self, half: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        network, fused = self._networks[half], self._fused.get(half)
        if not half or tensors[0].is_meta:  # without data there is nothing to cast; products take their weights' dtype
            return velocity(network, *tensors, fused=fused)
        with torch.autocast(tensors[0].device.type, dtype=torch.float16, cache_enabled=False):
            return tuple(tensor.float() for tensor in velocity(network, *tensors, fused=fused))

    def intervals(self, params: CodecParams) -> Iterable[Interval]:
        """Computed once for the few schedules that requests have; an unusually long one each time."""
        solver = SOLVERS[params.quality]
        key = params.num_steps, params.sway, solver
        if (stored := self._schedules.get(key)) is not None:
            return stored
        points = time_grid(params.num_steps, params.sway)
        intervals = (self._interval(solver, *ends) for ends in itertools.pairwise(points))
        count = sum(len(interval.times) for schedule in self._schedules.values() for interval in schedule)
        if (more := len(solver.guided(params.num_steps))) > _MAX_MODULATIONS:
            return intervals
        if count + more > _MAX_MODULATIONS or len(self._schedules) >= _MAX_MODULATIONS:
            self._schedules.clear()
        self._schedules[key] = list(intervals)
        return self._schedules[key]

    def _interval(self, solver: Solver, start: Tensor, end: Tensor) -> Interval:
        dit = self._networks[False]
        weight = dit.proj_out.weight
        times = [modulation(dit, weight.new_full((1,), t)) for t in solver.times(start, end)]
        return Interval((end - start).to(weight.device), torch.stack(times))

    # ------------------------------------------------------------------------------------------------- memory

    def kept_bytes(self, params: CodecParams) -> int:
        """What a window keeps for the next one."""
        rows = sum(1 + guided for guided in SOLVERS[params.quality].guided(params.num_steps))
        dtype: torch.dtype = self._networks[False].proj_out.weight.dtype
        return rows * math.prod(self._kept_shape(1)) * dtype.itemsize

    def interval_bytes(self, quality: SpeechQuality, blocks: int, windows: int) -> int:
        """The most that an interval takes at once with guidance, for a model on the meta device."""
        solver = SOLVERS[quality]
        inputs, constants = self._planned_inputs(solver, blocks, windows)
        half = self.has_half and bool(self._fused)  # torch's kernels cast by autocast, which does nothing without data
        return peak_bytes(lambda: self.advance(solver, half, *inputs, *constants))

    def buffer_bytes(self, quality: SpeechQuality, blocks: int, windows: int) -> int:
        """Inputs and results of a graph, which lie in buffers."""
        (x, step, times, *states), _ = self._planned_inputs(SOLVERS[quality], blocks, windows)
        return 2 * sum(tensor.nbytes for tensor in (x, *states)) + step.nbytes + times.nbytes

    def _planned_inputs(
        self, solver: Solver, blocks: int, windows: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        dit = self._networks[False]
        config, size = dit.config, dit.config.block_size
        empty = functools.partial(torch.empty, dtype=dit.proj_out.weight.dtype, device=META)
        index = functools.partial(torch.empty, dtype=torch.int64, device=META)
        layers = len(dit.transformer_blocks)
        inputs = (
            empty(blocks, size, config.mel_dim),
            empty(()),
            empty(solver.evaluations, 6 * layers + 2, config.hidden_size),
            *(empty(windows, count, *self._kept_shape(1 + guided)) for guided, count in solver.counts().items()),
        )
        constants = (
            index(blocks, size // config.repeats),
            *(empty(blocks, config.enc_emb_dim), empty(blocks, config.enc_dim + 1), empty(1)),
            *(index(blocks), index(blocks), torch.empty(blocks, size, dtype=torch.bool, device=META), index(windows)),
        )
        return inputs, constants
