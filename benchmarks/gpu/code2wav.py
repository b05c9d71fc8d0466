"""Times Qwen3-Omni's code2wav at its true shapes, streamed as the codec engine runs it.

    python benchmarks/gpu/code2wav.py [--dtypes float32,tf32,float16,bfloat16] [--requests 1,8,32] [--sizes 2,4,8,16]

Needs a CUDA device, and the package installed or PYTHONPATH set to the repository. Random weights, built on the device.
A window's time is the whole call: codes from the host, a replayed graph, samples back on the host. `x` is how many
seconds of sound come out in a second. SNR is against float32 without TF32; random layers amplify rounding, so that of
real weights is higher. Last: the activations as transformers' modules, and the layers without graphs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.params import CodecParams
from omnistage.engines.codec import Window

prepare_torchvision(required=False)

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig  # noqa: E402
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav  # noqa: E402

from omnistage.models.qwen3_omni_moe.code2wav import Code2Wav  # noqa: E402

FRAME_SECONDS = 0.08
Frames = tuple[tuple[int, ...], ...]


def build(dtype: torch.dtype) -> Qwen3OmniMoeCode2Wav:
    """Layers that keep their signal's size."""
    with torch.device("cuda"):
        model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig()).eval()
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                fan_in = 2 * weight.shape[0] if ".block.1.conv" in name else weight[0].numel()
                gain = 0.1 if name.startswith("decoder.6.") else 0.75
                weight.normal_(std=1.0 if "code_embedding" in name else gain * fan_in**-0.5, generator=generator)
    angles = model.pre_transformer.rotary_emb
    frequencies = angles.inv_freq
    model.to(dtype)
    angles.inv_freq = frequencies  # in float32, as it is loaded
    return model


def random_frames(count: int, seed: int) -> Frames:
    codes = np.random.default_rng(seed).integers(0, 2048, (count, 16))
    return tuple(tuple(frame) for frame in codes.tolist())


def decode(component: Code2Wav, states: list[object], size: int) -> list[np.ndarray]:
    frames = random_frames(size, seed=size)
    return component.decode([Window(state, frames, 0, size, False) for state in states])


def milliseconds(component: Code2Wav, requests: int, size: int, *, first: bool, repeats: int = 30) -> float:
    """Median time of a batch of windows."""
    times = []
    states = [component.open(str(i), CodecParams(), None) for i in range(requests)]
    decode(component, states, size)
    for _ in range(repeats):
        if first:
            states = [component.open(str(i), CodecParams(), None) for i in range(requests)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        decode(component, states, size)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def utterance(component: Code2Wav) -> np.ndarray:
    frames, state, done, waves = random_frames(40, seed=1), component.open("r", CodecParams(), None), 0, []
    for size in (4, 4, 8, 16, 8):
        waves += component.decode([Window(state, frames[done : done + size], 0, size, done + size == 40)])
        done += size
    return np.concatenate(waves)


def snr(wave: np.ndarray, expected: np.ndarray) -> float:
    return float(10 * np.log10(np.square(expected).sum() / max(float(np.square(wave - expected).sum()), 1e-30)))


def exact() -> np.ndarray:
    """transformers' forward over the utterance in float32."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    with torch.inference_mode():
        codes = torch.tensor(random_frames(40, seed=1), device="cuda").T[None]
        wave = build(torch.float32)(codes)[0, 0].cpu().numpy()
    torch.backends.cudnn.allow_tf32 = before
    return np.asarray(wave)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32,tf32,float16,bfloat16")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--sizes", default="2,4,8,16")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    sizes, requests = ([int(value) for value in text.split(",")] for text in (args.sizes, args.requests))
    expected = exact()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms a batch of windows")
    header = "".join(f"{f'{size} frames':>12}{'x':>7}" for size in sizes)
    for name in args.dtypes.split(","):
        torch.backends.cudnn.allow_tf32 = name == "tf32"
        model = build(getattr(torch, name) if name != "tf32" else torch.float32)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with torch.device("meta"):
            meta = Qwen3OmniMoeCode2Wav(model.config).to(model.dtype)
        plan = Code2Wav(meta, target=torch.device("cuda")).memory(max(1, 128 // sizes[-1]), sizes[-1], sizes[0])
        component = Code2Wav(model)
        start = time.perf_counter()
        component.warm_up(sizes, 0, 128)
        seconds, taken = time.perf_counter() - start, torch.cuda.memory_reserved() - before
        print(
            f"\n{name}: {component._graphs.captures} graphs in {seconds:.1f} s and {taken / 2**20:.0f} MiB (planned "
            f"{(plan.graphs + plan.activations) / 2**20:.0f}), {component.request_bytes / 2**20:.1f} MiB a request, "
            f"SNR {snr(utterance(component), expected):.0f} dB"
        )
        print(f"{'requests':>10}{header}{'first ' + str(sizes[0]):>12}")
        for count in requests:
            cells = ""
            for size in sizes:
                ms = milliseconds(component, count, size, first=False)
                cells += f"{ms:>12.2f}{count * size * FRAME_SECONDS / ms * 1e3:>7.0f}"
            print(f"{count:>10}{cells}{milliseconds(component, count, sizes[0], first=True):>12.2f}")
        component.close()
        plain = Code2Wav(model, kernels="torch")
        plain.warm_up(sizes, 0, 128)
        eager = Code2Wav(model, cuda_graphs=False)
        size, count = sizes[-1], requests[len(requests) // 2]
        times = [milliseconds(each, count, size, first=False) for each in (plain, eager)]
        print(f"{count} x {size}: modules' activations {times[0]:.2f} ms, without graphs {times[1]:.2f} ms")
        plain.close()


if __name__ == "__main__":
    main()
