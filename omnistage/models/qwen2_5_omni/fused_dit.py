"""The layers of token2wav's DiT on few kernels: four products a layer, Triton for what is between them.

A second way beside `dit._layers`, which stays the reference and runs on every device. The stream between layers is
overwritten in place; queries, keys and values are one product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from omnistage.models.qwen2_5_omni.dit import Neighbours, rotation
from omnistage.models.qwen2_5_omni.dit_kernels import add_norm, block_attention

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import DiTAttention, Qwen2_5OmniToken2WavDiTModel


class FusedLayers:
    """All layers of a DiT and the norm at its end."""

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel) -> None:
        self._dit = dit
        self._qkv = [_merge(layer.attn) for layer in dit.transformer_blocks]
        self._rotation = rotation(dit, 3 * dit.config.block_size)

    def __call__(
        self, rows: Tensor, times: Tensor, near: Neighbours, keep: Tensor, block_states: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """As `dit._layers`. `rows` is overwritten."""
        count, layers = len(rows), self._dit.transformer_blocks
        states: list[Tensor] = []
        gated: tuple[Tensor, Tensor] | None = None  # what a layer adds is added when the next one is normalised
        for layer, (weight, bias), time in zip(layers, self._qkv, times[:-2].view(len(layers), 6, -1), strict=True):
            shift, scale, gate, ff_shift, ff_scale, ff_gate = time
            previous = block_states[len(states)] if layer.look_backward_block else rows[:0]
            norm = rows.new_empty(count + len(previous), *rows.shape[1:], dtype=weight.dtype)
            add_norm(rows, gated, shift, scale, norm[:count], layer.attn_norm.norm.eps)
            if layer.look_backward_block:
                states.append(rows[keep])
                add_norm(previous, None, shift, scale, norm[count:], layer.attn_norm.norm.eps)
            mixed = block_attention(
                functional.linear(norm, weight, bias),
                layer.attn.heads,
                self._rotation,
                near.before if layer.look_backward_block else None,
                near.after if layer.look_ahead_block else None,
                near.valid,
            )
            norm = norm[:count]
            add_norm(rows, (gate, layer.attn.to_out[0](mixed)), ff_shift, ff_scale, norm, layer.ff_norm.eps)
            gated = ff_gate, layer.ff(norm)
        out = torch.empty_like(rows)
        add_norm(rows, gated, times[-2], times[-1], out, self._dit.norm_out.norm.eps)
        return out, states


def _merge(attention: DiTAttention) -> tuple[Tensor, Tensor]:
    """Weight and bias of queries, keys and values as one product; the three layers become views of them."""
    layers = (attention.to_q, attention.to_k, attention.to_v)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = torch.cat([layer.bias.detach() for layer in layers])
    for layer, own_weight, own_bias in zip(layers, weight.chunk(3), bias.chunk(3), strict=True):
        layer.weight.data, layer.bias.data = own_weight, own_bias
    return weight, bias
