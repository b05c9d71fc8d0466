"""`omnistage bench`: this engine against `transformers` on this machine, in one run, as ratios.

Absolute times on a shared CPU vary; ratios of alternating runs are stable. The median of the rounds is taken.
"""

from __future__ import annotations

import gc
import json
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence

from omnistage.config import OmniEngineArgs
from omnistage.core.errors import ConfigError
from omnistage.core.memory import resident_memory
from omnistage.core.params import CodecParams, SamplingParams
from omnistage.core.types import ARInput, OmniTokensPrompt, RequestInfo, StageInput
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.stage import ARStage
from omnistage.hf import transformers
from omnistage.models.causal_lm import tiny as tiny_lm
from omnistage.models.qwen2_5_omni import tiny as tiny_omni
from omnistage.models.qwen2_5_omni.reference import Reference
from omnistage.omni import Omni
from omnistage.pipeline.build import build_parts

REQUESTS = 16
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `target` None: only reported."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = True

    @property
    def ok(self) -> bool:
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(slots=True)
class Report:
    machine: dict[str, str]
    results: list[Result] = field(default_factory=list)


def run(*, quick: bool = False, out: Path | None = None, console: Console | None = None) -> int:
    """Measure everything, print a table, write `out/bench.json`; 0 if every target is met."""
    console = console or Console()
    report = Report(_machine())
    sections: list[tuple[str, Callable[[Path, bool], list[Result]]]] = [
        ("a causal LM, 16 at once", _causal_lm),
        ("Qwen2.5-Omni, 16 requests with speech", _omni),
        ("engine overhead", _overhead),
        ("memory over many requests", _memory),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for name, section in sections:
            with console.status(f"measuring {name}"):
                report.results.extend(section(Path(scratch), quick))
            console.print(f"measured {name}")
    _print(report, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    return 0 if all(result.ok for result in report.results) else 1


# -------------------------------------------------------------------------------------------------- sections


def _causal_lm(scratch: Path, quick: bool) -> list[Result]:
    """Greedy text of a 100-million-parameter LM: 16 concurrent requests against one after another."""
    folder = scratch / "lm"
    tiny_lm.write(folder, seed=0, scale=0.1 if quick else 0.5)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    tokens = 16 if quick else 32
    prompts = _prompts(model.config.vocab_size, REQUESTS, 24, 64)
    inputs = [OmniTokensPrompt(prompt) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with Omni(folder, device="cpu", progress=False) as omni:
        ours, sequential, batched, ours_single, single = _alternate(
            [
                lambda: omni.generate(inputs, params, progress=False),
                lambda: [_generate(model, [prompt], tokens) for prompt in prompts],
                lambda: _generate(model, prompts, tokens),
                lambda: omni.generate(inputs[:1], params, progress=False),
                lambda: _generate(model, prompts[:1], tokens),
            ],
            rounds=1 if quick else 3,
        )
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return [
        Result(f"LM of {millions:.0f}M, 16 at once, against transformers one by one", sequential / ours, "x", 3.0),
        Result("  against transformers' padded batch of 16", batched / ours, "x"),
        Result("  1 request, against transformers", single / ours_single, "x"),
    ]


def _omni(scratch: Path, quick: bool) -> list[Result]:
    """Text and speech: 16 requests against transformers one by one and in one batch."""
    folder = scratch / "omni"
    tiny_omni.write(folder, seed=0, scale=0.0)
    reference = Reference(folder)
    text, codes = (8, 24) if quick else (16, 48)
    vocab = int(reference.model.config.thinker_config.text_config.vocab_size)
    prompts = _prompts(min(vocab, 800), REQUESTS, 24, 64)
    inputs = [OmniTokensPrompt(prompt) for prompt in prompts]
    params = {
        "thinker": SamplingParams(temperature=0.0, max_tokens=text, ignore_eos=True),
        "talker": SamplingParams(temperature=0.0, min_tokens=codes, max_tokens=codes, repetition_penalty=1.05),
    }

    with Omni(folder, device="cpu", progress=False) as omni:

        def ours(streaming: bool) -> None:
            stage_params = {**params, "token2wav": CodecParams(streaming=streaming, seed=0)}
            outputs = omni.generate(inputs, stage_params, modalities=["text", "audio"], progress=False)
            if any(output.error is not None for output in outputs):
                raise ConfigError("a request of the benchmark failed")

        whole, streamed, sequential, batched = _alternate(
            [
                lambda: ours(False),
                lambda: ours(True),
                lambda: [_speak(reference, [prompt], text, codes) for prompt in prompts],
                lambda: _speak(reference, prompts, text, codes),
            ],
            rounds=1 if quick else 2,
        )
    return [
        Result("Omni, 16 requests, whole utterances, against transformers one by one", sequential / whole, "x", 4.0),
        Result("  against transformers' batch of 16", batched / whole, "x", 1.0),
        Result("  streaming speech, against transformers one by one", sequential / streamed, "x"),
        Result("  streaming speech, against transformers' batch of 16", batched / streamed, "x"),
    ]


def _overhead(scratch: Path, quick: bool) -> list[Result]:
    """Milliseconds of a decode step that are not the network: scheduling, bookkeeping, sampling, text."""
    folder = scratch / "overhead"
    tiny_lm.write(folder, seed=0, scale=0.0)
    parts = build_parts(OmniEngineArgs(model=str(folder), device="cpu"), progress=False)
    stage = parts.stages["thinker"]
    if not isinstance(stage, ARStage):
        raise ConfigError("the benchmark needs an autoregressive stage")
    results = []
    for name, params in (
        ("greedy", SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)),
        ("top-k 40, top-p 0.8", SamplingParams(top_k=40, top_p=0.8, seed=1, max_tokens=128, ignore_eos=True)),
    ):
        _decode_overhead(stage, params, f"{name} warm ")  # warm-up
        # The fastest of several rounds: other load on the machine only adds to a time.
        rounds = [statistics.median(_decode_overhead(stage, params, f"{name} {i} ")) for i in range(_ROUNDS)]
        results.append(Result(f"overhead a step at 16 requests, {name}", 1e3 * min(rounds), "ms", 1.0, at_least=False))
    return results


def _decode_overhead(stage: ARStage, params: SamplingParams, name: str) -> list[float]:
    """Seconds of each decode step of 16 requests that were not spent in the network."""
    for index, prompt in enumerate(_prompts(stage.component.spec.vocab_size, REQUESTS, 8, 24)):
        stage.submit(StageInput(RequestInfo(f"{name}{index}"), params, ARInput(prompt)))
    for _ in range(8):
        stage.step()
    steps = []
    with _network_seconds(stage.component) as network:
        while stage.has_work():
            start = time.perf_counter()
            stage.step()
            steps.append(time.perf_counter() - start - sum(network))
            network.clear()
    return steps


def _memory(scratch: Path, quick: bool) -> list[Result]:
    """Growth of the resident set over many short requests, after a warm-up."""
    folder = scratch / "overhead"
    count = 100 if quick else 1000
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with Omni(folder, device="cpu", progress=False) as omni:

        def generate(requests: int, seed: int) -> None:
            prompts = [OmniTokensPrompt(prompt) for prompt in _prompts(200, requests, 8, 40, seed=seed)]
            omni.generate(prompts, params, progress=False)
            gc.collect()

        generate(300, seed=0)
        before = (resident_memory() or _peak_memory()) / 2**20
        for start in range(0, count, 100):
            generate(100, seed=start + 1)
        growth = (resident_memory() or _peak_memory()) / 2**20 - before
    return [
        Result(f"growth over {count} short requests", growth, "MiB", 16.0, at_least=False),
        Result("peak resident memory of this whole run, both sides loaded", _peak_memory() / 2**20, "MiB"),
    ]


# --------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _network_seconds(component: ARComponent) -> Iterator[list[float]]:
    """The time of each call of a component's network inside the block."""
    names, seconds = ("embed", "forward", "logits"), list[float]()

    def timed(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        result = function(*args)
        seconds.append(time.perf_counter() - start)
        return result

    for name in names:
        setattr(component, name, partial(timed, getattr(component, name)))
    try:
        yield seconds
    finally:
        for name in names:
            delattr(component, name)  # back to the method of the class


def _peak_memory() -> int:
    """Bytes of this process at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _alternate(functions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each function; one warm-up each, then all in turn, `rounds` times."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for seconds, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


@torch.inference_mode()
def _generate(model: Any, prompts: Sequence[tuple[int, ...]], tokens: int) -> object:
    ids, mask = _padded(prompts)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )


def _speak(reference: Reference, prompts: Sequence[tuple[int, ...]], text: int, codes: int) -> object:
    ids, mask = _padded(prompts)
    with torch.inference_mode():
        return reference.model.generate(
            input_ids=ids,
            attention_mask=mask,
            thinker_max_new_tokens=text,
            thinker_min_new_tokens=text,
            thinker_do_sample=False,
            talker_max_new_tokens=codes,
            talker_min_new_tokens=codes,
            talker_do_sample=False,
        )


def _padded(prompts: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids, mask = (
        pad_sequence(tensors, batch_first=True, padding_side="left")
        for tensors in (rows, [torch.ones_like(row) for row in rows])
    )
    return ids, mask


def _prompts(vocab: int, count: int, shortest: int, longest: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(0, vocab, rng.integers(shortest, longest))) for _ in range(count)]


def _machine() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_threads": str(torch.get_num_threads()),
    }


def _print(report: Report, console: Console) -> None:
    table = Table(title=" · ".join(f"{k} {v}" for k, v in report.machine.items() if k != "platform"))
    for heading in ("what", "value", "target", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for result in report.results:
        target = "" if result.target is None else f"{'≥' if result.at_least else '≤'} {result.target:g}"
        mark = "" if result.target is None else ("[green]ok[/]" if result.ok else "[red]missed[/]")
        table.add_row(result.name, f"{result.value:.2f} {result.unit}", target, mark)
    console.print(table)
