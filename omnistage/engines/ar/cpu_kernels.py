"""Linear layers and norms that are faster on the CPU for a decode batch's few rows, over the same weights."""

from __future__ import annotations

import torch
from torch import nn

MIN_ROWS, MAX_ROWS = 7, 48
"""Rows for which the weight comes first in the product (`benchmarks/few_rows.py`): with fewer it is slower, and with
more there is nothing to gain."""


class WeightFirstLinear(nn.Linear):
    """The same product with the weight first: `(W xᵀ)ᵀ`, up to twice as fast for a few rows.

    MKL repacks the matrix with the many columns at every call, which for few rows is most of the work. The result is
    copied into rows: attention is slow on any other layout.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // max(self.in_features, 1)
        if not MIN_ROWS <= rows <= MAX_ROWS:
            return nn.functional.linear(input, self.weight, self.bias)
        out = torch.mm(self.weight, input.reshape(rows, self.in_features).t()).t().contiguous()
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)


class FusedRMSNorm:
    """An RMS norm in one call of torch's instead of seven; mixed into the class of a module that does the same."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def apply_cpu_kernels(model: nn.Module) -> None:
    """Exchange a model's float32 linear layers and norms on the CPU for faster ones over the same weights.

    Modules on other devices and of other classes stay: quantised layers, norms that give other numbers, and those
    that were exchanged before.
    """
    mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    fused: dict[type, type] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.dtype != torch.float32:
            continue  # others are quantised
        kind = type(module)
        if kind is nn.Linear and mkl:
            module.__class__ = WeightFirstLinear
        elif not isinstance(module, FusedRMSNorm) and _is_plain_norm(module):
            fused.setdefault(kind, type(kind.__name__, (FusedRMSNorm, kind), {}))
            module.__class__ = fused[kind]


@torch.no_grad()
def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it is an RMS norm and gives the very numbers that torch's own gives."""
    epsilon, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float) or weight is None:
        return False
    rows = torch.linspace(-2, 3, 3 * weight.numel()).view(3, -1)
    return torch.equal(module(rows), nn.functional.rms_norm(rows, weight.shape, weight, epsilon))
