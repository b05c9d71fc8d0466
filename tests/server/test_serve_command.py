"""`omnistage serve` as a process: it says when it is ready, answers, and leaves when it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.harness import make

KEY = "a-key-for-tests"
LONG = {"model": "chat", "prompt": "Once", "max_tokens": 800, "ignore_eos": True, "stream": True}


class Command:
    """The running command, and what it has written so far."""

    def __init__(self, *arguments: str, script: str = "from omnistage.cli import app; app()") -> None:
        command = [sys.executable, "-c", script, "serve", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._lines.append("[end]")
            self._changed.notify_all()

    def line(self, pattern: str, timeout: float = 90) -> re.Match[str]:
        """Wait for a line."""

        def found() -> re.Match[str] | None:
            return next((match for line in self._lines if (match := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._lines[-1:] == ["[end]"], timeout)
            match = found()
        assert match is not None, "".join(self._lines)
        return match

    def lines(self, pattern: str, count: int, timeout: float = 90) -> None:
        """Wait for a number of lines."""

        def found() -> bool:
            return sum(bool(re.search(pattern, line)) for line in self._lines) >= count

        with self._changed:
            assert self._changed.wait_for(found, timeout), "".join(self._lines)

    def end(self, timeout: float = 30) -> int:
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    @property
    def text(self) -> str:
        return "".join(self._lines)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Command]:
    made = Command(*arguments)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("causal_lm", tmp_path_factory.mktemp("command") / "lm")


def test_it_serves_and_drains(folder: Path, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    options = ("--port", "0", "--api-key", KEY, "--audit-log", str(audit), "--dtype", "float32", "--device", "cpu")
    with running("--model", f"chat={folder}", *options) as command:
        url = command.line(r"ready: (http://127\.0\.0\.1:\d+)/v1").group(1)
        command.line(r"chat: text in; text out")
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["chat"]
            assert client.completions.create(model="chat", prompt="Once", max_tokens=3).choices
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGTERM)
            command.line("stopping: running requests may finish")
            late = httpx.post(f"{url}/v1/completions", json=LONG, headers=headers)
            assert late.status_code == 503
            assert httpx.get(f"{url}/ready").json() == {"status": "draining"}
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert command.end() == 0
        assert "Traceback" not in command.text
        assert KEY not in command.text
    written = [json.loads(line) for line in audit.read_text().splitlines()]
    assert sorted(line["status"] for line in written) == [200, 200, 200, 503]
    assert all(line["who"] == "key-1" for line in written)


def test_a_request_that_outlasts_the_drain_is_ended(folder: Path) -> None:
    arguments = (str(folder), "--port", "0", "--drain-seconds", "0", "--dtype", "float32", "--device", "cpu")
    with running(*arguments) as command:
        url = command.line(r"ready: (http://127\.0\.0\.1:\d+)/v1").group(1)
        # Without keys it answers to this machine's own names only.
        assert httpx.get(f"{url}/v1/models", headers={"Host": "pages.example"}).status_code == 403
        body = {**LONG, "model": "lm", "max_tokens": 1900}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"  # what there was, properly ended
        assert command.end() == 0


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    with running(str(tmp_path / "nothing"), "--port", "0") as command:
        assert command.end(90) == 2
        assert "Traceback" not in command.text
        assert "nothing" in command.text
