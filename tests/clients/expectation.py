"""An expectation of a service: what is sent, and what must come back."""

from __future__ import annotations

import io
import json
import struct
import urllib.error
import urllib.request
import wave
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Answer:
    """A response; `data` is its JSON, `events` those of a stream."""

    status: int
    headers: Any
    raw: bytes
    data: Any = None
    events: list[Any] = field(default_factory=list)

    @property
    def message(self) -> Any:
        return self.data["choices"][0]["message"]

    @property
    def text(self) -> str:
        choice = self.data["choices"][0]
        content = choice["text"] if "text" in choice else choice["message"]["content"]
        return str(content)

    @property
    def error(self) -> Any:
        return self.data["error"]

    @property
    def deltas(self) -> str:
        pieces = [choice for event in self.events for choice in event["choices"]]
        return "".join(piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces)


@dataclass(frozen=True)
class Expectation:
    source: str
    says: str
    path: str
    body: Body | bytes | None
    holds: Callable[[Answer], Any]
    method: str = ""
    headers: Body = field(default_factory=dict)


def send(url: str, wanted: Expectation) -> Answer:
    headers = {"Content-Type": "application/json", **wanted.headers}
    data = wanted.body if isinstance(wanted.body, bytes) else json.dumps(wanted.body).encode() if wanted.body else None
    request = urllib.request.Request(url + wanted.path, data, headers, method=wanted.method or None)
    try:
        with urllib.request.urlopen(request, timeout=180) as response:
            answer = Answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        answer = Answer(error.code, error.headers, error.read())
    kind = answer.headers.get("content-type", "")
    if "json" in kind:
        answer.data = json.loads(answer.raw)
    elif "event-stream" in kind:
        lines = [line[6:] for line in answer.raw.decode().splitlines() if line.startswith("data: ")]
        answer.events = [json.loads(line) for line in lines if line != "[DONE]"]
    return answer


def clip() -> bytes:
    """A second of a tone."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(struct.pack("<16000h", *(8000 * (i // 20 % 2) for i in range(16_000))))
    return buffer.getvalue()
