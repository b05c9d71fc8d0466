"""The figures of the code, of small checkouts made for it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

if (folder := str(Path(__file__).parents[2] / "tools")) not in sys.path:
    sys.path.append(folder)

import code_report
import hot_path
from hot_path import Call


def checkout(root: Path, files: Mapping[str, str]) -> Path:
    """A checkout with these files, and the package's own `__init__.py`."""
    for name, text in {"omnistage/__init__.py": "__version__ = '1'\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def edges(root: Path) -> list[tuple[str, str, str, str]]:
    found = code_report.upward_edges(root)
    return [(edge.source, edge.target, edge.module, edge.kind) for edge in found]


# ------------------------------------------------------------------------------------------------------ reading

CODE = '''"""A module.

With a contract.
"""

# A comment.
VALUE = """two
lines"""


class Thing:
    """A class."""

    def one(self) -> int:
        """A method."""

        def inner() -> int:
            return 1  # why

        return inner()
'''


def test_code_lines_are_without_docstrings_comments_and_blank_lines(tmp_path: Path) -> None:
    [_, source] = code_report.read_sources(checkout(tmp_path, {"omnistage/core/a.py": CODE}), "omnistage")
    assert code_report.code_lines(source) == 7


def test_functions_are_measured_from_def_to_end_with_those_inside(tmp_path: Path) -> None:
    [_, source] = code_report.read_sources(checkout(tmp_path, {"omnistage/core/a.py": CODE}), "omnistage")
    place = "omnistage/core/a.py"
    assert code_report.function_sizes(source) == {f"{place}:14 Thing.one": 7, f"{place}:17 Thing.one.inner": 2}


def test_habits_are_counted_where_they_are_code(tmp_path: Path) -> None:
    text = """
import typing
from typing import Any
Values = dict[str, Any]
def f(a: Any, b: typing.Any) -> None:
    isinstance(a, int), getattr(a, "x"), getattr(a, "x", None)  # isinstance( Any
    try: ...
    except (ValueError, Exception): ...
    try: ...
    except ValueError: ...
"""
    [_, source] = code_report.read_sources(checkout(tmp_path, {"omnistage/core/a.py": text}), "omnistage")
    assert code_report.habits(source) == [3, 1, 1, 1]


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no package omnistage"):
        code_report.read_sources(tmp_path, "omnistage")


# ------------------------------------------------------------------------------------------------------- layers


def test_imports_of_each_kind_that_go_up_are_found(tmp_path: Path) -> None:
    text = """
from typing import TYPE_CHECKING
from importlib import import_module
import omnistage.pipeline.loop
if TYPE_CHECKING:
    from omnistage.media import audio
def f(name):
    from omnistage.server.app import create_app
    import_module(f"omnistage.models.{name}.family")
    import_module("json")
"""
    checkout(
        tmp_path,
        {"omnistage/media/audio.py": "", "omnistage/core/a.py": text, "omnistage/models/__init__.py": ""},
    )
    assert edges(tmp_path) == [
        ("core", "pipeline", "omnistage.pipeline.loop", "module"),
        ("core", "media", "omnistage.media.audio", "typing"),
        ("core", "server", "omnistage.server.app", "lazy"),
        ("core", "models", "omnistage.models", "lazy"),
    ]


def test_imports_that_go_down_or_stay_are_fine(tmp_path: Path) -> None:
    checkout(
        tmp_path,
        {
            "omnistage/config/a.py": "from omnistage.media import audio\nfrom omnistage.hf import transformers\n",
            "omnistage/core/a.py": "from omnistage import __version__\nfrom .b import c\nimport omnistage.core.b\n",
            "omnistage/core/b.py": "",
            "omnistage/cli/a.py": "import omnistage.server.app, omnistage.bench\n",
        },
    )
    assert edges(tmp_path) == []


def test_imports_beside_and_of_the_public_names_count_as_upward(tmp_path: Path) -> None:
    checkout(
        tmp_path,
        {
            "omnistage/media/a.py": "from omnistage.config import schema\n",
            "omnistage/bench/a.py": "from omnistage.server import app\n",
            "omnistage/omni.py": "from omnistage import Omni\n",
        },
    )
    assert [edge[:2] for edge in edges(tmp_path)] == [("bench", "server"), ("media", "config"), ("omni", "package")]


def test_the_starter_has_no_layer_in_either_of_its_places(tmp_path: Path) -> None:
    checkout(
        tmp_path,
        {
            "omnistage/models/starter/a.py": "from omnistage.cli import app\n",
            "omnistage/parts/a.py": "from omnistage.cli import app\n",
            "omnistage/core/a.py": "import omnistage_starter.family\n",
            "starter/omnistage_starter/family.py": "from omnistage.cli import app\n",
        },
    )
    assert edges(tmp_path) == []
    report = code_report.measure(tmp_path, "omnistage", run=False)
    assert report.sizes == {"(top level)": [1, 1, 1], "core": [1, 1, 1], "starter": [3, 3, 3]}


def test_a_module_without_a_layer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"omnistage\.utils has no layer"):
        code_report.upward_edges(checkout(tmp_path, {"omnistage/utils.py": ""}))


# ------------------------------------------------------------------------------------------------------- tables


def test_two_checkouts_are_compared_cell_by_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = {"omnistage/core/a.py": "x = 1\n"}
    old = checkout(tmp_path / "old", {**same, "omnistage/record.py": "import omnistage.cli\nx = 1\n"})
    new = checkout(tmp_path / "new", {**same, "omnistage/core/b.py": "def f() -> None: ...\n"})
    kept = tmp_path / "report.json"
    code_report.main(["--root", str(new), "--against", str(old), "--no-hot-path", "--json", str(kept)])
    said = capsys.readouterr().out
    assert "| (top level) | 2 → 1 | 3 → 1 | 3 → 1 |" in said
    assert "| core | 1 → 2 | 1 → 2 | 1 → 2 |" in said
    assert "| total | 3 | 4 → 3 | 4 → 3 |" in said
    assert "| edges | 1 → 0 | 1 → 0 | 0 | 0 |" in said
    assert "| omnistage/record.py:1 omnistage.cli | core → cli | module |" in said
    assert "Hot path" not in said
    now, before = json.loads(kept.read_text(encoding="utf-8"))
    assert (now["functions"], before["functions"]) == ({"omnistage/core/b.py:1 f": 1}, {})


def test_a_row_that_one_checkout_does_not_have_is_a_dash() -> None:
    old, new = (code_report.Table("T", ("folder", "lines"), rows) for rows in ({"a": [1]}, {"b": [2]}))
    assert code_report.markdown(new, old).splitlines()[-2:] == ["| a | 1 → - |", "| b | - → 2 |"]


# ----------------------------------------------------------------------------------------------------- hot path


def test_calls_of_every_thread_are_counted_while_it_is_on() -> None:
    tracer = hot_path.Tracer(Path(__file__).parent)

    def helper() -> None: ...

    def in_a_thread() -> None:
        sys.setprofile(tracer)
        helper()

    tracer.begin()
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    [call] = tracer.end()
    assert (call.path, call.name.rpartition(".")[2], call.calls, call.named) == (Path(__file__).name, "helper", 1, True)
    tracer.begin()
    assert tracer.end() == []


def test_a_token_crosses_what_it_calls_at_least_every_other_time() -> None:
    short = [Call("a.py", 1, "each", 20), Call("a.py", 5, "now_and_then", 1), Call("a.py", 9, "once", 1)]
    long = [Call("a.py", 1, "each", 148), Call("a.py", 5, "now_and_then", 5), Call("a.py", 9, "once", 1)]
    long.append(Call("b.py", 1, "late", 32))
    assert hot_path.calls_a_token(short, long) == [Call("a.py", 1, "each", 2.0), Call("b.py", 1, "late", 0.5)]


SERVICE = """
import json, sys
from importlib.metadata import entry_points
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

def token():
    return [str(value) for value in (lambda: range(2))()]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.answer(b\'{"data":[{"id":"m"}]}\')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for _ in range(body["max_tokens"]):
            token()
        self.answer(b\'data: {"audio":{},"finish_reason":"length"}\')

def app():
    if entry_points(group="omnistage.families"):
        sys.exit("families of another checkout")
    elif sys.argv[1] == "serve":
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
    elif sys.argv[1:3] != ["tiny", "qwen2_5_omni"]:
        sys.exit("no such command")
"""


@pytest.mark.slow
def test_a_checkout_is_served_and_what_its_answers_cross_is_counted(tmp_path: Path) -> None:
    request, token = hot_path.hot_path(checkout(tmp_path, {"omnistage/cli.py": SERVICE}), "omnistage")
    assert {call.name: call.calls for call in request if call.named} == {
        "Handler.do_POST": 1,
        "Handler.answer": 1,
        "token": hot_path.SPOKEN,
    }
    assert [(call.path, call.name, call.calls) for call in token if call.named] == [("cli.py", "token", 1.0)]
    assert "token.<locals>.<lambda>" in {call.name for call in token}


def test_a_checkout_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    checkout(tmp_path, {"omnistage/cli.py": "raise RuntimeError('broken here')\n"})
    with pytest.raises(SystemExit, match="broken here"):
        hot_path.hot_path(tmp_path, "omnistage")
