"""Files that decode for minutes: their requests end in time, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnistage.media.decode_pool import DecodePool, decode_processes
from omnistage.media.decode_process import DecodeProcess
from omnistage.media.limits import MediaLimits
from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.command_harness import running
from tests.server.harness import Running, awaited, data_url, make, raw, serving, until
from tests.server.realtime_client import raw_socket
from tests.slow_media import slow_jpeg

KEY, OTHER = "a-key-for-tests", "another-key-for-tests"
TEXT: dict[str, Any] = {"model": "omni", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
SLOW_URL = f"data:image/jpeg;base64,{base64.b64encode(slow_jpeg()).decode()}"


def picture_chat(url: str, **options: object) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return {"model": "omni", "max_tokens": 2, "messages": [{"role": "user", "content": content}], **options}


@pytest.fixture
def pool() -> Iterator[DecodePool]:
    with decode_processes(2) as made:
        assert made is not None
        yield made


@pytest.fixture
def any_scans(models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the slow file through the bound on its scans: not every format has such a bound."""
    omni = models["omni"]
    limits: Any = omni._requests._limits
    media: MediaLimits = limits.media.model_copy(update={"max_image_scans": 1_000_000})
    monkeypatch.setattr(omni._requests, "_limits", limits.model_copy(update={"media": media}))
    monkeypatch.setattr(omni, "media_limits", media)


@pytest.fixture
def guarded(models: dict[str, AsyncOmni], pool: DecodePool, any_scans: None) -> Iterator[Running]:
    holders = [Holder("ann", digest_of(KEY), max_concurrent=16), Holder("bob", digest_of(OTHER), max_concurrent=1)]
    service = Service(models={}, keyring=Keyring(holders))
    for name, omni in models.items():
        service.add(name, omni)
    service.loading = False
    with serving(service) as made:
        yield made


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_timeout_ends_a_request_whose_image_decodes_for_minutes(guarded: Running, pool: DecodePool) -> None:
    body = picture_chat(SLOW_URL, timeout=1)
    answer = httpx.post(f"{guarded.url}/v1/chat/completions", json=body, headers=headers(KEY))
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    until(lambda: not pool._running, "the end of the decoding")


@awaited
async def test_others_are_answered_while_a_key_has_sixteen_slow_images(guarded: Running, pool: DecodePool) -> None:
    url = f"{guarded.url}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60) as client:
        slow = [
            asyncio.ensure_future(client.post(url, json=picture_chat(SLOW_URL), headers=headers(KEY)))
            for _ in range(16)
        ]
        await asyncio.to_thread(until, lambda: bool(pool._running), "the start of the decoding")
        for body in (TEXT, picture_chat(data_url())):
            answer = await client.post(url, json=body, headers=headers(OTHER))
            assert answer.status_code == 200, answer.text
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
    await asyncio.to_thread(until, lambda: not pool._running, "the end of the decoding")


def test_a_client_that_left_has_its_place_until_the_decoding_has_ended(
    guarded: Running, pool: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[DecodeProcess] = []
    kill = DecodeProcess.kill
    monkeypatch.setattr(DecodeProcess, "kill", lambda process: held.append(process))
    with raw(guarded, *_slow_request(OTHER)):
        until(lambda: bool(pool._running), "the start of the decoding")
    until(lambda: bool(held), "the cancellation")

    def status() -> int:
        url = f"{guarded.url}/v1/chat/completions"
        return httpx.post(url, json=TEXT, headers=headers(OTHER)).status_code

    assert status() == 429
    kill(held[0])
    until(lambda: not pool._running, "the end of the decoding")
    until(lambda: status() == 200, "the end of the request")


def test_a_slow_recording_is_ended_with_its_request(guarded: Running, pool: DecodePool) -> None:
    """The service's own deadline; the audio is slow as no process is free for it."""
    slow = [raw(guarded, *_slow_request(KEY)) for _ in range(2)]
    file = io.BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setparams((1, 2, 16_000, 0, "NONE", ""))
        recording.writeframes(bytes(32_000))
    until(lambda: len(pool._waiting) == 1, "the start of the decoding")
    form = {"model": "omni", "timeout": "0.3"}
    url = f"{guarded.url}/v1/audio/transcriptions"
    answer = httpx.post(url, data=form, files={"file": file.getvalue()}, headers=headers(KEY))
    assert answer.status_code == 408
    for connection in slow:
        connection.close()
    until(lambda: not pool._running, "the end of the decoding")


def test_a_realtime_client_that_leaves_ends_the_decoding_of_its_image(guarded: Running, pool: DecodePool) -> None:
    content = [{"type": "input_image", "image_url": SLOW_URL}]
    with raw_socket(guarded, additional_headers=headers(KEY)) as session:
        session.until("session.created")
        session.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        until(lambda: bool(pool._running), "the start of the decoding")
    until(lambda: not pool._running, "the end of the decoding")
    until(lambda: not guarded.service.sessions, "the end of the session")


def _slow_request(key: str) -> tuple[bytes, str, str]:
    body = json.dumps(picture_chat(SLOW_URL)).encode()
    return body, f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n", "/v1/chat/completions"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_the_command_stops_with_its_processes_while_they_decode(tmp_path: Path) -> None:
    folder = make("qwen2_5_omni", tmp_path / "omni")
    arguments = ("--port", "0", "--api-key", KEY, "--drain-seconds", "0", "--dtype", "float32", "--device", "cpu")
    with running(str(folder), *arguments, "--set", "limits.media.max_image_scans=1000000") as command:
        url = command.line(r"ready: (http://127\.0\.0\.1:\d+)/v1").group(1)
        body = picture_chat(data_url())
        ordinary = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers(KEY), timeout=60)
        assert ordinary.status_code == 200, ordinary.text
        [process] = children(command.process.pid)
        body = picture_chat(SLOW_URL)

        def post() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers(KEY), timeout=60)

        used = processor_time(process)
        client = threading.Thread(target=post)
        client.start()
        until(lambda: processor_time(process) > used + 0.2, "the start of the decoding")
        command.process.send_signal(signal.SIGTERM)
        assert command.end() == 0
        client.join(HANG_SECONDS)
        assert not Path(f"/proc/{process}").exists()


def children(parent: int) -> list[int]:
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and _stat(int(folder.name))[1:2] == [str(parent)]
    ]


def processor_time(process: int) -> float:
    return sum(map(int, _stat(process)[11:13])) / os.sysconf("SC_CLK_TCK")


def _stat(process: int) -> list[str]:
    """The fields behind a process's name, from its state on; none where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []
