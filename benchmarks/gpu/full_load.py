"""500 mixed requests at full load on a budget of 24 GiB, and a model that does not fit.

    python benchmarks/gpu/full_load.py --folder /dev/shm/omni_load --out full_load.json
    python benchmarks/gpu/full_load.py --folder out/tiny --dry-run      the smallest checkpoint, on the CPU

Writes a random Qwen2.5-Omni of 9 GiB of weights if the folder is not there, starts `omnistage serve --gpu-memory 24GiB`
(which limits torch's allocator) and sends text up to the model's full length, pictures and sound, answered in text and
speech, 64 at once. Beside it a service with 6 GiB must be refused before it reads a weight. Exits with 1 unless every
request is answered or refused with a clear 4xx, nothing runs out of memory, and the GPU's memory stays in the budget.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from full_load_requests import LoadRequest, build_requests
from serve import PORT, URL, ready_after, service, write_checkpoint

from omnistage.config import parse_size
from omnistage.core.http_client import Address, BrokenResponseError, Client

GIB = 2**30
PATH = "/v1/chat/completions"
REFUSED = re.compile(r"\S+ does not fit: for one request it needs .{,200} available; .{,300}")
WEIGHTS_READ = re.compile(r"weights \d|after loading")
STREAM_ERROR = re.compile(rb'data: {"error".{,200}')
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)


class MemoryPeak:
    """The most memory of a GPU that was taken since the start, whoever took it; 0 without a GPU."""

    def __init__(self) -> None:
        self.peak = 0
        self._start = self._used()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _used(self) -> int:
        if not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.peak = max(self.peak, self._used() - self._start)


def outcome(status: int, streamed: bool, body: bytes) -> str:
    """`answered`, `refused STATUS` where the reason is clear, else what is wrong with it."""
    if status == 200 and streamed:
        error = STREAM_ERROR.search(body)
        if error is not None:
            return f"failed in its stream: {error[0].decode(errors='replace')}"
        return "answered" if body.rstrip().endswith(b"data: [DONE]") else "failed: the stream is not complete"
    try:
        content = json.loads(body)
    except ValueError:
        return f"failed: {status} without JSON"
    if status == 200:
        return "answered" if content.get("choices") else "failed: no choices"
    message = (content.get("error") or {}).get("message")
    return f"refused {status}" if 400 <= status < 500 and message else f"failed: {status} {message}"


async def send(client: Client, request: LoadRequest) -> str:
    try:
        async with client.request(PATH, request.body) as response:
            body = b"".join([part async for _time, part in response.stream()])
            return outcome(response.status, request.streamed, body)
    except (OSError, BrokenResponseError) as error:
        return f"failed: {error}"


async def send_all(requests: Sequence[LoadRequest], concurrency: int, limit: float) -> list[str]:
    """The outcome of each request, in order."""
    outcomes = ["failed: no answer in time"] * len(requests)
    client, waiting = Client(Address.parse(URL)), iter(enumerate(requests))

    async def work() -> None:
        for index, request in waiting:
            outcomes[index] = await send(client, request)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    await client.close()
    return outcomes


def metrics(*names: str) -> dict[str, float]:
    """Counters and gauges of the service, summed over their labels."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: sum(float(value) for key, value in pairs if key.partition("{")[0] == name) for name in names}


def refused_before_loading(process: subprocess.Popen[bytes], log: Path, limit: float) -> tuple[bool, str]:
    """Whether a start with too little memory ended by itself with a message that says what would fit."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return False, f"it was not refused within {limit:g} s"
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", log.read_text(encoding="utf-8", errors="replace")).split())
    message = REFUSED.search(text)
    if code == 0 or message is None or WEIGHTS_READ.search(text):
        return False, f"exit code {code}: {text[:600]}"
    return True, message[0]


def report(requests: Sequence[LoadRequest], outcomes: Sequence[str], checks: dict[str, bool]) -> None:
    by_kind = Counter((request.kind, result) for request, result in zip(requests, outcomes, strict=True))
    for (kind, result), count in sorted(by_kind.items()):
        print(f"  {count:4} {kind:<28} {result}")
    for check, passed in checks.items():
        print(f"{'ok    ' if passed else 'FAILED'} {check}", flush=True)


def load(options: argparse.Namespace, log: Path, requests: Sequence[LoadRequest]) -> dict[str, Any]:
    """Start the service and the one that must be refused, and send the requests."""
    # What is measured is memory: starting with compiled layers takes longer than all requests.
    flags = [] if options.compile else ["--set", "thinker.compile=false", "--set", "talker.compile=false"]
    flags += ["--set", f"talker.max_tokens={options.codes}", "--set", f"talker.min_tokens={options.codes}"]
    for value in options.set:
        flags += ["--set", value]
    memory = ["--device", "cpu"] if options.dry_run else ["--gpu-memory", options.gpu_memory]
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        peak = stack.enter_context(MemoryPeak())
        running = stack.enter_context(service(options.folder, PORT, log, *flags, *memory))
        small_log = log.with_name("refused.txt")
        if not options.dry_run:
            small = service(options.folder, PORT + 1, small_log, *flags, "--gpu-memory", options.too_small)
            process = stack.enter_context(small)
        found["ready_seconds"] = ready_after(running, options.ready_limit)
        print(f"ready after {found['ready_seconds']:.1f} s", flush=True)
        if not options.dry_run:
            found["refused"], found["refusal"] = refused_before_loading(process, small_log, 60)
            print(f"with {options.too_small}: {found['refusal']}", flush=True)
        start = time.perf_counter()
        found["outcomes"] = asyncio.run(send_all(requests, options.concurrency, options.limit))
        found["load_seconds"] = time.perf_counter() - start
        names = ("omnistage_cuda_memory_reserved_bytes", "omnistage_stage_failures_total")
        found |= metrics(*names, "omnistage_stage_rebuilds_total", "omnistage_stage_preemptions_total")
        found["alive"] = running.poll() is None
        found["peak_bytes"] = peak.peak
    return found


def judge(options: argparse.Namespace, found: dict[str, Any], requests: Sequence[LoadRequest], log: str) -> bool:
    outcomes: list[str] = found["outcomes"]
    too_long = [o for r, o in zip(requests, outcomes, strict=True) if r.kind == "text longer than the model"]
    answered = sum(o == "answered" for o in outcomes)
    failed = sum(o.startswith("failed") for o in outcomes)
    budget = parse_size(options.gpu_memory)
    reserved = found["omnistage_cuda_memory_reserved_bytes"]
    checks = {
        f"{len(outcomes)} requests: {answered} answered, {failed} failed, the others refused with a reason": not failed,
        "most of them are answered": answered >= 0.9 * len(outcomes),
        "those that are too long are refused": all(o.startswith("refused 4") for o in too_long),
        "no stage failed, the service is alive": found["alive"] and not found["omnistage_stage_failures_total"],
        "no out-of-memory in the log": not OUT_OF_MEMORY.search(log),
    }
    if not options.dry_run:
        taken = f"{found['peak_bytes'] / GIB:.2f} GiB of the GPU at the peak, torch {reserved / GIB:.2f} GiB at the end"
        checks[f"{taken}, budget {budget / GIB:.0f} GiB"] = 0 < found["peak_bytes"] <= budget
        checks[f"a start with {options.too_small} is refused before it reads a weight"] = found["refused"]
    report(requests, outcomes, checks)
    print(f"{found['load_seconds']:.1f} s of load, {found['omnistage_stage_preemptions_total']:.0f} preemptions")
    return all(checks.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=0.9, help="of the checkpoint, if it is written")
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--too-small", default="6GiB", help="a budget that must be refused")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192, help="tokens of long prompts")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the model's longest request")
    parser.add_argument("--codes", type=int, default=192, help="codec tokens of a spoken answer")
    parser.add_argument("--compile", action="store_true", help="as the service does by default; a longer start")
    parser.add_argument("--set", action="append", default=[], help="passed to serve")
    parser.add_argument("--ready-limit", type=float, default=60.0, help="seconds after which starting is given up")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for all requests")
    parser.add_argument("--dry-run", action="store_true", help="the CPU, to try the script out")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("this needs a GPU; try it on the CPU with --dry-run")
    start = time.perf_counter()
    if not (options.folder / "config.json").exists():
        write_checkpoint(options.folder, 0.0 if options.dry_run else options.scale)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    tokenizer = options.folder / "tokenizer.json"
    requests = build_requests(options.requests, tokenizer, context=options.context, longest=options.longest)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.txt"
        try:
            found = load(options, log, requests)
        finally:
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            print(text[-4000:], flush=True)
    passed = judge(options, found, requests, text)
    print(f"{time.perf_counter() - start:.0f} s in all", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found | {"passed": passed}, indent=1), encoding="utf-8")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
