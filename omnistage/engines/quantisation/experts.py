"""Quantised experts: a layer's weights of all experts, which `transformers` holds in one parameter.

They are rounded like those of linear layers, with scales by row and expert. With `int8_dynamic` each expert is a packed
layer of the CPU; with the other schemes weights become numbers of the model's dtype again when they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from omnistage.quantisation.numbers import expand_int4, pack
from omnistage.quantisation.packed import PackedInt8Linear, pack_linear
from omnistage.quantisation.schemes import MINIMUM, SCALE, VALUES, Scheme

_UP, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"
_INT4_EXPANSION = 13
"""Bytes a weight while integers of 4 bits become float32."""
ExpertsFunction = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class QuantisedExperts(nn.Module):
    """Stands in for a parameter `[E, O, I]`, or `[E, I, O]` if `transposed`: an index gives the weights of experts."""

    values: torch.Tensor
    """Integers, or float8 as bytes, `[E, O, I]`; two a byte in int4."""
    scale: torch.Tensor
    """float32 `[E, O]`, `[E, O, groups]` in int4."""
    minimum: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, scheme: Scheme, *, transposed: bool, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.shape, self.transposed = weight.dtype, weight.shape, transposed
        self.by_row = scheme.by_row
        self.products: list[PackedInt8Linear] = []
        """A packed layer for each expert, with `int8_dynamic`."""
        rows = weight.detach().transpose(1, 2) if transposed else weight.detach()
        if scheme.packed and device.type != "meta":
            self.products = [_packed(expert) for expert in rows]
            return
        # One expert at a time: beside the quantised ones there is no second copy of all.
        parts = [pack(expert.to(device).contiguous(), scheme) for expert in rows]
        for end, name in ((VALUES, "values"), (SCALE, "scale"), (MINIMUM, "minimum")):
            stacked = torch.stack([_as_bytes(part[end]) for part in parts]) if end in parts[0] else None
            self.register_buffer(name, stacked)

    def __getitem__(self, index: torch.Tensor | int) -> torch.Tensor:
        """The weights of these experts, in the order that the parameter had."""
        if self.products:
            weight = self.products[int(index)].weight.to(self.dtype)
        else:
            minimum = None if self.minimum is None else self.minimum[index]
            weight = _expand(self.values[index], self.scale[index], minimum, self.dtype)
        return weight.transpose(-1, -2) if self.transposed else weight

    def whole(self) -> torch.Tensor:
        """The weights of all experts."""
        if self.products:
            return torch.stack([self[expert] for expert in range(len(self.products))])
        weight = _expand(self.values, self.scale, self.minimum, self.dtype)
        return weight.transpose(1, 2) if self.transposed else weight

    def product(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """What one expert makes of rows `[T, I]`."""
        return self.products[expert](rows) if self.products else _product(rows, self[expert], self.transposed)

    @property
    def packed_bytes(self) -> int:
        """Of the packed layers, which are no tensors."""
        return sum(each.weight_bytes for each in self.products)

    @property
    def expansion_bytes(self) -> int:
        """Peak while `whole` is computed."""
        return self.shape.numel() * (2 * self.dtype.itemsize if self.by_row else _INT4_EXPANSION)


def _packed(weight: torch.Tensor) -> PackedInt8Linear:
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad=False)
    pack_linear(layer)
    if not isinstance(layer, PackedInt8Linear):
        raise TypeError("the layer was not packed")
    return layer


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    """float8 as uint8: it can be indexed on every device, and no change of a model's dtype changes it."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


def _expand(
    values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if minimum is not None:
        return expand_int4(values, scale, minimum).to(dtype)
    numbers = values.view(torch.float8_e4m3fn) if values.dtype == torch.uint8 else values  # see `_as_bytes`
    # int8 and float8 are exact in 16 bits, and the product is rounded once.
    out = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
    return torch.mul(numbers.to(dtype), scale[..., None], out=out)


def _product(rows: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return rows @ weight if transposed else nn.functional.linear(rows, weight)


# ------------------------------------------------------------------------------------------------ modules


def is_experts(module: nn.Module) -> bool:
    """Whether `transformers` lets others compute these experts, whose weights lie in one tensor each."""
    if not hasattr(module, "_is_expert_parallel") or not hasattr(module, "has_gate"):
        return False
    names = set(dict(module.named_parameters(recurse=False)))
    return _DOWN in names and bool(names.intersection(_UP))


def expert_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of `is_experts` that are products' weights: not biases."""
    for name in (*_UP, _DOWN):
        weight = module._parameters.get(name)
        if weight is not None and weight.ndim == 3:
            yield name, weight


def is_transposed(module: nn.Module) -> bool:
    return bool(module.is_transposed)


def expert_inputs(module: nn.Module) -> list[int]:
    """The numbers of inputs of a layer's products."""
    return [weight.shape[1 if is_transposed(module) else 2] for _, weight in expert_weights(module)]


def quantise_experts(module: nn.Module, scheme: Scheme, device: torch.device) -> None:
    """Exchange the weights of a layer's experts, in place; the rest of the module goes along to `device`."""
    for name, weight in list(expert_weights(module)):
        quantised = QuantisedExperts(weight, scheme, transposed=is_transposed(module), device=device)
        del module._parameters[name]
        module.add_module(name, quantised)
    if device.type != "meta":
        module.to(device)


def has_quantised_experts(module: nn.Module) -> bool:
    return any(isinstance(child, QuantisedExperts) for child in module.children())


def expansion_bytes(network: nn.Module) -> int:
    """What a large step takes for the weights of one layer's experts in full precision."""
    largest = 0
    for module in network.modules():
        sizes = [child.expansion_bytes for child in module.children() if isinstance(child, QuantisedExperts)]
        largest = max(largest, sum(sizes))
    return largest


# ------------------------------------------------------------------------------------------- computation


class Expanded:
    """A layer's experts, of which each look at a weight gives the whole of it in full precision."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.whole() if isinstance(value, QuantisedExperts) else value


def one_by_one(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the experts `index` `[T, K]` add to the rows, by `transformers`' contract: each that was chosen in turn."""
    out = torch.zeros_like(hidden)
    up = _UP[0] if module.has_gate else _UP[1]
    for expert in torch.unique(index).tolist():
        token, place = torch.where(index == expert)
        rows = _apply(module, up, hidden[token], expert)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)  # type: ignore[operator]
        rows = _apply(module, _DOWN, rows, expert)
        if getattr(module, "has_post_expert_norm", False):  # newer than the oldest transformers
            rows = module.post_expert_norm(rows)  # type: ignore[operator]
        rows = rows * weights[token, place, None]
        out.index_add_(0, token, rows.to(out.dtype))
    return out


def _apply(module: nn.Module, name: str, rows: torch.Tensor, expert: int) -> torch.Tensor:
    weight = getattr(module, name)
    if isinstance(weight, QuantisedExperts):
        out = weight.product(rows, expert)
    else:
        out = _product(rows, weight[expert], is_transposed(module))
    return out + getattr(module, f"{name}_bias")[expert] if module.has_bias else out
