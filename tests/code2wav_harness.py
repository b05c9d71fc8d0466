"""A small code2wav with random weights that keep its signal's size, and ways to run it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig  # noqa: E402
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav  # noqa: E402

from omnistage.core.params import CodecParams  # noqa: E402
from omnistage.engines.codec import CodecComponent, Window  # noqa: E402

SMALL: dict[str, object] = {
    "codebook_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_quantizers": 4,
    "upsample_rates": (4, 3, 2),
    "upsampling_ratios": (2, 2),
    "decoder_dim": 32,
    "max_position_embeddings": 400,
}
Frames = tuple[tuple[int, ...], ...]


def build(dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: object) -> Qwen3OmniMoeCode2Wav:
    """Layers that keep their signal's size, so that what lies far back still counts."""
    model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**{**SMALL, **changes})).eval()
    generator = torch.Generator().manual_seed(0)
    last = f"decoder.{len(model.decoder) - 1}."
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                middle = 1.0 if "norm" in name and name.endswith("weight") else 0.5 if "scale" in name else 0.0
                weight.copy_((0.5 if "gamma" in name else middle) + 0.1 * noise)
                continue
            fan_in = 2 * weight.shape[0] if ".block.1.conv" in name else weight[0].numel()
            gain = 0.1 if name.startswith(last) else 0.75  # clear of the clamp, and of chaos
            weight.copy_(noise * (2.0 if "code_embedding" in name else gain * fan_in**-0.5))
    angles = model.pre_transformer.rotary_emb
    frequencies = angles.inv_freq.to(device)
    model.to(device, dtype)
    angles.inv_freq = frequencies  # in float32, as it is loaded
    return model


def random_frames(model: Qwen3OmniMoeCode2Wav, count: int, seed: int = 1) -> Frames:
    shape = count, model.config.num_quantizers
    codes = torch.randint(0, model.config.codebook_size, shape, generator=torch.Generator().manual_seed(seed))
    return tuple(tuple(frame) for frame in codes.tolist())


def reference(model: Qwen3OmniMoeCode2Wav, frames: Frames) -> np.ndarray:
    """transformers' forward over the whole utterance."""
    with torch.no_grad():
        wave = model(torch.tensor(frames, device=model.device).T[None])[0, 0]
    return np.asarray(wave.double().cpu().numpy())


def stream(component: CodecComponent, frames: Frames, cuts: Sequence[int]) -> np.ndarray:
    """One request by itself, in windows of these sizes; the rest is its last window."""
    state, done, waves = component.open("r", CodecParams(), None), 0, []
    for count in (*cuts, len(frames) - sum(cuts)):
        window = Window(state, frames[done : done + count], 0, count, done + count == len(frames))
        waves += component.decode([window])
        done += count
    return np.concatenate(waves)


def error(wave: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference; of unequal lengths it is infinite."""
    return float(np.abs(wave - expected).max()) if wave.shape == expected.shape else float("inf")
