"""What is faster on the CPU for the few rows that a batch of decoding requests has, with the same weights."""

from __future__ import annotations

import torch
from torch import nn

FEWEST, MOST = 7, 48
"""Rows for which the product is taken the other way round (`benchmarks/few_rows.py`): with fewer it is slower, and with
more there is nothing to gain."""


class FewRowsLinear(nn.Linear):
    """The same product with the weight first: `(W xᵀ)ᵀ`, up to twice as fast for a few rows.

    MKL lays the matrix with the many columns out anew at every call, which for few rows is most of the work. What comes
    out is copied into rows: attention takes a slow way with anything else.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // max(self.in_features, 1)
        if not FEWEST <= rows <= MOST:
            return nn.functional.linear(input, self.weight, self.bias)
        out = torch.mm(self.weight, input.reshape(rows, self.in_features).t()).t().contiguous()
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)


class WholeNorm:
    """An RMS norm in one call of torch's instead of seven; mixed into the class of a module that does the same."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def quicken(model: nn.Module) -> None:
    """Have a model's linear layers and norms use what is faster here; weights stay where they are.

    Other devices are left alone, and so are modules of other classes: quantised layers, norms that give other numbers.
    """
    mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    whole: dict[type, type] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.device.type != "cpu" or weight.dtype != torch.float32:
            continue
        kind = type(module)
        if kind is nn.Linear and mkl:
            module.__class__ = FewRowsLinear
        elif _is_plain_norm(module):
            whole.setdefault(kind, type(kind.__name__, (WholeNorm, kind), {}))
            module.__class__ = whole[kind]


@torch.no_grad()
def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it is an RMS norm and gives the very numbers that torch's own gives."""
    epsilon, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float) or weight is None:
        return False
    rows = torch.linspace(-2, 3, 3 * weight.numel()).view(3, -1)
    return torch.equal(module(rows), nn.functional.rms_norm(rows, weight.shape, weight, epsilon))
