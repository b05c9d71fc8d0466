"""`omnistage serve` on a GPU, over HTTP: Qwen2.5-Omni at its true 7B shapes, random weights, its defaults.

    python benchmarks/gpu/serve.py --folder /dev/shm/omni7b --out serve.json
    python benchmarks/gpu/serve.py --family qwen3_omni_moe --folder /dev/shm/omni30b --listeners 1 8 16 32 64

Writes the checkpoint if the folder is not there, starts the service as a user would, and puts load on it with
`omnistage bench serve`: text streams, greedy and at OpenAI's default temperature, and spoken answers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"


FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen2_5_omni": ("talker.max_tokens=384", "talker.min_tokens=384"),
    "qwen3_omni_moe": ("talker.max_tokens=125", "talker.min_tokens=125"),
}
"""What makes spoken answers equally long: 7.7 and 10 s."""
_POOL = 2**26


def write_checkpoint(folder: Path, scale: float, family: str = "qwen2_5_omni") -> None:
    """A random checkpoint; large ones from pieces of a few pools of random numbers, which takes a minute less."""
    import torch

    from omnistage.models import _tiny_common as common
    from omnistage.models.registry import REGISTRY

    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, initial = time.perf_counter(), common.initial
    pools: dict[object, torch.Tensor] = {}

    @functools.wraps(initial)
    def quick(name: str, shape: Sequence[int], rule: common.Rule, seed: int) -> torch.Tensor:
        init, count = rule(name, shape), math.prod(shape)
        if init.keep_rows is not None or count > _POOL or scale < 1.0:
            return initial(name, shape, rule, seed, device=device)
        if init not in pools:
            numbers = torch.empty(_POOL + 2**20, device=device).normal_(init.mean, init.std)
            pools[init] = numbers.to(common.stored_dtype(scale)).cpu()
        offset = zlib.crc32(name.encode()) % 2**20
        return pools[init][offset : offset + count].view(tuple(shape)).clone()

    common.initial = quick
    try:
        tiny = REGISTRY.family(family).tiny
        if tiny is None:
            raise SystemExit(f"{family} has no random checkpoint")
        tiny(folder, scale=scale)
    finally:
        common.initial = initial
    print(f"checkpoint written in {time.perf_counter() - start:.1f} s", flush=True)


@contextlib.contextmanager
def service(folder: Path, port: int, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`omnistage serve` with its output in a file, ended with the block."""
    command = [sys.executable, "-m", "omnistage", "serve", "--model", f"omni={folder}", "--port", str(port), *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ready_after(service: subprocess.Popen[bytes], limit: float) -> float:
    start = time.perf_counter()
    while time.perf_counter() - start < limit:
        if service.poll() is not None:
            raise SystemExit("the service has ended")
        try:
            with urllib.request.urlopen(f"{URL}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return time.perf_counter() - start
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit("the service is not ready")


@contextlib.contextmanager
def profiled(pid: int, path: Path | None, *, gil: bool = True) -> Iterator[None]:
    """Who holds the interpreter meanwhile (or runs at all): stacks in py-spy's raw format, where they are asked for."""
    if path is None:
        yield
        return
    command = ["py-spy", "record", "--nonblocking", "--rate", "100", "--duration", "600", "--format", "raw"]
    command += ["--gil"] if gil else []
    profiler = subprocess.Popen([*command, "--pid", str(pid), "--output", str(path)], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        profiler.send_signal(signal.SIGINT)
        profiler.wait(30)


def load(count: int, waves: int, seed: str) -> tuple[str, ...]:
    return "--concurrency", str(count), "--requests", str(waves * count), "--warmup", "2", "--seed", seed


def bench(name: str, *options: str) -> dict[str, Any]:
    """One run of `omnistage bench serve`; its report."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "omnistage", "bench", "serve", URL, "--out", out, "--no-plot", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        print(f"--- {name} (exit {done.returncode})", flush=True)
        print("\n".join(done.stdout.splitlines()[-40:]), flush=True)
        if done.returncode:
            print(done.stderr[-2000:], flush=True)
        reports = sorted(Path(out).glob("*.json"))
        return json.loads(reports[0].read_text(encoding="utf-8")) if reports else {}


def steps() -> dict[str, tuple[float, float]]:
    """Seconds and number of the steps of each stage so far."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if match := re.match(r'omnistage_stage_step_seconds_(sum|count)\{.*stage="(\w+)".*\} (\S+)', line):
            found.setdefault(match[2], {})[match[1]] = float(match[3])
    return {stage: (values["sum"], values["count"]) for stage, values in found.items()}


def mean_steps(before: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Milliseconds of a step of each stage since then."""
    passed = {
        stage: (seconds - before.get(stage, (0, 0))[0], count - before.get(stage, (0, 0))[1])
        for stage, (seconds, count) in steps().items()
    }
    return {stage: 1e3 * seconds / count for stage, (seconds, count) in passed.items() if count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="of the checkpoint, if it is written")
    parser.add_argument("--family", choices=list(FAMILIES), default="qwen2_5_omni")
    parser.add_argument("--set", action="append", default=[], help="passed to serve")
    parser.add_argument("--listeners", type=int, nargs="*", default=[1, 8, 24])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--profile", type=Path, default=None, help="a folder for py-spy's stacks of each load")
    parser.add_argument("--ready-limit", type=float, default=150.0, help="seconds after which starting is given up")
    parser.add_argument("--log", type=Path, default=None, help="keep what the service writes")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        write_checkpoint(options.folder, options.scale, options.family)
    sets = (*FAMILIES[options.family], *options.set)
    flags = [argument for value in sets for argument in ("--set", value)]
    figures: dict[str, Any] = {}

    def keep(name: str, value: object) -> None:
        """At once: a load that fails takes no other one's figures with it."""
        figures[name] = value
        if options.out is not None:
            options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")

    with tempfile.NamedTemporaryFile() as file, contextlib.ExitStack() as stack:
        log = options.log or Path(file.name)
        stack.callback(lambda: print(log.read_text(encoding="utf-8", errors="replace")[-6000:], flush=True))
        process = stack.enter_context(service(options.folder, PORT, log, *flags))
        with profiled(process.pid, options.profile and options.profile / "start.txt", gil=False):
            keep("ready_seconds", ready_after(process, options.ready_limit))
        print(f"ready after {figures['ready_seconds']:.1f} s", flush=True)
        text = ("--prompt-tokens", "128", "--max-tokens", "128")
        seeds = map(str, itertools.count())  # each load has prompts of its own, which nobody has cached
        for count in options.streams:
            for temperature in ("0", "1"):
                name = f"text_{count}_temperature_{temperature}"
                many = load(count, 4, next(seeds))
                with profiled(process.pid, options.profile and options.profile / f"{name}.txt"):
                    keep(name, bench(name, *text, *many, "--temperature", temperature))
        for count in options.listeners:
            name = f"speech_{count}"
            many, before = load(count, 2, next(seeds)), steps()
            with profiled(process.pid, options.profile and options.profile / f"{name}.txt"):
                keep(name, bench(name, "--mix", "speech", *text, *many))
            keep(f"{name}_step_ms", mean_steps(before))
            print({stage: round(ms, 2) for stage, ms in figures[f"{name}_step_ms"].items()}, flush=True)


if __name__ == "__main__":
    main()
