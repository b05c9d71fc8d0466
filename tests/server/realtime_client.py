"""What the tests of `/v1/realtime` share: OpenAI's own connection, and sockets without any client around them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import websockets.sync.client as sockets
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed

from tests.server.harness import Running
from tests.voice import as_pcm

RATE = 24_000
QUIET: dict[str, Any] = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
"""Settings of a session that hears no turns."""
TEXT: dict[str, Any] = {
    **QUIET,
    "output_modalities": ["text"],
    "temperature": 0,
    "max_output_tokens": 6,
}
"""The same, and short answers in writing."""


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def base64_of(sound: NDArray[np.float32]) -> str:
    return base64.b64encode(as_pcm(sound)).decode()


def until_event(connection: Any, kind: str) -> list[Any]:
    """All events up to the first of this kind; an error where none is waited for fails the test."""
    seen = []
    while True:
        event = connection.recv()
        seen.append(event)
        if event.type == kind:
            return seen
        assert event.type != "error", event.to_json()


def types(events: list[Any]) -> list[str]:
    """The kinds of events, runs of the same deltas as one."""
    names = [event.type for event in events]
    return [name for i, name in enumerate(names) if not (name.endswith(".delta") and names[i - 1 : i] == [name])]


def text_of(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == kind)


def audio_of(events: list[Any]) -> bytes:
    return b"".join(base64.b64decode(event.delta) for event in events if event.type == "response.output_audio.delta")


class Raw:
    """A socket that says just what it is told to."""

    def __init__(self, connection: sockets.ClientConnection) -> None:
        self.connection = connection

    def send(self, kind: str, **fields: object) -> None:
        self.connection.send(json.dumps({"type": kind, **fields}))

    def recv(self) -> dict[str, Any]:
        received: dict[str, Any] = json.loads(self.connection.recv(timeout=60))
        return received

    def until_closed(self) -> tuple[list[dict[str, Any]], int | None]:
        """All that still comes, and the code with which the server closes."""
        seen = []
        try:
            while True:
                seen.append(self.recv())
        except ConnectionClosed as end:
            return seen, end.rcvd.code if end.rcvd is not None else None

    def until(self, kind: str) -> list[dict[str, Any]]:
        seen = [self.recv()]
        while seen[-1]["type"] != kind:
            assert seen[-1]["type"] != "error", seen[-1]
            seen.append(self.recv())
        return seen


@contextmanager
def raw_socket(server: Running, query: str = "?model=omni", **options: Any) -> Iterator[Raw]:
    url = server.url.replace("http://", "ws://")
    with sockets.connect(f"{url}/v1/realtime{query}", compression=None, **options) as connection:
        yield Raw(connection)
