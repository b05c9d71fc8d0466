"""The vocoders' activation as one kernel against transformers' module, in Triton's interpreter."""

from __future__ import annotations

from tests.unit.interpreted import needs_triton, run_interpreted

CHILD = """
import torch
from omnistage.hf import transformers
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeSnakeBeta
from omnistage.engines.codec import snake

snake._BLOCK = 32  # several programs, and channels that two of them share
torch.manual_seed(0)
for batch, channels, length in ((1, 1, 1), (2, 3, 7), (3, 5, 31), (1, 2, 32), (2, 4, 100)):
    for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        module = Qwen3OmniMoeSnakeBeta(channels)
        torch.nn.init.normal_(module.alpha, std=0.4)
        torch.nn.init.normal_(module.beta, std=0.4)
        module = module.to(dtype)
        x = 2 * torch.randn(channels, batch, length, dtype=dtype).transpose(0, 1)  # not contiguous
        with torch.inference_mode():
            ((_, fused),) = snake.fused_snakes([module, torch.nn.Tanh()]).items()
            error = (fused(x) - module(x)).abs().max()
        if not error < bound:
            raise SystemExit(f"[{batch}, {channels}, {length}] {dtype}: off by {error}")
print("equal")
"""


@needs_triton
def test_the_kernel_equals_the_module() -> None:
    child = run_interpreted("-c", CHILD)
    assert child.stdout.strip() == "equal", child.stdout + child.stderr
