"""What LoRA adapters cost a decode step: Qwen2.5-7B's shapes, random weights, 64 rows, 8 adapters on all linear layers.

    python benchmarks/gpu/adapters.py [--scale 1] [--hooks] [--plain] [--trace FOLDER]

Prints one line of JSON with the milliseconds of a step without adapters, with layers for eight of which one is used,
and with all eight used. `--hooks` also measures layers that add the adapters in products of their own, as quantised
ones do; `--plain` leaves compilation out. Without a GPU it runs a toy, to try the script out.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from text import profile_steps

from omnistage.config.schema import ARBudget
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageInput
from omnistage.engines.adapters.library import AdapterLibrary, AdapterLimits, AdapterSource
from omnistage.engines.ar import adapters as ar_adapters
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm.component import CausalLM

ROWS, ADAPTERS, RANK, PROMPT, STEPS = 64, 8, 16, 64, 60
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = torch.device("cuda" if CUDA else "cpu"), torch.bfloat16 if CUDA else torch.float32


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def component(scale: float) -> CausalLM:
    full = scale >= 1 and CUDA
    config = transformers.Qwen2Config(
        hidden_size=3584 if full else 112,
        intermediate_size=18944 if full else 256,
        num_hidden_layers=28 if full else 2,
        num_attention_heads=28 if full else 7,
        num_key_value_heads=4 if full else 1,
        vocab_size=152064 if full else 1000,
        tie_word_embeddings=False,
    )
    with torch.device(DEVICE):
        model = transformers.Qwen2ForCausalLM._from_config(config, dtype=DTYPE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    made = CausalLM(model.eval())
    made.eos_token_ids = ()
    return made


def write_adapter(folder: Path, model: torch.nn.Module) -> None:
    """An adapter on all linear layers of the decoder, as PEFT writes it."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            for part, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                numbers = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = numbers.to(DTYPE)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def step_ms(stage: ARStage, adapters: list[str]) -> tuple[float, set[tuple[int, ...]]]:
    """Median milliseconds of a decode step whose rows use these adapters in turn; the first tokens of the rows."""
    budget = STEPS + 20
    generated: dict[str, list[int]] = {}
    for index in range(ROWS):
        name = adapters[index % len(adapters)] if adapters else ""
        options: dict[str, Any] = {"lora": name} if name else {}
        params = SamplingParams(max_tokens=budget, temperature=0.0, ignore_eos=True, **options)
        stage.check_params(params)
        ids = tuple((index // max(len(adapters), 1) + 7 * i) % 900 for i in range(PROMPT))
        stage.submit(StageInput(RequestInfo(f"r{index}"), params, ARInput(ids)))
        generated[f"r{index}"] = []
    times: list[float] = []
    while stage.has_work():
        synchronize()
        start = time.perf_counter()
        for chunk in stage.step():
            if chunk.error is not None:
                raise chunk.error
            if chunk.payload is not None:
                generated[chunk.request_id] += chunk.payload.token_ids  # type: ignore[union-attr]
        times.append(time.perf_counter() - start)
    # Steps that overlap, as in service: the whole run by its tokens, without prompts and the first steps.
    middle = sorted(times[10:-5])
    return 1e3 * middle[len(middle) // 2], {tuple(tokens[:8]) for tokens in generated.values()}


def steady_ms(stage: ARStage, adapters: list[str]) -> float:
    """Milliseconds of a step in service: the host is not waited for, steps follow each other."""
    for index in range(ROWS):
        options: dict[str, Any] = {"lora": adapters[index % len(adapters)]} if adapters else {}
        if options.get("lora") == "":
            options = {}
        params = SamplingParams(max_tokens=STEPS + 40, temperature=0.0, ignore_eos=True, **options)
        stage.submit(StageInput(RequestInfo(f"s{index}"), params, ARInput(tuple(range(index, index + PROMPT)))))
    for _ in range(12):
        stage.step()
    synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        stage.step()
    synchronize()
    spent = 1e3 * (time.perf_counter() - start) / STEPS
    for index in range(ROWS):
        stage.abort(f"s{index}")
    stage.drain()
    return spent


def trace(stage: ARStage, adapters: list[str], path: Path) -> None:
    """What the device does in ten steps, by kernel."""
    for index in range(ROWS):
        options: dict[str, Any] = {"lora": adapters[index % len(adapters)]} if adapters else {}
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, **options)
        stage.submit(StageInput(RequestInfo(f"t{index}"), params, ARInput(tuple(range(index, index + PROMPT)))))
    for _ in range(12):
        stage.step()
    profile_steps(stage, 10, path)
    for index in range(ROWS):
        stage.abort(f"t{index}")
    stage.drain()


def stage_of(made: CausalLM, folder: Path | None, compiled: bool) -> ARStage:
    library = None
    if folder is not None:
        sources = {f"a{i}": AdapterSource(folder, 1.0 + i / 4) for i in range(ADAPTERS)}
        library = AdapterLibrary("thinker", sources, AdapterLimits(ADAPTERS, RANK, 8 << 30, False))
    budget = ARBudget(
        max_model_len=1024,
        max_running=ROWS,
        max_batch_tokens=ROWS * PROMPT if CUDA else 512,
        graph_batch_sizes=(ROWS,),
        graph_prefill_tokens=(),
        kv_memory="8GiB" if CUDA else "64MiB",
        prefix_caching=False,
        compile=compiled,
    )
    stage = ARStage("thinker", made, budget, library)
    stage.warm_up()
    synchronize()
    return stage


def measure(stage: ARStage, cases: dict[str, list[str]]) -> dict[str, float]:
    found = {}
    for name, adapters in cases.items():
        _, heads = step_ms(stage, adapters)
        if len(adapters) > 1 and len(heads) < len(adapters):
            raise SystemExit("rows with other adapters gave the same tokens")
        found[name] = round(min(steady_ms(stage, adapters) for _ in range(3)), 3)
    return found


def renewed(made: CausalLM, scale: float) -> CausalLM:
    """Another of the same: what was done to layers stays with them."""
    made.decoder.to("meta")
    del made
    gc.collect()
    return component(scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a toy")
    parser.add_argument("--hooks", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--trace", type=Path, help="a folder for the kernels of a step without and with adapters")
    options = parser.parse_args()
    begin = time.perf_counter()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name() if CUDA else "cpu", "compiled": not options.plain}
    names = [f"a{i}" for i in range(ADAPTERS)]
    cases = {"one_ms": names[:1], "eight_ms": names, "eight_and_none_ms": [*names, ""]}
    with tempfile.TemporaryDirectory() as temporary:
        made = component(options.scale)
        write_adapter(Path(temporary), made.model)
        compiled = CUDA and not options.plain
        stage = stage_of(made, None, compiled)
        figures |= measure(stage, {"without_ms": []})
        if options.trace:
            trace(stage, [], options.trace / "adapters_without.txt")
        figures["without_ready_s"] = round(time.perf_counter() - begin, 1)
        if options.hooks:
            made = renewed(made, options.scale)
            folds, ar_adapters.folds = ar_adapters.folds, lambda device: False
            hooked = measure(stage_of(made, Path(temporary), compiled), cases)
            figures |= {f"hooks_{name}": value for name, value in hooked.items()}
            ar_adapters.folds = folds
        made = renewed(made, options.scale)
        stage = stage_of(made, Path(temporary), compiled)
        figures |= measure(stage, cases)
        if options.trace:
            trace(stage, names, options.trace / "adapters_eight.txt")
    figures["cost_of_eight_percent"] = round(100 * (figures["eight_ms"] / figures["without_ms"] - 1), 1)
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
