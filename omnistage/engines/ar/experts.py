"""How a decoder with a mixture of experts computes them: by `transformers`' registry of implementations."""

from __future__ import annotations

import logging

import torch
from torch import nn

from omnistage.core.errors import ConfigError
from omnistage.engines.ar import triton_experts
from omnistage.engines.ar.sampling.device_selection import has_kernels
from omnistage.engines.quantisation.experts import Expanded, has_quantised_experts, one_by_one
from omnistage.engines.triton_jit import LAUNCH_ERRORS
from omnistage.hf import transformers

logger = logging.getLogger(__name__)

EXPERTS_NAME = "omnistage"
"""Of our implementation in `transformers`' registry."""
_MAX_GATHERED = 64
"""Tokens up to which each token's experts are gathered: a captured step's, whose weights fit beside the model's."""
_MARK = "omnistage_kernels"
"""Attribute of modules of which our kernels compute the same."""
_TOLERANCE = 0.02
"""Of the kernels' relative difference in 16 bits; another activation or order of weights differs by more than 0.1."""


def _experts(
    module: nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Nothing of a small batch waits for the device: it can be captured in a CUDA graph."""
    if has_quantised_experts(module):
        return _quantised(module, hidden, top_k_index, top_k_weights)
    if top_k_index.numel() <= triton_experts.MAX_PAIRS and getattr(module, _MARK, False):
        return _by_kernels(module, hidden, top_k_index, top_k_weights)
    return _by_products(module, hidden, top_k_index, top_k_weights)


def _by_kernels(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    parts: torch.Tensor = triton_experts.experts(hidden, module.gate_up_proj, module.down_proj, index, weights)
    return parts.sum(1)


def _quantised(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One expert after the other on the CPU; elsewhere nothing waits for the device.

    Few pairs of rows and experts take the weights of their experts, more of them those of all.
    """
    if hidden.device.type == "cpu":
        return one_by_one(module, hidden, index, weights)
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    if index.numel() <= int(module.num_experts):  # type: ignore[arg-type]
        return functions["batched_mm"](module, hidden, index, weights)  # type: ignore[no-any-return]
    return functions["grouped_mm"](Expanded(module), hidden, index, weights)  # type: ignore[no-any-return]


def _by_products(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    # Only bfloat16 has a grouped kernel.
    gathered = hidden.dtype != torch.bfloat16 and len(hidden) <= _MAX_GATHERED
    function = functions["batched_mm" if gathered else "grouped_mm"]
    return function(module, hidden, index, weights)  # type: ignore[no-any-return]


transformers.integrations.moe.ExpertsInterface.register(EXPERTS_NAME, _experts)


def experts_for(device: torch.device) -> str:
    """The implementation where the configuration names none.

    A step must not wait for the device to be captured in a CUDA graph. The loop over experts does, and so does
    `grouped_mm` where it has no kernel of its own; on other devices the loop, the reference, stays.
    """
    return EXPERTS_NAME if device.type == "cuda" else "eager"


def set_experts(decoder: nn.Module, choice: str, device: torch.device, dtype: torch.dtype) -> None:
    """Choose how `decoder` computes its experts, if it has any; raises where a named implementation does not fit."""
    if not isinstance(decoder, transformers.PreTrainedModel):
        return
    quantised = any(has_quantised_experts(module) for module in decoder.modules())
    if quantised and choice != "auto":
        raise ConfigError("budget.experts: quantised experts are computed in one way; leave it out", param="experts")
    name = (EXPERTS_NAME if quantised else experts_for(device)) if choice == "auto" else choice
    try:
        decoder.set_experts_implementation(name)
    except ValueError as error:  # a decoder without experts, or one whose experts cannot be chosen
        if choice != "auto":
            raise ConfigError(f"budget.experts: {error}; leave it out", param="experts") from error
        return
    if name == EXPERTS_NAME and has_kernels(device):
        mark_experts(decoder, dtype)


def compute_quantised(network: nn.Module) -> None:
    """Have quantised experts of a network computed here: `transformers`' own functions want whole tensors."""
    for module in network.modules():
        if isinstance(module, transformers.PreTrainedModel) and any(map(has_quantised_experts, module.modules())):
            module.set_experts_implementation(EXPERTS_NAME)


def mark_experts(decoder: nn.Module, dtype: torch.dtype) -> int:
    """Have the kernels compute those experts of which they give what `transformers`' own products do; how many."""
    kinds: dict[object, bool] = {}
    marked = 0
    for module in decoder.modules():
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor) or down.is_meta:
            continue
        if getattr(module, "_is_expert_parallel", False):  # it has some of the experts, and numbers beyond them
            continue
        kind = type(module), gate_up.shape, down.shape
        if kind not in kinds:
            kinds[kind] = triton_experts.fits(gate_up, down) and _agree(module, down, dtype)
        if kinds[kind]:
            setattr(module, _MARK, True)
            marked += 1
    return marked


@torch.inference_mode()
def _agree(module: nn.Module, down: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels compute what the module does: its activation, its order of weights, no bias and no norm."""
    experts, width, _ = down.shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, width, generator=generator).to(down.device, dtype)
    index = torch.tensor([[0, experts - 1], [experts - 1, 0], [0, 0], [experts // 2, 0]], device=down.device)
    weights = torch.rand(4, 2, generator=generator).to(down.device, dtype)
    expected = _by_products(module, hidden, index, weights).double()
    try:
        parts = triton_experts.run(hidden, module.gate_up_proj, down, index, weights, None)  # type: ignore[arg-type]
    except LAUNCH_ERRORS as error:
        logger.warning("experts run without kernels of their own: %s", error)
        return False
    total = parts.sum(1).double()
    return bool((total - expected).norm() <= _TOLERANCE * expected.norm())
