"""The memory plan against what torch's allocator and the driver measure on a GPU.

    python benchmarks/gpu/memory_plan.py --out memory.json                 Qwen2.5-Omni, written with random weights
    python benchmarks/gpu/memory_plan.py --model DIR --gpu-memory 40GiB    a checkpoint that is there
    python benchmarks/gpu/memory_plan.py --only diffusion                  steps and VAEs of FLUX and Qwen-Image shapes

For each stage: bytes planned and measured, and their ratio. Exits with 1 if one is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from omnistage.config import OmniEngineArgs, ResolvedConfig, resolve
from omnistage.core.family import LoadContext
from omnistage.core.params import CodecParams, DiffusionParams, SamplingParams
from omnistage.core.stage_memory import GIB, gib
from omnistage.core.types import Condition, MediaSpan, Modality, OmniTokensPrompt
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.codec.component import Window
from omnistage.engines.codec.stage import CodecStage
from omnistage.engines.diffusion.component import Row
from omnistage.engines.peak_memory import META
from omnistage.models.registry import REGISTRY
from omnistage.omni import Omni
from omnistage.pipeline.build import load_component, plan_memory

TOLERANCE = 0.1
FIGURES: list[dict[str, Any]] = []


def compare(what: str, planned: float, measured: float) -> None:
    """Print one line, and keep it."""
    ratio = planned / measured if measured else float("inf")
    judged = "" if abs(ratio - 1) <= TOLERANCE else "   <- off"
    print(f"{what:<44} planned {gib(planned):>10}  measured {gib(measured):>10}  {ratio:6.3f}{judged}", flush=True)
    FIGURES.append({"what": what, "planned": planned, "measured": measured, "ratio": ratio})


def note(what: str, size: float) -> None:
    """Print a size that the plan has a constant for."""
    print(f"{what:<44} {gib(size)}", flush=True)
    FIGURES.append({"what": what, "measured": size})


def used() -> int:
    """Bytes of the GPU that are taken, by whomever."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak_of(run: Callable[[], object]) -> int:
    """The allocator's peak while something runs, over what is there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def outside() -> int:
    """Bytes that are taken beside torch's allocator: the driver, its libraries, captured graphs."""
    return used() - torch.cuda.memory_reserved()


# ------------------------------------------------------------------------------------------- Qwen2.5-Omni


def measure_model(folder: Path, options: argparse.Namespace) -> None:
    start = used()
    torch.zeros(1, device="cuda") @ torch.zeros(1, 1, device="cuda")
    note("CUDA context (the plan has 576 MiB)", outside())
    others = start - outside() if start > outside() else 0
    overrides = tuple(f"deployment.{n}={getattr(options, n)}" for n in ("concurrency", "context"))
    arguments: dict[str, Any] = {"gpu_memory": options.gpu_memory} if options.gpu_memory else {}
    args = OmniEngineArgs.parse({"model": str(folder), "device": "cuda", "overrides": overrides, **arguments})
    resolved = resolve(args, registry=REGISTRY)
    plan = plan_memory(resolved)
    (device,) = plan.devices
    base = outside()
    began = time.perf_counter()
    with Omni(folder, device="cuda", overrides=overrides, progress=False, **arguments) as omni:
        note(f"loaded and warm after {time.perf_counter() - began:.1f} s; taken", used() - others)
        for stage in omni.memory:
            memory = stage.planned.memory
            compare(f"{stage.planned.name}: weights and KV cache", memory.weights + memory.kv_cache, stage.loaded)
            # What the driver takes of the graphs is not torch's, and the caches are empty.
            taken = memory.weights + memory.kv_cache + memory.activations
            compare(f"{stage.planned.name}: at the peak of the warm-up", taken, stage.peak)
        measure_vision(omni, plan.stages, options.context)
        measure_speech(omni, resolved)
        run_requests(omni, options.concurrency)
        idle = sum(stage.memory.caches for stage in device.stages)
        note("captured graphs and libraries, beside torch", outside() - base)
        note("torch: allocated", torch.cuda.memory_allocated())
        note("torch: reserved", torch.cuda.memory_reserved())
        note("torch: retries of the allocator", torch.cuda.memory_stats().get("num_alloc_retries", 0))
        compare(
            "all, after requests (less caches, reserve)", device.bytes_needed - device.reserve - idle, used() - others
        )
        for name, stage in omni.orchestrator.stages.items():
            graphs = getattr(getattr(stage, "runner", None), "graphs", None)
            captures = getattr(getattr(getattr(stage, "component", None), "_graphs", None), "captures", None)
            if graphs is not None or captures is not None:
                print(f"{name}: {len(graphs._captured) if graphs is not None else captures} graphs captured")


def measure_vision(omni: Omni, planned: Any, context: int) -> None:
    """A picture that fills a prompt."""
    stage = omni.orchestrator.stages.get("thinker")
    if not isinstance(stage, ARStage) or not hasattr(stage.component.modules[0], "visual"):
        return
    config = stage.component.modules[0].config.vision_config
    rows, columns = 64, context * config.spatial_merge_size**2 // 64
    width = 3 * config.temporal_patch_size * config.patch_size**2
    inputs = {
        "pixel_values": torch.randn(rows * columns, width),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }
    span = MediaSpan(Modality.IMAGE, b"picture", torch.arange(context), inputs)
    memory = planned["thinker"].memory
    with torch.inference_mode():
        measured = peak_of(lambda: stage.component.encode(span))
    planned_bytes = stage.component.media_bytes(context)
    compare(f"thinker: a picture of {context} tokens", planned_bytes, measured)
    note("thinker: planned for media, with the largest step", memory.media + memory.activations)


def measure_speech(omni: Omni, resolved: ResolvedConfig) -> None:
    """The largest batch of windows, which few requests reach."""
    for name, stage in omni.orchestrator.stages.items():
        if not isinstance(stage, CodecStage):
            continue
        component: Any = stage.component
        budget = stage._budget
        # As the plan has it: the longest windows, as many as a forward takes.
        blocks = component.layout.history_blocks + budget.max_chunk_blocks + budget.lookahead_blocks
        codes = min(blocks * component.layout.block_codes, component.layout.max_codes)
        rows = max(1, min(budget.max_batch, budget.max_batch_blocks // blocks))
        states = [component.open(str(i), CodecParams(seed=i), None) for i in range(rows)]
        windows = [Window(state, (1,) * codes, 0, codes, True) for state in states]
        # Eagerly: captured graphs keep what they take, so that there is nothing to see afterwards.
        graphs = component._graphs
        enabled, graphs.enabled = graphs.enabled, False
        measured = peak_of(partial(component.decode, windows))
        graphs.enabled = enabled
        settings = resolved.config.pipeline.stages[name]
        plain = settings.model_copy(update={"budget": budget.model_copy(update={"cuda_graphs": False})})
        target = torch.device("cuda")
        twin: Any = load_component(LoadContext(resolved.model, name, plain, META, torch.float32, target=target))
        compare(f"{name}: {rows} windows of {codes} codes", twin.memory(rows, codes).activations, measured)


def run_requests(omni: Omni, count: int) -> None:
    """Text and speech of as many requests as was planned for."""
    text = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    codes = SamplingParams(max_tokens=256, min_tokens=256, temperature=0.9, top_k=40, seed=1)
    params = {"thinker": text, "talker": codes, "token2wav": CodecParams(seed=1)}
    stages = omni.orchestrator.stages
    prompts = [OmniTokensPrompt(tuple(100 + (7 * i + n) % 97 for n in range(1024))) for i in range(count)]
    outputs = omni.generate(
        prompts,
        {name: value for name, value in params.items() if name in stages},
        modalities=[modality.value for modality in omni.modalities],
        progress=False,
    )
    failed = [str(output.error) for output in outputs if output.error is not None]
    print(f"{count} requests: {len(failed)} failed {failed[:1]}", flush=True)


# ---------------------------------------------------------------------------------------------- diffusion


def measure_diffusion(kind: Any, options: argparse.Namespace) -> None:
    """Steps of a transformer and decodings by a VAE, at true shapes."""
    device, dtype, size = torch.device("cuda"), torch.bfloat16, (options.size, options.size, 1)
    case = kind(device, dtype, options.layers)
    planned_pipe = copy.copy(case.pipe)
    parts = {name: copy.deepcopy(getattr(case.pipe, name)).to(META) for name in ("transformer", "vae")}
    planned_pipe.register_modules(**parts)
    denoiser, twin = case.denoiser(case.pipe, device, dtype), case.denoiser(planned_pipe, META, dtype)
    vae, decoder = case.pipe.vae, case.decoder(planned_pipe, META, tiling_pixels=0)
    tensors = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in twin.text_shapes().items()}
    with torch.inference_mode():
        params = DiffusionParams(steps=4, seed=0)
        lane = denoiser.open(Condition(tensors, None, {}, *size), params, torch.Generator())
        for count in (1, 4):
            rows = [Row(lane, "positive")] * count
            latents = torch.randn(count, *decoder.latent_shape(*size), device=device, dtype=dtype)
            step, decode = partial(denoiser.forward, rows), partial(vae.decode, latents)
            for run in (step, decode):
                run()  # workspaces of libraries stay
            compare(f"{kind.name}: a step of {count} rows", twin.step_bytes(count, *size), peak_of(step))
            compare(f"{kind.name}: decoding {count} pictures", decoder.decode_bytes(count, *size), peak_of(decode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; default: one is written")
    parser.add_argument("--scale", type=float, default=1.0, help="of the checkpoint that is written; 1 is the true 7B")
    parser.add_argument("--gpu-memory", default=None)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--size", type=int, default=1024, help="pixels of a picture's side")
    parser.add_argument("--layers", type=float, default=0.25, help="share of the transformers' layers")
    parser.add_argument("--only", choices=("omni", "diffusion"), default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU; `omnistage plan` does not")
    print(f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / GIB:.1f} GiB, torch {torch.__version__}")
    if options.only != "diffusion":
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.model
            if folder is None:
                folder, began = Path(scratch) / "model", time.perf_counter()
                tiny = REGISTRY.family("qwen2_5_omni").tiny
                if tiny is None:
                    sys.exit("the family writes no checkpoints")
                tiny(folder, scale=options.scale)
                print(f"checkpoint written in {time.perf_counter() - began:.0f} s", flush=True)
            measure_model(folder, options)
    gc.collect()
    torch.cuda.empty_cache()
    if options.only != "omni":
        from diffusion import FluxCase, QwenCase  # needs diffusers

        for kind in (FluxCase, QwenCase):
            measure_diffusion(kind, options)
            gc.collect()
            torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(json.dumps(FIGURES, indent=1), encoding="utf-8")
    if any("planned" in figure and abs(figure["ratio"] - 1) > TOLERANCE for figure in FIGURES):
        sys.exit(1)


if __name__ == "__main__":
    main()
