"""Every example runs, two of them as programs, against small checkpoints with random weights."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import soundfile
from PIL import Image
from typer.testing import CliRunner

from omnistage import Omni, OmniEngineArgs
from omnistage.cli import app
from omnistage.core.registry import Registry
from omnistage.pipeline.build import build_parts
from tests.hang_guard import HANG_SECONDS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# An end token, which is sampled now and then, is ignored: the lengths are what is tested. Seeds, so that a run is like
# any other.
SHORT = (
    *("thinker.max_tokens=8", "thinker.ignore_eos=true", "thinker.seed=1"),
    *("talker.max_tokens=60", "talker.ignore_eos=true", "talker.seed=1"),
)


def tiny(family: str, folder: Path) -> Path:
    result = CliRunner().invoke(app, ["tiny", family, str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="session")
def omni_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen2_5_omni", tmp_path_factory.mktemp("omni") / "model")


@pytest.fixture(scope="session")
def lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("causal_lm", tmp_path_factory.mktemp("lm") / "model")


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers")
    return tiny("flux", tmp_path_factory.mktemp("flux") / "model")


@pytest.fixture(scope="session")
def starter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers")
    pytest.importorskip("hibari")
    return tiny("starter", tmp_path_factory.mktemp("starter") / "model")


def run(example: str, *args: object, cwd: Path) -> str:
    """Standard output of an example that must succeed, in this process: to start one takes longer than an example."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [example, *map(str, args)])
        try:
            runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"{example} ended with {end.code}") from end
    return out.getvalue()


def run_program(example: str, *args: object, cwd: Path) -> str:
    """The same in a process of its own, as a user would start it."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "starter")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(EXAMPLES / example), *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{example} ended with {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def test_every_example_is_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names
    tested = re.findall(r'run(?:_program)?\(\s*"(\w+\.py)"', here)
    assert sorted(set(tested)) == names


def test_chat_with_audio_answers_in_text_and_speech(omni_folder: Path, tmp_path: Path) -> None:
    settings = [part for setting in SHORT for part in ("--set", setting)]
    printed = run_program("chat_with_audio.py", omni_folder, *settings, cwd=tmp_path)
    samples, rate = soundfile.read(tmp_path / "answer.wav")
    assert (rate, len(samples)) == (24_000, 60 * 480), printed
    assert re.search(r"^thinker .* 8  length$", printed, re.MULTILINE), printed
    assert re.search(r"^token2wav ", printed, re.MULTILINE), printed


def test_the_first_page_of_the_readme_runs(
    omni_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "path/or/name" in block)
    soundfile.write(tmp_path / "question.wav", [0.0, 0.1, -0.1] * 2000, 16_000)
    names = {"b64": base64.b64encode((tmp_path / "question.wav").read_bytes()).decode()}
    monkeypatch.chdir(tmp_path)
    opened = f"Omni({str(omni_folder)!r}, overrides={SHORT!r})"
    assert 'Omni("path/or/name")' in code
    exec(code.replace('Omni("path/or/name")', opened), names)
    names["omni"].close()
    assert soundfile.info(tmp_path / "answer.wav").frames == 60 * 480
    assert "ms in all" in capsys.readouterr().out


def test_the_snippets_on_other_pages_run(
    omni_folder: Path, lm_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xgrammar")
    ran = 0
    for page in ("README.md", "docs/sampling.md"):
        for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
            known = code.replace("out/tiny-lm", str(lm_folder)).replace("out/tiny-qwen2.5-omni", str(omni_folder))
            if known != code:
                exec(known.replace('"max_tokens": 200', '"max_tokens": 60'), {})
                ran += 1
    assert ran == 3
    printed = capsys.readouterr().out
    assert "s of speech]" in printed
    assert re.search(r"^(yes|no) stop$", printed, re.MULTILINE)


def test_speech_streams_while_text_does(omni_folder: Path, tmp_path: Path) -> None:
    # So much that the first sound, held back for 3 s at most, goes out before the last on a slow machine, too.
    printed = run("stream_speech.py", omni_folder, "Hi", "--max-tokens", 6, "--max-codes", 400, cwd=tmp_path)
    lines = [re.fullmatch(r" *([\d.]+) ms  (text|audio|end) +(.*)", line) for line in printed.splitlines()]
    assert all(lines)
    kinds = [line[2] for line in lines]
    times = [float(line[1]) for line in lines]
    assert times == sorted(times)
    assert kinds.index("text") < kinds.index("audio")
    assert kinds.count("audio") >= 2
    assert kinds[-1] == "end"
    assert soundfile.info(tmp_path / "speech.wav").frames == 400 * 480


def test_each_image_of_a_batch_gets_its_caption(omni_folder: Path, tmp_path: Path) -> None:
    printed = run("batch_captions.py", omni_folder, "--max-tokens", 6, cwd=tmp_path)
    captions = dict(re.findall(r"^(\w+): (.+)$", printed, re.MULTILINE))
    assert list(captions) == ["red", "green", "blue"]
    assert len(set(captions.values())) > 1


def test_structured_output_follows_its_schema(lm_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    city = json.loads(run("structured_output.py", lm_folder, cwd=tmp_path))
    assert list(city) == ["city", "country", "population", "capital"]
    assert city["country"] in ("France", "Italy", "Japan")
    assert isinstance(city["population"], int)
    assert isinstance(city["capital"], bool)


def test_a_pipeline_of_ones_own_plays_a_note_a_word(lm_folder: Path, tmp_path: Path) -> None:
    printed = run_program("custom_bridge_pipeline.py", lm_folder, "Once upon", "--max-tokens", 24, cwd=tmp_path)
    text = printed[: printed.rindex("wrote notes.wav")].removesuffix("\n")
    notes = len([word for word in text.split(" ") if word])
    assert notes > 1
    assert f"{notes} notes" in printed
    assert soundfile.info(tmp_path / "notes.wav").frames == notes * 3200


def test_prompts_are_drawn_together(flux_folder: Path, tmp_path: Path) -> None:
    small = ("--size", 32, "--steps", 2, "--seed", 5)
    printed = run("draw.py", flux_folder, "A fox", "A boat", "-n", 2, *small, cwd=tmp_path)
    names = [f"picture-{number}-{seed}.png" for number in (0, 1) for seed in (5, 6)]
    assert [line.partition(":")[0] for line in printed.splitlines()] == names
    pictures = [Image.open(tmp_path / name) for name in names]
    assert all(picture.size == (32, 32) for picture in pictures)
    assert len({picture.tobytes() for picture in pictures}) == 4


def test_the_drawing_snippets_of_the_pages_run(
    flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = 0
    for page in ("README.md", "docs/diffusion.md"):
        for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
            if "out/tiny-flux" in code:
                exec(code.replace("out/tiny-flux", str(flux_folder)), {})
                ran += 1
    assert ran == 3
    assert Image.open("a.png").size == (128, 128)
    assert Image.open("lighthouse.png").size == (64, 64)
    assert "step 8 of 8" in capsys.readouterr().out


def test_a_picture_is_watched_while_it_is_drawn(flux_folder: Path, tmp_path: Path) -> None:
    printed = run("draw.py", flux_folder, "A fox", "--size", 32, "--steps", 6, "--preview-every", 2, cwd=tmp_path)
    steps = [int(step) for step in re.findall(r"^step (\d) of 6$", printed, re.MULTILINE)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6
    assert printed.splitlines()[-1] == "picture-0.png: the picture"
    assert Image.open(tmp_path / "picture-0.png").size == (32, 32)
    for preview in tmp_path.glob("preview-*.png"):
        assert Image.open(preview).size == (32, 32)


def test_the_tour_uses_all_modalities(starter_folder: Path, tmp_path: Path) -> None:
    printed = run("starter_tour.py", starter_folder, "--max-tokens", 12, "--out", "made", cwd=tmp_path)
    made = tmp_path / "made"
    assert {path.name for path in made.iterdir()} == {"answer.txt", "answer.wav", "picture.png", "question.wav"}
    assert (made / "answer.txt").read_text(encoding="utf-8").split()[0] in printed
    assert Image.open(made / "picture.png").size == (96, 96)
    assert soundfile.info(made / "question.wav").duration > 0.5
    assert re.findall(r"^(\w+) +[░█]", printed, re.MULTILINE) == ["hear", "think", "speak", "draw", "paint"]
    assert printed.count("starter  ") == 2


def test_the_tour_ends_with_its_own_exit_code_without_the_starter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    with pytest.raises(AssertionError, match="ended with 3"):
        run("starter_tour.py", "starter", cwd=tmp_path)
    assert "omnistage pull starter" in capsys.readouterr().err


def test_the_snippets_about_the_starter_run(
    starter_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "starter.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert 'Omni("starter")' in code
    exec(code.replace('"starter"', f"{str(starter_folder)!r}, overrides=['think.max_tokens=12']"), {})
    assert Image.open("picture.png").size == (96, 96)
    assert soundfile.info("aloud.wav").duration > 0.3


class Typist:
    """Somebody at a terminal: types, and waits for what appears."""

    def __init__(self, *command: object) -> None:
        pty = pytest.importorskip("pty")
        self._seen = b""
        self.process, self._screen = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a terminal; tests in a shell's background ignore it
            os.environ.update(TERM="xterm-256color", OMP_NUM_THREADS="1", COLUMNS="100")
            os.execv(sys.executable, [sys.executable, *map(str, command)])

    def wait_for(self, text: str, seconds: float = HANG_SECONDS) -> str:
        """What appeared up to and with `text`."""
        seen, end = b"", time.monotonic() + seconds
        while text.encode() not in seen:
            assert time.monotonic() < end, self._seen
            if select.select([self._screen], [], [], 1.0)[0]:
                try:
                    piece = os.read(self._screen, 1)
                except OSError:
                    code, _ = self.end()
                    pytest.fail(
                        f"the program ended with {code} before {text!r} appeared: {self._seen.decode(errors='replace')}"
                    )
                seen += piece
                self._seen += piece
        return seen.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def end(self) -> tuple[int, str]:
        """The exit code, and what appeared at last."""
        seen = b""
        with contextlib.suppress(OSError):  # Linux says so where nobody has the other end any longer
            while piece := os.read(self._screen, 4096):
                seen += piece
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        os.close(self._screen)
        return code, seen.decode(errors="replace")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_in_a_terminal_stops_the_answer_and_ctrl_d_the_conversation(lm_folder: Path) -> None:
    command = "from omnistage.cli import app; app()"
    options = ("--max-tokens", 100_000, "--set", "thinker.ignore_eos=true", "--seed", 1)
    typist = Typist("-c", command, "chat", lm_folder, *options)
    typist.wait_for("Ctrl-D")  # libraries may write anything while the model is loaded, "> " too
    typist.wait_for("> ")
    typist.type("Hello\r")
    typist.wait_for("Hello\r\n")
    typist.wait_for(" ")  # the answer has begun
    typist.type("\x03")
    typist.wait_for("(stopped)")
    typist.wait_for("> ")
    typist.type("/help\r")
    assert "/draw TEXT            not supported by this model" in typist.wait_for("/quit")
    typist.wait_for("> ")
    typist.type("\x04")
    code, seen = typist.end()
    assert code == 0, seen


def test_an_installed_family_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What installing examples/toy_family leaves behind: its code on the path and its metadata beside it."""
    metadata = tmp_path / "site" / "toy_family-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 0.1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[omnistage.families]\ntone = toy_family:FAMILY\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(EXAMPLES / "toy_family")
    registry = Registry()
    family = registry.family("tone")
    family.tiny(tmp_path / "model", seed=1)

    parts = build_parts(OmniEngineArgs(model=str(tmp_path / "model")), progress=False, registry=registry)
    with Omni.from_parts(parts.graph, parts.stages, parts.bridges, parts.defaults, parts.processor) as omni:
        question = [{"role": "user", "content": "Sing"}]
        own = {"thinker": {"max_tokens": 10, "ignore_eos": True, "seed": 3}}
        low, high = (omni.chat(question, own, modalities=["text", "audio"], voice=v) for v in ("low", "high"))
        whole = omni.chat(question, {**own, "beeper": {"streaming": False}}, modalities=["text", "audio"])
    assert low.text == high.text != ""
    assert len(low.audio.samples) == 10 * 800
    assert (low.audio.samples != high.audio.samples).any()
    assert low.audio.samples == pytest.approx(whole.audio.samples, abs=1e-5)
