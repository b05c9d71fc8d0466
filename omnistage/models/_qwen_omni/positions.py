"""Positions of a prompt with pictures, by the model's own rule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from omnistage.core.types import ARInput

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def with_positions(
    model: PreTrainedModel,
    payload: ARInput,
    text_ids: tuple[int, ...],
    *,
    use_audio_in_video: bool | None = None,
    after_largest: bool = False,
) -> ARInput:
    """m-RoPE positions of `text_ids`. Without pictures they are 0, 1, 2, ... and need no work.

    `use_audio_in_video` None: as the processor says. What is generated goes on after the last position, as in
    `generate`, or after the largest, where the model's `forward` counts on: those of a picture may be larger than those
    of the sound and text that follow it.
    """
    context = payload.context
    if "image_grid_thw" not in context and "video_grid_thw" not in context:
        return payload
    values = {**context, "second_per_grids": context.get("video_second_per_grid")}
    if use_audio_in_video is not None:
        values["use_audio_in_video"] = torch.tensor(use_audio_in_video)
    positions, delta = rope_positions(model, text_ids, values)
    if not after_largest:
        delta = positions[0, -1] + 1 - len(text_ids)
    return replace(payload, positions=positions, position_delta=delta.item())


def rope_positions(
    module: torch.nn.Module, token_ids: Sequence[int], values: Mapping[str, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """m-RoPE positions `[3, n]` of a prompt by the module's own `get_rope_index`, and what it counts on from.

    Of `values`, those that it takes.
    """
    rule: Any = module.get_rope_index
    ids = torch.tensor([token_ids])
    known = {**values, "attention_mask": torch.ones_like(ids)}
    positions, delta = rule(ids, **{name: known[name] for name in inspect.signature(rule).parameters if name in known})
    return positions[:, 0], delta


def vision_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Peak memory of a vision tower that makes so many tokens.

    It has the most rows a token, `spatial_merge_size` squared. At its peak there are the residual stream, queries, keys
    and values, those rotated in float32 with their halves; or the products of its MLP.
    """
    item, full = dtype.itemsize, torch.float32.itemsize
    pixels = 3 * config.temporal_patch_size * config.patch_size**2 * full
    attention = config.hidden_size * (5 * item + 6 * full)
    products = (2 * config.hidden_size + 3 * config.intermediate_size) * item
    patches: int = tokens * config.spatial_merge_size**2
    return patches * int(pixels + max(attention, products))
