"""Processor time that `omnistage serve` spends for each request and each streamed token, in two checkouts.

    python benchmarks/request_cost.py before=../base after=.
    python benchmarks/request_cost.py before=../base after=. --family qwen2_5_omni

Every checkout serves the same small random checkpoint in a process of its own. Its layers and its head are left out
(`--with-head` computes the head), so that what is measured is what happens between the socket and the layers: HTTP,
validation, chat template, tokenising, scheduling, sampling, events. Bursts of chats, all at once on connections that
stay open, go to each checkout in turn: short answers and long ones, whose difference is what tokens cost. Processor
time is that of the service's threads, by their kind, so that neither the client nor other programs add to it; ratios
are taken within a round, and their median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from serve_trees import PREPARE, run, serve

SHORT_TOKENS = 8
STEP_SECONDS, PROMPT_TOKEN_SECONDS = 0.005, 22e-6
"""Of the device, about as a 7B model takes on an H200."""
SETTLE_SECONDS = 0.2
TOTAL, WALL = "all threads", "wall time"
LOGIT_ROWS = 4096
# The system's names of threads are Python's. In place of the layers there is a device: a step gives back what it is
# given, and its tokens can be read once it would be done. In place of the head there are rows of random logits.
_PREPARE = f"""{PREPARE}
import threading, time
set_native_id = threading.Thread._set_native_id
def set_native_id_and_name(self):
    set_native_id(self)
    with open(f"/proc/self/task/{{self.native_id}}/comm", "w") as file:
        file.write(self.name[:15])
threading.Thread._set_native_id = set_native_id_and_name
from omnistage.engines.ar.runner import Runner
init, launch, read = Runner.__init__, Runner.launch, Runner.read
busy_until, done = 0.0, {{}}
def init_without_layers(self, component, *args, **options):
    if "torchscript" in options:
        options["torchscript"] = False  # programs of the layers would run in place of the device
    init(self, component, *args, **options)
    component.forward = lambda embeds, positions, paged: embeds
def launch_on_device(self, output):
    global busy_until
    tokens = sum(item.count for item in output.batch)
    busy_until = max(busy_until, time.perf_counter()) + max({STEP_SECONDS}, tokens * {PROMPT_TOKEN_SECONDS})
    step = launch(self, output)
    done[id(step)] = busy_until
    return step
def read_from_device(self, step):
    time.sleep(max(0.0, done.pop(id(step)) - time.perf_counter()))
    return read(self, step)
Runner.__init__, Runner.launch, Runner.read = init_without_layers, launch_on_device, read_from_device
"""
_WITHOUT_HEAD = f"""
import itertools, torch
init_with_head = Runner.__init__
def init_without_head(self, component, *args, **options):
    init_with_head(self, component, *args, **options)
    vocabulary = component.spec.vocab_size
    table = torch.randn({LOGIT_ROWS}, vocabulary, generator=torch.Generator().manual_seed(1))
    starts = itertools.cycle(range(0, {LOGIT_ROWS} // 2, 67))
    component.logits = lambda hidden: table[(start := next(starts)) : start + hidden.shape[0]]
Runner.__init__ = init_without_head
"""
_WORDS = "river stone lamp garden winter paper bridge morning " * 5

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Seconds = Counter[str]
"""Of processor time, by kind of thread."""


def cpu_seconds(pid: int) -> Seconds:
    seconds: Seconds = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "event loop" if int(task.name) == pid else (task / "comm").read_text().strip()
        kind = "preparation" if name.startswith("omnistage-prep") else name
        nanoseconds = int((task / "schedstat").read_text().split()[0])
        for each in (kind if kind in ("event loop", "preparation") else "stage and others", TOTAL):
            seconds[each] += nanoseconds / 1e9
    return seconds


async def stream(connection: Connection, body: bytes) -> int:
    """One streamed chat, read to its end; its events."""
    reader, writer = connection
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    received = bytearray()
    while not received.endswith(b"\r\n0\r\n\r\n"):
        piece = await reader.read(2**16)
        if not piece:
            raise SystemExit(f"the service closed a connection: {bytes(received[-500:])!r}")
        received += piece
    if b"data: [DONE]" not in received:
        raise SystemExit(f"a chat failed: {bytes(received[:1000])!r}")
    return received.count(b"data: {")


async def burst(connections: list[Connection], pid: int, tokens: int, label: str) -> tuple[Seconds, int]:
    """The processor time of one chat on each connection, all sent at once, and their events."""
    fields = {"model": "model", "stream": True, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    bodies = [
        json.dumps({**fields, "messages": [{"role": "user", "content": f"{label} {row} {_WORDS}"}]}).encode()
        for row in range(len(connections))
    ]
    before, start = cpu_seconds(pid), time.perf_counter()
    events = await asyncio.gather(*map(stream, connections, bodies))
    wall = time.perf_counter() - start
    await asyncio.sleep(SETTLE_SECONDS)  # what is put away after the answer
    after = cpu_seconds(pid)
    return Counter({WALL: wall, **{kind: after[kind] - before[kind] for kind in after}}), sum(events)


async def costs(connections: list[Connection], pid: int, args: argparse.Namespace, label: str) -> dict[str, Seconds]:
    """Microseconds a request (without its tokens) and a token, by kind of thread."""
    short, long = Counter[str](), Counter[str]()
    for turn in range(args.bursts):
        seconds, _ = await burst(connections, pid, SHORT_TOKENS, f"{label}.{turn} short")
        short.update(seconds)
        seconds, events = await burst(connections, pid, args.tokens, f"{label}.{turn} long")
        long.update(seconds)
        if events < args.streams * args.tokens / 2:
            raise SystemExit(f"{events} events for {args.streams} answers of {args.tokens} tokens: most have no text")
    requests, more = args.bursts * args.streams, args.tokens - SHORT_TOKENS
    token = {kind: (long[kind] - short[kind]) * 1e6 / requests / more for kind in long}
    request = {kind: short[kind] * 1e6 / requests - SHORT_TOKENS * token[kind] for kind in short}
    return {"request": Counter(request), "token": Counter(token)}


async def measure(services: dict[str, tuple[int, int]], args: argparse.Namespace) -> None:
    connections = {
        name: [await asyncio.open_connection("127.0.0.1", port) for _ in range(args.streams)]
        for name, (port, _) in services.items()
    }
    results: dict[str, list[dict[str, Seconds]]] = {name: [] for name in services}
    for turn in range(args.rounds + 1):
        for name in list(services) if turn % 2 else reversed(services):
            found = await costs(connections[name], services[name][1], args, str(turn))
            if turn:  # the first round is a warm-up
                results[name].append(found)
                print(f"round {turn}, {name}: {found}", file=sys.stderr)
    _report(list(services), results)


def _report(names: list[str], results: dict[str, list[dict[str, Seconds]]]) -> None:
    first, last = names[0], names[-1]
    print(f"| processor time, µs | {' | '.join(names)} | {last} / {first}, median of the rounds |")
    print("| --- |" + " --- |" * (len(names) + 1))
    for what in ("request", "token"):
        for kind in (TOTAL, "event loop", "preparation", "stage and others", WALL):
            cells = [f"{statistics.median(found[what][kind] for found in results[name]):.1f}" for name in names]
            pairs = zip(results[last], results[first], strict=True)
            ratios = [a[what][kind] / b[what][kind] for a, b in pairs if b[what][kind] > 0]
            ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
            print(f"| a {what}, {kind} | {' | '.join(cells)} | {ratio} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="checkouts; the first is the reference")
    parser.add_argument("--family", default="causal_lm", choices=("causal_lm", "qwen2_5_omni"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--bursts", type=int, default=2, help="of each kind, in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--with-head", action="store_true", help="also compute the product of the model's head")
    args = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in args.trees)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        run(list(trees.values())[-1], "tiny", args.family, str(Path(scratch, "model")))
        options = ("--set", "thinker.budget.run_ahead=true")
        prepare = _PREPARE if args.with_head else _PREPARE + _WITHOUT_HEAD
        services = {
            name: stack.enter_context(serve(tree, Path(scratch), *options, prepare=prepare))
            for name, tree in trees.items()
        }
        asyncio.run(measure(services, args))


if __name__ == "__main__":
    main()
