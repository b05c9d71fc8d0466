"""Sizes of pictures in tokens: what the language model writes, what it is shown, and what the transformer takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError
from omnistage.core.params import DiffusionParams
from omnistage.models._diffusers.checks import check_sides

CELL = 32
"""Pixels of a picture token's side."""
DEFAULT_SIZE = 1024
MAX_IMAGES = 16
_PREVIEW = 16
"""A preview has about this many tokens a side, whatever the picture's size."""
_MAX_RATIO = 4

Grid = tuple[int, int]
"""Rows and columns of picture tokens."""


def check_params(params: DiffusionParams, *, num_images: int, masked: bool) -> None:
    """Refuse parameters that this model does not support."""
    check_sides(params, CELL)
    if num_images > MAX_IMAGES:
        raise UnsupportedModalityError(f"this model takes {MAX_IMAGES} images at most, got {num_images}", param="image")
    frames = None if params.num_frames == 1 else params.num_frames
    unsupported = {
        "mask": masked or None,
        "strength": params.strength,
        "control_scale": params.control_scale,
        "true_cfg": params.true_cfg,
        "num_frames": frames,
        "fps": params.fps,
        "negative_prompt": params.negative_prompt or None,
    }
    for name, value in unsupported.items():
        if value is not None:
            raise InvalidRequestError("not supported by this model; omit it", param=name)


def target_size(params: DiffusionParams, images: Sequence[np.ndarray], default: int) -> tuple[int, int]:
    """(width, height) as asked, else as the first input picture's, else the default."""
    if images and params.width is None and params.height is None:
        height, width = images[0].shape[:2]
        return width, height
    return params.width or default, params.height or default


def target_grids(width: int, height: int, *, edits: bool) -> list[Grid]:
    """The grids that are written, in the order in which the prompt names them: the picture's and, before an edit
    has anything to look at, a preview's. They are generated in the reverse order."""
    grid = (height // CELL, width // CELL)
    if edits:
        return [grid]
    ratio = grid[0] / grid[1]
    preview = int(math.sqrt(ratio) * _PREVIEW), int(math.sqrt(1 / ratio) * _PREVIEW)
    if min(preview) < 1:
        raise InvalidRequestError(
            f"{width}x{height} is outside the supported aspect ratios; choose a size nearer to a square", param="width"
        )
    return [grid, preview]


def fitted_size(width: int, height: int, shortest: int, longest: int) -> tuple[int, int]:
    """The size nearest to an input picture's that has a whole number of tokens and is within the model's bounds.

    diffusers' pipeline fails on all others: its two encoders round them to different grids.
    """
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise InvalidRequestError(
            f"an image of {width}x{height} is too long and thin for this model; crop it to 1:{_MAX_RATIO} or less",
            param="image",
        )
    scale = max(1.0, shortest / min(width, height))
    scale = min(scale, longest / max(width, height))
    sides = [max(round(side * scale / CELL), 1) * CELL for side in (width, height)]
    return sides[0], sides[1]


def generated_positions(start: int, grids: Sequence[Grid]) -> Tensor:
    """m-RoPE positions `[3, n]` of generated tokens: a grid each, in the order of generation, one behind the other."""
    parts = []
    for rows, columns in grids:
        down, across = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack((torch.zeros_like(down), down, across)).reshape(3, -1) + start)
        start += max(rows, columns)
    return torch.cat(parts, dim=1)


def upsampled(tokens: Tensor, grid: Grid) -> Tensor:
    """Picture tokens of a grid as the transformer takes them: each is four of its patches, `[4 * n]`."""
    rows, columns = grid
    return tokens.view(rows, columns).repeat_interleave(2, dim=0).repeat_interleave(2, dim=1).reshape(-1)
