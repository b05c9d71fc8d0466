"""What adapters add to a layer's output, in one Triton kernel: choose by row, multiply by `up`, add.

Separate launches (a mask, a product, a sum for each layer) take longer at a decode step's sizes than reading the
adapters' weights. A product of merged layers is block-diagonal: a tile reads the columns of its own layer only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omnistage.engines.triton_jit import HAS_TRITON, jit

if HAS_TRITON:
    import triton
    import triton.language as tl

MAX_PARTS = 3
"""Layers of a merged product, at most."""
_MAX_ROWS = 64
_DEPTH = 128
"""Columns of `up` that a program multiplies at once, at most."""
_WIDE = 16384
"""Outputs from which on tiles may be wider, and the device is still filled."""


def fits(sizes: Sequence[int], outputs: int) -> bool:
    """Whether the kernel takes a product whose parts change so many outputs each, one after the other."""
    return len(sizes) <= MAX_PARTS and sum(sizes) == outputs and not any(size % _tile(outputs) for size in sizes)


def _tile(outputs: int) -> int:
    return 64 if outputs >= _WIDE else 32


@torch.library.custom_op("omnistage::adapter_up", mutates_args=())
def adapter_up(both: torch.Tensor, up: torch.Tensor, table: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """`[.., T, O]`: the first O columns of `both` and what the adapters of each row add to them.

    The columns of `both` behind them are the product with all adapters' `down`. `up` is `[O, parts * slots * rank]`,
    `table` `[rows, slots]`, `sizes` the outputs of each part.
    """
    outputs, columns = up.shape
    flat = both.view(-1, both.shape[-1])
    out = torch.empty(len(flat), outputs, dtype=both.dtype, device=both.device)
    rows, tile = min(_MAX_ROWS, max(16, triton.next_power_of_2(len(flat)))), _tile(outputs)
    each = columns // len(sizes)
    # A part begins where those before it end; past the last there are no tiles.
    second, third = (sum(sizes[:count]) for count in (1, 2))
    _adapter_up_kernel[(outputs // tile, triton.cdiv(len(flat), rows))](
        flat, up, table, out, len(flat), flat.stride(0), outputs, second, third,
        PARTS=len(sizes), SLOTS=table.shape[1], RANK=each // table.shape[1], ROWS=rows, COLUMNS=tile,
        DEPTH=min(_DEPTH, max(16, triton.next_power_of_2(each))),
    )  # fmt: skip
    return out.view(*both.shape[:-1], outputs)


@adapter_up.register_fake
def _adapter_up_fake(both: torch.Tensor, up: torch.Tensor, table: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return both.new_empty(*both.shape[:-1], up.shape[0])


# Triton reads the kernel's annotations itself, so only constexpr arguments have any.
# fmt: off


@jit(counts=("count",), metadata=("table_ptr",))
def _adapter_up_kernel(  # type: ignore[no-untyped-def]  # kernel
    both_ptr, up_ptr, table_ptr, out_ptr, count, stride, outputs, second, third,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`COLUMNS` outputs of one part, of `ROWS` rows. Nothing that it reads has to wait for something else."""
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    present = row < count
    kind = out_ptr.dtype.element_ty
    row_ptr = both_ptr + row.to(tl.int64)[:, None] * stride
    plain = tl.load(row_ptr + column[None, :], mask=present[:, None], other=0.0)
    part = (first >= second).to(tl.int32) + (first >= third).to(tl.int32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SLOTS * RANK, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        known = depth < SLOTS * RANK
        place = part * SLOTS * RANK + depth
        both = present[:, None] & known[None, :]
        weight = tl.load(table_ptr + row[:, None] * SLOTS + (depth // RANK)[None, :], mask=both, other=0.0)
        low = tl.load(row_ptr + outputs + place[None, :], mask=both, other=0.0)
        up_row = up_ptr + column.to(tl.int64)[:, None] * (PARTS * SLOTS * RANK)
        up = tl.load(up_row + place[None, :], mask=known[None, :], other=0.0)
        # Not a product alone: another request's adapter may have overflowed in this row, and 0 x inf is NaN.
        scaled_low = tl.where(weight != 0, low * weight, 0.0).to(kind)
        acc = tl.dot(scaled_low, tl.trans(up), acc, input_precision="ieee")
    # Rounded where the separate products round: what is added is a tensor of the layer's precision.
    result = plain.to(tl.float32) + acc.to(kind).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * outputs + column[None, :], result.to(kind), mask=present[:, None])
