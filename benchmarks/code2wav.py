"""What streaming Qwen3-Omni's code2wav costs against one forward over the whole utterance, and how far it is off.

    python benchmarks/code2wav.py [--frames 60] [--width 1.0] [--threads 1]

Random weights in float32 on the CPU. `streamed` is the component with the windows of the engine; `left context` is what
windows without state would do: each computes 25 frames before it again, as transformers' `chunked_decode` does, or as
many as attention can see (sliding window × layers). Seconds are the processor's; ratios are to the whole forward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.params import CodecParams
from omnistage.engines.codec import Window

prepare_torchvision(required=False)

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig  # noqa: E402
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav  # noqa: E402

from omnistage.models.qwen3_omni_moe.code2wav import Code2Wav  # noqa: E402


def build(width: float) -> Qwen3OmniMoeCode2Wav:
    """True depth and rates; layers keep their signal's size, so that what lies far back still counts."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "decoder_dim": 1536, "num_attention_heads": 16}
    scaled = {name: max(16, int(size * width) // 16 * 16) for name, size in sizes.items()}
    config = Qwen3OmniMoeCode2WavConfig(**{**scaled, "num_key_value_heads": scaled["num_attention_heads"]})
    model = Qwen3OmniMoeCode2Wav(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                fan_in = 2 * weight.shape[0] if ".block.1.conv" in name else weight[0].numel()
                gain = 0.1 if name.startswith("decoder.6.") else 0.75
                weight.normal_(std=1.0 if "code_embedding" in name else gain * fan_in**-0.5, generator=generator)
            elif "scale" in name or "gamma" in name:
                weight.fill_(0.5)
    return model


def windows(frames: int, first: int, longest: int) -> Iterator[int]:
    """Sizes as the engine's scheduler has them: each as long as all before it."""
    done = 0
    while done < frames:
        size = min(max(first, done), longest, frames - done)
        yield size
        done += size


def streamed(component: Code2Wav, codes: torch.Tensor, sizes: Sequence[int]) -> np.ndarray:
    frames = tuple(tuple(frame) for frame in codes[0].T.tolist())
    state, done, waves = component.open("r", CodecParams(), None), 0, []
    for size in sizes:
        last = done + size == len(frames)
        waves += component.decode([Window(state, frames[done : done + size], 0, size, last)])
        done += size
    return np.concatenate(waves)


def left_context(model: Qwen3OmniMoeCode2Wav, codes: torch.Tensor, sizes: Sequence[int], context: int) -> np.ndarray:
    """Windows without state; each gives what its own last frames complete."""
    rate, done, sent, waves = int(model.total_upsample), 0, 0, []
    for size in sizes:
        start = max(0, done - context)
        wave = model(codes[:, :, start : done + size])[0, 0]
        waves.append(wave[sent - start * rate :])
        sent, done = start * rate + len(wave), done + size
    return torch.cat(waves).numpy()


def snr(wave: np.ndarray, expected: np.ndarray) -> float:
    return float(10 * np.log10(np.square(expected).sum() / max(float(np.square(wave - expected).sum()), 1e-30)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=60, help="80 ms each")
    parser.add_argument("--width", type=float, default=1.0, help="of the true model's layers")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args.width)
    component, config = Code2Wav(model), model.config
    codes = torch.randint(0, config.codebook_size, (1, config.num_quantizers, args.frames))
    field = (config.sliding_window - 1) * config.num_hidden_layers
    steady = list(windows(args.frames, 4, 16))
    cases: dict[str, Callable[[], np.ndarray]] = {
        "whole forward": lambda: model(codes)[0, 0].numpy(),
        "streamed, one window": lambda: streamed(component, codes, [args.frames]),
        "streamed, 4 4 8 16 16 ...": lambda: streamed(component, codes, steady),
        "streamed, 4 at a time": lambda: streamed(component, codes, list(windows(args.frames, 4, 4))),
        "left context 25, 4 4 8 16 ...": lambda: left_context(model, codes, steady, 25),
        "left context 25, 4 at a time": lambda: left_context(model, codes, list(windows(args.frames, 4, 4)), 25),
        f"left context {field}, 4 4 8 16 ...": lambda: left_context(model, codes, steady, field),
    }
    print(f"{args.frames} frames, {args.frames * 0.08:.1f} s of sound, {args.threads} thread(s), width {args.width}")
    print(f"{'':<32}{'seconds':>9}{'ratio':>7}{'largest error':>15}{'SNR, dB':>9}")
    expected, base = np.zeros(0), 0.0
    with torch.inference_mode():
        model(codes[:, :, :4])
        for name, case in cases.items():
            start = time.process_time()
            wave = case()
            seconds = time.process_time() - start
            if not base:
                expected, base = wave, seconds
            off = np.abs(wave - expected).max()
            print(f"{name:<32}{seconds:>9.2f}{seconds / base:>7.2f}{off:>15.1e}{snr(wave, expected):>9.0f}")
        start = time.process_time()
        first = streamed(component, codes[:, :, :4], [4])
        seconds = time.process_time() - start
        print(f"the samples' deviation is {expected.std():.2f}")
        print(f"first 4 frames: {seconds:.3f} s for {first.size / 24_000:.3f} s of sound")


if __name__ == "__main__":
    main()
