"""The kernels of experts and code predictors on a GPU, at sizes near the true ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.engines.ar import experts, triton_experts
from omnistage.engines.ar.depth_decoder import DepthDecoder
from omnistage.hf import transformers
from omnistage.models.qwen3_omni_moe import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def scaled(model: nn.Module) -> nn.Module:
    generator = torch.Generator("cuda").manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        elif "norm" in name:
            weight.normal_(1.0, 0.1, generator=generator)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "inner", "top_k"), [(2048, 768, 8), (1024, 384, 6), (96, 160, 2)])
def test_experts(dtype: torch.dtype, width: int, inner: int, top_k: int) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = transformers.Qwen3MoeConfig(hidden_size=width, moe_intermediate_size=inner, num_experts=32)
    config._experts_implementation = "eager"
    with torch.device("cuda"):
        module = scaled(Qwen3MoeExperts(config).to(dtype).requires_grad_(False))
    assert experts.mark_experts(nn.ModuleList([module]), dtype) == 1
    for tokens in (1, 2, 9, 64):
        hidden = torch.randn(tokens, width, device="cuda", dtype=dtype)
        index = torch.stack([torch.randperm(32, device="cuda")[:top_k] for _ in range(tokens)])
        weights = torch.rand(tokens, top_k, device="cuda", dtype=dtype)
        found, expected = experts._by_kernels(module, hidden, index, weights), module(hidden, index, weights)
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.01)
        alone = experts._by_kernels(module, hidden[-1:], index[-1:], weights[-1:])
        assert torch.equal(alone, found[-1:])
        slots = torch.arange(tokens, device="cuda") - 1
        parts = triton_experts.run(hidden, module.gate_up_proj, module.down_proj, index, weights, slots).sum(1)
        assert not parts[0].any()
        assert torch.equal(parts[1:], found[1:])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_code_predictor(dtype: torch.dtype) -> None:
    config = tiny.config_for(1.0).talker_config.code_predictor_config
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorModel

    with torch.device("cuda"):
        model = Qwen3OmniMoeTalkerCodePredictorModel._from_config(config, dtype=dtype).eval().requires_grad_(False)
    kernels = DepthDecoder.of(scaled(model), 16)  # it compares
    assert kernels is not None
    rows = torch.randn(64, 1024, device="cuda", dtype=dtype)
    many, alone = kernels.start(64), kernels.start(3)
    for _ in range(16):
        last = many.step(rows)
        first = alone.step(rows[:3])
    if dtype == torch.float32:
        assert torch.equal(first, last[:3])
    else:
        torch.testing.assert_close(first, last[:3], rtol=0.05, atol=0.05)
