"""Microseconds that the sampler adds to a step, for batches of 16 rows over 32,000 tokens.

    python benchmarks/sampler_overhead.py [--rows 16] [--vocab 32000] [--device cpu] [--slope 1.5] [--steps 50]

Probabilities fall with the rank to the power of `--slope`: about 1.5 for a language model; 1 and below spread the mass
over thousands of tokens, the worst case for top-p and plain temperature. Times are the processor's (`--clock wall` for
the wall's), so that a busy machine does not blur them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling.sampler import Sampler

CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p 0.9 + temperature": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 40": {"top_k": 40},
    "top_k 40 + top_p 0.9": {"top_k": 40, "top_p": 0.9, "temperature": 0.8},
    "greedy + repetition": {"temperature": 0.0, "repetition_penalty": 1.1},
    "top_k 40 + all penalties": {"top_k": 40, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "greedy + 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def measure(
    params: SamplingParams, logits: torch.Tensor, steps: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Median and minimum microseconds of one `sample` call on an unchanged batch."""
    sampler = Sampler(logits.shape[1], logits.device)
    keys = [f"request-{row}" for row in range(len(logits))]
    for row, key in enumerate(keys):
        sampler.add(key, params.model_copy(update={"seed": row}), prompt_token_ids=range(100))
    times = []
    for _ in range(steps + 3):
        start = clock()
        sampler.sample(logits, keys)
        times.append(clock() - start)
    return statistics.median(times[3:]) * 1e6, min(times[3:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--slope", type=float, default=1.5)
    parser.add_argument("--clock", default="cpu", choices=("cpu", "wall"))
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    ranks = torch.stack([torch.randperm(args.vocab) for _ in range(args.rows)])
    logits = -args.slope * (ranks + 1).log() + 0.1 * torch.randn(args.rows, args.vocab)
    logits = logits.to(args.device, getattr(torch, args.dtype))
    print(f"{args.rows} rows x {args.vocab} tokens, {args.device}, {args.dtype}, {torch.get_num_threads()} threads")
    clock = time.perf_counter if args.clock == "wall" else time.thread_time
    with torch.inference_mode():
        for name, values in CASES.items():
            median, minimum = measure(SamplingParams.parse(values), logits, args.steps, clock)
            print(f"{name:<28}{median:>10.0f} us, at best {minimum:.0f}")


if __name__ == "__main__":
    main()
