"""What token2wav's cheaper solvers cost: distance to the full one, and how much faster they are.

A random model with the real depth and layer pattern of Qwen2.5-Omni's token2wav at reduced width, each utterance as one
window. Signal-to-noise ratio of the waveform in dB, root mean square distance of the log-mel spectrogram in dB, and
evaluations a second against `full`. A random field is no trained one: measure on your checkpoint with --model.

    python benchmarks/speech_quality.py [--device cuda] [--codes 132] [--gain 2] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from token2wav_streaming import build, snr

from omnistage.bench.quality import mel_distance
from omnistage.core.params import CodecParams, SpeechQuality
from omnistage.engines.codec import Window
from omnistage.engines.codec.flow import SOLVERS
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav


def load(folder: Path, device: str) -> Token2Wav:
    from omnistage.hf import transformers
    from omnistage.models.loading import Checkpoint, load_model
    from omnistage.models.qwen2_5_omni.load import read_config, read_speakers

    whole = read_config(folder, speaks=True)
    model = load_model(
        transformers.Qwen2_5OmniToken2WavModel,
        whole.token2wav_config,
        Checkpoint(folder).tensors("token2wav."),
        torch.device(device),
        torch.float32,
    )
    return Token2Wav(model, read_speakers(folder, whole), device, precision="float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codes", type=int, default=132)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--gain", type=float, default=1.0, help="scale of the DiT's weights: more bends the field more")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder instead of random weights")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    if args.model:
        component = load(args.model, args.device)
    else:
        speakers = {"v": {"cond": torch.randn(1, 16, generator=generator), "ref_mel": torch.randn(1, 50, 80)}}
        component = Token2Wav(build(args.width, args.gain), speakers, args.device, precision="float32")
    codes = tuple(torch.randint(0, 64, (args.codes,), generator=generator).tolist())

    def speak(quality: SpeechQuality, **changes: int) -> tuple[np.ndarray, float]:
        params = CodecParams(seed=7, quality=quality, **changes)
        best = float("inf")
        for _ in range(2):
            state = component.open("r", params, None)
            start = time.perf_counter()
            (wave,) = component.decode([Window(state, codes, 0, len(codes), True)])
            best = min(best, time.perf_counter() - start)
        return wave, best

    reference, whole = speak("full")
    print(f"{'quality':>10}{'rows':>8}{'SNR dB':>9}{'mel dB':>9}{'speed':>8}")
    for quality in get_args(SpeechQuality):
        wave, seconds = speak(quality)
        guided = SOLVERS[quality].guided(10)
        rows = (len(guided) + sum(guided)) / 72  # rows of the DiT, of 36 evaluations with guidance
        distance = mel_distance(wave, reference, 24_000)
        print(f"{quality:>10}{rows:>8.3f}{snr(wave, reference):>9.1f}{distance:>9.3f}{whole / seconds:>8.2f}")


if __name__ == "__main__":
    main()
