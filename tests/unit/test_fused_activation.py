"""BigVGAN's activation as one kernel against transformers' modules, in Triton's interpreter.

The interpreter is chosen when a kernel is defined and holds for the whole process, so the cases run in a child.
"""

from __future__ import annotations

import torch
from torch import nn

from omnistage.compat import prepare_torchvision
from tests.unit.interpreted import needs_triton, run_interpreted

prepare_torchvision(required=False)

from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling  # noqa: E402

from omnistage.models.qwen2_5_omni.vocoder import can_fuse, fuse_activations  # noqa: E402

CHILD = """
import torch
from omnistage.compat import prepare_torchvision
prepare_torchvision(required=False)
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling
from omnistage.models.qwen2_5_omni import activation_kernel
from omnistage.models.qwen2_5_omni.vocoder import FusedActivation, can_fuse

activation_kernel._LANES = 16  # several programs, and rows that two of them share
torch.manual_seed(0)
# Shorter than the filter, odd, around a lane's chunk of 16 and around a program's 256.
shapes = {(1, 1): (1, 2, 3, 4, 5, 11, 16), (2, 3): (7, 15, 17, 32, 100), (3, 2): (255, 256, 258)}
for (batch, channels), lengths in shapes.items():
    for length in lengths:
        module = modeling.Qwen2_5OmniAntiAliasedActivation1d(modeling.Qwen2_5OmniSnakeBeta(channels))
        torch.nn.init.normal_(module.act.alpha, std=0.4)
        torch.nn.init.normal_(module.act.beta, std=0.4)
        if not can_fuse(module):
            raise SystemExit("the activation of this version of transformers is not what the kernel was written for")
        x = 2 * torch.randn(channels, batch, length).transpose(0, 1)  # not contiguous
        with torch.inference_mode():
            error = (FusedActivation(module)(x) - module(x)).abs().max()
        if not error < 1e-5:
            raise SystemExit(f"[{batch}, {channels}, {length}]: off by {error}")
print("equal")
"""


@needs_triton
def test_the_kernel_equals_the_modules() -> None:
    child = run_interpreted("-c", CHILD)
    assert child.stdout.strip() == "equal", child.stdout + child.stderr


def test_other_activations_are_left_as_they_are() -> None:
    activation, snake = modeling.Qwen2_5OmniAntiAliasedActivation1d, modeling.Qwen2_5OmniSnakeBeta
    assert can_fuse(activation(snake(4)))
    assert not can_fuse(activation(nn.Tanh()))
    assert not can_fuse(activation(snake(4), up_ratio=4))
    assert not can_fuse(activation(snake(4), down_ratio=4))
    assert not can_fuse(activation(snake(4), up_kernel_size=10))
    assert not can_fuse(activation(snake(4), down_kernel_size=10))
    assert not can_fuse(activation(snake(4)).to(torch.float16))
    assert not can_fuse(type("Subclass", (activation,), {})(snake(4)))


def test_nothing_changes_off_cuda() -> None:
    config = modeling.Qwen2_5OmniBigVGANConfig(upsample_initial_channel=64)
    vocoder = modeling.Qwen2_5OmniToken2WavBigVGANModel(config)
    assert fuse_activations(vocoder) is vocoder
