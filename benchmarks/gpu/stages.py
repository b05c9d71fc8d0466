"""Where the time of Qwen2.5-Omni's stages goes on a GPU, each stage alone: true 7B shapes, random weights.

python benchmarks/gpu/stages.py [--compile] [--precision float16] [--kernels torch] [--out stages.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from qwen2_5_omni import CODES, PROMPT, build, params

from omnistage.config.schema import ARBudget
from omnistage.core.params import CodecParams
from omnistage.core.types import ARInput, RequestInfo, SideRows, StageInput
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.codec.component import Window
from omnistage.models.qwen2_5_omni.components import Talker, Thinker
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav


def timed(function: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds, device included."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def watch(owner: Any, name: str, spent: dict[str, float]) -> None:
    """Add up the host seconds spent in `owner.name`."""
    function, label = getattr(owner, name), f"{type(owner).__name__}.{name}"

    def timed_call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        spent[label] = spent.get(label, 0.0) + time.perf_counter() - start
        return result

    setattr(owner, name, timed_call)


def decode(stage: ARStage, batch: int, sampling: Any, streaming: bool) -> dict[str, float]:
    """A decode step's milliseconds and how its host time divides."""
    width, device, dtype = stage.component.spec.embed_size, stage.component.device, stage.component.dtype
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(PROMPT + 1, width, device=device, dtype=dtype, generator=generator)
    for i in range(batch):
        info = RequestInfo(f"{batch}-{i}")
        ids = tuple(range(i, i + PROMPT + 1))
        payload = ARInput(ids, embeds=rows, streaming=True, side_rows=rows[:0]) if streaming else ARInput(ids)
        stage.submit(StageInput(info, sampling, payload))
        if streaming:
            stage.feed(info.request_id, SideRows(rows, final=True))
    for _ in range(4):
        stage.step()
    spent: dict[str, float] = {}
    for owner, name in (
        (stage.scheduler, "schedule"),
        (stage.runner, "launch"),
        (stage.runner, "read"),
        (stage.runner.graphs, "run"),
        (stage.runner.sampler, "launch"),
    ):
        if owner is not None:
            watch(owner, name, spent)
    steps, start = 100, time.perf_counter()
    for _ in range(steps):
        stage.step()
    total = time.perf_counter() - start
    for owner, name in (
        (stage.scheduler, "schedule"),
        (stage.runner, "launch"),
        (stage.runner, "read"),
        (stage.runner.sampler, "launch"),
    ):
        delattr(owner, name)
    if stage.runner.graphs is not None:
        del stage.runner.graphs.run
    for i in range(batch):
        stage.abort(f"{batch}-{i}")
    return {"step": 1e3 * total / steps, **{name: 1e3 * value / steps for name, value in spent.items()}}


def speech(component: Token2Wav, batch: int, emit: int, ahead: int) -> float:
    """Milliseconds of a window of `batch` requests in the middle of their utterances; sizes in blocks."""
    block = component.layout.block_codes
    codes = tuple((7 * i) % 8000 for i in range((emit + ahead) * block))
    states = [component.open(str(i), CodecParams(seed=i), None) for i in range(batch)]
    windows = [Window(state, codes, 0, emit * block, False) for state in states]
    component.decode(windows)
    component.decode(windows)
    return timed(lambda: component.decode(windows), 4)


def fit(figures: dict[tuple[int, int], float]) -> tuple[float, float]:
    """Milliseconds of a batch and of each block, by least squares over (requests, blocks of a window)."""
    blocks = torch.tensor([float(batch * size) for batch, size in figures])
    matrix = torch.stack((torch.ones_like(blocks), blocks), dim=1)
    fixed, each = torch.linalg.lstsq(matrix, torch.tensor(list(figures.values()))[:, None]).solution[:, 0].tolist()
    return fixed, each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="the language models' layers")
    parser.add_argument("--kernels", choices=("auto", "torch", "triton"), default="auto", help="of token2wav's DiT")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--precision", choices=("float32", "tf32", "float16"), default="tf32", help="of token2wav")
    parser.add_argument("--trace", type=Path, default=None, help="write which kernels a window of 8 takes")
    parser.add_argument("--only", choices=("ar", "speech"), default=None)
    options = parser.parse_args()
    device = torch.device("cuda")
    model = build(1.0, device)
    figures: dict[str, Any] = {}
    budget = ARBudget(
        max_model_len=4096, graph_batch_sizes=(1, 8), max_running=8, kv_memory="4GiB", compile=options.compile
    )
    table = model.thinker.get_input_embeddings().weight
    config = model.config.talker_config
    wanted = {int(s["bos_token"]) for s in model.speaker_map.values()}
    wanted |= {config.tts_text_end_token_id, config.tts_text_pad_token_id}
    rows = {i: table[i].detach().clone() for i in wanted}
    for name, component in (
        ("thinker", Thinker(model.thinker)),
        ("talker", Talker(model.talker, model.speaker_map, rows, 8193)),
    ):
        if options.only == "speech":
            break
        start = time.perf_counter()
        stage = ARStage(name, component, budget)
        print(f"{name} ready in {time.perf_counter() - start:.1f} s", flush=True)
        for batch in (1, 8):
            sampling = params(speech=True)[name].model_copy(update={"max_tokens": CODES, "min_tokens": 0})
            figures[f"{name}_{batch}"] = found = decode(stage, batch, sampling, name == "talker")
            print(f"{name}, {batch}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()) + " ms", flush=True)
    if options.only != "ar":
        component = Token2Wav(
            model.token2wav,
            model.speaker_map,
            kernels=options.kernels,
            precision=options.precision,
            early_vocoder=True,
        )
        start = time.perf_counter()
        component.warm_up((1, 2, 4, 8, 16), 2 * component.layout.block_codes, 192)
        print(f"token2wav warm in {time.perf_counter() - start:.1f} s", flush=True)
        windows: dict[tuple[int, int], float] = {}
        for batch in (1, 8, 24):
            for emit in (1, 2, 4, 8, 16):
                windows[batch, emit + 2] = ms = speech(component, batch, emit, 2)
                figures[f"token2wav_{batch}_{emit}+2"] = ms
                print(f"token2wav, {batch} x ({emit} + 2 blocks): {ms:.1f} ms", flush=True)
        fixed, each = fit(windows)
        print(f"token2wav: {fixed:.1f} ms a batch and {each:.2f} ms a block; simulate listeners with:", flush=True)
        print(f"  python benchmarks/codec_clock.py --fixed {fixed / 1e3:.4f} --block {each / 1e3:.5f} --square 0")
        if options.trace is not None:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                speech(component, 8, 8, 2)
            options.trace.write_text(
                seen.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=80)
            )
        mel = torch.randn(8, 240, 80, device=device)
        ms = timed(lambda: component._vocode(mel, graphed=True), 5)
        print(f"vocoder, 8 x 240 frames: {ms:.1f} ms", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
