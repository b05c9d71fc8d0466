"""Which linear layers of a network are quantised: the safe ones of its kind, and what the configuration says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

from torch import nn
from torch.nn.modules.conv import _ConvNd

from omnistage.config.quantize import QuantizeConfig
from omnistage.core.errors import UnsupportedModelError
from omnistage.engines.ar.cpu_kernels import WeightFirstLinear
from omnistage.engines.quantisation.experts import is_experts

_BLOCK = re.compile(r"(?:^|.*?\.)(\w+)\.(\d+)\.")
"""A layer inside one of many equal blocks; embeddings, heads and projections around them are not."""
_KEPT_IN_DECODERS = re.compile(
    r"(^|\.)(visual|vision\w*|image\w*|audio\w*|code_predictor|depth_decoder|router|gate|shared_expert_gate)(\.|$)"
)
"""Media encoders, small decoders inside one step, and what chooses experts."""
_KEPT_IN_DITS = re.compile(r"(^|[._])(norm\w*|mod|modulation|adaln\w*)([._]|$)", re.IGNORECASE)
"""What scales and shifts whole blocks: errors there are seen in every pixel."""


def layers_to_quantise(
    network: nn.Module, config: QuantizeConfig, *, dit: bool, full_precision: Sequence[str] = ()
) -> dict[str, nn.Module]:
    """Linear layers and layers of experts by name. What matches `full_precision`, and the first
    and the last block of a DiT, are left out.

    Raises for weights of experts that no scheme quantises: most of the model would silently stay.
    """
    layers = {name: module for name, module in network.named_modules() if _is_linear(module) or is_experts(module)}
    if config.only is not None:
        only = re.compile("|".join(config.only)) if config.only else None
        return {name: layer for name, layer in layers.items() if only is not None and only.search(name)}
    selected = _defaults(layers, full_precision, dit=dit)
    include, exclude = _joined(config.include), _joined(config.exclude)
    selected |= {name: layer for name, layer in layers.items() if include is not None and include.search(name)}
    if exclude is not None:
        selected = {name: layer for name, layer in selected.items() if not exclude.search(name)}
    for name in _unknown_experts(network, dit=dit):
        if exclude is None or not exclude.search(name):
            raise UnsupportedModelError(
                f"{type(network).__name__} has weights of experts that cannot be quantised ({name}): transformers lets "
                "no other code compute them; leave quantize out, or add that name to its exclude to quantise the "
                "other layers only"
            )
    return selected


def _unknown_experts(network: nn.Module, *, dit: bool) -> Iterator[str]:
    """Weights of several products in one tensor, in modules that nobody else can compute."""
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | _ConvNd) or is_experts(module):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            joined = parameter.ndim == 3 and min(parameter.shape) > 1 and _BLOCK.match(name) is not None
            if (not dit and joined and not _KEPT_IN_DECODERS.search(name)) or (
                parameter.ndim >= 2 and "expert" in name
            ):
                yield name


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Not a subclass with a forward of its own."""
    return type(module) in (nn.Linear, WeightFirstLinear)


def _defaults(linears: Mapping[str, nn.Module], full_precision: Sequence[str], *, dit: bool) -> dict[str, nn.Module]:
    own = _joined(full_precision)
    blocks = {name: match for name in linears if (match := _BLOCK.match(name))}
    lists = list(dict.fromkeys(match.group(1) for match in blocks.values()))
    edges: set[tuple[str, int]] = set()
    if dit and lists:
        last = max(int(match.group(2)) for match in blocks.values() if match.group(1) == lists[-1])
        edges = {(lists[0], 0), (lists[-1], last)}
    rule = _KEPT_IN_DITS if dit else _KEPT_IN_DECODERS
    return {
        name: linears[name]
        for name, match in blocks.items()
        if not rule.search(name)
        and (own is None or not own.search(name))
        and (match.group(1), int(match.group(2))) not in edges
    }


def _joined(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None
