"""Quantise a loaded model from outside: its linear layers change in place, one by one, on the device that runs them.

For a GPU a `Quantiser` is open while a stage is loaded. Whatever loads a model then leaves it in host memory, and
`on_device` hands it over: the GPU holds quantised weights and one layer at full size, never all of them. On the CPU the
component is complete before, so that it was compared with the reference in full precision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn

from omnistage.config.quantize import QuantizeConfig
from omnistage.core.errors import ConfigError, InternalError
from omnistage.engines.ar.experts import compute_quantised
from omnistage.engines.ar.merged import MergedLinear, merge_linears
from omnistage.engines.ar.packed_linear import PackedLinear
from omnistage.engines.quantisation.experts import (
    QuantisedExperts,
    expert_inputs,
    expert_weights,
    has_quantised_experts,
    is_experts,
    is_transposed,
    quantise_experts,
)
from omnistage.engines.quantisation.rules import layers_to_quantise
from omnistage.quantisation.packed import PackedInt8Linear
from omnistage.quantisation.schemes import Scheme

_current: ContextVar[Quantiser | None] = ContextVar("quantiser", default=None)


@dataclass(slots=True)
class Quantiser:
    """Quantises the models of one stage while they are loaded."""

    config: QuantizeConfig
    diffusion: bool
    """The stage's engine is the diffusion engine: DiTs are quantised, and text encoders where the stage is named."""
    full_precision: Sequence[str] = ()
    """Patterns of the family."""
    merge: bool = True
    layers: list[str] = field(default_factory=list)
    """Names of what was quantised."""

    def choose(self, network: nn.Module) -> dict[str, nn.Module]:
        """The layers of a network that the scheme takes: linear ones and those of experts."""
        text = hasattr(type(network), "get_input_embeddings")  # of transformers
        if self.diffusion and not text and "Transformer" not in type(network).__name__:
            return {}  # a VAE
        if self.diffusion and text and not self.config.required:
            return {}
        layers = layers_to_quantise(
            network, self.config, dit=self.diffusion and not text, full_precision=self.full_precision
        )
        return {name: layer for name, layer in layers.items() if _fits(layer, self.config.method)}

    def apply(self, network: nn.Module, device: torch.device) -> None:
        """Exchange the layers, for `device`, where they are put; the rest of the network stays where it is."""
        layers = self.choose(network)
        self.layers += layers
        if self.merge and (device.type == "cuda" or self.config.method.packed):
            merge_linears(network, set(layers))
        for name in layers:
            module = network.get_submodule(name)
            layer = module.group.joint if isinstance(module, MergedLinear) else module
            if not isinstance(module, MergedLinear) or module.index == 0:
                self.quantise_layer(layer, device)
        compute_quantised(network)

    def apply_to(self, component: object, device: torch.device) -> None:
        """Exchange the layers of a component that is complete; on the meta device for ones of the same size."""
        for network in networks_of(component):
            if device.type == "meta":
                self.plan(network)
            else:
                self.apply(network, device)

    def plan(self, network: nn.Module) -> None:
        """Exchange the layers of a network on the meta device for ones of the size that they will have."""
        for name, layer in self.choose(network).items():
            self.layers.append(name)
            if isinstance(layer, nn.Linear):
                network.set_submodule(name, _PlannedLinear(layer, self.config.method))
            else:
                quantise_experts(layer, self.config.method, torch.device("meta"))
        compute_quantised(network)

    def check(self, stage: str) -> None:
        """Refuse a stage in which nothing was quantised, and a recipe of layers that there are not."""
        self._check_recipe(stage)
        if self.config.required and not self.layers:
            raise ConfigError(
                f"{self.config.scheme} would quantise nothing in this stage: it has no linear layer that the scheme "
                "and its exclusions allow; leave quantize out, or name layers with include",
                param=f"{stage}.quantize",
            )

    def _check_recipe(self, stage: str) -> None:
        names = set(self.layers)
        for pattern in self.config.only or ():
            if pattern[1:-1].replace("[.]", ".") in names or any(re.search(pattern, name) for name in names):
                continue
            raise ConfigError(
                f"{pattern} names no linear layer of this stage that {self.config.scheme} can quantise; if a quantised "
                "checkpoint says so, its files are of different models: fetch it again",
                param=f"{stage}.quantize.only",
            )

    def quantise_layer(self, layer: nn.Module, device: torch.device) -> None:
        """Quantise one layer in place, for `device`."""
        if is_experts(layer):
            quantise_experts(layer, self.config.method, device)
            return
        if not isinstance(layer, nn.Linear):
            raise InternalError(f"{type(layer).__name__} is not a linear layer")
        self.config.method.quantise(layer, device)


def networks_of(component: object) -> tuple[nn.Module, ...]:
    """The networks of a component that may be quantised."""
    from omnistage.engines.ar.component import ARComponent
    from omnistage.engines.diffusion.component import Denoiser, PromptEncoder

    if isinstance(component, Denoiser):
        return tuple(component.transformers)
    return tuple(component.modules) if isinstance(component, ARComponent | PromptEncoder) else ()


def quantised_layers(network: nn.Module) -> dict[str, nn.Module]:
    """The layers of a loaded network that are quantised, by their own names; merged ones share a layer."""
    layers: dict[str, nn.Module] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        if has_quantised_experts(module):
            layers[name] = module
        layer = module.group.joint if isinstance(module, MergedLinear) else module
        if ".group." not in f"{name}." and isinstance(layer, nn.Linear) and is_quantised(layer):
            layers[name] = layer
    return layers


def full_weights(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights `[O, I]` of a network's linear layers that are in full precision, by the layers' own names.

    A layer of experts has several, each `[E, O, I]`.
    """
    for name, module in network.named_modules(remove_duplicate=False):
        if is_experts(module):
            transposed = is_transposed(module)
            yield from ((name, each.transpose(1, 2) if transposed else each) for _, each in expert_weights(module))
        layer = module.group.joint if isinstance(module, MergedLinear) else module
        if ".group." in f"{name}." or not isinstance(layer, nn.Linear) or is_quantised(layer):
            continue
        weight = layer.weight
        yield (
            name,
            torch.split(weight, list(module.group.sizes))[module.index] if isinstance(module, MergedLinear) else weight,
        )


def is_quantised(layer: nn.Linear) -> bool:
    if isinstance(layer, PackedLinear):
        return False
    return isinstance(layer, PackedInt8Linear) or type(layer._parameters.get("weight")) is not nn.Parameter


def network_bytes(network: nn.Module) -> int:
    """Bytes of a network's weights as they are in memory."""
    sizes: dict[int, int] = {}
    for module in network.modules():
        if isinstance(module, PackedInt8Linear | PackedLinear):
            sizes[id(module)] = module.weight_bytes
        elif isinstance(module, QuantisedExperts):
            sizes[id(module)] = module.packed_bytes
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                for part in _plain_tensors(tensor):
                    sizes[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(sizes.values())


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor of torchao consists of; else itself."""
    value = tensor.data if type(tensor) is nn.Parameter else tensor
    names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else None
    return [value] if names is None else [getattr(value, name) for name in names]


def _fits(layer: nn.Module, scheme: Scheme) -> bool:
    """Whether the scheme has products for weights of this size."""
    if isinstance(layer, nn.Linear):
        return scheme.fits(layer.in_features, layer.out_features)
    return scheme.by_row or all(inputs % scheme.group_size == 0 for inputs in expert_inputs(layer))


class _PlannedLinear(nn.Module):
    """A quantised layer without numbers."""

    def __init__(self, layer: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        size = scheme.weight_bytes(layer.in_features, layer.out_features)
        self.register_buffer("packed", torch.empty(size, dtype=torch.uint8, device="meta"))

    @property
    def weight(self) -> torch.Tensor:
        return torch.empty(self.out_features, self.in_features, device="meta")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.new_empty(*input.shape[:-1], self.out_features)


@contextmanager
def quantising(quantiser: Quantiser | None) -> Iterator[None]:
    """Models that are loaded within, in this thread, are quantised."""
    token = _current.set(quantiser)
    try:
        yield
    finally:
        _current.reset(token)


def current_quantiser() -> Quantiser | None:
    """That of the stage which this thread loads."""
    return _current.get()
