"""Sends broken requests to a service of small models: `python tools/fuzz_http.py --count 5000 --seed 1`.

Each case is a valid request of one endpoint with a few random changes: values of other kinds, numbers and texts at the
limits, fields that are missing or repeated, deep and long values, bytes that are flipped or cut off. Same seed, same
cases. A response with status 500, an error in another form than OpenAI's, or none within a minute is a failure, and is
printed with the case's number: `--only NUMBER` runs it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import copy
import io
import json
import random
import socket
import sys
import tempfile
import threading
import time
import wave
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from PIL import Image

from omnistage.models.registry import REGISTRY
from omnistage.omni import AsyncOmni
from omnistage.server.http.app import create_app
from omnistage.server.http.run import server_config
from omnistage.server.service import Service

FAMILIES = {"lm": "causal_lm", "omni": "qwen2_5_omni", "draw": "stable_diffusion_3"}
# With a bias for the end token: a transcription has no limit of tokens, and random weights do not end by themselves.
SHORT = {
    "lm": ("thinker.max_tokens=2",),
    "omni": ("thinker.min_tokens=2", "thinker.logit_bias={877: 100}", "talker.max_tokens=4"),
    "draw": (),
}
TIMEOUT = 60.0
CONCURRENT = 4
BOUNDARY = "fuzzed-boundary"
_CAPS = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 2, "steps": 1}
"""Fields that decide how long a valid request runs."""


def _png() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(encoded, "PNG")
    return encoded.getvalue()


def _wav() -> bytes:
    encoded = io.BytesIO()
    with wave.open(encoded, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(6_400))
    return encoded.getvalue()


_IMAGE = "data:image/png;base64," + base64.b64encode(_png()).decode()
_SCHEMA = {"type": "object", "properties": {"town": {"type": "string", "enum": ["a", "b"]}}, "required": ["town"]}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"town": "a"}'}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "chat/completions",
        {
            "model": "lm",
            "messages": [
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": [{"type": "text", "text": "Look"}]},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "description": "x", "parameters": _SCHEMA}}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "metadata": {"key": "value"},
            "max_tokens": 2,
        },
    ),
    (
        "chat/completions",
        {
            "model": "omni",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": _IMAGE, "detail": "auto"}},
                        {
                            "type": "input_audio",
                            "input_audio": {"data": base64.b64encode(_wav()).decode(), "format": "wav"},
                        },
                        {"type": "text", "text": "What is it?"},
                    ],
                }
            ],
            "max_completion_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "chat/completions",
        {
            "model": "lm",
            "messages": [{"role": "user", "content": "Say"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA, "strict": True}},
            "stop": ["one", "two"],
            "logit_bias": {"5": 1},
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "seed": 1,
            "max_tokens": 2,
        },
    ),
    (
        "responses",
        {
            "model": "lm",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
                {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
            ],
            "instructions": "Be brief",
            "tools": [{"type": "function", "name": "look", "description": "x", "parameters": _SCHEMA}],
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"key": "value"},
            "max_output_tokens": 2,
        },
    ),
    ("completions", {"model": "lm", "prompt": ["Once", "upon"], "stop": "end", "logprobs": 2, "max_tokens": 2}),
    ("completions", {"model": "lm", "prompt": [5, 6, 7], "stop_token_ids": [3], "stream": True, "max_tokens": 2}),
    ("images/generations", {"model": "draw", "prompt": "a hat", "size": "32x32", "steps": 1, "output_format": "png"}),
    ("audio/speech", {"model": "omni", "input": "Hello", "response_format": "pcm", "voice": {"id": "Chelsie"}}),
    ("videos", {"model": "draw", "prompt": "a hat", "input_reference": {"image_url": _IMAGE}, "seconds": 0.1}),
]
FORMS: list[tuple[str, list[tuple[str, str | None, bytes]]]] = [
    ("audio/transcriptions", [("file", "a.wav", _wav()), ("model", None, b"omni"), ("keywords[]", None, b"rain")]),
    (
        "images/edits",
        [("image", "a.png", _png()), ("model", None, b"draw"), ("prompt", None, b"a hat"), ("steps", None, b"1")],
    ),
    ("videos", [("input_reference", "a.png", _png()), ("model", None, b"draw"), ("prompt", None, b"a hat")]),
]
"""Parts: name, file name, content."""


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    path: str
    body: bytes
    content_type: str


@dataclass
class Report:
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0


# ------------------------------------------------------------------------------------------------------ changes


def _odd_value(rng: random.Random) -> Any:
    deep: Any = []
    for _ in range(rng.choice((5, 90, 150))):
        deep = [deep]
    texts = (
        "",
        " ",
        "a" * 10_000,
        "\ud800",
        "\x00",
        "<|im_start|>",
        "é" * 50,
        "data:,",
        "../../etc/passwd",
        "\U0001f600" * 70,
    )
    numbers = (0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 10**400)
    others = (
        None,
        True,
        False,
        [],
        {},
        [[]],
        {"": ""},
        {"type": "text"},
        [None] * 300,
        {str(n): n for n in range(300)},
    )
    return rng.choice((rng.choice(texts), rng.choice(numbers), copy.deepcopy(rng.choice(others)), deep))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree: what is around it, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def _change(body: dict[str, Any], rng: random.Random, max_copies: int) -> None:
    places = list(_places(body))
    if not places:
        return
    around, key = rng.choice(places)
    other, other_key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1:
            around[key] = _odd_value(rng)
        case 2:
            around.pop(key)
        case 3:
            around[key] = copy.deepcopy(other[other_key])
        case 4 if isinstance(around, dict):
            around[rng.choice((f"{key}x", "", "type", "content", "é", "__class__"))] = around.pop(key)
        case 5 if isinstance(around[key], str) and around[key]:
            at = rng.randrange(len(around[key]))
            around[key] = (
                around[key][:at] + rng.choice(("", "\\", '"', "\n", "\u202e", "{{", "%s")) + around[key][at + 1 :]
            )
        case _:
            around[key] = [around[key]] * min(max_copies, rng.choice((2, 70, 2000)))


def _broken(data: bytes, rng: random.Random) -> bytes:
    """Bytes cut, flipped, repeated or added."""
    if not data:
        return data
    at = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 2:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 3:
            return data[:at] + data[max(0, at - 40) : at] * rng.choice((2, 100)) + data[at:]
        case _:
            return data[:at] + rng.choice((b"[", b"{", b'"', b",", b"\\", b"\r\n", b"--", b"NaN")) * 200 + data[at:]


def _json_case(number: int, rng: random.Random) -> Case:
    path, valid = rng.choice(BODIES)
    body = copy.deepcopy(valid)
    for index in range(rng.choice((1, 1, 2, 4))):
        _change(body, rng, max_copies=2 if index else 2000)  # lists of lists of copies would be gigabytes
    for name, most in _CAPS.items():
        if name in valid:
            body.setdefault(name, most)
        if type(body.get(name)) is int:
            body[name] = min(body[name], most)
    data = json.dumps(body).encode()
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        data = _broken(data, rng)
    kinds = ("application/json",) * 40 + (
        "application/vnd.api+json",
        "text/plain",
        "application/json; charset=utf-16",
        "",
    )
    return Case(number, path, data, rng.choice(kinds))


def _form_case(number: int, rng: random.Random) -> Case:
    path, valid = rng.choice(FORMS)
    parts = list(valid)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(parts))
        name, filename, content = parts[at]
        match rng.randrange(6):
            case 0:
                del parts[at]
            case 1:
                parts[at] = (name, filename, _broken(content, rng))
            case 2:
                parts[at] = (rng.choice(("", name + "[]", 'a"b', "model", "prompt", "é")), filename, content)
            case 3:
                parts[at] = (name, None if filename else "f", content)
            case 4:
                parts[at] = (name, filename, rng.choice((b"", b"nan", b"-1", b"\xff\xfe", b"a" * 5000, b"1e999")))
            case _:
                parts += [parts[at]] * rng.choice((1, 40, 300))
        if not parts:
            break
    data = b"".join(map(_part, parts)) + f"--{BOUNDARY}--\r\n".encode()
    for _ in range(rng.choice((0, 0, 1))):
        data = _broken(data, rng)
    kinds = (f"multipart/form-data; boundary={BOUNDARY}",) * 40 + (
        "multipart/form-data",
        "multipart/form-data; boundary=" + "b" * 300,
        f"multipart/form-data; boundary={BOUNDARY}; charset=punycode",
        "application/x-www-form-urlencoded",
    )
    return Case(number, path, data, rng.choice(kinds))


def _part(part: tuple[str, str | None, bytes]) -> bytes:
    name, filename, content = part
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
    head += f'; filename="{filename}"' if filename is not None else ""
    return head.encode() + b"\r\n\r\n" + content + b"\r\n"


def case(seed: int, number: int) -> Case:
    """One case, which depends on nothing else."""
    rng = random.Random(f"{seed}-{number}")
    return _form_case(number, rng) if rng.random() < 0.25 else _json_case(number, rng)


# ------------------------------------------------------------------------------------------------------- running


async def fuzz(url: str, cases: Iterator[Case]) -> Report:
    """Send the cases to a service, a few at a time."""
    report = Report()
    async with httpx.AsyncClient(base_url=f"{url}/v1") as client:

        async def work() -> None:
            for one in cases:
                began = time.monotonic()
                failure = await _failure(client, one, report)
                report.slowest = max(report.slowest, time.monotonic() - began)
                if failure is not None:
                    report.failures.append(f"case {one.number}, {one.path}: {failure}: {one.body[:2000]!r}")

        await asyncio.gather(*(work() for _ in range(CONCURRENT)))
    return report


async def _failure(client: httpx.AsyncClient, one: Case, report: Report) -> str | None:
    headers = {"Content-Type": one.content_type} if one.content_type else {}
    try:
        async with asyncio.timeout(TIMEOUT):
            response = await client.post(f"/{one.path}", content=one.body, headers=headers, timeout=None)
    except TimeoutError:
        return f"no response in {TIMEOUT:g} s"
    except httpx.RemoteProtocolError as error:
        report.statuses[one.path, 0] += 1
        # A stream of bytes has no other way to say that speech ended early.
        return None if one.path == "audio/speech" else f"no whole response: {error}"
    report.statuses[one.path, response.status_code] += 1
    if response.status_code >= 500:
        return f"status {response.status_code}"
    if response.status_code < 400:
        return "an internal error in the stream" if b'"internal_error"' in response.content else None
    try:
        keys = set(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code} with {response.content[:200]!r}"
    return None if keys == {"message", "type", "param", "code"} else f"an error with the fields {sorted(keys)}"


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """The address of the service, which runs in a thread until the block ends."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(create_app(service)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, metavar="NUMBER", help="run one case")
    options = parser.parse_args()
    numbers = range(options.count) if options.only is None else [options.only]
    service = Service()
    with tempfile.TemporaryDirectory() as folder:
        for name, family in FAMILIES.items():
            tiny = REGISTRY.family(family).tiny
            if tiny is None:
                raise SystemExit(f"the family {family} has no small checkpoint")
            place = Path(folder) / name
            place.mkdir()
            tiny(place, seed=0)
            overrides = ("limits.media.allow_paths=false", *SHORT[name])
            service.add(name, AsyncOmni(place, device="cpu", dtype="float32", overrides=overrides, progress=False))
        service.loading = False
        began = time.monotonic()
        with serving(service) as url:
            report = asyncio.run(fuzz(url, iter(case(options.seed, number) for number in numbers)))
        for model in service.models.values():
            asyncio.run(model.omni.shutdown(drain=False))
    print(
        f"{sum(report.statuses.values())} responses in {time.monotonic() - began:.0f} s, slowest {report.slowest:.1f} s"
    )
    for (path, status), count in sorted(report.statuses.items()):
        print(f"  {path:22} {status or 'cut':>3} {count:6}")
    print(*report.failures, sep="\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
