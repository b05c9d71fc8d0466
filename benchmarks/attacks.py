"""Ordinary requests beside hostile ones: `omnistage serve` over HTTP while others send what is dear to process.

    python benchmarks/attacks.py [--attackers 16] [--seconds 15] [--only TEXT]

Serves two small random checkpoints. For each kind of hostile request it keeps `--attackers` of them in flight, to one
of the models, and meanwhile sends ordinary chats to that model and to the other, and asks for `/health`. At last the
service gets SIGTERM in the middle of an attack. Times are compared with those of the service at rest, in the same run;
memory is that of the service and of its decode processes before, during and some seconds after an attack.
"""

from __future__ import annotations

import argparse
import base64
import collections
import http.client
import io
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image

from omnistage.bench.child import serve_models

MODELS = ("causal_lm", "qwen2_5_omni")
DRAIN_SECONDS = 2
_QUIET_CHATS = 20
_BEGIN_SECONDS = 3.0
"""Until the attackers' process has started and all of its requests are in flight."""
_AFTER_SECONDS = 8.0
"""After an attack, until what it took should be free again."""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    target: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Settings:
    attackers: int
    seconds: float
    pause: float


@dataclass(slots=True)
class Times:
    """Seconds of what was sent while an attack ran."""

    health: list[float] = field(default_factory=list)
    chats: dict[str, list[float]] = field(default_factory=lambda: {model: [] for model in MODELS})
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    """Of the hostile requests."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Bytes of the service, and of its decode processes."""


# ------------------------------------------------------------------------------------------------- hostile requests


def jpeg_of_many_scans(scans: int, side: int) -> bytes:
    """A progressive JPEG whose last scan, which changes nothing, is there again and again."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), 128).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * scans + data[-2:]


def large_png(side: int) -> bytes:
    """One colour: a few hundred kilobytes, whatever its size."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (10, 120, 200)).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def attacks() -> list[Attack]:
    text, omni = MODELS
    image = base64.b64encode(jpeg_of_many_scans(8000, 3000)).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}}]
    large = base64.b64encode(large_png(8000)).decode()
    many = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{large}"}}] * 12
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(.{1,500}){400,500}$"}}}
    structured = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "required": ["a"]}}}
    zeros = _chat(text, "hi", tools="?").replace(b'"?"', b"[" + b"0," * (2 * 2**20) + b"0]")
    return [
        Attack("JPEG of 8,000 scans", omni, _chat(omni, [*parts, {"type": "text", "text": "hi"}])),
        Attack("12 pictures of 64 megapixels", omni, _chat(omni, [*many, {"type": "text", "text": "hi"}])),
        Attack("4 MiB of tools: [0, 0, ...]", text, zeros),
        Attack("grammar dear to step", text, _chat(text, "hi", response_format=structured, max_tokens=64)),
        Attack("2,000,000 x U+E0F0", text, _chat(text, "\ue0f0" * 2_000_000)),
        Attack("200,000 special tokens", text, _chat(text, "<|im_start|>" * 160_000)),
    ]


def _chat(model: str, content: object, **more: object) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}
    return json.dumps(body, ensure_ascii=False).encode()


# -------------------------------------------------------------------------------------------------------- measuring


def send(address: str, body: bytes | None, timeout: float = 120.0) -> int:
    """POST a chat, or GET /health; the status."""
    host = urlsplit(address)
    connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=timeout)
    try:
        if body is None:
            connection.request("GET", "/health")
        else:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def timed(address: str, body: bytes | None) -> float:
    start = time.perf_counter()
    status = send(address, body)
    if status != 200:
        raise SystemExit(f"an ordinary request was answered with {status}")
    return time.perf_counter() - start


def flood(address: str, body: bytes, attackers: int, pause: float, statuses: SimpleQueue[str]) -> None:
    """Keep so many hostile requests in flight, each sent again a pause after its answer; runs in its own process."""
    os.nice(5)  # the clients are not what is measured

    def run() -> None:
        while True:
            try:
                statuses.put(str(send(address, body)))
            except (OSError, http.client.HTTPException) as error:
                statuses.put(type(error).__name__)
            time.sleep(pause)

    threads = [threading.Thread(target=run) for _ in range(attackers)]
    for thread in threads:
        thread.start()


@contextmanager
def attacked(address: str, attack: Attack, settings: Settings, times: Times) -> Iterator[None]:
    """Hostile requests are in flight inside the block; their clients leave at its end."""
    spawn = multiprocessing.get_context("spawn")
    statuses = spawn.SimpleQueue()
    process = spawn.Process(target=flood, args=(address, attack.body, settings.attackers, settings.pause, statuses))
    process.start()
    try:
        yield
    finally:
        while not statuses.empty():
            times.statuses[statuses.get()] += 1
        process.kill()
        process.join()


def ordinary(model: str) -> bytes:
    return _chat(model, "How are you today?")


def resident(process: int) -> int:
    """Bytes of one process, its share of what it has in common with others."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0


def memory(process: int) -> tuple[int, int]:
    """Bytes of the service and of its decode processes."""
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return resident(process), sum(map(resident, children))


def measure(address: str, process: int, attack: Attack, settings: Settings) -> Times:
    times = Times(memory=[memory(process)])
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            times.memory.append(memory(process))

    def repeat(into: list[float], body: bytes | None) -> None:
        while not over.is_set():
            into.append(timed(address, body))
            over.wait(0.05)

    tasks: list[Callable[[], None]] = [lambda: repeat(times.health, None)]
    tasks += [lambda model=model: repeat(times.chats[model], ordinary(model)) for model in MODELS]  # type: ignore[misc]
    with attacked(address, attack, settings, times):
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        time.sleep(_BEGIN_SECONDS)
        threads = [threading.Thread(target=task, daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        time.sleep(settings.seconds)
        over.set()
        for thread in threads:
            thread.join(120)
    watching.join()
    time.sleep(_AFTER_SECONDS)
    times.memory.append(memory(process))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attackers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0, help="for each attack")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before an attacker sends again")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the attacks whose name has this in it")
    args = parser.parse_args()
    chosen = [attack for attack in attacks() if args.only in attack.name]
    with tempfile.TemporaryDirectory() as scratch:
        models = []
        for family in MODELS:
            folder = Path(scratch) / family
            command = [sys.executable, "-m", "omnistage", "tiny", family, str(folder)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            models += ["--model", f"{family}={folder}"]
        with serve_models([*models, "--drain-seconds", str(DRAIN_SECONDS)]) as (address, process):
            run_all(address, process, chosen, Settings(args.attackers, args.seconds, args.pause))


def run_all(address: str, process: int, chosen: list[Attack], settings: Settings) -> None:
    quiet = {model: [timed(address, ordinary(model)) for _ in range(_QUIET_CHATS + 3)][3:] for model in MODELS}
    typical = {model: statistics.median(quiet[model]) for model in MODELS}
    print(f"{settings.attackers} hostile requests at once, {settings.seconds:g} s of each, sent again after a pause of")
    print(f"{settings.pause:g} s; times in ms, and as multiples of those at rest")
    print("at rest: " + ", ".join(f"{model} {1000 * typical[model]:.0f}" for model in MODELS))
    columns = ["/health, longest", "same model, median", "other model, median", "MiB before", "highest", "after"]
    print(f"\n| attack | {' | '.join(columns)} | answers to it |")
    print("| --- | " + "---: | " * len(columns) + "--- |")
    for attack in chosen:
        times = measure(address, process, attack, settings)
        other = next(model for model in MODELS if model != attack.target)
        cells = [f"{1000 * max(times.health):.0f}"]
        for model in (attack.target, other):
            median = statistics.median(times.chats[model])
            cells.append(f"{1000 * median:.0f} ({median / typical[model]:.1f})")
        highest = max(range(len(times.memory)), key=lambda at: sum(times.memory[at]))
        for service, decoding in (times.memory[0], times.memory[highest], times.memory[-1]):
            cells.append(f"{service >> 20} + {decoding >> 20}")
        answers = ", ".join(f"{status}: {count}" for status, count in sorted(times.statuses.items()))
        print(f"| {attack.name} | {' | '.join(cells)} | {answers} |", flush=True)
    with attacked(address, chosen[0], settings, Times()):
        time.sleep(_BEGIN_SECONDS)
        start = time.perf_counter()
        os.kill(process, signal.SIGTERM)
        while _alive(process) and time.perf_counter() - start < 60:
            time.sleep(0.05)
        took = time.perf_counter() - start
        print(f"\nSIGTERM during the first: ended after {took:.1f} s (--drain-seconds {DRAIN_SECONDS})")


def _alive(process: int) -> bool:
    """Whether it runs; one that has ended stays a zombie until its parent asks."""
    with suppress(OSError):
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return False


if __name__ == "__main__":
    main()
