"""Whether a decoder's layers run on Triton."""

from __future__ import annotations

from typing import Literal

import torch

from omnistage.core.errors import ConfigError
from omnistage.engines.ar.attention.triton_backend import triton_available

Kernels = Literal["auto", "torch", "triton"]


def use_triton(kernels: Kernels, device: torch.device, *, planned: bool = False) -> bool:
    """Whether layers on a device run on Triton. `planned`: the device may be another machine's."""
    available = triton_available() or (planned and device.type == "cuda" and not torch.cuda.is_available())
    if kernels == "auto":
        return device.type == "cuda" and available
    if kernels == "triton" and not planned and not available:
        raise ConfigError("kernels: triton needs a CUDA device and the triton package; use torch")
    return kernels == "triton"
