"""Times BigVGAN at Qwen2.5-Omni's shapes with its activations as one Triton kernel each and as transformers' modules.

    python benchmarks/gpu/vocoder.py [--batch 8] [--frames 240]

Needs a CUDA device, and the package installed or PYTHONPATH set to the repository. Both sides are replayed from a CUDA
graph, as the engine runs them, with random weights. GB/s counts each sample read once and written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import triton.testing
from torch import Tensor

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling  # noqa: E402

from omnistage.engines.graphs import GraphCache, allow_tf32  # noqa: E402
from omnistage.models import _tiny_common as common  # noqa: E402
from omnistage.models.qwen2_5_omni import tiny  # noqa: E402
from omnistage.models.qwen2_5_omni.vocoder import bigvgan, fuse_activations  # noqa: E402


def microseconds(function: Callable[[Tensor], Tensor], x: Tensor, calls: int = 1) -> float:
    """Median time of one call, over a graph of `calls` of them, each on the output of the last."""

    def repeat(x: Tensor) -> tuple[Tensor]:
        for _ in range(calls):
            x = function(x)
        return (x,)

    graphs = GraphCache(enabled=True)
    run = lambda: graphs("key", repeat, x)  # noqa: E731
    run()
    if not graphs.captures:
        raise SystemExit("the call could not be captured as a CUDA graph")
    return float(triton.testing.do_bench(run, warmup=20, rep=200, return_mode="median")) * 1e3 / calls


def difference(result: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The largest difference as a share of the largest value, without TF32, whose rounding would hide it."""
    torch.backends.cudnn.allow_tf32 = False
    expected = reference(x)
    error = float((result(x) - expected).abs().max() / expected.abs().max())
    torch.backends.cudnn.allow_tf32 = True
    return error


def build() -> modeling.Qwen2_5OmniToken2WavBigVGANModel:
    config = tiny.config_for(1.0)
    with torch.device("cuda"):
        vocoder = modeling.Qwen2_5OmniToken2WavBigVGANModel(config.token2wav_config.bigvgan_config).eval()
    rule = tiny.weight_rule(config)
    for name, parameter in vocoder.named_parameters():
        name = f"token2wav.code2wav_bigvgan_model.{name}"
        parameter.copy_(common.initial(name, parameter.shape, rule, 0, parameter.device))
    return vocoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--frames", type=int, default=240)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    plain = build()
    fused = fuse_activations(plain)
    print(f"{torch.cuda.get_device_name()}, {args.batch} x {args.frames} mel frames, TF32")
    print("activation  channels  samples | modules us   GB/s | kernel us   GB/s | relative error")
    length = args.frames
    for stage, rate in enumerate(plain.config.upsample_rates):
        length *= rate
        block = stage * plain.num_residual_blocks
        before, after = (vocoder.resblocks[block].activations[0] for vocoder in (plain, fused))
        x = torch.randn(args.batch, before.act.in_features, length, device="cuda")
        error = difference(after, before, x)
        cells = []
        for module in (before, after):
            us = microseconds(module, x, calls=16)  # the graph's copy of its input is a small part
            cells.append(f"{us:10.1f} {2 * x.nbytes / us / 1e3:6.0f}")
        print(f"            {x.shape[1]:8d} {length:8d} | " + " | ".join(cells) + f" | {error:.1e}")
    spectrogram = torch.randn(args.batch, plain.config.mel_dim, args.frames, device="cuda").clamp(-1, 1)
    calls = [partial(bigvgan, vocoder) for vocoder in (plain, fused)]
    error = difference(calls[1], calls[0], spectrogram)
    times = [microseconds(call, spectrogram) / 1e3 for call in calls]
    print(f"whole vocoder: modules {times[0]:.1f} ms, kernel {times[1]:.1f} ms, relative error {error:.1e}")


if __name__ == "__main__":
    with torch.inference_mode(), allow_tf32(True):
        main()
