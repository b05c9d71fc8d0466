"""BigVGAN as transformers has it: its forward on the device, its activations as one kernel, its receptive field."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from omnistage.core.errors import CheckpointError
from omnistage.engines.codec.receptive_field import Conv, Layer, Parallel, Transposed, frame_context
from omnistage.engines.shared_copy import shared_copy
from omnistage.engines.triton_jit import HAS_TRITON, has_c_compiler
from omnistage.models.qwen2_5_omni.activation_kernel import TAPS, fused_activation

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel


def bigvgan(vocoder: Qwen2_5OmniToken2WavBigVGANModel, spectrogram: Tensor) -> Tensor:
    """`[B, samples]` of a processed spectrogram `[B, mel, frames]`: transformers' forward without its last `.cpu()`."""
    hidden = vocoder.conv_pre(spectrogram)
    for i, (upsample,) in enumerate(vocoder.ups):
        hidden = upsample(hidden)
        count = vocoder.num_residual_blocks
        first, *others = vocoder.resblocks[i * count : (i + 1) * count]
        total = first(hidden)  # its own: a block ends with a sum
        for block in others:
            total += block(hidden)
        hidden = total.div_(count)
    wave = vocoder.conv_post(vocoder.activation_post(hidden))
    return torch.clamp(wave, min=-1.0, max=1.0)[:, 0]


class FusedActivation(nn.Module):
    """Stands in for a `Qwen2_5OmniAntiAliasedActivation1d` that `can_fuse` accepts: one kernel instead of a dozen."""

    alpha: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        act, up, down = _parts(module)
        with torch.no_grad():
            self.register_buffer("alpha", act.alpha.exp(), persistent=False)
            self.register_buffer("scale", 1.0 / (act.beta.exp() + act.no_div_by_zero), persistent=False)
            self._up, self._down = _taps(up.ratio * up.filter), _taps(down.filter)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return fused_activation(hidden_states, self.alpha, self.scale, self._up, self._down)


def _taps(weights: Tensor) -> tuple[float, ...]:
    """Empty on the meta device, where nothing is computed with them."""
    return () if weights.is_meta else tuple(weights.flatten().tolist())


def _parts(activation: nn.Module) -> tuple[Any, Any, Any]:
    return activation.act, activation.upsample, activation.downsample


def can_fuse(module: nn.Module) -> bool:
    """Whether the module computes what the kernel was written for."""
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    if type(module) is not modeling.Qwen2_5OmniAntiAliasedActivation1d:
        return False
    act, up, down = _parts(module)
    return bool(
        type(act) is modeling.Qwen2_5OmniSnakeBeta
        and type(up) is modeling.Qwen2_5OmniUpSample1d
        and type(down) is modeling.Qwen2_5OmniDownSample1d
        and (up.ratio, up.stride, up.pad, up.pad_left, up.pad_right) == (2, 2, 5, 15, 15)
        and (down.stride, down.pad_left, down.pad_right) == (2, 5, 6)
        and up.filter.shape == down.filter.shape == (1, 1, TAPS)
        and {tensor.dtype for tensor in (act.alpha, act.beta, up.filter, down.filter)} == {torch.float32}
    )


def fuse_activations(
    vocoder: Qwen2_5OmniToken2WavBigVGANModel, *, planned: bool = False
) -> Qwen2_5OmniToken2WavBigVGANModel:
    """A copy for CUDA whose activations are one kernel each; without Triton or on another device the vocoder itself.

    The activation's factors are computed here, so the parameters must have their values. `planned`: a vocoder on the
    meta device will run on CUDA, maybe that of another machine.
    """
    if not planned and (not HAS_TRITON or vocoder.device.type != "cuda" or not has_c_compiler()):
        return vocoder
    swaps = {module: FusedActivation(module) for module in vocoder.modules() if can_fuse(module)}
    return shared_copy(vocoder, swaps)


def vocoder_context(vocoder: Qwen2_5OmniToken2WavBigVGANModel) -> tuple[int, int]:
    """Mel frames left and right of a frame that its samples depend on: BigVGAN's receptive field, layer by layer."""
    config = vocoder.config
    up, down = vocoder.activation_post.upsample, vocoder.activation_post.downsample
    activation: tuple[Layer, ...] = (
        Transposed(up.kernel_size, up.stride, crop=up.pad_left, pad=up.pad),
        Conv(down.kernel_size, down.pad_left, down.pad_right, stride=down.stride),
    )
    blocks = Parallel(
        tuple(
            tuple(
                layer
                for dilation in dilations
                for layer in (*activation, Conv.same(kernel, dilation), *activation, Conv.same(kernel))
            )
            for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        )
    )
    layers: list[Layer] = [Conv.same(7)]
    for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        if (kernel - rate) % 2:
            raise CheckpointError(
                f"bigvgan_config: upsample kernel {kernel} with rate {rate} does not give {rate} samples a frame"
            )
        layers += [Transposed(kernel, rate, crop=(kernel - rate) // 2), blocks]
    layers += [*activation, Conv.same(7)]
    return frame_context(layers, math.prod(config.upsample_rates))
