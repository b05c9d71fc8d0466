"""What a batch of Qwen2.5-Omni's token2wav asks of the host, and how long it takes alone and beside a busy thread.

    python benchmarks/gpu/token2wav_calls.py [--batch 8] [--blocks 8] [--precision float16] [--quality balanced]

Needs a CUDA device, and the package installed or PYTHONPATH set to the repository. True shapes, random weights, windows
in the middle of their utterances. For a batch without CUDA graphs and with them: calls of torch from Python, replays of
graphs, launches of all kinds as the profiler sees them, and milliseconds. The busy thread is like a language model's
stage: small kernels on a stream of its own, and Python between them. `--device cpu --scale 0` shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch_calls import TorchCalls

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling  # noqa: E402

from omnistage.core.params import CodecParams  # noqa: E402
from omnistage.engines.codec.component import Window  # noqa: E402
from omnistage.models import _tiny_common as common  # noqa: E402
from omnistage.models.qwen2_5_omni import tiny  # noqa: E402
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav  # noqa: E402

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def build(scale: float, device: torch.device, options: Mapping[str, Any]) -> Token2Wav:
    config = tiny.config_for(scale)
    with torch.device(device):
        model = modeling.Qwen2_5OmniToken2WavModel(config.token2wav_config).float().eval()
    rule = tiny.weight_rule(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(common.initial(f"token2wav.{name}", parameter.shape, rule, 0, parameter.device))
    speakers = tiny.speakers(config.thinker_config.text_config.vocab_size)
    return Token2Wav(model, speakers, device, early_vocoder=True, **options)


def launches(run: Callable[[], object]) -> dict[str, int]:
    """By kind, of one run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
    found: dict[str, int] = {}
    for event in seen.key_averages():
        for kind in LAUNCHES:
            if event.key.startswith(kind):
                found[kind] = found.get(kind, 0) + event.count
    return found


@contextmanager
def busy_thread(device: torch.device) -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        row = torch.zeros(64, device=device)
        with torch.inference_mode(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            while not stop.is_set():
                for _ in range(20):
                    row.add_(1)
                    sum(range(1000))
                if stream is not None:
                    stream.synchronize()

    thread = threading.Thread(target=work, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()  # ends with its samples on the host
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="requests")
    parser.add_argument("--blocks", type=int, default=6, help="blocks that a window emits; 2 are looked ahead")
    parser.add_argument("--precision", choices=("float32", "tf32", "float16"), default="float16")
    parser.add_argument("--quality", choices=("full", "balanced", "fast"), default="full")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of the shapes; 1 is the true ones")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    component = build(args.scale, device, {"precision": args.precision})
    block = component.layout.block_codes
    codes = tuple((7 * i) % (component.layout.codebook_size - 1) for i in range((args.blocks + 2) * block))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.batch} windows of {args.blocks} + 2 blocks, {args.precision}")
    for enabled in (False, True) if component._graphs.enabled else (False,):
        component._graphs.enabled = enabled
        params = [CodecParams(seed=i, quality=args.quality) for i in range(args.batch)]
        states = [component.open(str(i), own, None) for i, own in enumerate(params)]
        windows = [Window(state, codes, 0, args.blocks * block, False) for state in states]
        run = lambda windows=windows: component.decode(windows)  # noqa: E731
        for _ in range(3):  # captures; then windows have left context
            run()
        replays = component._graphs.replays
        with TorchCalls() as calls:
            run()
        replays = component._graphs.replays - replays
        kinds = launches(run) if device.type == "cuda" else {}
        alone = milliseconds(run, args.repeats)
        with busy_thread(device):
            beside = milliseconds(run, args.repeats)
        print(f"{'CUDA graphs' if enabled else 'plain'}: {calls.count} calls of torch, {replays} replays", end="")
        print("".join(f", {count} {kind}" for kind, count in kinds.items()), end="")
        print(f"; {alone:.1f} ms alone, {beside:.1f} ms beside a busy thread", flush=True)


if __name__ == "__main__":
    main()
