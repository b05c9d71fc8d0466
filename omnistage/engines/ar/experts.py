"""How a decoder with a mixture of experts computes them: `transformers`' own implementations, by its public setting."""

from __future__ import annotations

import torch
from torch import nn

from omnistage.core.errors import ConfigError
from omnistage.hf import transformers

EXPERTS_NAME = "omnistage"
"""Of our implementation in `transformers`' registry."""
_MAX_GATHERED = 64
"""Tokens up to which each token's experts are gathered: a captured step's, whose weights fit beside the model's."""


def _experts(
    module: nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """For dtypes that have no grouped kernel: nothing of a small batch waits for the device."""
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    name = "batched_mm" if len(hidden) <= _MAX_GATHERED else "grouped_mm"
    return functions[name](module, hidden, top_k_index, top_k_weights)  # type: ignore[no-any-return]


transformers.integrations.moe.ExpertsInterface.register(EXPERTS_NAME, _experts)


def experts_for(device: torch.device, dtype: torch.dtype) -> str:
    """The implementation where the configuration names none.

    A step must not wait for the device to be captured in a CUDA graph. The loop over experts does, and so does
    `grouped_mm` where it has no kernel of its own; elsewhere the loop is the reference.
    """
    if device.type != "cuda":
        return "eager"
    return "grouped_mm" if dtype == torch.bfloat16 else EXPERTS_NAME


def set_experts(decoder: nn.Module, choice: str, device: torch.device, dtype: torch.dtype) -> None:
    """Choose how `decoder` computes its experts, if it has any; raises where a named implementation does not fit."""
    if not isinstance(decoder, transformers.PreTrainedModel):
        return
    try:
        decoder.set_experts_implementation(experts_for(device, dtype) if choice == "auto" else choice)
    except ValueError as error:  # a decoder without experts, or one whose experts cannot be chosen
        if choice != "auto":
            raise ConfigError(f"budget.experts: {error}; leave it out", param="experts") from error
