"""An autoregressive stage over several ranks: rank 0 schedules and samples, all of them compute each step together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from omnistage.config.schema import ARBudget
from omnistage.core.errors import InternalError
from omnistage.core.types import ARInput, MediaSpan, RequestInfo
from omnistage.engines.ar.attention import BatchLayout, PagedContext, bind_caches, current, make_backend
from omnistage.engines.ar.attention.float8_cache import FLOAT8, new_caches
from omnistage.engines.ar.component import ARComponent, Choose
from omnistage.engines.ar.memory import kv_dtype_of, max_length_of, plan_blocks, zeros
from omnistage.engines.ar.prepared_layers import prepare_layers
from omnistage.engines.ar.sharding import RankGroup
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.ar.step_plan import Forward, Logits
from omnistage.engines.ranks import OtherRanks, RankedStage
from omnistage.engines.streams import upload

_PLAIN_STEPS = {"cuda_graphs": False, "compile": False, "run_ahead": False}
"""Ranks are told what to compute step by step, so no step may be captured or launched ahead."""


class LeadingRank(ARComponent):
    """Rank 0's share of a component; runs each step with the other ranks. What leads to the decoder's input and comes
    of its output is computed here alone."""

    def __init__(self, inner: ARComponent, ranks: OtherRanks, block_size: int) -> None:
        self._inner = inner
        self._ranks = ranks
        self._block_size = block_size
        self.spec, self.decoder = inner.spec, inner.decoder
        self.device, self.dtype = inner.device, inner.dtype
        self.eos_token_ids, self.suppress_token_ids = inner.eos_token_ids, inner.suppress_token_ids
        self.tokenizer = inner.tokenizer

    @property
    def attention_modules(self) -> Sequence[nn.Module]:
        return self._inner.attention_modules

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        return self._inner.prepare(info, payload)

    def check(self, info: RequestInfo, payload: ARInput) -> None:
        self._inner.check(info, payload)

    def use_kernels(self) -> None:
        self._inner.use_kernels()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._inner.embed(token_ids)

    def emit(self, embeds: torch.Tensor, hidden: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        return self._inner.emit(embeds, hidden, media)

    def media_bytes(self, tokens: int) -> int:
        return self._inner.media_bytes(tokens)

    def encode(self, span: MediaSpan) -> torch.Tensor:
        return self._inner.encode(span)

    def add_side(self, embeds: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._inner.add_side(embeds, rows)

    def final_side_rows(self) -> torch.Tensor:
        return self._inner.final_side_rows()

    def predict(self, hidden: torch.Tensor, token_ids: torch.Tensor, choose: Choose) -> torch.Tensor:
        return self._inner.predict(hidden, token_ids, choose)

    def embed_frames(self, frames: torch.Tensor) -> torch.Tensor:
        return self._inner.embed_frames(frames)

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        try:
            self._send(self._plan(paged), embeds, positions)
            return self._inner.forward(embeds, positions, paged)
        except BaseException as error:  # the boundary of a step that others compute, too
            raise self._ranks.fail(error) from error

    def forward_media(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        paged: PagedContext,
        places: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        try:
            self._send(self._plan(paged, len(rows)), embeds, positions, places, rows)
            return self._inner.forward_media(embeds, positions, paged, places, rows)
        except BaseException as error:  # the boundary of a step that others compute, too
            raise self._ranks.fail(error) from error

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        try:
            self._send(Logits(*hidden.shape), hidden)
            return self._inner.logits(hidden)
        except BaseException as error:  # the same boundary
            raise self._ranks.fail(error) from error

    def _send(self, step: Forward | Logits, *tensors: torch.Tensor) -> None:
        self._ranks.send(step)
        for tensor in tensors:
            self._ranks.group.broadcast(tensor.contiguous())

    def _plan(self, paged: PagedContext, deep_rows: int | None = None) -> Forward:
        if (layout := paged.layout) is None:
            raise InternalError("a step of several ranks needs its layout")
        counts = (-(-layout.sequence_lengths // self._block_size)).tolist()
        tables = [table[:count] for table, count in zip(layout.block_tables, counts, strict=True)]
        return Forward(layout.query_lengths, layout.sequence_lengths, np.concatenate(tables), deep_rows)


class FollowingComponent:
    """Another rank's share of a component: computes what rank 0 says, over its own KV pool."""

    def __init__(self, component: ARComponent, group: RankGroup, budget: ARBudget) -> None:
        self._component = component
        self.group = group
        self._block_size = budget.block_size
        self._kv_dtype = kv_dtype_of(component, budget)
        self._backend = make_backend(
            budget.attention, component.device, component.spec.plain_attention, float8=self._kv_dtype == FLOAT8
        )
        prepare_layers(component, budget.model_copy(update=_PLAIN_STEPS), kernels=self._backend.name == "triton")

    def serve(self, kv_blocks: int) -> None:
        """Allocate the KV pool."""
        spec, device = self._component.spec, self._component.device
        caches = new_caches(
            spec, kv_blocks, self._block_size, self._kv_dtype, lambda shape, kind: zeros(shape, device, kind)
        )
        bind_caches(self._component.attention_modules, caches)

    @torch.inference_mode()
    def run(self, step: Forward | Logits) -> None:
        component, spec = self._component, self._component.spec
        device, dtype = component.device, component.dtype
        if isinstance(step, Logits):
            hidden = torch.empty(step.rows, step.width, device=device, dtype=dtype)
            self.group.broadcast(hidden)
            component.logits(hidden)
            return
        tokens = int(step.query_lengths.sum())
        embeds = torch.empty(tokens, spec.embed_size, device=device, dtype=dtype)
        kind = torch.float64 if spec.fractional_positions else torch.int64
        positions = torch.empty(spec.position_dims, tokens, device=device, dtype=kind)
        self.group.broadcast(embeds)
        self.group.broadcast(positions)
        layout, slots = self._layout(step)
        paged = current.paged = PagedContext(
            self._backend, upload(slots, device), self._backend.plan(layout, device), layout
        )
        if step.deep_rows is None:
            component.forward(embeds, positions, paged)
            return
        places = torch.empty(tokens, device=device, dtype=torch.bool)
        rows = torch.empty(step.deep_rows, spec.deep_size, device=device, dtype=dtype)
        self.group.broadcast(places)
        self.group.broadcast(rows)
        component.forward_media(embeds, positions, paged, places, rows)

    def _layout(self, step: Forward) -> tuple[BatchLayout, np.ndarray]:
        """The layout that rank 0 has, and the slots of this step's tokens."""
        size = self._block_size
        tables = np.split(step.block_tables, np.cumsum(-(-step.sequence_lengths // size))[:-1])
        slots = [
            (table[:, None].astype(np.int64) * size + np.arange(size)).reshape(-1)[:length]
            for table, length in zip(tables, step.sequence_lengths.tolist(), strict=True)
        ]
        new = [each[-count:] for each, count in zip(slots, step.query_lengths.tolist(), strict=True)]
        return BatchLayout(step.query_lengths, step.sequence_lengths, slots, tables), np.concatenate(new)


class ParallelStage(RankedStage, ARStage):
    """A stage on the autoregressive engine whose steps several ranks compute. It fails as a whole with any of them."""

    def __init__(self, name: str, component: ARComponent, budget: ARBudget, ranks: OtherRanks) -> None:
        self._ranks = ranks
        blocks = plan_blocks(component, budget, max_length_of(component, budget))
        ranks.serve(blocks)
        settings = {"kv_blocks": blocks, **_PLAIN_STEPS}
        super().__init__(name, LeadingRank(component, ranks, budget.block_size), budget.model_copy(update=settings))
