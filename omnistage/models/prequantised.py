"""Checkpoints that others quantised and that `transformers` loads: float8, AWQ, GPTQ, bitsandbytes and so on."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from omnistage.core.errors import MissingDependencyError, UnsupportedModelError
from omnistage.hf import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_QUANTISATION_PACKAGES = {
    "torchao": ("torchao", "torchao"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "awq": ("gptqmodel", "gptqmodel"),
    "gptq": ("gptqmodel", "gptqmodel"),
    "fbgemm_fp8": ("fbgemm_gpu", "fbgemm-gpu-genai"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "quanto": ("optimum", "optimum-quanto"),
    "hqq": ("hqq", "hqq"),
    "aqlm": ("aqlm", "aqlm"),
    "vptq": ("vptq", "vptq"),
    "eetq": ("eetq", "eetq"),
}
"""Modules that transformers needs for weights quantised by a method, and how each is installed."""


def check_quantisation(config: PreTrainedConfig) -> bool:
    """Whether the weights are quantised. `transformers` would load what it does not know as if they were not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not transformers.quantizers.AutoHfQuantizer.supports_quant_method(settings):
        raise UnsupportedModelError(f"config.json names the quantisation {method!r}, which transformers cannot read")
    package = _QUANTISATION_PACKAGES.get(str(getattr(method, "value", method)))
    if package is not None and importlib.util.find_spec(package[0]) is None:
        raise MissingDependencyError(f"these weights are quantised by {method}, which needs: pip install {package[1]}")
    return True
