"""How close streamed speech comes to the whole utterance, against look-ahead and chunk size.

A random model with the real depth and layer pattern of Qwen2.5-Omni's token2wav at reduced width. Prints the
signal-to-noise ratio in dB of the streamed waveform against the same utterance decoded as one window. Random weights
mix blocks in their own way: read the trend, not the last decibel.

    python benchmarks/token2wav_streaming.py [--device cuda] [--codes 132] [--early]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.params import CodecParams
from omnistage.core.types import AudioChunk, CodecInput, RequestInfo, StageInput
from omnistage.engines.codec import CodecStage, Window

prepare_torchvision(required=False)

from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig  # noqa: E402
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel  # noqa: E402

from omnistage.models.qwen2_5_omni.token2wav import Token2Wav  # noqa: E402

CHUNKS = (1, 2, 4)
LOOKAHEADS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Budget:
    lookahead_blocks: int
    max_chunk_blocks: int
    first_chunk_blocks: int = 1
    max_batch: int = 8
    max_running: int = 64
    max_hold_seconds: float = 3.0


def build(width: int, gain: float, seed: int = 0) -> Qwen2_5OmniToken2WavModel:
    """Layers that keep their signal's size (times `gain`), so that attention across blocks matters."""
    dit = {
        "hidden_size": width,
        "num_hidden_layers": 22,
        "num_attention_heads": 4,
        "head_dim": width // 4,
        "emb_dim": 32,
        "look_ahead_layers": [10],
        "look_backward_layers": [0, 20],
        "num_embeds": 64,
        "enc_emb_dim": 16,
        "enc_dim": 12,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
    }
    vocoder = {"upsample_initial_channel": 64}
    model = Qwen2_5OmniToken2WavModel(Qwen2_5OmniToken2WavConfig(dit_config=dit, bigvgan_config=vocoder)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fan_in = weight.shape[0] * 2 if ".ups." in name else weight[0].numel()
            deviation = fan_in**-0.5 if weight.dim() > 1 else 0.05
            if "transformer_blocks" in name and weight.dim() > 1:
                deviation *= gain
            if "codec_embed" in name:
                deviation = 1.0
            if "conv_post" in name:
                deviation *= 0.05
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    return model


def streamed(component: Token2Wav, budget: Budget, codes: tuple[int, ...], params: CodecParams) -> np.ndarray:
    stage = CodecStage("token2wav", component, budget)
    stage.submit(StageInput(RequestInfo("r"), params, CodecInput(codes, final=True)))
    return np.concatenate([c.payload.samples for c in stage.drain() if isinstance(c.payload, AudioChunk)])


def snr(got: np.ndarray, want: np.ndarray) -> float:
    return float(10 * np.log10(np.square(want).sum() / max(float(np.square(got - want).sum()), 1e-30)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codes", type=int, default=132)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--gain", type=float, default=1.0, help="scale of the DiT's weights: more mixes blocks more")
    parser.add_argument("--early", action="store_true", help="BigVGAN's right context from the look-ahead")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    speakers = {"v": {"cond": torch.randn(1, 16, generator=generator), "ref_mel": torch.randn(1, 50, 80)}}
    model = build(args.width, args.gain)
    component = Token2Wav(model, speakers, args.device, early_vocoder=args.early, precision="float32")
    codes = tuple(torch.randint(0, 64, (args.codes,), generator=generator).tolist())
    params = CodecParams(seed=7)
    (want,) = component.decode([Window(component.open("r", params, None), codes, 0, len(codes), True)])
    print(f"{args.codes} codes, {want.size} samples of deviation {want.std():.3f}; SNR in dB, lengths in blocks")
    print("look-ahead" + "".join(f"{f'chunk {c}':>10}" for c in CHUNKS) + f"{'seconds':>10}")
    for lookahead in LOOKAHEADS:
        start = time.perf_counter()
        row = [snr(streamed(component, Budget(lookahead, chunk), codes, params), want) for chunk in CHUNKS]
        seconds = time.perf_counter() - start
        print(f"{lookahead:>10}" + "".join(f"{value:>10.1f}" for value in row) + f"{seconds:>10.1f}")


if __name__ == "__main__":
    main()
