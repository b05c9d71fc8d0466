"""BigVGAN as transformers has it: its forward on the device, and how far it looks around a frame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omnistage.core.errors import CheckpointError
from omnistage.engines.codec.receptive import Conv, Layer, Parallel, Transposed, frame_context

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel


def bigvgan(vocoder: Qwen2_5OmniToken2WavBigVGANModel, spectrogram: Tensor) -> Tensor:
    """`[B, samples]` of a processed spectrogram `[B, mel, frames]`: transformers' forward without its last `.cpu()`."""
    hidden = vocoder.conv_pre(spectrogram)
    for i, (upsample,) in enumerate(vocoder.ups):
        hidden = upsample(hidden)
        count = vocoder.num_residual_blocks
        hidden = sum(block(hidden) for block in vocoder.resblocks[i * count : (i + 1) * count]) / count
    wave = vocoder.conv_post(vocoder.activation_post(hidden))
    return torch.clamp(wave, min=-1.0, max=1.0)[:, 0]


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
