"""Ordinary requests beside hostile ones: `omnistage serve` over HTTP while others send what is expensive to process.

    python benchmarks/attacks.py [--attackers 16] [--seconds 15] [--only TEXT] [--memory]

Serves two small random checkpoints. For each kind of hostile request it keeps `--attackers` of them in flight, to one
of the models, and meanwhile sends ordinary chats to that model and to the other, and asks for `/health`. At last the
service gets SIGTERM in the middle of an attack. Times are compared with those of the same ordinary requests alone, just
before the attack.

With `--memory` also the memory of the service and of its decode processes before, during and some seconds after.

The hostile clients write bytes that were built before and share the processor with the service. What they take away
shows in the control rows: as many bytes as often, to a path that does not exist; and ordinary chats. The service's
processor time for one hostile request is measured before the ordinary ones begin.
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
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from omnistage.bench.child import serve_models

TEXT_MODEL, OMNI_MODEL = MODELS = ("causal_lm", "qwen2_5_omni")
DRAIN_SECONDS = 2
MAX_RATIO, MAX_HEALTH_SECONDS = 3.0, 0.2
_BEGIN_SECONDS = 1.0
"""Until all requests of the attackers are in flight."""
_AFTER_SECONDS = 8.0
"""After an attack, until what it took should be free again."""
_TICK = os.sysconf("SC_CLK_TCK")
_HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n%s\r\n\r\n"
_CHAT = b"/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    target: str
    request: bytes


@dataclass(frozen=True, slots=True)
class Settings:
    attackers: int
    seconds: float
    pause: float
    memory: bool


@dataclass(slots=True)
class Times:
    """Seconds of what was sent while an attack ran."""

    health: list[float] = field(default_factory=list)
    chats: dict[str, list[float]] = field(default_factory=lambda: {model: [] for model in MODELS})
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    """Of the hostile requests."""
    service_cpu: float | None = None
    """Processor seconds of the service for one hostile request; None where none was answered."""
    client_cpu: float = 0.0
    """Share of one core that the hostile clients took."""
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
    image = base64.b64encode(jpeg_of_many_scans(8000, 3000)).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}}]
    large = base64.b64encode(large_png(8000)).decode()
    many = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{large}"}}] * 12
    zeros = _chat(TEXT_MODEL, "hi", tools="?").replace(b'"?"', b"[" + b"0," * (2 * 2**20) + b"0]")
    words = " ".join(f"{i * 7919 % 9973:x}" for i in range(40_000))
    prediction = {"type": "content", "content": "word " * 400_000}
    small = _chat(TEXT_MODEL, "hi")
    logprobs = {"logprobs": True, "top_logprobs": 20, "max_tokens": 64}
    return [
        Attack("control: 6 MB to an unknown path", TEXT_MODEL, _post(b"/v1/unknown", b"0" * 6_000_000)),
        Attack("control: 100 bytes to an unknown path", TEXT_MODEL, _post(b"/v1/unknown", small)),
        _chat_attack("JPEG of 8,000 scans", OMNI_MODEL, [*parts, {"type": "text", "text": "hi"}]),
        _chat_attack("12 pictures of 64 megapixels", OMNI_MODEL, [*many, {"type": "text", "text": "hi"}]),
        Attack("4 MiB of tools: [0, 0, ...]", TEXT_MODEL, _post(_CHAT, zeros)),
        _chat_attack("2,000,000 x U+E0F0", TEXT_MODEL, "\ue0f0" * 2_000_000),
        _chat_attack("200,000 special tokens", TEXT_MODEL, "<|im_start|>" * 160_000),
        _chat_attack("130,000 characters", TEXT_MODEL, words[:130_000]),
        _chat_attack("130,000 characters, other model", OMNI_MODEL, words[:130_000]),
        _chat_attack("130,000 combining characters", TEXT_MODEL, "a" + "\u0301\u0316" * 65_000),
        _chat_attack("2 MB of prediction", TEXT_MODEL, "hi", prediction=prediction),
        _chat_attack("120 large tools", TEXT_MODEL, "hi", tools=[_tool(i, 400) for i in range(120)]),
        _messages_attack("2,000 messages", TEXT_MODEL, 2_000),
        _messages_attack("16,000 messages", OMNI_MODEL, 16_000),
        _grammar_attack("grammar that is slow to step", {"type": "string", "pattern": "^(.{1,500}){400,500}$"}),
        _grammar_attack("grammar within the bounds that is slow to step", {"type": "string", "pattern": _AMBIGUOUS}),
        _grammar_attack("grammar that is slow to compile", _wide_schema()),
        _chat_attack("strict tool with a pattern of 60 KB", TEXT_MODEL, "hi", tools=[_strict_tool("[a-z]x?" * 8_500)]),
        _chat_attack("strict tool with a pattern of 8 KB", TEXT_MODEL, "hi", tools=[_strict_tool("a?" * 4_000)]),
        _grammar_attack("schema of 2,400 schemas", {"anyOf": [{"type": "null"}] * 2_400}),
        _chat_attack("control: 64 tokens", TEXT_MODEL, "hi", max_tokens=64, ignore_eos=True),
        _chat_attack("64 tokens with log probabilities", TEXT_MODEL, "hi", **{**logprobs, "ignore_eos": True}),
        Attack("tiny chunks", TEXT_MODEL, _chunked(small + b" " * 60_000)),
        Attack("tiny frames", TEXT_MODEL, _frames(60_000)),
    ]


def _post(path: bytes, body: bytes) -> bytes:
    return _HEAD % (path, b"Content-Length: %d" % len(body)) + body


def _chunked(body: bytes) -> bytes:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    return _HEAD % (_CHAT, b"Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"


def _frames(count: int) -> bytes:
    """A WebSocket with text in frames of one byte, masked with zeros."""
    fields = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: " + base64.b64encode(bytes(16))
    head = b"GET /v1/realtime?model=%s HTTP/1.1\r\nHost: localhost\r\n%s%s\r\n\r\n"
    return head % (OMNI_MODEL.encode(), fields, key) + b"\x01\x81\0\0\0\0 " + b"\x00\x81\0\0\0\0 " * count


def _chat(model: str, content: object, **more: object) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}
    return json.dumps(body, ensure_ascii=False).encode()


def _chat_attack(name: str, model: str, content: object, **more: object) -> Attack:
    return Attack(name, model, _post(_CHAT, _chat(model, content, **more)))


def _messages_attack(name: str, model: str, count: int) -> Attack:
    messages = [{"role": "assistant" if i % 2 else "user", "content": "a"} for i in range(count)]
    return Attack(name, model, _post(_CHAT, _chat(model, "hi", messages=messages)))


_AMBIGUOUS = "^(([^x]{0,9}([^x]{0,5}a{0,7})*[^x]*){10}){50,100}$"
"""Compiled in milliseconds; a text can be read in so many ways that one token's mask takes 20 s."""


def _grammar_attack(name: str, value: dict[str, Any]) -> Attack:
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return _chat_attack(name, TEXT_MODEL, "hi", response_format=form, max_tokens=64)


def _wide_schema() -> dict[str, Any]:
    """Just within the limits: many properties and alternatives, each a pattern of its own."""
    patterns = [{"type": "string", "pattern": f"^[a-{chr(98 + i % 24)}]{{1,{30 + i % 7}}}[0-9{i}]$"} for i in range(40)]
    return {"anyOf": patterns}


def _tool(number: int, properties: int) -> dict[str, Any]:
    fields = {f"field_{number}_{i}": {"type": "string", "description": "what it is for"} for i in range(properties)}
    parameters = {"type": "object", "properties": fields}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


def _strict_tool(pattern: str) -> dict[str, Any]:
    fields = {"a": {"type": "string", "pattern": pattern}}
    schema = {"type": "object", "properties": fields, "required": ["a"], "additionalProperties": False}
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}


# -------------------------------------------------------------------------------------------------------- measuring


def send_raw(address: tuple[str, int], request: bytes) -> str:
    """Send bytes and read to the end; the status of the response."""
    answer = b""
    with socket.create_connection(address, 120.0) as connection:
        with suppress(ConnectionError):  # the service may answer and close before it has read everything
            connection.sendall(request)
        try:
            while piece := connection.recv(2**16):
                answer = (answer + piece)[:64]
        except ConnectionError:
            answer = answer or b"HTTP/1.1 reset"
    return answer.split(b" ", 2)[1].decode() if answer else "closed"


def timed(address: tuple[str, int], body: bytes | None) -> float:
    """The seconds of an ordinary chat, or of /health."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection(*address, timeout=120.0)
    try:
        if body is None:
            connection.request("GET", "/health")
        else:
            connection.request("POST", _CHAT.decode(), body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise SystemExit(f"an ordinary request was answered with {response.status}")
    return time.perf_counter() - start


def flood(address: tuple[str, int], request: bytes, settings: Settings, statuses: int) -> None:
    """Keep hostile requests in flight, each sent again a pause after its answer; runs in its own process.

    Their statuses are written to a pipe, one a line.
    """
    os.nice(5)  # the clients are not what is measured

    def run() -> None:
        while True:
            try:
                status = send_raw(address, request)
            except OSError as error:
                status = type(error).__name__
            os.write(statuses, f"{status}\n".encode())
            time.sleep(settings.pause)

    threads = [threading.Thread(target=run) for _ in range(settings.attackers)]
    for thread in threads:
        thread.start()


@contextmanager
def attacked(
    address: tuple[str, int], attack: Attack, settings: Settings
) -> Iterator[tuple[collections.Counter[str], int]]:
    """Hostile requests are in flight inside the block: the statuses so far, and their process."""
    statuses = collections.Counter[str]()
    reading, writing = os.pipe()
    # Forked: it starts at once, and needs nothing but what it is given.
    process = multiprocessing.get_context("fork").Process(
        target=flood, args=(address, attack.request, settings, writing)
    )
    process.start()
    os.close(writing)

    def count() -> None:
        with open(reading) as lines:
            for line in lines:
                statuses[line.strip()] += 1

    counting = threading.Thread(target=count)
    counting.start()
    try:
        yield statuses, process.pid or 0
    finally:
        process.kill()
        process.join()
        counting.join()


def cpu_seconds(session: int) -> float:
    """Processor time of a process, and of those that it has started."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session or path.parent.name == str(session):
                total += int(fields[11]) + int(fields[12])
    return total / _TICK


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


@contextmanager
def watched_memory(process: int, times: Times) -> Iterator[None]:
    """Memory before, while and after the block runs. Reading it delays the service, so it is no part of the times."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            times.memory.append(memory(process))

    times.memory.append(memory(process))
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        time.sleep(_AFTER_SECONDS)
        times.memory.append(memory(process))


def ordinary(model: str) -> bytes:
    return _chat(model, "How are you today?")


def send_ordinary(address: tuple[str, int], times: Times, seconds: float) -> None:
    """Chats to both models and /health, at the same time, one after the other each."""
    over = threading.Event()

    def repeat(into: list[float], body: bytes | None) -> None:
        while not over.is_set():
            into.append(timed(address, body))
            over.wait(0.05)

    tasks: list[Callable[[], None]] = [lambda: repeat(times.health, None)]
    tasks += [lambda model=model: repeat(times.chats[model], ordinary(model)) for model in MODELS]  # type: ignore[misc]
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join(120)


def measure(address: tuple[str, int], service: int, attack: Attack, settings: Settings) -> tuple[Times, Times]:
    """Of the ordinary requests alone, just before, and beside the hostile ones."""
    quiet, times = Times(), Times()
    send_ordinary(address, quiet, settings.seconds / 2)
    with attacked(address, attack, settings) as (statuses, clients):
        time.sleep(_BEGIN_SECONDS)
        before, clients_before, answered = cpu_seconds(service), cpu_seconds(clients), statuses.total()
        time.sleep(settings.seconds / 2)
        times.client_cpu = (cpu_seconds(clients) - clients_before) / (settings.seconds / 2)
        if statuses.total() > answered:
            times.service_cpu = (cpu_seconds(service) - before) / (statuses.total() - answered)
        send_ordinary(address, times, settings.seconds)
        times.statuses += statuses
    if settings.memory:
        with watched_memory(service, times), attacked(address, attack, settings):
            time.sleep(settings.seconds)
    return quiet, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attackers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0, help="for each attack")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before an attacker sends again")
    parser.add_argument("--memory", action="store_true", help="also measure memory, in a run of its own")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the attacks whose name has this in it")
    args = parser.parse_args()
    chosen = [attack for attack in attacks() if args.only in attack.name]
    with tempfile.TemporaryDirectory() as scratch:
        models = []
        for family in MODELS:
            folder = Path(scratch) / family
            command = [sys.executable, "-m", "omnistage", "tiny", family, str(folder)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            models += ["--model", f"{family}={folder}"]
        with serve_models([*models, "--drain-seconds", str(DRAIN_SECONDS)]) as (url, process):
            host = urlsplit(url)
            address = (str(host.hostname), int(host.port or 80))
            run_all(address, process, chosen, Settings(args.attackers, args.seconds, args.pause, args.memory))


def run_all(address: tuple[str, int], process: int, chosen: list[Attack], settings: Settings) -> None:
    send_ordinary(address, Times(), 1.0)
    print(f"{settings.attackers} hostile requests at once, {settings.seconds:g} s of each, sent again after a pause of")
    print(f"{settings.pause:g} s; times in ms, and as multiples of those just before; * over {MAX_RATIO:g} times, or")
    print(f"{1000 * MAX_HEALTH_SECONDS:g} ms for /health; ms of the service's processor time for one hostile request")
    columns = ["/health, longest", "same model, median", "other model, median", "CPU each", "clients"]
    columns += ["MiB before", "highest", "after"] * settings.memory
    print(f"\n| attack | {' | '.join(columns)} | answers |")
    print("| --- | " + "---: | " * len(columns) + "--- |")
    for attack in chosen:
        print(row(attack, *measure(address, process, attack, settings)), flush=True)
    with attacked(address, chosen[0], settings):
        time.sleep(_BEGIN_SECONDS)
        start = time.perf_counter()
        os.kill(process, signal.SIGTERM)
        while _alive(process) and time.perf_counter() - start < 60:
            time.sleep(0.05)
        took = time.perf_counter() - start
        print(f"\nSIGTERM during the first: ended after {took:.1f} s (--drain-seconds {DRAIN_SECONDS})")


def row(attack: Attack, quiet: Times, times: Times) -> str:
    other = next(model for model in MODELS if model != attack.target)
    health = max(times.health)
    cells = [f"{1000 * health:.0f}{'*' * (health > MAX_HEALTH_SECONDS)}"]
    for model in (attack.target, other):
        median = statistics.median(times.chats[model])
        ratio = median / statistics.median(quiet.chats[model])
        cells.append(f"{1000 * median:.0f} ({ratio:.1f}){'*' * (ratio > MAX_RATIO)}")
    cells.append("" if times.service_cpu is None else f"{1000 * times.service_cpu:.1f}")
    cells.append(f"{100 * times.client_cpu:.0f}%")
    if times.memory:
        for service, decoding in (times.memory[0], max(times.memory, key=sum), times.memory[-1]):
            cells.append(f"{service >> 20} + {decoding >> 20}")
    answers = ", ".join(f"{status}: {count}" for status, count in sorted(times.statuses.items()))
    return f"| {attack.name} | {' | '.join(cells)} | {answers} |"


def _alive(process: int) -> bool:
    """Whether it runs; one that has ended stays a zombie until its parent asks."""
    with suppress(OSError):
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return False


if __name__ == "__main__":
    main()
