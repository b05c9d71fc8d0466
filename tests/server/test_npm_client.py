"""OpenAI's JavaScript client against the service, where node and npm are there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Running

HERE = Path(__file__).parent / "npm"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client in it, made once a session."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not here")
    folder = tmp_path_factory.mktemp("npm")
    for name in ("package.json", "client.mjs"):
        shutil.copy(HERE / name, folder / name)
    command = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch the client in time: is the registry within reach?")
    if done.returncode != 0:
        pytest.skip(f"npm could not fetch the client: {done.stderr.strip().splitlines()[:1]}")
    return folder


@pytest.fixture
def told(installed: Path, server: Running) -> dict[str, Any]:
    """What the script saw."""
    node = shutil.which("node")
    assert node is not None
    voice = server.service.models["omni"].omni.processor.voices()[0]
    command = [node, "client.mjs", f"{server.url}/v1", voice]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.mark.slow
def test_the_javascript_client_chats_draws_and_reads_errors(told: dict[str, Any], server: Running) -> None:
    assert {"lm", "omni", "draw"} <= set(told["models"])
    assert told["chat"]["usage"] == 8
    assert told["stream"] == told["chat"]
    assert told["audio"]["head"] == "RIFF"
    assert told["audio"]["bytes"] > 1000
    assert told["image"] == {"head": "PNG", "size": "64x48"}
    assert told["imageEvents"][-1] == "image_generation.completed"
    assert "image_generation.partial_image" in told["imageEvents"]
    wrong, unknown, extra = told["errors"]
    assert wrong == {"kind": "BadRequestError", "status": 400, "param": "temperature", "code": "invalid_request"}
    assert (unknown["kind"], unknown["status"], unknown["param"]) == ("NotFoundError", 404, "model")
    assert (extra["status"], extra["param"]) == (400, "no_such_field")
    # Leaving the loop ended the request: the `server` fixture finds the engines idle.
    assert server.service.models["lm"].omni.stats().inflight == 0


def test_nothing_here_names_a_registry() -> None:
    assert json.loads((HERE / "package.json").read_text())["dependencies"] == {"openai": "7.53.0"}
    assert sorted(path.name for path in HERE.iterdir()) == ["client.mjs", "package.json"]
