"""The experts of a small batch in two Triton kernels: gate, up and activation; then down and the router's weight.

`transformers`' grouped products sort the (token, expert) pairs, count and gather them first, a dozen launches a layer
that take longer than reading the experts' weights. Here a program looks through the pairs for those of its expert, so
nothing is sorted and nothing is read back. A pair's result does not depend on the others, bit for bit. Rows that only
fill a captured step up (`slots` below 0) read no weights.
"""

from __future__ import annotations

import torch

from omnistage.engines.ar.attention import current
from omnistage.engines.triton_jit import HAS_TRITON, jit

if HAS_TRITON:
    import triton
    import triton.language as tl

MAX_PAIRS = 512
"""Of tokens and experts, which every program looks through."""
_FEW_PAIRS = 64
GATE_UP, DOWN = (32, 128, 4, 3), (64, 128, 4, 3)
"""Columns of a program, how deep a tile of weights is at most, warps, stages."""
_ROWS = 16
"""Pairs of an expert that are computed at once: the fewest that the tensor cores take."""


def fits(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether the kernels take such weights, `[experts, 2 * inner, width]` and `[experts, width, inner]`."""
    if not (HAS_TRITON and gate_up.dim() == down.dim() == 3 and gate_up.is_contiguous() and down.is_contiguous()):
        return False
    experts, width, inner = down.shape
    return gate_up.shape == (experts, 2 * inner, width) and width % 32 == 0 and inner % 32 == 0


@torch.library.custom_op("omnistage::experts", mutates_args=())
def experts(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """What each chosen expert adds to each token, `[T, K, H]`, of `hidden` `[T, H]`, `index` and `weights` `[T, K]`.

    One opaque operator, so that `torch.compile` of a layer does not look inside. Their sum is left to it.
    """
    slots: torch.Tensor | None = getattr(getattr(current, "paged", None), "slot_mapping", None)
    if slots is not None and len(slots) != len(hidden):  # of other rows than these
        slots = None
    return run(hidden, gate_up, down, index, weights, slots)


def run(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """`experts`; rows whose number in `slots` is below 0 are zeros."""
    tokens, top_k = index.shape
    width, inner = down.shape[1:]
    pairs = tokens * top_k
    index, weights, hidden = index.contiguous(), weights.contiguous(), hidden.contiguous()
    padded = _FEW_PAIRS if pairs <= _FEW_PAIRS else MAX_PAIRS
    between = torch.empty(pairs, inner, dtype=hidden.dtype, device=hidden.device)
    out = torch.empty(tokens, top_k, width, dtype=hidden.dtype, device=hidden.device)
    # Sizes do not depend on the batch: neither does the order in which a sum is taken.
    exact = hidden.dtype == torch.float32
    columns, most, warps, stages = GATE_UP
    depth = 32 if exact else _divisor(width, most)
    _gate_up_kernel[(pairs, triton.cdiv(inner, columns))](
        hidden, gate_up, index, index if slots is None else slots, between, pairs, width, inner,
        SLOTS=slots is not None, TOP_K=top_k, PADDED=padded, ROWS=_ROWS, COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    columns, most, warps, stages = DOWN
    depth = 32 if exact else _divisor(inner, most)
    _down_kernel[(pairs, triton.cdiv(width, columns))](
        between, down, index, index if slots is None else slots, weights, out, pairs, width, inner,
        SLOTS=slots is not None, TOP_K=top_k, PADDED=padded, ROWS=_ROWS, COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@experts.register_fake
def _experts_fake(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return hidden.new_empty(index.shape[0], index.shape[1], hidden.shape[1])


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(most, size & -size)


# Kernels: Triton reads their arguments' annotations itself, so only constexpr ones have any.
# fmt: off


@jit()
def _pairs_of(index_ptr, slots_ptr, pairs, SLOTS: tl.constexpr, TOP_K: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """The expert of each pair; -1: there is no such pair, or it is of a row that nobody reads."""
    place = tl.arange(0, PADDED)
    experts = tl.load(index_ptr + place, mask=place < pairs, other=-1).to(tl.int32)
    if SLOTS:
        slot = tl.load(slots_ptr + place // TOP_K, mask=place < pairs, other=-1)
        experts = tl.where(slot < 0, -1, experts)
    return experts


@jit()
def _members(same, rank, first, count, PADDED: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # kernel
    """The pairs of an expert from the `first` on, and which of the `ROWS` there are."""
    ranks = first + tl.arange(0, ROWS)
    match = same[None, :] & (rank[None, :] == ranks[:, None])
    pairs = tl.sum(tl.where(match, tl.arange(0, PADDED)[None, :], 0), 1)
    return pairs, ranks < count


@jit(counts=("pairs",), metadata=("index_ptr", "slots_ptr"))
def _gate_up_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, weight_ptr, index_ptr, slots_ptr, out_ptr, pairs, width, inner,
    SLOTS: tl.constexpr, TOP_K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """SiLU(gate) * up of `COLUMNS` columns for all pairs of the expert of pair `program_id(0)`, if it is the first."""
    pair, tile = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, PADDED)
    experts = _pairs_of(index_ptr, slots_ptr, pairs, SLOTS, TOP_K, PADDED)
    expert = tl.max(tl.where(place == pair, experts, -1))
    same = experts == expert
    if (expert < 0) | (tl.min(tl.where(same, place, PADDED)) < pair):
        return
    count = tl.sum(same.to(tl.int32))
    rank = tl.cumsum(same.to(tl.int32)) - 1
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    gate_ptr = weight_ptr + expert.to(tl.int64) * 2 * inner * width + column[:, None] * width
    up_ptr = gate_ptr + inner * width
    for first in range(0, count, ROWS):
        rows, valid = _members(same, rank, first, count, PADDED, ROWS)
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, width, DEPTH):
            depth = start + tl.arange(0, DEPTH)[None, :]
            x = tl.load(x_ptr + (rows // TOP_K)[:, None] * width + depth, mask=valid[:, None], other=0.0)
            w_gate = tl.load(gate_ptr + depth, mask=inside[:, None], other=0.0)
            w_up = tl.load(up_ptr + depth, mask=inside[:, None], other=0.0)
            gate = tl.dot(x, tl.trans(w_gate), gate, input_precision="ieee")
            up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
        # Rounded where the module rounds: its projection and its activation are tensors.
        kind = out_ptr.dtype.element_ty
        gate = gate.to(kind).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = (active * up.to(kind).to(tl.float32)).to(kind)
        tl.store(out_ptr + rows[:, None] * inner + column[None, :], result, mask=valid[:, None] & inside[None, :])


@jit(counts=("pairs",), metadata=("index_ptr", "slots_ptr", "scale_ptr"))
def _down_kernel(  # type: ignore[no-untyped-def]  # kernel
    x_ptr, weight_ptr, index_ptr, slots_ptr, scale_ptr, out_ptr, pairs, width, inner,
    SLOTS: tl.constexpr, TOP_K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`COLUMNS` columns of an expert's output for all of its pairs, times the router's weights."""
    pair, tile = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, PADDED)
    experts = _pairs_of(index_ptr, slots_ptr, pairs, SLOTS, TOP_K, PADDED)
    expert = tl.max(tl.where(place == pair, experts, -1))
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    if expert < 0:
        tl.store(out_ptr + pair * width + column, tl.zeros([COLUMNS], out_ptr.dtype.element_ty), mask=inside)
        return
    same = experts == expert
    if tl.min(tl.where(same, place, PADDED)) < pair:
        return
    count = tl.sum(same.to(tl.int32))
    rank = tl.cumsum(same.to(tl.int32)) - 1
    weight_ptr += expert.to(tl.int64) * width * inner + column[:, None] * inner
    for first in range(0, count, ROWS):
        rows, valid = _members(same, rank, first, count, PADDED, ROWS)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, inner, DEPTH):
            depth = start + tl.arange(0, DEPTH)[None, :]
            x = tl.load(x_ptr + rows[:, None] * inner + depth, mask=valid[:, None], other=0.0)
            weight = tl.load(weight_ptr + depth, mask=inside[:, None], other=0.0)
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        kind = out_ptr.dtype.element_ty
        scale = tl.load(scale_ptr + rows, mask=valid, other=0.0).to(tl.float32)
        result = (acc.to(kind).to(tl.float32) * scale[:, None]).to(kind)
        tl.store(out_ptr + rows[:, None] * width + column[None, :], result, mask=valid[:, None] & inside[None, :])
