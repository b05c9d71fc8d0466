"""Text on a GPU, the engine alone: Qwen2.5-Omni's thinker at its true 7B shapes, random weights.

    python benchmarks/gpu/text.py [--variants plain ahead merged compiled] [--out text.json] [--trace trace.json]
    python benchmarks/gpu/text.py --inductor combo_kernels coordinate_descent_tuning triton.enable_pdl

Each variant adds to the one before it: `plain` reads every step's tokens before the next is launched, `ahead` launches
the next one first, `merged` computes queries, keys and values (and gate and up) as one product, `compiled` compiles the
layers. `--inductor` measures compiled layers once more with each of these switches of torch's compiler on; several in
one, with commas.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from qwen2_5_omni import build, synchronize

from omnistage.config.schema import ARBudget
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageInput
from omnistage.engines.ar.stage import ARStage
from omnistage.models.qwen2_5_omni.components import Thinker

CASES = ((1, 128, 128), (8, 128, 128), (64, 128, 128), (256, 256, 256))
VARIANTS = {
    "plain": {"run_ahead": False, "merge_linears": False, "compile": False},
    "ahead": {"run_ahead": True, "merge_linears": False, "compile": False},
    "merged": {"run_ahead": True, "merge_linears": True, "compile": False},
    "compiled": {"run_ahead": True, "merge_linears": True, "compile": True},
}


def budget(variant: str, largest: int) -> ARBudget:
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= largest]
    return ARBudget(
        max_model_len=1024,
        max_running=largest,
        max_batch_tokens=8192,
        graph_batch_sizes=tuple(sizes),
        kv_memory="24GiB" if torch.cuda.is_available() else "256MiB",
        prefix_caching=False,
        **VARIANTS[variant],  # type: ignore[arg-type]
    )


def run(stage: ARStage, count: int, prompt: int, tokens: int, **sampling: Any) -> dict[str, Any]:
    """Seconds for `count` requests at once, and how they divide."""
    vocab = min(stage.component.spec.vocab_size, 100_000)
    ids = torch.randint(0, vocab, (count, prompt), generator=torch.Generator().manual_seed(count)).tolist()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
    synchronize()
    start = time.perf_counter()
    for index, row in enumerate(ids):
        each = params.model_copy(update={"seed": index})
        stage.submit(StageInput(RequestInfo(f"{count}-{index}"), each, ARInput(tuple(row))))
    generated, first, times = 0, 0.0, []
    while stage.has_work():
        before = time.perf_counter()
        chunks = stage.step()
        times.append(time.perf_counter() - before)
        new = sum(len(chunk.payload.token_ids) for chunk in chunks if chunk.payload is not None)
        generated += new
        if generated >= count and not first:
            first = time.perf_counter() - start
    synchronize()
    total = time.perf_counter() - start
    if generated != count * tokens:
        raise SystemExit(f"{generated} tokens instead of {count * tokens}")
    times.sort()
    return {
        "seconds": total,
        "tokens_per_second": generated / total,
        "all_first_tokens": first,
        "ms_per_token": 1e3 * (total - first) / (tokens - 1),
        "median_step_ms": 1e3 * times[len(times) // 2],
        "slowest_steps_ms": [round(1e3 * each, 1) for each in times[:-15:-1]],
        "steps": len(times),
    }


def switched(names: str) -> AbstractContextManager[object]:
    """The compiler with these switches on, and nothing compiled before."""
    from torch._inductor import config

    torch._dynamo.reset()
    return config.patch(dict.fromkeys(names.split(","), True))  # type: ignore[no-any-return]


def compare_switches(component: Thinker, switches: list[str], largest: int) -> None:
    """The same steps with other code from torch's compiler, the one that is used first and last."""
    for names in ("", *switches, ""):
        with switched(names) if names else contextlib.nullcontext():
            torch._dynamo.reset()
            start = time.perf_counter()
            try:
                stage = ARStage("thinker", component, budget("compiled", largest))
                stage.warm_up()
                synchronize()
                line: dict[str, Any] = {"ready": round(time.perf_counter() - start, 1)}
                for count, prompt, tokens in CASES:
                    if count <= largest:
                        run(stage, count, prompt, 8, temperature=0.0)
                        found = run(stage, count, prompt, tokens, temperature=0.0)
                        line[f"{count}x"] = round(found["tokens_per_second"])
                        line[f"{count}x step, first"] = (
                            round(found["median_step_ms"], 3),
                            round(1e3 * found["all_first_tokens"], 1),
                        )
                del stage
            except Exception as error:  # a boundary: a switch that this version lacks must not cost the others
                line = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(f"{names or 'as it is':40} {json.dumps(line)}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def host_share(stage: ARStage, count: int) -> dict[str, float]:
    """Milliseconds a decode step spends launching and reading, where the device is given time to finish each."""
    vocab = min(stage.component.spec.vocab_size, 100_000)
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0)
    for index in range(count):
        row = tuple((index * 31 + i * 7) % vocab for i in range(64))
        stage.submit(StageInput(RequestInfo(f"h{index}"), params, ARInput(row)))
    for _ in range(5):
        stage.step()
    spent, steps = 0.0, 20
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        stage.step()
        spent += time.perf_counter() - start
    for index in range(count):
        stage.abort(f"h{index}")
    stage.drain()
    return {f"host_ms_{count}": 1e3 * spent / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--scale", type=float, default=1.0, help="1 is the true 7B")
    parser.add_argument("--largest", type=int, default=256, help="leave out cases with more requests")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--trace", type=Path, default=None, help="a profiler trace of some decode steps of the last")
    parser.add_argument("--inductor", nargs="*", default=[], help="switches of torch's compiler to measure instead")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU only to try the script out
    model = build(options.scale, device)
    component = Thinker(model.thinker)
    component.eos_token_ids = ()  # a token that ends nothing need not be ruled out
    del model.talker, model.token2wav
    gc.collect()
    torch.cuda.empty_cache()
    if options.inductor:
        compare_switches(component, options.inductor, options.largest)
        return
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    for variant in options.variants:
        start = time.perf_counter()
        stage = ARStage("thinker", component, budget(variant, options.largest))
        stage.warm_up()
        synchronize()
        found: dict[str, Any] = {"ready_seconds": time.perf_counter() - start}
        print(f"{variant} ready in {found['ready_seconds']:.1f} s", flush=True)
        for count, prompt, tokens in CASES:
            if count > options.largest:
                continue
            run(stage, count, prompt, 8, temperature=0.0)
            found[f"{count}x({prompt}+{tokens}) greedy"] = run(stage, count, prompt, tokens, temperature=0.0)
        for count in (1, 64):
            if count <= options.largest:
                found[f"{count}x(128+128) temperature 1"] = run(stage, count, 128, 128, temperature=1.0)
        if options.largest >= 64:
            found["64x(128+128) top_p 0.9"] = run(stage, 64, 128, 128, temperature=1.0, top_p=0.9)
            found["64x(128+128) top_k 40, penalty"] = run(
                stage, 64, 128, 128, temperature=0.9, top_k=40, repetition_penalty=1.05
            )
        found |= host_share(stage, min(64, options.largest))
        figures[variant] = found
        for name, values in found.items():
            shown = (
                values
                if isinstance(values, float)
                else {k: v if isinstance(v, list) else round(v, 3) for k, v in values.items()}
            )
            print(f"{variant:9} {name}: {shown}", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        if options.trace is not None and variant == options.variants[-1]:
            trace(stage, options.trace)
        del stage
        gc.collect()
        torch.cuda.empty_cache()


def trace(stage: ARStage, path: Path) -> None:
    """What the device does in a decode step, by kernel, and in a step of prompts."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0)

    def submit(count: int, length: int) -> None:
        for index in range(count):
            prompt = ARInput(tuple(range(100 + index, 100 + index + length)))
            stage.submit(StageInput(RequestInfo(f"t{index}"), params, prompt))

    for batch in (1, 64, 256):
        if batch > stage._budget.max_running:
            continue
        submit(batch, 128)
        for _ in range(12):  # past the prompts
            stage.step()
        profile_steps(stage, 10, path.with_name(f"{path.stem}_{batch}.txt"))
        for index in range(batch):
            stage.abort(f"t{index}")
        stage.drain()
    submit(64, 256)
    profile_steps(stage, 3, path.with_name(f"{path.stem}_prefill.txt"))


def profile_steps(stage: ARStage, steps: int, path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            stage.step()
        synchronize()
    table = seen.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70)
    path.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
