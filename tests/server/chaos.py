"""Clients of every temper, for the test of a service under siege: polite ones, and those that leave, stall or lie."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import random
import socket
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import soundfile
from PIL import Image
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from tests.hang_guard import HANG_SECONDS

TEXTS = ("Once upon a time", "The sea", "A small door", "Why not", "Snow fell", "Two ships and a storm")
PICTURES = ("a hat", "a red boat")
TAG = "X-Chaos"
MAX_BODY = 2**18
MAX_PIXELS = 250_000
MAX_SECONDS = 2.0
LONG = {"model": "lm", "prompt": "On and on", "max_tokens": 120, "ignore_eos": True}
WIDE = {**LONG, "n": 4, "logprobs": 20, "stream": True}  # half a megabyte of events
LONGEST_WAIT = HANG_SECONDS


def wav(seconds: float) -> bytes:
    times = np.arange(int(seconds * 8_000)) / 8_000
    encoded = io.BytesIO()
    soundfile.write(encoded, 0.3 * np.sin(2 * np.pi * 440 * times).astype(np.float32), 8_000, format="WAV")
    return encoded.getvalue()


def png_url(side: int) -> str:
    encoded = io.BytesIO()
    Image.new("RGB", (side, side), "navy").save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


SOUND = wav(0.25)
DEEP = b'{"model": "lm", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
NO_REQUESTS: dict[str, tuple[bytes, ...]] = {
    "/v1/completions": (
        b"",
        b"{",
        b"null",
        b"[1]",
        b"\xff\xfe",
        DEEP,
        b'{"model": "lm"}',
        b'{"model": "lm", "prompt": NaN}',
        b'{"model": "lm", "prompt": "a", "max_tokens": 1e400}',
        b'{"model": "lm", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "lm", "prompt": "a", "n": 1' + b"0" * 300 + b"}",
        b'{"model": "lm", "prompt": "a", "temperature": -1}',
        b'{"model": "lm", "prompt": "a", "no_such_field": 1}',
        b'{"model": "lm", "prompt": ["a"], "n": "many"}',
    ),
    "/v1/chat/completions": (
        b'{"model": "lm", "messages": "hello"}',
        b'{"model": "lm", "messages": [], "temperature": "\\ud800"}',
        b'{"model": "lm", "messages": [{"role": "user", "content": "a"}], "logit_bias": {"x": 1}}',
        b'{"model": 3, "messages": [{"role": "user", "content": "a"}]}',
    ),
    "/v1/responses": (b'{"model": "lm", "input": 5}', b'{"model": "lm", "input": "a", "text": {"format": 1}}'),
    "/v1/audio/speech": (b'{"model": "omni", "input": ""}', b'{"model": "omni", "input": "a", "voice": [1]}'),
    "/v1/images/generations": (
        b'{"model": "draw", "prompt": "a", "size": "huge"}',
        b'{"model": "draw", "prompt": "a", "n": 1000}',
    ),
    "/v1/videos": (b"{", b"[]", b'{"model": "film", "prompt": "a", "seconds": -1}'),
}
MALFORMED = [(path, body, "application/json") for path, bodies in NO_REQUESTS.items() for body in bodies]
MALFORMED += [
    ("/v1/completions", b'{"model": "lm", "prompt": "a"}', "text/plain"),
    ("/v1/completions", b"model=lm&prompt=a", "application/x-www-form-urlencoded"),
    ("/v1/images/edits", b"--x\r\nbroken", "multipart/form-data; boundary=x"),
    ("/v1/images/edits", b"{}", "application/json"),
    ("/v1/audio/transcriptions", b"anything", "multipart/form-data"),
    ("/v1/videos", b"--x\r\nbroken", "multipart/form-data; boundary=x"),
]


@dataclass
class Expected:
    """What the models say to the polite, found out without a server."""

    completion: dict[str, str]
    chat: dict[str, str]
    speech: np.ndarray[Any, Any]
    pictures: dict[str, np.ndarray[Any, Any]]
    transcription: str


@dataclass
class Seen:
    """What a client saw of one HTTP request: its status, None if it did not wait for one."""

    kind: str
    allowed: frozenset[int]
    """Statuses that are right for this kind of trouble, as the service's own record has them."""
    status: int | None = None


@dataclass
class Storm:
    """Sends requests of random kinds and checks every answer that somebody waits for."""

    url: str
    expected: Expected
    chance: random.Random
    keys: dict[str, str]
    over: Container[str]
    """The tags of requests that the service has recorded as ended."""
    seen: dict[str, Seen] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    """How many answers were compared with what is expected, by kind."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    client: httpx.AsyncClient = field(init=False)

    async def run(self, count: int, width: int) -> None:
        """`count` requests, `width` of them at any time."""
        limits = httpx.Limits(max_connections=width, max_keepalive_connections=width)
        kinds = self._kinds()
        chosen = iter(self.chance.choices(list(kinds), weights=list(kinds.values()), k=count))

        async def client() -> None:
            for kind in chosen:
                await kind()

        self.client = httpx.AsyncClient(base_url=self.url, timeout=LONGEST_WAIT, limits=limits)
        async with self.client, asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(client())

    def _kinds(self) -> dict[Callable[[], Awaitable[object]], int]:
        return {
            self.completes: 16,
            self.chats: 14,
            self.responds: 6,
            self.speaks: 3,
            self.draws: 4,
            self.films: 1,
            self.transcribes: 3,
            self.converses: 4,
            self.leaves_in_its_body: 5,
            self.leaves_at_once: 8,
            self.leaves_a_stream: 8,
            self.reads_slowly: 2,
            self.sends_nonsense: 12,
            self.breaks_the_protocol: 3,
            self.sends_too_much: 6,
            self.is_cancelled: 4,
            self.is_late: 6,
            self.asks_for_nothing_there: 4,
            self.may_not: 3,
            self.comes_too_often: 4,
        }

    # ---------------------------------------------------------------------------------------------- polite

    def _tag(self, kind: str, *allowed: int, key: str = "main") -> dict[str, str]:
        tag = f"{kind}-{next(self._numbers)}"
        self.seen[tag] = Seen(kind, frozenset(allowed))
        head = {TAG: tag}
        return {**head, "Authorization": f"Bearer {self.keys[key]}"} if key else head

    async def _sent(self, method: str, path: str, head: dict[str, str], **given: Any) -> httpx.Response:
        answer = await self.client.request(method, path, headers=head, **given)
        seen = self.seen[head[TAG]]
        seen.status = answer.status_code
        assert answer.status_code in seen.allowed, (seen.kind, answer.status_code, answer.text[:300])
        if answer.status_code >= 400:
            told = answer.json()["error"]
            assert set(told) == {"message", "type", "param", "code"}
            assert told["message"]
        if answer.status_code in (429, 503):
            assert int(answer.headers["Retry-After"]) >= 1
        return answer

    async def _streamed(self, path: str, head: dict[str, str], body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream; none where it was refused."""
        answer = await self._sent("POST", path, head, json={**body, "stream": True})
        if answer.status_code != 200:
            return []
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def _compare(self, kind: str, got: object, expected: object) -> None:
        assert got == expected, kind
        self.compared[kind] = self.compared.get(kind, 0) + 1

    def _near(self, kind: str, got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], most: float) -> None:
        assert got.shape == expected.shape, kind
        assert float(np.abs(got.astype(np.float64) - expected.astype(np.float64)).max()) <= most, kind
        self.compared[kind] = self.compared.get(kind, 0) + 1

    async def completes(self, key: str = "main") -> None:
        text = self.chance.choice(TEXTS)
        body = {"model": "lm", "prompt": text, "max_tokens": 8, "temperature": 0}
        head = self._tag("completion", 200, 429, key=key)
        if self.chance.random() < 0.5:
            if events := await self._streamed("/v1/completions", head, body):
                got = "".join(choice["text"] for event in events for choice in event["choices"])
                self._compare("streamed completion", got, self.expected.completion[text])
            return
        answer = await self._sent("POST", "/v1/completions", head, json=body)
        if answer.status_code == 200:
            self._compare("completion", answer.json()["choices"][0]["text"], self.expected.completion[text])

    async def chats(self) -> None:
        text = self.chance.choice(TEXTS)
        body = {"model": "lm", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        head = self._tag("chat", 200, 429)
        if self.chance.random() < 0.5:
            if events := await self._streamed("/v1/chat/completions", head, body):
                deltas = [choice["delta"] for event in events for choice in event["choices"]]
                got = "".join(delta.get("content") or "" for delta in deltas)
                self._compare("streamed chat", got, self.expected.chat[text])
            return
        answer = await self._sent("POST", "/v1/chat/completions", head, json=body)
        if answer.status_code == 200:
            self._compare("chat", answer.json()["choices"][0]["message"]["content"], self.expected.chat[text])

    async def responds(self) -> None:
        text = self.chance.choice(TEXTS)
        body = {"model": "lm", "input": text, "max_output_tokens": 8, "temperature": 0}
        head = self._tag("response", 200, 429)
        if self.chance.random() < 0.5:
            if events := await self._streamed("/v1/responses", head, body):
                got = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
                self._compare("streamed response", got, self.expected.chat[text])
            return
        answer = await self._sent("POST", "/v1/responses", head, json=body)
        if answer.status_code == 200:
            self._compare("response", answer.json()["output"][0]["content"][0]["text"], self.expected.chat[text])

    async def speaks(self) -> None:
        format = self.chance.choice(("pcm", "wav"))
        body = {"model": "omni", "input": TEXTS[0], "response_format": format, "seed": 3}
        answer = await self._sent("POST", "/v1/audio/speech", self._tag("speech", 200, 429), json=body)
        if answer.status_code != 200:
            return
        if format == "pcm":
            samples = np.frombuffer(answer.content, "<i2") / 32767
        else:
            samples, _ = soundfile.read(io.BytesIO(answer.content), dtype="float32")
        self._near("speech", samples, self.expected.speech, 0.01)

    async def draws(self) -> None:
        prompt = self.chance.choice(PICTURES)
        body = {"model": "draw", "prompt": prompt, "size": "32x32", "steps": 2, "seed": 5}
        head = self._tag("picture", 200, 429)
        if self.chance.random() < 0.5:
            events = await self._streamed("/v1/images/generations", head, body)
            found = [event["b64_json"] for event in events if event["type"] == "image_generation.completed"]
        else:
            answer = await self._sent("POST", "/v1/images/generations", head, json=body)
            found = [answer.json()["data"][0]["b64_json"]] if answer.status_code == 200 else []
        for data in found:
            pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
            self._near("picture", pixels, self.expected.pictures[prompt], 2)

    async def films(self) -> None:
        body = {"model": "film", "prompt": "a cat", "size": "32x32", "steps": 1, "num_frames": 5, "seed": 1}
        answer = await self._sent("POST", "/v1/videos", self._tag("video", 200, 429), json=body)
        if answer.status_code != 200:
            return
        path = f"/v1/videos/{answer.json()['id']}"
        async with asyncio.timeout(LONGEST_WAIT):
            while (job := (await self._sent("GET", path, self._tag("poll", 200))).json())["status"] != "completed":
                assert job["status"] in ("queued", "in_progress"), job
                await asyncio.sleep(0.05)  # a client that polls, as OpenAI's does
        video = await self._sent("GET", f"{path}/content", self._tag("content", 200))
        self._compare("video", video.content[4:8], b"ftyp")
        await self._sent("DELETE", path, self._tag("deletion", 200))

    async def transcribes(self) -> None:
        head = self._tag("transcription", 200, 429)
        given = {"files": {"file": ("said.wav", SOUND)}, "data": {"model": "omni", "timeout": "100"}}
        answer = await self._sent("POST", "/v1/audio/transcriptions", head, **given)
        if answer.status_code == 200:
            self._compare("transcription", answer.json()["text"], self.expected.transcription)

    async def converses(self) -> None:
        """Two thirds hear the answer and say goodbye, the others leave in the middle of it, at times by a reset."""
        head, leaves = self._tag("conversation", 101, 429), self.chance.random() < 0.33
        url = f"{self.url.replace('http://', 'ws://')}/v1/realtime?model=lm"
        try:
            async with connect(url, additional_headers=head, compression=None, ping_interval=None) as socket:
                self.seen[head[TAG]].status = 101
                async with asyncio.timeout(LONGEST_WAIT):
                    await self._converse(socket, leaves)
        except InvalidStatus as refusal:
            self.seen[head[TAG]].status = refusal.response.status_code

    async def _converse(self, socket: ClientConnection, leaves: bool) -> None:
        text = self.chance.choice(TEXTS)
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        asked = {"output_modalities": ["text"], "temperature": 0, "max_output_tokens": 120 if leaves else 8}
        await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        await socket.send(json.dumps({"type": "response.create", "response": asked}))
        got = ""
        async for message in socket:
            event = json.loads(message)
            assert event["type"] != "error", event
            if event["type"] == "response.output_text.delta":
                got += event["delta"]
                if leaves:
                    if self.chance.random() < 0.5:
                        socket.transport.abort()
                    return
            if event["type"] == "response.done":
                response = event["response"]
                if response["status"] == "failed":
                    assert response["status_details"]["error"]["code"] == "queue_full", response
                elif not leaves:
                    self._compare("conversation", got, self.expected.chat[text])
                return
        raise AssertionError(f"a conversation broke off: {socket.close_code} {socket.close_reason}")

    async def is_served_afterwards(self) -> None:
        """The storm is over, though not all of it is cleared away: the service is there, and answers rightly."""
        body = {"model": "lm", "prompt": TEXTS[0], "max_tokens": 8, "temperature": 0}
        self.client = httpx.AsyncClient(base_url=self.url, timeout=LONGEST_WAIT)
        async with asyncio.timeout(LONGEST_WAIT), self.client:
            assert (await self.client.get("/health")).status_code == 200
            status = 429  # the places of those who have just left
            while status == 429:
                answer = await self._sent("POST", "/v1/completions", self._tag("afterwards", 200, 429), json=body)
                status = answer.status_code
        self._compare("afterwards", answer.json()["choices"][0]["text"], self.expected.completion[TEXTS[0]])

    # ------------------------------------------------------------------------------------- wrong, late, refused

    async def sends_nonsense(self) -> None:
        path, body, kind = self.chance.choice(MALFORMED)
        head = {**self._tag("nonsense", 400), "Content-Type": kind}
        await self._sent("POST", path, head, content=body)

    async def sends_too_much(self) -> None:
        match self.chance.randrange(4):
            case 0:  # pixels
                parts = [{"type": "image_url", "image_url": {"url": png_url(600)}}, {"type": "text", "text": "?"}]
                body = {"model": "omni", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
                await self._sent("POST", "/v1/chat/completions", self._tag("pixels", 413, 429), json=body)
            case 1:  # seconds
                given = {"files": {"file": ("said.wav", wav(MAX_SECONDS + 1))}, "data": {"model": "omni"}}
                await self._sent("POST", "/v1/audio/transcriptions", self._tag("seconds", 413, 429), **given)
            case 2:  # bytes, announced
                content = b" " * (MAX_BODY + 1)
                await self._sent("POST", "/v1/completions", self._tag("bytes", 413), content=content)
            case 3:  # bytes, not announced

                async def pieces() -> Any:
                    for _ in range(MAX_BODY // 2**15 + 2):
                        yield b" " * 2**15

                await self._sent("POST", "/v1/completions", self._tag("chunks", 413), content=pieces())

    async def is_late(self) -> None:
        timeout = self.chance.choice((1e-6, 0.002, 0.02))
        head = self._tag("late", 200, 408, 429)
        await self._sent("POST", "/v1/completions", head, json={**LONG, "timeout": timeout})

    async def asks_for_nothing_there(self) -> None:
        match self.chance.randrange(4):
            case 0:
                body = {"model": "nobody", "prompt": "a"}
                await self._sent("POST", "/v1/completions", self._tag("no model", 404), json=body)
            case 1:
                await self._sent("DELETE", "/v1/requests/req-none", self._tag("no request", 404))
            case 2:
                await self._sent("GET", "/v1/nowhere", self._tag("no path", 404))
            case 3:
                await self._sent("GET", "/v1/completions", self._tag("no method", 405))

    async def may_not(self) -> None:
        body = {"model": "lm", "prompt": "a", "max_tokens": 1}
        if self.chance.random() < 0.5:
            await self._sent("POST", "/v1/completions", self._tag("stranger", 401, key=""), json=body)
        else:
            await self._sent("POST", "/v1/completions", self._tag("forbidden", 403, key="painter"), json=body)

    async def comes_too_often(self) -> None:
        await self.completes(key="rated")

    async def is_cancelled(self) -> None:
        head = self._tag("cancelled", 200, 429)
        async with self.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=head) as answer:
            self.seen[head[TAG]].status = answer.status_code
            assert answer.status_code in (200, 429)
            if answer.status_code == 429:
                return
            asked, last = False, ""
            async for line in answer.aiter_lines():
                last = line or last
                if not asked and line.startswith("data: {"):
                    asked = True
                    path = f"/v1/requests/{json.loads(line[6:])['id']}"
                    await self._sent("DELETE", path, self._tag("cancelling", 200, 404))
            assert last == "data: [DONE]"

    # ------------------------------------------------------------------------------------------------- rude

    @contextlib.asynccontextmanager
    async def _raw(self, head: dict[str, str], body: bytes, extra: str, window: int | None = None) -> Any:
        """A connection on which a request was sent. It is closed without a word, at times by a reset."""
        host, port = self.url.removeprefix("http://").split(":")
        made = socket.socket()
        made.setblocking(False)
        if window is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        if self.chance.random() < 0.5:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by a reset
        await asyncio.get_running_loop().sock_connect(made, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=made, limit=1024)  # it reads no further ahead than this
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        start = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{lines}{extra}\r\n"
        try:
            writer.write(start.encode() + body)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            yield reader
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _whole(self, head: dict[str, str], given: dict[str, Any], window: int | None = None) -> Any:
        body = json.dumps(given).encode()
        return self._raw(head, body, f"Content-Length: {len(body)}\r\n", window)

    async def leaves_in_its_body(self) -> None:
        head = self._tag("left in its body", 499)
        async with self._raw(head, b'{"model": "lm", "pro', "Content-Length: 1000\r\n"):
            await asyncio.sleep(self.chance.random() * 0.02)

    async def leaves_at_once(self) -> None:
        head = self._tag("left at once", 200, 429, 499)
        async with self._whole(head, {**LONG, "stream": self.chance.random() < 0.5}):
            await asyncio.sleep(self.chance.random() * 0.05)

    async def leaves_a_stream(self) -> None:
        head = self._tag("left a stream", 200, 429, 499)
        async with self._whole(head, {**LONG, "stream": True}) as reader:
            with contextlib.suppress(ConnectionError):
                await reader.read(self.chance.choice((1, 200, 1000)))

    async def reads_slowly(self, stops: bool | None = None) -> bool:
        """Half of them stop for good, until they are cut off; the others take it all, in small bites.

        Whether there was a response to read: most of these many answers are refused while others are served.
        """
        head = self._tag("slow", 200, 429, 499)
        stops = self.chance.random() < 0.5 if stops is None else stops
        begun = b""
        async with self._whole({**head, "Connection": "close"}, WIDE, window=4096) as reader:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                begun = await reader.readexactly(600)
                async with asyncio.timeout(LONGEST_WAIT):
                    while stops and head[TAG] not in self.over:
                        await asyncio.sleep(0.05)
                    while not stops and await reader.read(512):
                        pass
        return b" 200 " in begun

    async def is_cut_off(self) -> None:
        """A reader that stops, sent again until it is served."""
        async with asyncio.timeout(LONGEST_WAIT):
            while not await self.reads_slowly(stops=True):
                await asyncio.sleep(0.05)

    async def breaks_the_protocol(self) -> None:
        """A chunk whose length is no number, in the middle of a body."""
        head = self._tag("broken chunks", 400)
        async with self._raw(head, b"5\r\nhello\r\nzz\r\n", "Transfer-Encoding: chunked\r\n") as reader:
            line = b""
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(LONGEST_WAIT):
                    line = await reader.readline()
            assert not line or int(line.split()[1]) == 400, line
