"""The curl lines of the documentation, run as they are written, against the service that it tells to start.

Only the port is another: a free one takes the place of 8000, so that tests can run side by side.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.hang_guard import HANG_SECONDS
from tests.server.harness import until

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/api.md")
PORT = "8000"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here"),
]


def commands(page: str) -> list[str]:
    """The commands of a page's shell blocks, each as it is written, over however many lines."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    return [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines() if line.strip()]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Shell:
    """Where the commands run: a folder of their own, with `omnistage` and curl on the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = str(free_port())
        self.url = f"http://127.0.0.1:{self._port}"
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        named = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self._environment = {**named, "PATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}

    def _moved(self, command: str) -> str:
        return re.sub(rf"(:|--port ){PORT}\b", rf"\g<1>{self._port}", command)

    def start(self, command: str) -> subprocess.Popen[bytes]:
        # exec: what is ended later is the service itself, not a shell around it.
        given = ["bash", "-c", f"exec {self._moved(command)}"]
        with (self._folder / "serve.log").open("wb") as log:
            return subprocess.Popen(given, cwd=self._folder, env=self._environment, stderr=log)

    def run(self, command: str) -> str:
        """Run a command to its end. A curl that gets 400 or more fails, and says no more than the answer."""
        strict = 'curl() { command curl --silent --show-error --fail-with-body --max-time 120 "$@"; }'
        given = ["bash", "-c", f"{strict}\n{self._moved(command)}"]
        done = subprocess.run(
            given, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def check_answer(self, command: str, answer: str) -> None:
        written = re.search(r" (?:-o|--output) (\S+)", command)
        if written:
            file = self._folder / written[1]
            assert file.stat().st_size > 0, command
            answer = file.read_text() if file.suffix == ".json" else answer
            if file.suffix != ".json":
                return
        if "/metrics" in command:
            assert "omnistage_requests_inflight" in answer
        elif '"stream": true' in command:
            events = [line for line in answer.splitlines() if line]
            assert all(line.startswith(("data: ", "event: ")) for line in events), command
            assert len(events) > 2
        else:
            assert "error" not in json.loads(answer), command


@contextmanager
def served(shell: Shell, lines: list[str]) -> Iterator[None]:
    """The service of a page: its `omnistage tiny` lines, then its `omnistage serve` of what they made."""
    (serve,) = [line for line in lines if line.startswith("omnistage serve --model")]
    for line in lines[: lines.index(serve)]:
        folder = re.search(r"^omnistage tiny \S+ (\S+)", line)
        if folder and f"={folder[1]}" in serve:
            shell.run(line)
    process = shell.start(serve)

    def ready() -> bool:
        assert process.poll() is None, "the service ended; see serve.log"
        try:
            return httpx.get(f"{shell.url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready, "the service is ready")
        yield
    finally:
        process.terminate()
        try:
            process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(HANG_SECONDS)


@pytest.mark.parametrize("page", PAGES)
def test_the_curl_lines_of_a_page_work(page: str, tmp_path: Path) -> None:
    lines = commands(page)
    curls = [line for line in lines if line.startswith("curl ")]
    assert curls, "there is nothing to try"
    assert not [line for line in lines if "curl " in line and line not in curls]
    shell = Shell(tmp_path)
    with served(shell, lines):
        for line in curls:
            shell.check_answer(line, shell.run(line))
