"""The kernel that adds adapters, in Triton's interpreter; on a GPU see `tests/gpu/test_adapters_cuda.py`."""

from __future__ import annotations

from tests.unit.interpreted import needs_triton, run_interpreted

pytestmark = needs_triton

CHILD = """
import torch
from torch import nn
from omnistage.engines.adapters import layers, triton_up

torch.manual_seed(0)
for sizes, slots, rank in (((64,), 1, 4), ((96, 32, 64), 3, 5), ((64, 64), 8, 20)):
    outputs, columns = sum(sizes), len(sizes) * slots * rank
    layer = nn.Linear(32, outputs)
    table = torch.zeros(80, slots)
    layer.adapter_shape, layer.adapter_by_token = (len(sizes), slots, rank), True
    layer.register_buffer("adapter_table", table)
    if not triton_up.fits(sizes, outputs):
        raise SystemExit(f"{sizes} should fit")
    up, first = torch.zeros(outputs, columns), 0
    for part, size in enumerate(sizes):
        place = slice(part * slots * rank, (part + 1) * slots * rank)
        up[first : first + size, place] = torch.randn(size, slots * rank)
        first += size
    layer.register_buffer("adapter_up", up)
    layers._fold(layer, columns)
    layer.adapter_down.copy_(torch.randn(columns, 32))
    for rows in (1, 7, 70):
        table.zero_()
        table[torch.arange(rows), torch.randint(0, slots, (rows,))] = torch.rand(rows) + 0.5
        table[rows // 2] = 0
        hidden = torch.randn(1, rows, 32)
        layer.adapter_sizes = ()
        expected = layer(hidden)
        layer.adapter_sizes = sizes
        found = layer(hidden)
        if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            raise SystemExit(f"{sizes}, {rows} rows: {(found - expected).abs().max()}")
        plain = nn.functional.linear(hidden, layer.weight, layer.bias)
        if not torch.equal(found[0, rows // 2], plain[0, rows // 2]):
            raise SystemExit("a row without adapters was changed")
        if rows > 1 and torch.equal(found, plain):
            raise SystemExit("no adapter was added")
    # The first row's adapter overflows; the others have none of it.
    table.zero_()
    table[0, 0] = 1
    layer.adapter_down[:rank] = torch.inf
    found = layer(torch.ones(1, 5, 32))
    if found[0, 0].isfinite().all() or not found[0, 1:].isfinite().all():
        raise SystemExit("an adapter that overflows reaches other rows")
for sizes, outputs in (((40, 24), 64), ((32, 32), 96), ((32, 32, 32, 32), 128)):
    if triton_up.fits(sizes, outputs):
        raise SystemExit(f"{sizes} of {outputs} outputs cannot be computed in tiles")
print("equal")
"""


def test_the_kernel_adds_what_separate_products_do() -> None:
    child = run_interpreted("-c", CHILD)
    assert child.stdout.strip() == "equal", child.stdout + child.stderr
