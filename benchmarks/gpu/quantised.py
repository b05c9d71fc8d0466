"""Quantised weights on a GPU: a 7B language model's decode steps, and one denoising step of FLUX and Qwen-Image.

    python benchmarks/gpu/quantised.py [--seconds 150] [--parts lm flux qwen qwen_all] > quantised.jsonl

`qwen_all` is Qwen-Image with its `img_mlp` quantised, too, which the family leaves as it is by default: float8 changes
its pictures visibly there. True shapes, random weights made on the device; the transform is the package's own. One JSON
line a part, as soon as it is measured; a part that fails gives its error and the next one runs. torchao must be
importable, its compiled extensions need not be. To try it out on a CPU: --scale 0.1 (narrower, and with the schemes
int8 and int8_dynamic).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from omnistage.config.quantize import QuantizeConfig
from omnistage.config.schema import ARBudget
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageInput
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.compiling import compile_layers
from omnistage.engines.diffusion.runner import fast_attention
from omnistage.engines.quantisation.transform import Quantiser, quantising
from omnistage.hf import transformers
from omnistage.models._diffusers.loading import diffusers
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.qwen_image import FAMILY as QWEN

ROWS = (1, 8, 64)
PROMPT, TOKENS = 32, 48
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
NARROW = 1 if CUDA else 8
"""By which a CPU's sizes are divided."""


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def release() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def gib() -> float | None:
    return round(torch.cuda.memory_allocated() / 2**30, 2) if CUDA else None


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def initialise(network: nn.Module, deviation: float) -> None:
    """Weights as large as in trained models, so that activations stay finite over all layers."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, deviation)


def quantise(network: nn.Module, scheme: str, *, diffusion: bool, kept: tuple[str, ...] = ()) -> Quantiser | None:
    if scheme == "full":
        return None
    quantiser = Quantiser(QuantizeConfig(scheme=scheme), diffusion, kept)  # type: ignore[arg-type]
    quantiser.apply(network, DEVICE)
    return quantiser


# --------------------------------------------------------------------------------------------- language model


def language_model(scheme: str, scale: float, *, compiled: bool = False) -> dict[str, Any]:
    config = transformers.Qwen2Config(
        vocab_size=152_064 // NARROW,
        hidden_size=3584 // NARROW,
        intermediate_size=18_944 // NARROW,
        num_hidden_layers=max(2, round(28 * scale)),
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    )
    with torch.device(DEVICE):
        model = transformers.Qwen2ForCausalLM._from_config(config, dtype=DTYPE)
    initialise(model, 0.02)
    model.eval().requires_grad_(False)
    before = gib()
    start = time.perf_counter()
    quantiser = quantise(model, scheme, diffusion=False)
    synchronize()
    seconds = time.perf_counter() - start
    release()
    figures: dict[str, Any] = {"weights_gib": gib(), "weights_gib_full": before, "quantise_seconds": round(seconds, 1)}
    with quantising(quantiser):
        component = CausalLM(model)
    budget = ARBudget(
        max_model_len=256,
        max_running=max(ROWS),
        max_batch_tokens=4096,
        graph_batch_sizes=ROWS,
        graph_prefill_tokens=(),
        kv_memory="4GiB" if CUDA else "64MiB",
        prefix_caching=False,
        compile=compiled,
    )
    stage = ARStage("thinker", component, budget)
    start = time.perf_counter()
    stage.warm_up()
    figures["warm_up_seconds"] = round(time.perf_counter() - start, 1)
    for rows in ROWS:
        figures[f"step_ms_{rows}"] = decode_step(stage, rows)
    stage.close()
    return figures


def decode_step(stage: ARStage, rows: int) -> float:
    """Milliseconds a token, over all steps after the prompts'."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    for index in range(rows):
        ids = tuple((index * 31 + i * 7) % 10_000 for i in range(PROMPT))
        stage.submit(StageInput(RequestInfo(f"{rows}-{index}"), params, ARInput(ids)))
    stage.step()
    stage.step()
    synchronize()
    start, generated = time.perf_counter(), 0
    while stage.has_work():
        for chunk in stage.step():
            if chunk.error is not None:
                raise chunk.error
            generated += len(chunk.payload.token_ids) if chunk.payload is not None else 0  # type: ignore[union-attr]
    synchronize()
    return round(1e3 * (time.perf_counter() - start) / max(generated / rows, 1), 3)


# ------------------------------------------------------------------------------------------------------- DiTs


def flux(scale: float) -> tuple[nn.Module, dict[str, Any]]:
    double, single = max(2, round(19 * scale)), max(2, round(38 * scale))
    with torch.device(DEVICE), default_dtype(DTYPE):
        network = diffusers().FluxTransformer2DModel(
            guidance_embeds=True, num_layers=double, num_single_layers=single, num_attention_heads=24 // NARROW
        )
    side = 64 if CUDA else 8
    inputs = {
        "hidden_states": torch.randn(1, side * side, 64),
        "encoder_hidden_states": torch.randn(1, 512 if CUDA else 16, 4096),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(side * side, 3),
        "txt_ids": torch.zeros(512 if CUDA else 16, 3),
    }
    return network, inputs


def qwen(scale: float) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device(DEVICE), default_dtype(DTYPE):
        network = diffusers().QwenImageTransformer2DModel(
            num_layers=max(3, round(60 * scale)), num_attention_heads=24 // NARROW
        )
    side = 64 if CUDA else 8
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(1, side * side, 64),
        "encoder_hidden_states": torch.randn(1, 128 if CUDA else 16, 3584),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, side, side)]],
    }
    return network, inputs


def denoiser(
    build: Callable[[float], tuple[nn.Module, dict[str, Any]]], kept: tuple[str, ...], scheme: str, scale: float
) -> dict[str, Any]:
    """A step in full precision and in `scheme`, both compiled, over the same weights."""
    network, inputs = build(scale)
    initialise(network, 0.02)
    network.eval().requires_grad_(False)
    torch.manual_seed(1)
    given = {n: v.to(DEVICE, DTYPE) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in network.parameters()), "gib_full": gib()}
    outputs = []
    with torch.inference_mode(), fast_attention(CUDA):
        for name in ("full", scheme):
            torch._dynamo.reset()
            quantiser = quantise(network, name, diffusion=True, kept=kept)
            release()
            if quantiser is not None:
                figures |= {"layers_quantised": len(quantiser.layers), "gib": gib()}
            start = time.perf_counter()
            if CUDA:
                lists = [child for child in network.children() if isinstance(child, nn.ModuleList) and len(child) > 1]
                compile_layers(block for blocks in lists for block in blocks)
            outputs.append(network(**given, return_dict=False)[0].float())
            synchronize()
            figures[f"{name}_first_seconds"] = round(time.perf_counter() - start, 1)
            figures[f"{name}_step_ms"] = step_ms(lambda: network(**given, return_dict=False))
    figures["times_as_fast"] = round(figures["full_step_ms"] / figures[f"{scheme}_step_ms"], 3)
    figures["relative_error"] = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    return figures


def step_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(8 if CUDA else 2):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times[1:]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no part after this")
    parser.add_argument(
        "--parts", nargs="*", choices=("lm", "flux", "qwen", "qwen_all"), default=["lm", "flux", "qwen"]
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the layers")
    options = parser.parse_args()
    begun, scale = time.perf_counter(), options.scale
    schemes = ("full", "int8", "int4", "float8") if CUDA else ("full", "int8", "int8_dynamic")
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    if "lm" in options.parts:
        jobs += [(f"7B {scheme}", partial(language_model, scheme, scale)) for scheme in schemes]
    kept: dict[str, tuple[str, ...]] = {"flux": (), "qwen": QWEN.full_precision, "qwen_all": ()}
    cases = {name: (flux if name == "flux" else qwen, layers) for name, layers in kept.items()}
    for name, (build, layers) in cases.items():
        if name in options.parts:
            jobs.append((f"{name} {schemes[-1]}", partial(denoiser, build, layers, schemes[-1], scale)))
    if "lm" in options.parts and CUDA:
        jobs += [(f"7B {s} compiled", partial(language_model, s, scale, compiled=True)) for s in ("full", "float8")]
    for name, job in jobs:
        spent = time.perf_counter() - begun
        if spent > options.seconds:
            line: dict[str, Any] = {"skipped": f"{spent:.0f} s were over"}
        else:
            try:
                line = job()
            except Exception as error:  # a boundary: one part must not cost the others
                line = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            line["seconds"] = round(time.perf_counter() - begun - spent, 1)
        print(json.dumps({"part": name, "layers": scale, **line}), flush=True)
        release()


if __name__ == "__main__":
    main()
