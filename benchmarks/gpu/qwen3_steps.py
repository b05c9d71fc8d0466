"""Decode steps of Qwen3-Omni's language models on a GPU, each stage alone: true 30B-A3B shapes, random weights.

    python benchmarks/gpu/qwen3_steps.py [--layers 48] [--batches 1 8 64] [--experts auto grouped_mm] [--trace FOLDER]

A step of the talker is everything up to the last residual code of a frame. `--layers` shortens the thinker.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from text import profile_steps

from omnistage.config.schema import ARBudget
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, SideRows, StageInput
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.qwen3_omni_moe import tiny
from omnistage.models.qwen3_omni_moe.components import Talker, Thinker

PROMPT, STEPS = 128, 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=512, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=512, ignore_eos=True, seed=0)


def on_device(cls: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    with torch.device(device):
        model = cls._from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
            elif "norm" in name:
                weight.fill_(1.0)
    return model.eval()


def components(layers: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What makes each of the stages' components; one at a time is in memory."""
    whole = tiny.config_for(1.0)
    whole.thinker_config.text_config.num_hidden_layers = layers
    whole.talker_config.audio_config = whole.thinker_config.audio_config
    ids = (whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id)
    rows = {i: torch.randn(whole.talker_config.thinker_hidden_size) for i in ids}

    def talker() -> Talker:
        cls = transformers.Qwen3OmniMoeTalkerForConditionalGeneration
        return Talker(on_device(cls, whole.talker_config, dtype, device), whole, {"ethan": 2302}, rows)

    def thinker() -> Thinker:
        cls = transformers.Qwen3OmniMoeThinkerForConditionalGeneration
        return Thinker(on_device(cls, whole.thinker_config, dtype, device), layers // 2)

    return {"talker": talker, "thinker": thinker}


def submit(stage: ARStage, count: int) -> None:
    spec, component = stage.component.spec, stage.component
    generator = torch.Generator(component.device).manual_seed(0)
    shape, where = (PROMPT, spec.embed_size), {"device": component.device, "dtype": component.dtype}
    rows = torch.randn(shape, generator=generator, **where)  # type: ignore[call-overload]
    side = torch.randn(4, spec.side_size or 1, generator=generator, **where)  # type: ignore[call-overload]
    positions = torch.arange(PROMPT, dtype=torch.float64).expand(3, -1)
    for i in range(count):
        ids = tuple(range(100 + i, 100 + i + PROMPT))
        payload = ARInput(ids, positions=positions)
        if spec.side_input:
            payload = ARInput((0,) * PROMPT, embeds=rows, positions=positions, streaming=True, side_rows=side[:0])
        stage.submit(StageInput(RequestInfo(f"r{i}"), SAMPLED if spec.side_input else GREEDY, payload))
        if spec.side_input:
            stage.feed(f"r{i}", SideRows(side, final=True))


def decode(stage: ARStage, count: int, trace: Path | None) -> float:
    """Milliseconds of a decode step of `count` requests, everything included."""
    submit(stage, count)
    for _ in range(8):
        stage.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        stage.step()
    torch.cuda.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - start) / STEPS
    if trace is not None:
        profile_steps(stage, 8, trace)
    for i in range(count):
        stage.abort(f"r{i}")
    stage.drain()
    return milliseconds


def mixed(stage: ARStage) -> None:
    """Prompts of many lengths beside each other and beside answers; raises where a layer is compiled again for them."""
    rng, spec, component, count = random.Random(0), stage.component.spec, stage.component, 0
    where: Any = {"device": component.device, "dtype": component.dtype}
    slowest = 0.0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(150):
            for _ in range(rng.choice([0, 0, 1, 1, 2, 5, 16])):
                length = rng.choice([1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 128, 300, 700])
                positions = torch.arange(length, dtype=torch.float64).expand(3, -1)
                ids = tuple(rng.randrange(1000) for _ in range(length))
                payload = ARInput(ids, positions=positions)
                if spec.side_input:
                    rows, side = torch.randn(length, spec.embed_size, **where), torch.randn(4, spec.side_size, **where)
                    payload = ARInput(ids, embeds=rows, positions=positions, streaming=True, side_rows=side[:0])
                params = SAMPLED.model_copy(update={"max_tokens": rng.randrange(1, 30)})
                stage.submit(StageInput(RequestInfo(f"m{count}"), params, payload))
                if spec.side_input:
                    stage.feed(f"m{count}", SideRows(side, final=True))
                count += 1
            start = time.perf_counter()
            stage.step()
            slowest = max(slowest, time.perf_counter() - start)
    while stage.has_work():
        stage.step()
    print(f"{count} mixed requests, the slowest step {1e3 * slowest:.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48, help="of the thinker")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--experts", nargs="*", default=["auto"], help="implementations of the experts to compare")
    parser.add_argument("--stages", nargs="*", default=["talker", "thinker"])
    parser.add_argument("--mixed", action="store_true", help="also serve prompts of many lengths at once")
    parser.add_argument("--trace", type=Path, default=None, help="write which kernels a step takes, a file each")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device("cuda")
    figures: dict[str, float] = {}
    for name in options.stages:
        component: ARComponent = components(options.layers, torch.bfloat16, device)[name]()
        component.prepare = lambda info, payload: payload  # type: ignore[method-assign]  # its rows are given
        for experts in options.experts:
            budget = ARBudget(
                max_model_len=2048,
                max_running=max(options.batches),
                graph_batch_sizes=tuple(options.batches),
                kv_memory="4GiB",
                experts=experts,
                compile=True,
            )
            start = time.perf_counter()
            stage = ARStage(name, component, budget)
            stage.warm_up()
            torch.cuda.synchronize()
            print(f"{name}, experts {experts}: ready in {time.perf_counter() - start:.1f} s", flush=True)
            for batch in options.batches:
                trace = None if options.trace is None else options.trace / f"{name}_{experts}_{batch}.txt"
                figures[f"{name} {experts} {batch}"] = ms = decode(stage, batch, trace)
                print(f"{name}, experts {experts}, {batch}: {ms:.2f} ms a step", flush=True)
            if options.mixed:
                mixed(stage)
            del stage
            gc.collect()
        del component
        gc.collect()
        torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
