"""EfficientNet-lite0: image classification into the 1,000 classes of ImageNet.

Written here because no dependency has it: transformers' EfficientNet always has squeeze-and-excitation layers, which
the lite variants lack, and timm's needs torchvision, which has no CPU build for the torch that is pinned here. Module
names are those of the published weights. They were trained with TensorFlow, hence its uneven "same" padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from omnistage.core.errors import CheckpointError

SIDE = 224
"""Input width and height in pixels."""
CLASSES = 1000


class _Row(NamedTuple):
    """Blocks of one width; only the first of them has the stride."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    width: int


_STEM = 32
_ROWS = (
    _Row(1, 3, 1, 1, 16),
    _Row(2, 3, 2, 6, 24),
    _Row(2, 5, 2, 6, 40),
    _Row(3, 3, 2, 6, 80),
    _Row(3, 5, 1, 6, 112),
    _Row(4, 5, 2, 6, 192),
    _Row(1, 3, 1, 6, 320),
)
_HEAD = 1280


class _Conv(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding: the odd pixel goes to the right and to the bottom."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:])
        padded = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return super().forward(padded)


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class _Block(nn.Module):
    """An inverted residual block: expand, depthwise convolution, project."""

    def __init__(self, inputs: int, row: _Row, stride: int) -> None:
        super().__init__()
        inner = inputs * row.expand
        self.expands = row.expand != 1
        if self.expands:
            self._expand_conv = _Conv(inputs, inner)
            self._bn0 = _norm(inner)
        self._depthwise_conv = _Conv(inner, inner, row.kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = _Conv(inner, row.width)
        self._bn2 = _norm(row.width)
        self.adds = stride == 1 and inputs == row.width

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        wide = F.relu6(self._bn1(self._depthwise_conv(wide)))
        y: Tensor = self._bn2(self._project_conv(wide))
        return x + y if self.adds else y


class EfficientNetLite0(nn.Module):
    """Takes `[batch, 3, SIDE, SIDE]`, RGB from -1 to 1; gives logits `[batch, CLASSES]`."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _Conv(3, _STEM, 3, 2)
        self._bn0 = _norm(_STEM)
        blocks, width = [], _STEM
        for row in _ROWS:
            for index in range(row.repeats):
                blocks.append(_Block(width, row, row.stride if index == 0 else 1))
                width = row.width
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = _Conv(width, _HEAD)
        self._bn1 = _norm(_HEAD)
        self._fc = nn.Linear(_HEAD, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(pixels)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(x.mean(dim=(2, 3)))
        return logits

    @classmethod
    def load(cls, path: Path) -> EfficientNetLite0:
        """The network with the weights of a safetensors file, ready to run."""
        with torch.device("meta"):
            network = cls()
        try:
            weights = load_file(path)
            network.load_state_dict(weights, assign=True)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not contain EfficientNet-lite0 ({str(error).splitlines()[0]}); "
                "run `omnistage pull starter --force`"
            ) from error
        return network.eval().requires_grad_(False)
