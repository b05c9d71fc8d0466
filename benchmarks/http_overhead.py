"""What the HTTP service costs beside calling the engine: whole time of streamed text, time to first audio.

A server in a process of its own, asked from this one, against `AsyncOmni` in another process of its own; the same
requests, in turn, round after round, one torch thread on either side. The ratio is taken within each round, and its
median over the rounds is what counts: whatever else the machine does meets both sides. The ratio of processor time (of
those two processes) is given beside it, which other programs hardly add to.

python benchmarks/http_overhead.py                     a causal LM of 100 million parameters, and the smallest one
python benchmarks/http_overhead.py --quick             smaller sizes, few rounds: does it run?
python benchmarks/http_overhead.py --out out/http      also writes out/http/http_overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from omnistage.bench.child import serve_models
from omnistage.bench.load import connect
from omnistage.bench.measure import Outcome, count_event
from omnistage.bench.report import environment
from omnistage.bench.workload import Kind
from omnistage.core.http_client import Client, EventReader
from omnistage.core.params import SamplingParams
from omnistage.models.causal_lm import tiny as tiny_lm
from omnistage.models.qwen2_5_omni import tiny as tiny_omni
from omnistage.omni import AsyncOmni

MOST_TIME = 1.10
MOST_FIRST_AUDIO = 1.20
_WORDS = ("river", "stone", "lamp", "garden", "winter", "paper", "bridge", "morning")
_TICK = os.sysconf("SC_CLK_TCK")
_HAS_PROC = Path("/proc/self/stat").exists()

Messages = list[dict[str, Any]]
Ask = Callable[[Messages], Awaitable[float]]
"""Sends one conversation; the seconds to what is measured: the end of the text, or the first audio chunk."""
Side = Callable[[list[Messages]], Awaitable[float]]
"""Sends conversations at once; the seconds for all of them, or the median time to the first audio chunk."""


@dataclass
class Comparison:
    """Both sides of one measurement, one value per round."""

    name: str
    target: float | None
    engine: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    engine_cpu: list[float] = field(default_factory=list)
    http_cpu: list[float] = field(default_factory=list)
    """Of the server's process alone: the client is not its cost."""

    @property
    def ratio(self) -> float:
        return statistics.median(h / e for h, e in zip(self.http, self.engine, strict=True))

    @property
    def cpu_ratio(self) -> float | None:
        pairs = [(h, e) for h, e in zip(self.http_cpu, self.engine_cpu, strict=True) if e > 0]
        return statistics.median(h / e for h, e in pairs) if _HAS_PROC and pairs else None

    @property
    def ok(self) -> bool:
        return self.target is None or self.ratio <= self.target

    def line(self) -> str:
        engine, http = statistics.median(self.engine), statistics.median(self.http)
        cpu = f", processor time {self.cpu_ratio:.3f}" if self.cpu_ratio is not None else ""
        verdict = "" if self.target is None else f"  (at most {self.target:g}: {'ok' if self.ok else 'missed'})"
        return (
            f"{self.name:<46} {1e3 * engine:8.1f} ms  {1e3 * http:8.1f} ms  ratio {self.ratio:.3f}{cpu}"
            f", {len(self.http)} rounds{verdict}"
        )


def conversation(mark: str, words: int) -> Messages:
    """A unique conversation, so that no prefix is cached."""
    text = " ".join(_WORDS[i % len(_WORDS)] for i in range(words))
    return [{"role": "user", "content": f"{mark} {text}"}]


def engine_asks(omni: AsyncOmni, tokens: int, *, speech: bool) -> Ask:
    params = {"thinker": SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)}
    modalities = ["text", "audio"] if speech else ["text"]

    async def ask(messages: Messages) -> float:
        start, heard = time.perf_counter(), None
        async for item in omni.generate(messages, params, modalities=modalities):
            if item.audio is not None and heard is None:
                heard = time.perf_counter() - start
            if item.final is not None and item.final.error is not None:
                raise item.final.error
        return _required(heard) if speech else time.perf_counter() - start

    return ask


def http_asks(client: Client, tokens: int, *, speech: bool) -> Ask:
    fields: dict[str, Any] = {"model": "model", "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    fields |= {"stream": True, "modalities": ["text", "audio"] if speech else ["text"]}

    async def ask(messages: Messages) -> float:
        outcome = Outcome(0, Kind.TEXT, 0.0, 0.0)
        events, start = EventReader(), time.perf_counter()
        body = json.dumps({**fields, "messages": messages}).encode()
        async with client.request("/v1/chat/completions", body) as response:
            if response.status != 200:
                raise SystemExit(f"the service responded with status {response.status}: {await response.read_json()}")
            async for moment, piece in response.stream():
                for event in events.push(piece):
                    count_event(outcome, moment - start, event)
        if outcome.error is not None:
            raise SystemExit(f"a request of the benchmark failed: {outcome.error}, {outcome.message}")
        return _required(outcome.ttfa) if speech else time.perf_counter() - start

    return ask


def _required(seconds: float | None) -> float:
    if seconds is None:
        raise SystemExit("a response of the benchmark has no audio")
    return seconds


def cpu_seconds(pid: int) -> float:
    """Processor time of a process; 0 where the system has no figure."""
    if not _HAS_PROC:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


async def at_once(ask: Ask, conversations: list[Messages], *, speech: bool) -> float:
    start = time.perf_counter()
    times = await asyncio.gather(*(ask(messages) for messages in conversations))
    return statistics.median(times) if speech else time.perf_counter() - start


async def work_offline(folder: Path, tokens: int, codes: int, *, speech: bool) -> None:
    """The engine in a separate process: a JSON line of conversations in, a line of seconds out."""
    overrides = (f"talker.max_tokens={codes}",) if speech else ()
    async with AsyncOmni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
        ask = engine_asks(omni, tokens, speech=speech)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(await at_once(ask, json.loads(line), speech=speech), flush=True)


@asynccontextmanager
async def offline(folder: Path, tokens: int, codes: int, *, speech: bool) -> AsyncIterator[tuple[Side, int]]:
    """The engine in another process, and that process's id."""
    arguments = ["--offline", str(folder), "--tokens", str(tokens), "--codes", str(codes), *(["--speech"] * speech)]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if child.stdin is None or child.stdout is None:
        raise SystemExit("the engine's process has no pipes")
    send, receive = child.stdin, child.stdout
    if await receive.readline() != b"ready\n":
        raise SystemExit("the engine's process did not start")

    async def side(conversations: list[Messages]) -> float:
        send.write(json.dumps(conversations).encode() + b"\n")
        return float(await receive.readline())

    try:
        yield side, child.pid
    finally:
        send.close()
        await child.wait()


async def alternate(
    measurement: Comparison, sides: Sequence[tuple[Side, int]], level: int, rounds: int, words: int
) -> None:
    """Rounds of the engine and the service in turn, after a warm-up of each."""
    results = ((measurement.engine, measurement.engine_cpu), (measurement.http, measurement.http_cpu))
    for number in range(-1, rounds):
        conversations = [conversation(f"{measurement.name}, {number}, {row}", words) for row in range(level)]
        for index in (0, 1) if number % 2 else (1, 0):
            side, pid = sides[index]
            cpu = cpu_seconds(pid)
            took = await side(conversations)
            if number >= 0:
                results[index][0].append(took)
                results[index][1].append(cpu_seconds(pid) - cpu)


async def compare(
    folder: Path, name: str, levels: Sequence[int], options: argparse.Namespace, *, speech: bool, counts: bool
) -> list[Comparison]:
    """One model on both sides."""
    given = ["--set", f"talker.max_tokens={options.codes}"] if speech else []
    arguments = ["--model", f"model={folder}", "--device", "cpu", "--dtype", "float32", *given]
    tokens = options.speech_tokens if speech else options.tokens
    target = (MOST_FIRST_AUDIO if speech else MOST_TIME) if counts else None
    measurements = []
    with serve_models(arguments, {"OMP_NUM_THREADS": "1"}) as (url, pid):
        client = connect(url, None)
        ask = http_asks(client, tokens, speech=speech)

        async def http(conversations: list[Messages]) -> float:
            return await at_once(ask, conversations, speech=speech)

        async with offline(folder, tokens, options.codes, speech=speech) as engine:
            for level in levels:
                what = "time to first audio" if speech else "whole time"
                measurement = Comparison(f"{name}, {level} at once, {what}", target)
                await alternate(measurement, (engine, (http, pid)), level, options.rounds, options.words)
                print(measurement.line(), flush=True)
                measurements.append(measurement)
        await client.close()
    return measurements


async def measure(options: argparse.Namespace) -> list[Comparison]:
    with tempfile.TemporaryDirectory() as scratch:
        small, smallest, omni = (Path(scratch) / name for name in ("small", "smallest", "omni"))
        tiny_lm.write(small, seed=0, scale=options.scale)
        tiny_lm.write(smallest, seed=0, scale=0.0)
        tiny_omni.write(omni, seed=0, scale=0.0)
        levels = options.concurrency
        measurements = await compare(
            small, f"LM of scale {options.scale:g}", levels, options, speech=False, counts=True
        )
        measurements += await compare(omni, "small Qwen2.5-Omni", [1], options, speech=True, counts=True)
        if not options.required:
            measurements += await compare(smallest, "smallest LM", levels, options, speech=False, counts=False)
        return measurements


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.5, help="size of the LM, 0 to 1; 0.5: 100 million parameters")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=16, help="length of the prompts")
    parser.add_argument("--speech-tokens", type=int, default=16)
    parser.add_argument("--codes", type=int, default=96, help="length of the speech, in codes")
    parser.add_argument("--required", action="store_true", help="only what has a target")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--offline", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--speech", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if options.offline is not None:
        asyncio.run(work_offline(options.offline, options.tokens, options.codes, speech=options.speech))
        return 0
    if options.quick:
        options.scale, options.rounds, options.tokens = 0.1, 2, 16
    where = environment()
    print(f"{where['date']}, {where['cpu']}, {where['cores']} cores, torch {torch.__version__}: engine, HTTP")
    measurements = asyncio.run(measure(options))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(one), "ratio": one.ratio, "cpu_ratio": one.cpu_ratio, "ok": one.ok} for one in measurements]
        report = {"environment": {**where, "torch": torch.__version__}, "options": vars(options), "results": rows}
        (options.out / "http_overhead.json").write_text(json.dumps(report, indent=1, default=str), encoding="utf-8")
    return 0 if all(one.ok for one in measurements) else 1


if __name__ == "__main__":
    sys.exit(main())
