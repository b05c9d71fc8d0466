"""A signal ends the process in time, whatever its threads, its stages and its event loop are doing."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnistage.server.http.stopping import STOP_SECONDS
from tests.server.command_harness import Command
from tests.server.harness import make

DRAIN_SECONDS = 0.5
SECONDS = DRAIN_SECONDS + STOP_SECONDS + 15
"""With time for a busy machine; without a bound it would take for ever."""

# The command, with parts that never return.
STUCK = """
import sys, threading
from omnistage.cli import app
from omnistage.engines.ar.stage import ARStage
from omnistage.server.openai.files import FileStore
from omnistage.server.service import Service

def wait_for_ever(*_):
    print("is stuck", file=sys.stderr, flush=True)
    threading.Event().wait()

def compute_for_ever(*_):
    print("is stuck", file=sys.stderr, flush=True)
    while True:
        pass

FileStore.get = wait_for_ever  # in a worker thread: GET /files/NAME
ARStage.step = wait_for_ever  # in the stage's thread: a completion
Service.unavailable_stages = compute_for_ever  # in the event loop: GET /health
app()
"""
FILE = "GET /files/name HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTH = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
_BODY = '{"model": "lm", "prompt": "Once", "max_tokens": 4}'
COMPLETION = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(_BODY)}\r\n\r\n{_BODY}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("causal_lm", tmp_path_factory.mktemp("stopping") / "lm")


@contextlib.contextmanager
def stuck(folder: Path, *requests: str, drain_seconds: float = DRAIN_SECONDS) -> Iterator[Command]:
    """A service in which each of these requests is stuck."""
    options = ("--port", "0", "--drain-seconds", str(drain_seconds), "--dtype", "float32", "--device", "cpu")
    command = Command(str(folder), *options, script=STUCK)
    with contextlib.ExitStack() as stack:
        stack.callback(command.process.kill)
        host, port = command.line(r"ready: http://([\d.]+):(\d+)/v1").groups()
        for number, request in enumerate(requests):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            connection.sendall(request.encode())
            command.lines(r"is stuck", number + 1)
        yield command


def test_threads_and_stages_that_never_return_do_not_hold_it_up(folder: Path) -> None:
    with stuck(folder, COMPLETION, *[FILE] * 5) as command:
        command.process.send_signal(signal.SIGTERM)
        assert command.end(SECONDS) == 0, command.text
        assert "Traceback" not in command.text


def test_a_blocked_event_loop_ends_with_the_stacks_of_all_threads(folder: Path) -> None:
    with stuck(folder, HEALTH) as command:
        command.process.send_signal(signal.SIGTERM)
        assert command.end(SECONDS) == 1
        assert "Timeout (" in command.text
        assert "in compute_for_ever" in command.text


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_drain(folder: Path) -> None:
    with stuck(folder, COMPLETION, drain_seconds=3600) as command:
        command.process.send_signal(signal.SIGTERM)
        command.line(r"stopping: running requests may finish")
        command.process.send_signal(signal.SIGTERM)
        assert command.end(SECONDS) == 0, command.text


EMBEDDED = """
import os, signal
from omnistage.server.http import stopping
from omnistage.server.http.app import create_app
from omnistage.server.http.run import run
from omnistage.server.service import Service

class Timer:  # instead of the one that ends the process
    calls = []
    def dump_traceback_later(*arguments, **options):
        Timer.calls.append("set")
    def cancel_dump_traceback_later():
        Timer.calls.append("cancelled")
stopping.faulthandler = Timer
service = Service()
def load(_):
    os.kill(os.getpid(), signal.SIGTERM)
run(create_app(service), service, load, host="127.0.0.1", port=0, drain_seconds=0.0, notify=lambda *_: None)
print(*Timer.calls)
"""


def test_a_program_that_runs_the_service_goes_on_after_it() -> None:
    """The timer that ends a stuck process must not end this one."""
    done = subprocess.run([sys.executable, "-c", EMBEDDED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set cancelled\n"), done.stderr


OVER_TLS = """
import os, signal, ssl, sys
import httpx
from omnistage.server.http.app import create_app
from omnistage.server.http.run import run
from omnistage.server.service import Service

certificate, key = sys.argv[1:]
clients = []
def notify(line, _):
    if line.startswith("ready: "):
        port = line.split(":")[3].split("/")[0]
        client = httpx.Client(verify=ssl.create_default_context(cafile=certificate))
        clients.append(client)  # its connection stays open, and nothing is read from it
        print(client.get(f"https://localhost:{port}/health").status_code, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
service = Service()
run(create_app(service), service, lambda _: None, host="127.0.0.1", port=0, drain_seconds=0.0, notify=notify,
    certificate=(certificate, key))
"""


def test_an_idle_client_over_tls_does_not_hold_it_up(tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    script = [sys.executable, "-c", OVER_TLS, certificate, key]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "200\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "timeout graceful shutdown exceeded" not in done.stderr
