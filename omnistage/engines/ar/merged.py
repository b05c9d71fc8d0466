"""Linear layers over the same input, computed as one product: a decoder's queries, keys and values; gate and up.

Small batches are bound by how fast weights are read and how many kernels that takes: one large product reads as fast as
the memory allows where three small ones do not. The modules around them stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Merged(nn.Module):
    """The weights of several layers, one after the other, and their outputs for the last input."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = tuple(layer.out_features for layer in layers)
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        # A layer like others, so that whatever changes linear layers from outside can change it.
        self.joint = nn.Linear(layers[0].in_features, sum(self.sizes), bias=bool(biases), device="meta")
        self.joint.weight = nn.Parameter(torch.cat(tuple(layer.weight for layer in layers)), requires_grad=False)
        self.biased = bool(biases)
        if biases:
            self.joint.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The output of one of the layers. The first to be asked with an input computes all of them."""
        if self._input is not x:
            self._input = x
            self._outputs = self.joint(x).split(self.sizes, dim=-1)
        out = self._outputs[index]
        if index == len(self.sizes) - 1:  # usually the last to be asked: nothing is held until the next step
            self._input, self._outputs = None, ()
        return out


class MergedLinear(nn.Module):
    """Stands where one of the merged layers was."""

    def __init__(self, merged: _Merged, index: int) -> None:
        super().__init__()
        self.group = merged
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.part(self.index, x)


def merge_linears(decoder: nn.Module) -> int:
    """Merge what can be merged in a decoder; how many groups. Layers of other classes (quantised ones) stay."""
    merged = 0
    for module in list(decoder.modules()):
        for names in _GROUPS:
            layers = [getattr(module, name, None) for name in names]
            linears = [layer for layer in layers if type(layer) is nn.Linear]
            if len(linears) < len(names) or not _alike(linears):
                continue
            group = _Merged(linears)
            for index, name in enumerate(names):
                setattr(module, name, MergedLinear(group, index))
            merged += 1
    return merged


def merged_weight(layer: nn.Module) -> torch.Tensor:
    """All weights of the group that a merged layer is one of; `TypeError`: it is no such layer, or has a bias."""
    if not isinstance(layer, MergedLinear) or layer.group.biased:
        raise TypeError("layers that are not merged, or have a bias")
    return layer.group.joint.weight


def _alike(layers: Sequence[nn.Linear]) -> bool:
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(kinds) == 1
