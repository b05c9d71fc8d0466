"""Linear layers on the CPU, for the few rows that a batch of decoding requests has."""

from __future__ import annotations

import torch
from torch import nn

FEWEST, MOST = 7, 48
"""Rows for which the product is taken the other way round (`benchmarks/few_rows.py`): with fewer it is slower, and with
more there is nothing to gain."""


class FewRowsLinear(nn.Linear):
    """The same product with the weight first: `(W xᵀ)ᵀ`, up to two and a half times as fast for a few rows.

    MKL lays the matrix with the many columns out anew at every call, which for few rows is most of the work. What comes
    out is copied into rows: attention takes a slow way with anything else.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // max(self.in_features, 1)
        if not FEWEST <= rows <= MOST:
            return super().forward(input)
        out = torch.mm(self.weight, input.reshape(rows, self.in_features).t()).t().contiguous()
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)


def quicken(model: nn.Module) -> None:
    """Have a model's linear layers use what is faster here; weights stay where they are. Other devices are left alone.

    Layers of other classes (quantised ones) are left alone too.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.__class__ = FewRowsLinear
