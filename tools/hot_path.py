"""The path of a request and of a token: which functions of the package each of them crosses, counted by running it.

A small random Qwen2.5-Omni is served by `omnistage serve` on a free port, and a client in the same process sends it
streamed chats. `sys.setprofile` of every thread counts the calls of Python functions whose file lies in the package:
other libraries, C functions, the bodies of imported modules and the methods that `dataclass` writes are not counted.
A function is one `def`; lambdas and comprehensions are kept apart, since Python 3.12 has fewer of them for the same
code. A generator or coroutine is called again each time that it goes on.

- A request: the distinct functions from the first byte sent until 0.5 s after the last one received, for a chat with a
  picture, a sound and a text, answered in 8 tokens of text and 96 of speech. It is the second one on its connection,
  with another picture and sound than the first: what is done once has been done, and the encoders do work. The
  thread that looks for hung stages every few seconds is left out: it would be counted in some runs only.
- A token: the same greedy chat, text only, is sent with 16 and with 80 tokens, both for the second time. How much more
  often a function was called in the longer one, divided by 64, is its calls a token. Functions with at least half a
  call are those that a token crosses; the calls of a token are the sum of theirs.

`python tools/code_report.py --list-hot-path` prints it. Nothing of the package is imported but its command line, so
that this measures checkouts of any layout.
"""

from __future__ import annotations

import base64
import dataclasses
import http.client
import io
import json
import math
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import wave
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SHORT, LONG, SPOKEN, TALKER = 16, 80, 8, 96  # tokens asked for
SETTLE_SECONDS = 0.5
MODEL = "m"
BY_THE_CLOCK = frozenset({"omnistage-watchdog"})
"""Threads that do not work for a request."""
CALLS_OF_A_TOKEN = 0.5
# The command line without the families that are installed: those are of another checkout than the one measured.
COMMAND = """
import importlib.metadata as metadata
known = metadata.entry_points
def entry_points(**wanted):
    return metadata.EntryPoints(()) if wanted.get("group") == "omnistage.families" else known(**wanted)
metadata.entry_points = entry_points
from omnistage.cli import app
app()
"""


@dataclass(frozen=True, slots=True)
class Call:
    """How often a function of the package was called: in one request, or a token."""

    path: str
    line: int
    name: str
    calls: float

    @property
    def named(self) -> bool:
        return not self.name.rpartition(".")[2].startswith("<")


class Tracer:
    """A profile function for all threads: how often each function of the package was called while it is on."""

    def __init__(self, place: Path) -> None:
        self._place = f"{place}{os.sep}"
        # By thread, so that none adds to what another adds to; by place, since alike code of two files is equal.
        self._calls: dict[int, Counter[tuple[str, int, str]]] = {}
        self._on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._on and event == "call" and code.co_filename.startswith(self._place):
            key = code.co_filename, code.co_firstlineno, code.co_qualname
            self._calls.setdefault(threading.get_ident(), Counter())[key] += 1

    def begin(self) -> None:
        self._calls.clear()
        self._on = True

    def end(self) -> list[Call]:
        """What was called since `begin`."""
        self._on = False
        total: Counter[tuple[str, int, str]] = Counter()
        left_out = {thread.ident for thread in threading.enumerate() if thread.name in BY_THE_CLOCK}
        for ident, calls in list(self._calls.items()):
            if ident not in left_out:
                total.update(calls)
        return [
            Call(path.removeprefix(self._place).replace(os.sep, "/"), line, name, calls)
            for (path, line, name), calls in total.items()
            if name != "<module>"
        ]


def trace(place: Path, checkpoint: Path, result: Path) -> None:
    """Serve the checkpoint in this process, send it chats, write their calls to `result` and end the process."""
    tracer = Tracer(place)
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

    def drive() -> None:
        try:
            found = _drive(tracer, _connect(port))
            rows = {name: [dataclasses.astuple(call) for call in calls] for name, calls in found.items()}
            result.write_text(json.dumps(rows), encoding="utf-8")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=drive, daemon=True).start()
    limits = ("--set", f"talker.max_tokens={TALKER}")  # a random talker never ends by itself
    sys.argv[1:] = ["serve", str(checkpoint), "--port", str(port), "--name", MODEL, "--device", "cpu", *limits]
    exec(COMMAND, {})


def _connect(port: int, patience: float = 300.0) -> http.client.HTTPConnection:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience)
        try:
            connection.request("GET", "/v1/models")
            if f'"{MODEL}"'.encode() in connection.getresponse().read():
                return connection
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError("the service has not loaded its model")


def _drive(tracer: Tracer, connection: http.client.HTTPConnection) -> dict[str, list[Call]]:
    """The calls of a chat with everything, and of a short and a long one in text."""

    def ask(content: object, tokens: int, modalities: Sequence[str], **options: object) -> list[Call]:
        message = {"role": "user", "content": content}
        body = {"model": MODEL, "messages": [message], "modalities": modalities, "max_tokens": tokens, "stream": True}
        tracer.begin()
        sent = json.dumps(body | options)
        connection.request("POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read().decode()
        time.sleep(SETTLE_SECONDS)  # what is put away after the answer
        calls = tracer.end()
        expected = ('"finish_reason":"length"', '"audio":{' if "audio" in modalities else "")
        if answer.status != 200 or not all(part in said for part in expected):
            raise RuntimeError(f"the chat did not give {tokens} tokens of {modalities}: {answer.status} {said[-2000:]}")
        return calls

    found = {}
    for turn in (1, 2):  # the second is the one that counts
        voice = {"voice": "Chelsie", "format": "pcm16"}
        found["request"] = ask(_seen_and_heard(turn), SPOKEN, ("text", "audio"), audio=voice, ignore_eos=True)
        found["short"] = ask("Hello", SHORT, ("text",), temperature=0)
        found["long"] = ask("Hello", LONG, ("text",), temperature=0)
    return found


def _seen_and_heard(seed: int) -> list[dict[str, object]]:
    """A picture of 56 x 56, a second of sound and a question; another seed, another picture and sound."""
    rows = b"".join(b"\0" + bytes(v for x in range(56) for v in (x * 4, y * 4, seed * 40)) for y in range(56))
    png = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", 56, 56, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    wav = io.BytesIO()
    with wave.open(wav, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(b"".join(struct.pack("<h", int(8000 * math.sin(i * seed / 20))) for i in range(16_000)))
    sound = base64.b64encode(wav.getvalue()).decode()
    return [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "text", "text": "What is this?"},
    ]


def hot_path(root: Path, package: str) -> tuple[list[Call], list[Call]]:
    """The functions of a request and of a token, by running that checkout in a process of its own.

    Raises `SystemExit`, with what the process said, if that fails.
    """
    paths = os.pathsep.join((str(root), str(root / "starter")))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, result = Path(folder, "tiny"), Path(folder, "calls.json")
        make = ["-c", COMMAND, "tiny", "qwen2_5_omni", str(checkpoint)]
        measure = [str(Path(__file__).resolve()), str(root / package), str(checkpoint), str(result)]
        for step in (make, measure):
            ended = subprocess.run(
                [sys.executable, *step], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
            )
            if ended.returncode:
                raise SystemExit(f"error: measuring {root} failed\n{ended.stdout[-1000:]}{ended.stderr[-4000:]}")
        found = {name: [Call(*call) for call in calls] for name, calls in json.loads(result.read_text()).items()}
    if not found["request"]:
        raise SystemExit(f"error: a request to {root} crossed nothing of {package}; is another checkout imported?")
    return found["request"], calls_a_token(found["short"], found["long"])


def calls_a_token(short: Iterable[Call], long: Iterable[Call]) -> list[Call]:
    """The functions that a token crosses, from the calls of `SHORT` and of `LONG` tokens."""
    before = {(call.path, call.line, call.name): call.calls for call in short}
    more = ((call, call.calls - before.get((call.path, call.line, call.name), 0)) for call in long)
    rates = (dataclasses.replace(call, calls=calls / (LONG - SHORT)) for call, calls in more)
    return [call for call in rates if call.calls >= CALLS_OF_A_TOKEN]


if __name__ == "__main__":
    trace(*map(Path, sys.argv[1:4]))
