"""Token2wav's DiT on Triton against the same on torch: `python -m tests.dit_harness` prints how far they are apart.

Triton's interpreter is chosen when a kernel is defined and holds for the whole process, so without a GPU the comparison
runs in a child process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig  # noqa: E402
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel  # noqa: E402

from omnistage.models.qwen2_5_omni.blocks import BlockBatch, WindowRows  # noqa: E402
from omnistage.models.qwen2_5_omni.dit import (  # noqa: E402
    SpeakerRows,
    half_copy,
    look_back_layers,
    modulation,
    velocity,
)
from omnistage.models.qwen2_5_omni.fused_dit import FusedLayers  # noqa: E402

LAYERS: dict[str, object] = {
    "num_hidden_layers": 4,
    "look_backward_layers": [0, 2],  # one sees the block before, one that after, one both, one neither
    "look_ahead_layers": [1, 2],
    "num_embeds": 64,
    "enc_dim": 12,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
}
SMALL: dict[str, object] = {
    **LAYERS,
    "hidden_size": 48,  # not a power of two, nor is the size of a block
    "num_attention_heads": 3,
    "head_dim": 16,
    "emb_dim": 32,
    "mel_dim": 20,
    "enc_emb_dim": 16,
    "block_size": 6,
}
LARGE: dict[str, object] = {**LAYERS, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 64}
UTTERANCES = {
    # codes of each window in blocks, and whether a block before it is kept
    "one block": [(1.0, False)],
    "one short block after another": [(0.34, True)],
    "several": [(2.67, True), (0.67, False), (2.0, True), (1.0, True)],
}


def build(config: dict[str, object], device: str) -> Qwen2_5OmniToken2WavDiTModel:
    """A random model whose layers keep their signal's size, so that every block depends on its neighbours."""
    dit = Qwen2_5OmniToken2WavDiTModel(Qwen2_5OmniDiTConfig(**config)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in dit.named_parameters():
            deviation = weight[0].numel() ** -0.5 if weight.dim() > 1 and "codec_embed" not in name else 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    dit.input_embed.spk_encoder = SpeakerRows(torch.randn(1, dit.config.enc_dim, generator=generator))
    return dit.requires_grad_(False).to(device)


def batch_of(
    dit: Qwen2_5OmniToken2WavDiTModel,
    windows: Sequence[tuple[float, bool]],
    kept: dict[bool, tuple[int, int, int]],
    *,
    padded: bool,
    seed: int = 0,
) -> BlockBatch:
    """Windows in the middle or at the ends of utterances. `kept` is intervals, evaluations, g of each kind."""
    config, device = dit.config, dit.proj_out.weight.device
    generator = torch.Generator().manual_seed(seed)
    size, layers = config.block_size // config.repeats, look_back_layers(dit)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = []
    for length, has_left in windows:
        codes = torch.randint(config.num_embeds, (max(1, round(length * size)),), generator=generator).tolist()
        rows.append(
            WindowRows(
                codes=codes,
                noise=noise(len(codes) * config.repeats, config.mel_dim),
                cond=noise(1, config.enc_emb_dim).to(device),
                reference=torch.cat((noise(1, config.enc_dim), torch.ones(1, 1)), dim=1).to(device),
                context={
                    kind: noise(intervals, count, layers, g, config.block_size, config.hidden_size).to(device)
                    for kind, (intervals, count, g) in kept.items()
                }
                if has_left
                else None,
                emit_blocks=1,
            )
        )
    return BlockBatch(rows, size, config.repeats, device, padded=padded)


def inputs(
    dit: Qwen2_5OmniToken2WavDiTModel, windows: Sequence[tuple[float, bool]], guided: bool, padded: bool, seed: int = 0
) -> tuple[Tensor, ...]:
    """What `velocity` takes."""
    config, device, layers, g = dit.config, dit.proj_out.weight.device, look_back_layers(dit), 1 + guided
    batch = batch_of(dit, windows, {guided: (1, 1, g)}, padded=padded, seed=seed)
    (left,) = batch.contexts(
        guided, 1, torch.empty(0, 1, layers, g, config.block_size, config.hidden_size, device=device)
    )
    left = left[:, 0].permute(1, 2, 0, 3, 4).flatten(1, 2).contiguous()
    times = modulation(dit, torch.tensor([0.3], device=device))
    scale = torch.full((int(guided),), 0.5, device=device)
    condition = (batch.codes, batch.cond, batch.reference, scale)
    return (batch.noise.to(device), times, *condition, *batch.neighbours, batch.keep, left)


Velocity = Callable[..., tuple[Tensor, ...]]


def velocities(dit: Qwen2_5OmniToken2WavDiTModel, device: str) -> dict[str, Velocity]:
    """`velocity` on torch and on Triton, in float32 and in half precision."""
    half = half_copy(dit)
    fused, fused_half = FusedLayers(dit), FusedLayers(half)

    def in_half(layers: FusedLayers | None) -> Velocity:
        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            with torch.autocast(device, dtype=torch.float16, cache_enabled=False):
                return tuple(tensor.float() for tensor in velocity(half, *tensors, fused=layers))

        return run

    return {
        "torch": lambda *tensors: velocity(dit, *tensors),
        "triton": lambda *tensors: velocity(dit, *tensors, fused=fused),
        "torch half": in_half(None),
        "triton half": in_half(fused_half),
    }


def errors(config: dict[str, object], device: str) -> dict[str, dict[str, float]]:
    """For each case, by how much of the largest value each way differs from torch in float32."""
    dit = build(config, device)
    ways = velocities(dit, device)
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, windows in UTTERANCES.items():
            for guided, padded in ((True, True), (False, False)):
                given = inputs(dit, windows, guided, padded)
                expected = ways["torch"](*given)
                found[f"{name}, {guided=}, {padded=}"] = {
                    way: distance(function(*given), expected) for way, function in ways.items() if way != "torch"
                }
    return found


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, as a share of the largest value of its tensor; infinite where a value is not finite."""
    shares = [0.0]
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or not bool(one.isfinite().all()):
            return float("inf")
        if one.numel():
            shares.append(float((one - other).abs().max() / other.abs().max()))
    return max(shares)


def check(found: dict[str, dict[str, float]], exact: float) -> None:
    for case, error in found.items():
        assert error["triton"] < exact, (case, error)
        assert error["triton half"] < max(2 * error["torch half"], 1e-3), (case, error)
        assert error["torch half"] < 5e-2, (case, error)


if __name__ == "__main__":
    print(json.dumps(errors(SMALL, "cpu")))
