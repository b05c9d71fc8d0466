"""One evaluation of token2wav's flow field over the blocks of many windows at once, on transformers' own layers.

The DiT attends within blocks of mel frames; a few of its layers also see the block before (look-back) or after
(look-ahead). So blocks are the rows of the batch, whatever windows they belong to: layers that stay within a block need
nothing else, and the few others look up a neighbour by its row. Windows of any length share a forward, no product of
attention is computed to be masked away, and what a window's first block sees on its left is the *kept* rows: the input
of each look-back layer for the block before, as it was when that block was solved.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from omnistage.core.errors import CheckpointError
from omnistage.engines.shared_copy import shared_copy

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import DiTDecoderLayer, Qwen2_5OmniToken2WavDiTModel

    from omnistage.models.qwen2_5_omni.fused_dit import FusedLayers

_MAX_ERROR = 1e-3  # of the largest velocity, in float32


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Rows of the blocks before and after each of n blocks, and what of them holds frames.

    A block without a neighbour names itself: what is masked is still multiplied by zero, and another request's block
    may hold what is not a number.
    """

    before: Tensor
    """`[n]`: a row below n, or n + i for kept row i."""
    after: Tensor
    """`[n]`: a row below n."""
    valid: Tensor
    """`[n, frames]`, bool: frames that exist. An utterance's last block may be cut short."""

    def twice(self, num_rows: int) -> Neighbours:
        """For the rows with guidance and then the same without; each half has half of the `num_rows` that are kept."""
        count, own = len(self.before), self.before < len(self.before)
        before = torch.where(own, self.before, self.before + count)
        return Neighbours(
            torch.cat((before, torch.where(own, before + count, before + num_rows // 2))),
            torch.cat((self.after, self.after + count)),
            torch.cat((self.valid, self.valid)),
        )

    def masks(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which keys of the block before, of the block itself and of the block after count: each `[n, frames]`."""
        rows = torch.arange(len(self.before), device=self.before.device)
        whole = self.valid.new_ones(num_rows, self.valid.shape[1])  # a block that is kept has all its frames
        before = torch.cat((self.valid, whole))[self.before] & (self.before != rows)[:, None]
        after = self.valid[self.after] & (self.after != rows)[:, None]
        return before, self.valid, after


def look_back_layers(dit: Qwen2_5OmniToken2WavDiTModel) -> int:
    """How many layers see the block before: so many rows are kept of a block."""
    return sum(layer.look_backward_block > 0 for layer in dit.transformer_blocks)


def modulation(dit: Qwen2_5OmniToken2WavDiTModel, t: Tensor) -> Tensor:
    """What the time `t [1]` does in every layer and at the end: `[6 × layers + 2, hidden]`.

    It depends on nothing else, so it is computed once for all blocks of all requests.
    """
    signal = functional.silu(dit.time_embed(t))
    parts = []
    for layer in dit.transformer_blocks:
        shift, scale, gate, ff_shift, ff_scale, ff_gate = layer.attn_norm.linear(signal).chunk(6, dim=1)
        parts += [shift, 1 + scale, gate, ff_shift, 1 + ff_scale, ff_gate]
    scale, shift = dit.norm_out.linear(signal).chunk(2, dim=1)
    return torch.cat((*parts, shift, 1 + scale))


def velocity(
    dit: Qwen2_5OmniToken2WavDiTModel, *tensors: Tensor, fused: FusedLayers | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The field at n blocks, as in transformers' `sample`; what guidance adds to it; the rows of the blocks `keep`.

    `x [n, frames, mel]`, `times` as `modulation` gives it, `codes [n, codes]`, `cond [n, enc_emb_dim]`,
    `reference [n, enc_dim + 1]` (see `SpeakerRows`), `scale [1]` or `[0]` for no guidance, `before`, `after` and
    `valid` as in `Neighbours`, `keep [w]` (rows below n), `kept [look-back layers, g × s, frames, hidden]` where g is
    2 with guidance, else 1.
    Gives `[n, frames, mel]` twice (the second with no rows where there is no guidance) and
    `[look-back layers, g × w, frames, hidden]`. `fused` computes the same layers with fewer kernels.
    """
    x, times, codes, cond, reference, scale, before, after, valid, keep, block_states = tensors
    guided = len(scale) > 0
    near = Neighbours(before, after, valid)
    text = dit.text_embed(codes)
    silent = dit.text_embed(codes, drop_code=True) if guided else None
    speaker = cond[:, None].expand(-1, x.shape[1], -1)
    rows = dit.input_embed(x, speaker, reference[:, None], text, code_embed_uncond=silent, apply_cfg=guided)
    if guided:
        near = near.twice(block_states.shape[1])
        keep = torch.cat((keep, keep + len(x)))
    run = functools.partial(_layers, dit) if fused is None else fused
    out, states = run(rows, times, near, keep, block_states)
    plain = dit.proj_out(out)
    guidance = plain[:0]
    if guided:
        plain, without = plain.chunk(2)
        guidance = (plain - without) * scale
    return plain, guidance, torch.stack(states) if states else rows.new_empty(0, len(keep), *rows.shape[1:])


def _layers(
    dit: Qwen2_5OmniToken2WavDiTModel, rows: Tensor, times: Tensor, near: Neighbours, keep: Tensor, block_states: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """All layers and the norm at the end; and the rows `keep` of each look-back layer's input."""
    view = _View(near, near.masks(block_states.shape[1]), rotation(dit, 3 * rows.shape[1]))
    states: list[Tensor] = []
    for layer, time in zip(dit.transformer_blocks, times[:-2].view(-1, 6, times.shape[1]), strict=True):
        previous = None
        if layer.look_backward_block:
            previous = block_states[len(states)]
            states.append(rows[keep])
        rows = _layer(layer, rows, previous, time, view)
    return torch.addcmul(times[-2], dit.norm_out.norm(rows), times[-1]), states


@dataclass(frozen=True, slots=True)
class _View:
    """What the layers of one evaluation share."""

    near: Neighbours
    masks: tuple[Tensor, Tensor, Tensor]
    rotation: tuple[Tensor, Tensor]


def _layer(layer: DiTDecoderLayer, rows: Tensor, previous: Tensor | None, time: Tensor, view: _View) -> Tensor:
    """DiTDecoderLayer.forward on blocks as rows. `left` is there in a look-back layer: its kept rows."""
    shift, scale, gate, ff_shift, ff_scale, ff_gate = time
    attention, count, frames = layer.attn, *rows.shape[:2]
    source = rows if previous is None else torch.cat((rows, previous))
    norm = torch.addcmul(shift, layer.attn_norm.norm(source), scale)
    query, key, value = attention.to_q(norm[:count]), attention.to_k(norm), attention.to_v(norm)
    parts: list[tuple[Tensor, Tensor, Tensor]] = [(key[:count], value[:count], view.masks[1])]
    if previous is not None:
        before = view.near.before
        parts.insert(0, (key[before], value[before], view.masks[0]))
    if layer.look_ahead_block:
        after = view.near.after
        parts.append((key[after], value[after], view.masks[2]))
    keys, values, mask = (torch.cat(part, dim=1) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    first = 0 if previous is None else frames  # positions count from the first key
    mixed = functional.scaled_dot_product_attention(
        _heads(_rotate(query, attention.heads, view.rotation, first), attention.heads),
        _heads(_rotate(keys, attention.heads, view.rotation, 0), attention.heads),
        _heads(values, attention.heads),
        attn_mask=mask[:, None, None],
    )
    rows = torch.addcmul(rows, gate, attention.to_out[0](mixed.transpose(1, 2).flatten(2)).to(rows.dtype))
    norm = torch.addcmul(ff_shift, layer.ff_norm(rows), ff_scale)
    return torch.addcmul(rows, ff_gate, layer.ff(norm).to(rows.dtype))


def rotation(dit: Qwen2_5OmniToken2WavDiTModel, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the sign of the place in a pair: each `[positions, head_dim]`."""
    frequencies: Tensor = dit.rotary_embed.inv_freq.float()
    angles = torch.arange(positions, device=frequencies.device, dtype=frequencies.dtype)[:, None] * frequencies
    sines = torch.stack((-angles.sin(), angles.sin()), dim=-1)
    return angles.cos().repeat_interleave(2, dim=1), sines.flatten(1)


def _rotate(x: Tensor, heads: int, rotation: tuple[Tensor, Tensor], first: int) -> Tensor:
    """Rotate pairs of the first head in place: in Qwen2.5-Omni that one alone knows positions."""
    places = slice(first, first + x.shape[1])
    cos, sin = rotation[0][places], rotation[1][places]
    head = x[..., : x.shape[-1] // heads]
    pairs = head.reshape(*head.shape[:-1], -1, 2)
    head.copy_(torch.addcmul(head * cos, pairs.flip(-1).flatten(-2), sin))
    return x


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[n, heads, positions, head_dim]`."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class SpeakerRows(nn.Module):
    """Stands in for the DiT's speaker encoder, which transformers runs on the reference clip at every evaluation.

    The clip never changes, so each voice is encoded once, and the DiT is given the result in the clip's place: rows
    `[n, 1, enc_dim + 1]` whose last column is 1. Guidance replaces a row by zeros; that stands for the silent clip,
    whose embedding is the same for every length (a constant stays one through reflect padding and pooling).
    """

    silence: Tensor

    def __init__(self, silence: Tensor) -> None:
        super().__init__()
        self.register_buffer("silence", silence, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.where(rows[:, 0, -1:] > 0, rows[:, 0, :-1], self.silence)


class _Exact(nn.Module):
    """Runs a module outside autocast, so that what follows adds up in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            return self.module(x.float())  # type: ignore[no-any-return]


def half_copy(dit: Qwen2_5OmniToken2WavDiTModel) -> Qwen2_5OmniToken2WavDiTModel:
    """A copy whose blocks hold their large matrices in float16; the stream between them stays float32."""
    half = shared_copy(dit, {dit.input_embed.proj: _Exact(dit.input_embed.proj)})
    for layer in half.transformer_blocks:
        for module in (*layer.attn.modules(), *layer.ff.modules()):
            if isinstance(module, nn.Linear):
                for name, tensor in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(tensor.detach().half(), requires_grad=False))
    return half


@torch.no_grad()
def check_velocity(
    dit: Qwen2_5OmniToken2WavDiTModel, cond: Tensor, reference: Tensor, fused: FusedLayers | None = None
) -> None:
    """Hold `velocity` against transformers' own forward, guided and not; raises if this version computes another."""
    config, device, dtype = dit.config, cond.device, cond.dtype
    frames = config.block_size
    size = frames // config.repeats
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, frames, config.mel_dim, generator=generator).to(device, dtype)
    codes = torch.randint(config.num_embeds, (3, size), generator=generator).to(device)
    t = torch.tensor([0.3], device=device, dtype=dtype)
    rows = torch.arange(3, device=device)
    for apply_cfg in (True, False):
        expected = dit(
            hidden_states=x.reshape(1, 3 * frames, -1),
            speaker_embedding=cond[:, None].expand(-1, 3 * frames, -1),
            condition_vector=reference[:, None],
            quantized_code=codes.reshape(1, -1),
            time_step=t,
            apply_cfg=apply_cfg,
        )
        if apply_cfg:
            with_codes, without = expected.chunk(2)
            expected = with_codes + (with_codes - without) * 0.5
        result, guidance, _ = velocity(
            dit,
            *(x, modulation(dit, t), codes, cond.expand(3, -1), reference.expand(3, -1)),
            torch.full((int(apply_cfg),), 0.5, device=device, dtype=dtype),
            *((rows - 1).clamp(min=0), (rows + 1).clamp(max=2)),
            torch.ones(3, frames, dtype=torch.bool, device=device),
            rows[2:],
            torch.empty(look_back_layers(dit), 0, frames, config.hidden_size, device=device, dtype=dtype),
            fused=fused,
        )
        result = result + guidance if apply_cfg else result
        error = (result.reshape(expected.shape) - expected).abs().max()
        if not bool(error <= _MAX_ERROR * expected.abs().max()):  # also where it is not a number
            raise CheckpointError(
                f"token2wav's DiT differs from this version of transformers by {float(error):.3g}; install a version "
                "of transformers that omnistage was tested with, see pyproject.toml"
            )
