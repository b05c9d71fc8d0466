"""`omnistage serve` as a process: it says when it is ready, answers, and leaves when it is told to."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.command_harness import running
from tests.server.harness import make

KEY = "a-key-for-tests"
LONG = {"model": "chat", "prompt": "Once", "max_tokens": 800, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("causal_lm", tmp_path_factory.mktemp("command") / "lm")


def test_it_serves_and_drains(folder: Path, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    options = ("--port", "0", "--api-key", KEY, "--audit-log", str(audit), "--dtype", "float32", "--device", "cpu")
    with running("--model", f"chat={folder}", *options) as command:
        url = command.line(r"ready: (http://127\.0\.0\.1:\d+)/v1").group(1)
        command.line(r"chat: text in; text out")
        page = command.line(r"web page: (\S+)").group(1)
        assert "<title>Omnistage" in httpx.get(page).text
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
        assert "nanobind" not in command.text  # nothing is reported as leaked
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
        assert command.end() == 2
        assert "Traceback" not in command.text
        assert "nothing" in command.text
