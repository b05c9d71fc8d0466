"""Linear layers over the same input, computed as one product: a decoder's queries, keys and values; gate and up.

Small batches are bound by how fast weights are read and how many kernels that takes: one large product reads as fast as
the memory allows where three small ones do not. The modules around them stay as they are.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeGuard

import torch
from torch import nn

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _LastProduct:
    """An input and what the layers made of it, beside the module: setting attributes of one takes long."""

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()


class _Merged(nn.Module):
    """The weights of several layers, one after the other, and their outputs for the last input."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = tuple(layer.out_features for layer in layers)
        # A layer like others, so that whatever changes linear layers from outside can change it.
        merged = nn.Linear(1, 1, bias=False, device="meta")
        merged.in_features, merged.out_features = layers[0].in_features, sum(self.sizes)
        merged.weight = nn.Parameter(torch.cat(tuple(layer.weight for layer in layers)), requires_grad=False)
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.biased = bool(biases)
        if biases:
            merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self.joint: nn.Module = merged
        """Exchanged where weights are quantised."""
        self.last = _LastProduct()


class MergedLinear(nn.Module):
    """Stands where one of the merged layers was."""

    def __init__(self, merged: _Merged, index: int) -> None:
        super().__init__()
        self.group = merged
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first of the group that gets an input computes all of them."""
        group, last = self.group, self.group.last
        if last.input is not x:
            last.input = x
            last.outputs = group.joint(x).split(group.sizes, dim=-1)
        out = last.outputs[self.index]
        if self.index == len(group.sizes) - 1:  # usually the last to be asked: nothing is held until the next step
            last.input, last.outputs = None, ()
        return out


def merge_linears(decoder: nn.Module, only: Container[str] | None = None) -> int:
    """Merge what can be merged in a decoder; how many groups. Quantised layers stay.

    `only`: names of layers, where others stay as they are; these may be of classes over the same weights.
    """
    merged = 0
    for path, module in list(decoder.named_modules()):
        for names in _GROUPS:
            layers = [getattr(module, name, None) for name in names]
            linears = [layer for layer in layers if _is_plain(layer, any_kind=only is not None)]
            if len(linears) < len(names) or not _alike(linears):
                continue
            if only is not None and any(f"{path}.{name}".lstrip(".") not in only for name in names):
                continue
            group = _Merged(linears)
            for index, name in enumerate(names):
                setattr(module, name, MergedLinear(group, index))
            merged += 1
    return merged


def merged_weight(layer: nn.Module) -> torch.Tensor:
    """All weights of the group that a merged layer is one of; `TypeError`: it is no such layer, or has a bias."""
    joint = layer.group.joint if isinstance(layer, MergedLinear) and not layer.group.biased else None
    weight = None if joint is None else joint._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        raise TypeError("layers that are not merged, are quantised, or have a bias")
    return weight


def _is_plain(layer: object, *, any_kind: bool = False) -> TypeGuard[nn.Linear]:
    if not isinstance(layer, nn.Linear) or not (any_kind or type(layer) is nn.Linear):
        return False
    return type(layer._parameters.get("weight")) is nn.Parameter


def _alike(layers: Sequence[nn.Linear]) -> bool:
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(kinds) == 1
