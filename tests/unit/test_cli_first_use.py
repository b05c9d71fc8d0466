"""What somebody sees who uses the command line for the first time: first steps, help, mistakes, a narrow terminal."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from omnistage.cli import app
from omnistage.cli.common import print_error, print_note
from omnistage.cli.help import _FIRST_STEPS
from omnistage.cli.terminal import Terminal, WordWrap
from omnistage.core.errors import ConfigError

SWITCHES = ("--version", "--help", "--force", "--check", "--quick", "--metadata", "--media-http", "--trace")


def run(*arguments: str, code: int = 0, width: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(width), "NO_COLOR": "1"}).invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return str(result.output)


def test_no_arguments_show_the_five_things_that_people_do():
    shown = run()
    assert len(_FIRST_STEPS) == 5
    assert all(command in shown for command, _ in _FIRST_STEPS)
    assert "omnistage --help" in shown


def test_what_pull_check_found_is_not_broken_within_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    note = "A small diffusion transformer, trained for Omnistage: text to image: in the package, 20 MB"
    for terminal, lines in ((True, 2), (False, 1)):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
        bundle = SimpleNamespace(name="b", check=lambda: SimpleNamespace(notes=[note], problems=[]))
        module = sys.modules["omnistage.cli.pull"]  # the package has the command by this name
        monkeypatch.setattr(module, "_bundle", lambda name, bundle=bundle: bundle)
        monkeypatch.setattr(module, "out", lambda console=console: console)
        run("pull", "b", "--check")
        printed = console.file.getvalue().splitlines()[:-1]
        assert len(printed) == lines
        assert " ".join(line.strip() for line in printed) == note


COMMANDS = (
    "pull",
    "list",
    "chat",
    "serve",
    "generate",
    "plan",
    "config",
    "tiny",
    "verify",
    "quantize",
    "models",
    "bench",
)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("bench", "serve")])
def test_switches_look_like_switches_and_types_are_short(command):
    shown = run(*command, "--help", width=120)
    lines = [line for line in shown.splitlines() if any(f"{name} " in line for name in SWITCHES)]
    assert lines
    assert "<bool>" not in shown
    assert not [line for line in lines_of_options(shown) if re.search(r"<(str|int|float|list)", line)]


def lines_of_options(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith(("│ --", "│ *  --", "│    --"))]


def test_the_help_lists_every_command_with_what_is_needed_first_at_the_top():
    shown = run("--help")
    places = [shown.index(f"│ {name} ") for name in COMMANDS]
    assert places[:5] == sorted(places)[:5]


def test_every_command_that_a_first_step_names_exists():
    for command, _ in _FIRST_STEPS:
        assert "Usage" in run(command.split()[1], "--help")


def test_the_list_of_bundles_fits_80_columns(monkeypatch, tmp_path):
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    shown = run("list")
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert all(word in shown for word in ("smollm2", "moonshine-tokenizer", "imagenet-names", "voice", "draw", "MIT"))


def test_a_misspelt_model_is_recognised(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    told = run("config", "startr", code=2)
    assert "did you mean starter?" in told
    assert "`omnistage pull starter`" in told
    assert "`hf download OWNER/NAME`" in told
    assert f"did you mean {tmp_path}/tiny?" in "".join(run("config", f"{tmp_path}/tinny", code=2).splitlines())
    assert "`hf download someone/something`" in run("config", "someone/something", code=2)
    assert "did you mean" not in run("config", "quite-another", code=2)


def test_a_misspelt_family_or_bundle_is_recognised(tmp_path):
    assert "did you mean qwen2_5_omni" in run("tiny", "qwen_omni", str(tmp_path), code=2)
    assert "did you mean starter?" in run("pull", "startr", code=2)


def test_a_port_in_use_needs_no_advice_about_the_configuration(capsys):
    print_error(ConfigError("cannot listen on 127.0.0.1:8000: Address already in use; choose another --port"))
    assert "hint" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [("chat", "m"), ("generate", "m", "hi")])
def test_an_interruption_while_loading_is_named(command, monkeypatch):
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("omnistage.omni.Omni", interrupted)
    assert "stopped while m was loading" in run(*command, code=130)


@pytest.mark.parametrize(
    ("command", "place", "told"),
    [
        (("serve", "m"), "server.http.app.create_app", "stopped before the service listened; no model was loaded"),
        (("verify", "m"), "config.checkpoint.find_model", "stopped"),
        (("pull", "starter", "--check"), "core.bundle.find_bundle", "stopped"),
    ],
)
def test_an_interruption_says_what_it_ended(command, place, told, monkeypatch):
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"omnistage.{place}", interrupted)
    assert run(*command, code=130) == f"{told}\n"


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap()
    return "".join(wrap.push(part, width) for part in [*pieces, "\n"])


@given(st.text(st.sampled_from("ab \n"), max_size=120), st.integers(4, 20), st.integers(1, 5))
@example("aaaaa a", 4, 1)
def test_words_are_wrapped_and_never_lost(text, width, piece):
    written = wrapped([text[at : at + piece] for at in range(0, len(text), piece)], width)
    assert written.split() == text.split()
    for line in written.split("\n"):
        overlong = any(len(word) >= width for word in line.split())  # the terminal breaks what no line holds
        assert len(line.rstrip()) <= width or overlong
    if all(len(line) <= width for line in text.split("\n")):
        assert [line.rstrip() for line in written[:-1].split("\n")] == [line.rstrip() for line in text.split("\n")]


@given(st.text(st.sampled_from("ab 猫、"), max_size=120), st.integers(4, 20))
@example("aaaaa、", 4)
def test_wide_characters_are_written_at_once_and_fill_lines(text, width):
    wrap = WordWrap()
    assert all(wrap.push(character, width).endswith(character) for character in text if cell_len(character) == 2)
    written = wrapped([text], width)
    assert "".join(written.split()) == "".join(text.split())
    for line in written.split("\n"):
        overlong = re.search(f"[ab]{{{width},}}", line)
        assert cell_len(line.rstrip()) <= width or overlong


def test_a_word_that_no_line_holds_streams_and_stays_whole():
    wrap = WordWrap()
    address = "https://example.org/a/long/way"
    written = wrap.push("see ", 10) + wrap.push(address[:20], 10)
    assert written.endswith(address[:20])
    written += wrap.push(address[20:] + " and on\n", 10)
    assert address in written


def test_notes_and_errors_break_between_words_on_a_terminal_and_stay_whole_in_a_log():
    text = "error: the model is neither a folder nor in the local hub cache"
    for terminal, lines in ((True, 3), (False, 1)):
        file = io.StringIO()
        print_note(text, Console(file=file, width=30, force_terminal=terminal, color_system=None))
        shown = file.getvalue().splitlines()
        assert len(shown) == lines
        assert " ".join(line.strip() for line in shown) == text


@pytest.mark.parametrize(("size", "height"), [((40, 80), 12), ((96, 96), 10), ((300, 100), 40)])
def test_a_picture_leaves_room_for_the_conversation(size, height):
    def console() -> Console:
        return Console(file=io.StringIO(), width=80, height=height, force_terminal=True, color_system="truecolor")

    terminal = Terminal(True, console(), console())
    assert terminal.show(Image.new("RGB", size))
    file = terminal.output.file
    assert isinstance(file, io.StringIO)
    lines = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines()
    assert len(lines) <= height - 3
    shape = size[0] / size[1] / (len(lines[0]) / (2 * len(lines)))
    assert 0.8 < shape < 1.25


def test_ctrl_c_in_an_import_while_a_model_loads_raises_nothing_in_it() -> None:
    """Triton's module in C++ makes Python's enums while it is imported; what is raised in them aborts the process."""
    interrupting = (
        "import importlib.abc, importlib.machinery, os, signal, sys\n"
        "class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'omnistage.omni': return importlib.machinery.ModuleSpec(name, self)\n"
        "    def exec_module(self, module):\n"
        "        try: signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt: os.abort()\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from omnistage.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", interrupting, "chat", "m"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "loading m\nstopped while m was loading; nothing was generated\n"


def test_a_note_appears_above_a_bar_that_another_console_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    console = Console(file=screen, force_terminal=True, width=80)
    with Progress(console=console, auto_refresh=False) as bar:
        bar.add_task("loading think")
        bar.refresh()
        print_note("stopped while loading")
        _, _, below = screen.getvalue().rpartition("stopped while loading")
        assert "loading think" in below  # it was drawn again


def test_ctrl_c_during_the_imports_ends_the_command_without_a_traceback() -> None:
    interrupting = (
        "import importlib.abc, signal, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'omnistage.cli.chat': signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from omnistage.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", interrupting, "list"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")
