"""The kernels of a small batch's experts, in Triton's interpreter; on a GPU see `tests/gpu/test_experts.py`."""

from __future__ import annotations

from tests.unit.interpreted import needs_triton, run_interpreted

pytestmark = needs_triton

CHILD = """
import torch
from torch import nn
from omnistage.engines.ar import experts, triton_experts
from omnistage.hf import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

torch.manual_seed(0)
config = transformers.Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=96, num_experts=6, num_experts_per_tok=3)
config._experts_implementation = "eager"
module = Qwen3MoeExperts(config).eval()
for weight in module.parameters():
    nn.init.normal_(weight, std=0.2)
module.requires_grad_(False)
if experts.mark_experts(nn.ModuleList([module]), torch.float32) != 1:
    raise SystemExit("the kernels do not agree with the module")
for tokens in (1, 2, 7, 22):
    hidden = torch.randn(tokens, 64)
    index = torch.stack([torch.randperm(6)[:3] for _ in range(tokens)])
    if tokens == 22:
        index[:20, 0], index[:20, 1], index[:20, 2] = 5, 1, 2  # more of an expert than a program takes at once
    weights = torch.rand(tokens, 3)
    expected = module(hidden, index, weights)
    found = triton_experts.experts(hidden, module.gate_up_proj, module.down_proj, index, weights).sum(1)
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise SystemExit(f"{tokens} tokens: {(found - expected).abs().max()}")
    alone = triton_experts.experts(hidden[:1], module.gate_up_proj, module.down_proj, index[:1], weights[:1]).sum(1)
    if not torch.equal(found[:1], alone):
        raise SystemExit("the others of its batch change a token's result")
    # The second half fills a captured step up. The others keep their places in a tile, by which numpy may round.
    slots = torch.where(torch.arange(tokens) < (tokens + 1) // 2, torch.arange(tokens), -1)
    parts = triton_experts.run(hidden, module.gate_up_proj, module.down_proj, index, weights, slots).sum(1)
    if parts[slots < 0].any() or not torch.equal(parts[slots >= 0], found[slots >= 0]):
        raise SystemExit("rows that fill a step up are not zeros")

module.act_fn = nn.GELU()  # the kernels compute another activation
if experts.mark_experts(nn.ModuleList([module]), torch.float32) != 0:
    raise SystemExit("another activation is not noticed")
print("equal")
"""


def test_the_kernels_give_what_the_module_does() -> None:
    child = run_interpreted("-c", CHILD)
    assert child.stdout.strip() == "equal", child.stdout + child.stderr
