"""The diffusion transformer: diffusers' class, in pixel space."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

PATCH = 6
CONFIG = {
    "patch_size": 1,
    "in_channels": 3 * PATCH * PATCH,
    "num_layers": 1,
    "num_single_layers": 8,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 576,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (16, 16, 16, 16),
    "guidance_embeds": False,
}
MIN_SIGMA = 0.05
"""Velocities at lower noise levels are computed with this one."""


def initialise(model: nn.Module) -> nn.Module:
    """Blocks start as the identity, and the output at zero."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            still = "modulation" in name or name in ("norm_out.linear", "proj_out")
            nn.init.zeros_(module.weight) if still else nn.init.xavier_uniform_(module.weight)
    return model


def patches(pictures: Tensor) -> Tensor:
    """`[B, 3, S, S]` → `[B, (S / PATCH)², 3 · PATCH²]`."""
    return pixel_unshuffle(pictures, PATCH).flatten(2).transpose(1, 2)


def pictures(rows: Tensor) -> Tensor:
    side = int(rows.shape[1] ** 0.5)
    return pixel_shuffle(rows.transpose(1, 2).unflatten(2, (side, side)), PATCH)


def position_ids(side: int, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Positions of patches and of text rows, as FLUX.2's pipeline numbers them."""
    high, wide = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    nothing = torch.zeros_like(high)
    image = torch.stack([nothing, high, wide, nothing], -1).reshape(-1, 4)
    text = torch.zeros(rows, 4, dtype=torch.int64)
    text[:, 3] = torch.arange(rows)
    return {"img_ids": image.to(device), "txt_ids": text.to(device)}


def clean(model: Any, noisy: Tensor, sigma: Tensor, text: Tensor, where: dict[str, Tensor]) -> Tensor:
    """The network's prediction of the clean patches."""
    predicted: Tensor = model(
        hidden_states=noisy, encoder_hidden_states=text, timestep=sigma, guidance=None, return_dict=False, **where
    )[0]
    return predicted


@torch.no_grad()
def sample(
    model: Any,
    text: Tensor,
    generator: torch.Generator,
    *,
    side: int,
    steps: int,
    guidance: float,
    shift: float,
    bounded: bool = True,
) -> Tensor:
    """EmojiSet `[B, 3, S, S]` by Euler steps along the flow; `bounded` keeps predictions within the colours."""
    where = position_ids(side, text.shape[1], text.device)
    rows = torch.randn(len(text), side * side, CONFIG["in_channels"], generator=generator, device=text.device)  # type: ignore[call-overload]
    times = torch.linspace(1, 1 / steps, steps, device=text.device)
    sigmas = torch.cat([shift * times / (1 + (shift - 1) * times), torch.zeros(1, device=text.device)])
    both = torch.cat([text, torch.zeros_like(text)])
    for now, then in itertools.pairwise(sigmas):
        predicted = clean(model, torch.cat([rows, rows]), now.expand(len(both)), both, where).float()
        with_text, without = predicted.chunk(2)
        guided = without + guidance * (with_text - without)
        guided = guided.clamp(-1, 1) if bounded else guided
        velocity = (rows - guided) / now.clamp(min=MIN_SIGMA)
        rows = rows + (then - now) * velocity
    return pictures(rows)
