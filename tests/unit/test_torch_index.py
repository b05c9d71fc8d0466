"""`make install` without a GPU: the CPU build of torch comes from PyTorch's own index where that can be reached."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.torch_index import option

ROOT = Path(__file__).parents[2]


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


def _add_torch(folder: Path, version: str) -> None:
    """A package index with one release of a torch without any code."""
    place = folder / "torch"
    place.mkdir(parents=True)
    name = f"torch-{version}"
    with zipfile.ZipFile(place / f"{name}-py3-none-any.whl", "w") as wheel:
        info = f"{name}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (place / "index.html").write_text(f'<a href="{name}-py3-none-any.whl">{name}-py3-none-any.whl</a>', "utf-8")


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """The URL of a server with the index `pypi`, and `pytorch` with the same version of torch as a CPU build."""
    _add_torch(tmp_path / "pypi", "2.13.0")
    _add_torch(tmp_path / "pytorch", "2.13.0+cpu")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_index_that_answers_is_given_to_pip(indexes: str) -> None:
    assert option(f"{indexes}/pytorch", "linux") == f"--extra-index-url {indexes}/pytorch"


def test_a_server_that_speaks_another_language_is_no_index(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")
                connection.recv(4096)

        threading.Thread(target=greet, daemon=True).start()
        assert option(f"http://127.0.0.1:{server.getsockname()[1]}", "linux") is None
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["missing", ""])
def test_without_an_index_there_pip_uses_its_own(indexes: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert option(f"{indexes}/{path}", "linux") is None
    assert "TORCH_CPU_INDEX" in capsys.readouterr().err


def test_an_index_that_nobody_answers_for_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert option("http://127.0.0.1:9/pytorch", "linux") is None
    assert "cannot be reached" in capsys.readouterr().err


def test_no_index_and_other_systems_need_none(indexes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert option("", "linux") is None
    assert option(f"{indexes}/pytorch", "darwin") is None  # PyPI has a CPU build there
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems get a CPU build from PyPI")
@pytest.mark.parametrize(("index", "build"), [("pytorch", "2.13.0+cpu"), ("missing", "2.13.0")])
def test_the_installation_takes_the_cpu_build_where_there_is_one(indexes: str, index: str, build: str) -> None:
    """The line of the Makefile, with pip's own answer to which torch it would install."""
    recipe = subprocess.run(
        [
            "make",
            "-n",
            "-B",
            ".venv/.installed",
            f"TORCH_CPU_INDEX={indexes}/{index}",
            f"BIN={Path(sys.executable).parent}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")},
    ).stdout
    (line,) = re.findall(r"\S+ -m pip install (-c constraints\.txt .*?) torch;", recipe.replace("\\\n", ""), re.DOTALL)
    command = f"{sys.executable} -m pip --isolated install --dry-run --no-deps --ignore-installed"
    result = subprocess.run(
        ["bash", "-c", f"{command} --index-url {indexes}/pypi {line} torch"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert f"Would install torch-{build}\n" in result.stdout, result.stdout + result.stderr
