"""The user's path in two checkouts, side by side: `omnistage serve` over HTTP with OpenAI's default parameters.

    python benchmarks/serve_trees.py before=../base after=.
    python benchmarks/serve_trees.py before=../base after=. --scale 1 --streams 64 --rounds 5     on a GPU

Every checkout serves the same small random checkpoints in a process of its own, with its own defaults. The same streams
go to each of them in turn, round after round; a ratio is taken within a round, and the median over the rounds is what
counts. Absolute figures mean something on an idle machine only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_SECONDS = 300.0
# Families of installed packages belong to one of the checkouts only.
PREPARE = """
import importlib.metadata as metadata, sys
all_entry_points = metadata.entry_points
metadata.entry_points = lambda **by: () if by.get("group") == "omnistage.families" else all_entry_points(**by)
"""
_START = """
from omnistage.cli import app
app(sys.argv[1:])
"""
_WORDS = "river stone lamp garden winter paper bridge morning " * 16


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that are sent at once."""

    name: str
    model: str
    streams: int
    body: dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="checkouts; the first is the reference")
    parser.add_argument(
        "--scale",
        type=float,
        default=0.1,
        help="size of the language model: 0.5 is 100 million parameters, 1 is 1.1 billion",
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the loads whose name has this in it")
    args = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in args.trees)
    loads = [load for load in _loads(args.streams, args.tokens) if args.only in load.name]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        newest = list(trees.values())[-1]
        run(newest, "tiny", "causal_lm", str(folder / "causal_lm"), "--scale", str(args.scale))
        run(newest, "tiny", "qwen2_5_omni", str(folder / "qwen2_5_omni"))
        ports = {name: stack.enter_context(serve(tree, folder))[0] for name, tree in trees.items()}
        seconds: dict[str, dict[str, list[float]]] = {load.name: {name: [] for name in trees} for load in loads}
        tokens: dict[str, int] = {}
        for turn in range(args.rounds + 1):
            for load in loads:
                order = list(trees) if turn % 2 else list(trees)[::-1]
                for name in order:
                    took, tokens[load.name] = _send(ports[name], load, turn)
                    if turn:  # the first round is a warm-up
                        seconds[load.name][name].append(took)
                        print(f"round {turn}: {load.name}, {name}: {took:.3f} s", file=sys.stderr)
    _report(list(trees), seconds, tokens)


def _loads(streams: int, tokens: int) -> list[Load]:
    text: dict[str, object] = {"max_tokens": tokens, "ignore_eos": True}
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "pcm16"}, "max_tokens": 16}
    return [
        Load("1 text stream, temperature 1", "causal_lm", 1, text),
        Load(f"{streams} text streams, temperature 1", "causal_lm", streams, text),
        Load(f"{streams} text streams, greedy", "causal_lm", streams, {**text, "temperature": 0}),
        Load("8 spoken answers", "qwen2_5_omni", 8, spoken),
    ]


def _environment(tree: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(tree).resolve()), os.environ.get("PYTHONPATH", "")))}


def run(tree: str, *arguments: str) -> None:
    command = [sys.executable, "-P", "-c", PREPARE + _START, *arguments]
    subprocess.run(command, env=_environment(tree), check=True, stdout=subprocess.DEVNULL)


@contextmanager
def serve(tree: str, folder: Path, *options: str, prepare: str = PREPARE) -> Iterator[tuple[int, int]]:
    """A service of this checkout over the models in `folder`: its port and process id. `prepare` is run before it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    models = [argument for path in sorted(folder.iterdir()) for argument in ("--model", f"{path.name}={path}")]
    command = [sys.executable, "-P", "-c", prepare + _START, "serve", *models, *options, "--port", str(port)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, env=_environment(tree), stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        try:
            _wait_ready(port, process)
            yield port, process.pid
        finally:
            process.terminate()


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise SystemExit(f"the service on port {port} did not become ready")


def _send(port: int, load: Load, turn: int) -> tuple[float, int]:
    """Seconds until all streams have ended, and the tokens of all of them."""
    with ThreadPoolExecutor(load.streams) as pool:
        start = time.perf_counter()
        counts = list(pool.map(lambda index: _stream(port, load, f"{turn}.{index}"), range(load.streams)))
        return time.perf_counter() - start, sum(counts)


def _stream(port: int, load: Load, label: str) -> int:
    """One streamed chat, read to its end; its completion tokens."""
    prompt = f"{label} {_WORDS}"  # its own beginning: no prompt is found in the prefix cache
    body = {
        "model": load.model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **load.body,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{load.name}: status {response.status}: {response.read(500)!r}")
        last = b""
        for line in response:
            if line.startswith(b"data: {"):
                last = line
        return int(json.loads(last[6:])["usage"]["completion_tokens"])
    finally:
        connection.close()


def _report(names: list[str], seconds: dict[str, dict[str, list[float]]], tokens: dict[str, int]) -> None:
    reference = names[0]
    print(f"| | {' | '.join(f'{name}, s (tokens/s)' for name in names)} | {reference} / {names[-1]}, median |")
    print("| --- |" + " --- |" * (len(names) + 1))
    for load, by_name in seconds.items():
        cells = [f"{(s := statistics.median(by_name[name])):.3f} ({tokens[load] / s:.0f})" for name in names]
        ratios = [a / b for a, b in zip(by_name[reference], by_name[names[-1]], strict=True)]
        print(f"| {load} | {' | '.join(cells)} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
