"""The command line, through typer's runner."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from omnistage import __version__
from omnistage.cli import app
from omnistage.cli.common import progress_bar
from omnistage.cli.generate import chat_messages
from omnistage.core.errors import CapacityError, StageError
from omnistage.core.family import Family
from omnistage.core.params import DiffusionParams, SamplingParams
from omnistage.core.registry import Registry
from omnistage.core.types import FinishReason, Modality
from omnistage.core.verification import VerifyRow
from omnistage.media.audio_output import AudioOutput
from omnistage.media.image_output import ImageOutput
from omnistage.models import registry as registry_module
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, StageTrace, Trace, Usage

PIPELINE = """\
pipeline:
  name: fake
  stages:
    thinker: {engine: autoregressive, component: fake.thinker, output: text}
"""

runner = CliRunner()


def run(*arguments: object, code: int = 0, **options: object):
    result = runner.invoke(app, [str(argument) for argument in arguments], **options)
    assert result.exit_code == code, result.output
    return result


def write_tiny(folder: Path, *, seed: int, scale: float, progress) -> None:
    progress("weights", 0.5)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Fake"], "seed": seed, "scale": scale}))
    progress("", 1.0)


@pytest.fixture
def fake_registry(tmp_path, monkeypatch):
    """A registry with a family that can do everything, `verify` giving whatever is put into the list."""
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(PIPELINE)
    rows: list[object] = []

    def verify(runner, *, cases, seed, progress):
        progress("case", 1.0)
        return rows

    registry = Registry()
    registry._discovered = True  # no built-in families here
    common = {"pipeline": pipeline, "bridges": {}, "processor": lambda model: None}
    registry.register(
        Family(
            name="fake",
            architectures=("Fake",),
            components={"fake.thinker": lambda context: None},
            tiny=write_tiny,
            verify=verify,
            aliases=("fake-1.0",),
            **common,
        )
    )
    registry.register(Family(name="bare", architectures=("Bare",), components={}, **common))
    monkeypatch.setattr(registry_module, "REGISTRY", registry)
    return rows


@pytest.fixture
def model(tmp_path, fake_registry) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Fake"]}')
    return folder


# ----------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["generate", "chat", "config", "tiny", "verify", "bench", "pull", "models"])
def test_help_of_every_command_teaches_with_examples(command):
    output = run(command, "--help").output
    assert "Examples" in output
    assert f"omnistage {command}" in output


def test_help_lists_the_commands_and_version_prints():
    output = run("--help").output
    assert all(command in output for command in ("generate", "chat", "config", "tiny", "verify", "bench"))
    assert run("--version").output == f"omnistage {__version__}\n"


def test_help_imports_nothing_heavy():
    script = (
        "import sys\nfrom omnistage.cli import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'av', 'PIL', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------------------- config


def test_config_prints_yaml_that_can_be_given_back(model, tmp_path):
    text = run("config", model, "--set", "thinker.max_running=4", "--device", "cpu").stdout
    assert "max_running: 4" in text
    assert "# --set" in text
    saved = tmp_path / "saved.yaml"
    saved.write_text(text)
    again = run("config", model, "--config", saved).stdout
    assert [line.split(" #")[0].rstrip() for line in again.splitlines()] == [
        line.split(" #")[0].rstrip() for line in text.splitlines()
    ]


def test_config_is_coloured_on_a_terminal(model, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in run("config", model).stdout


def test_config_check_only_validates(model):
    output = run("config", model, "--check").stdout
    assert output == "valid: family fake, stages thinker, outputs text\n"


def test_an_error_is_one_line_with_a_hint_and_no_traceback(model, tmp_path):
    user = tmp_path / "user.yaml"
    user.write_text("deployment:\n  devise: cpu\n  max_inflight: 0\n")
    result = run("config", model, "--config", user, code=2)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert "max_inflight" in lines[0] + lines[1]
    assert f"{user}:2: deployment.devise: unknown key; did you mean device?" in lines[0] + lines[1]
    assert lines[1].startswith("also: ")
    assert lines[2].startswith("hint: ")
    assert len(lines) == 3
    assert result.stdout == ""


def test_debug_shows_the_traceback(model, monkeypatch):
    monkeypatch.setenv("OMNISTAGE_DEBUG", "1")
    result = run("config", model, "--set", "x", code=1)
    assert type(result.exception).__name__ == "LocatedConfigError"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["config", "./nowhere"], "there is no folder"),
        (["config", "{model}", "--device", "gpu"], "use auto, cpu"),
        (["config", "{model}", "--config", "no.yaml"], "does not exist"),
        (["verify", "./nowhere"], "there is no folder"),
        (["tiny", "nope", "{tmp}/x"], "known: fake, bare"),
        (["tiny", "bare", "{tmp}/x"], "has no small checkpoint"),
        (["tiny", "fake", "{model}"], "add --force"),
        (["tiny", "fake", "{model}/config.json"], "is a file"),
        (["generate", "{model}"], "give a text, or a file"),
        (["generate", "{model}", "hi", "--image", "no.png"], "--image: there is no file no.png"),
        (["generate", "{model}", "hi", "--raw", "--system", "x"], "takes a text alone"),
        (["generate", "{model}", "hi", "--modalities", "smell"], "join some of text, image, audio, video"),
        (["generate", "{model}", "hi", "--modalities", ","], "join some of"),
        (["generate", "{model}", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "{model}", "hi", "--out", "/proc/x"], "error: /proc/x: No such file or directory"),
        (["generate", "{model}", "hi", "--out", "{model}/config.json"], "config.json: File exists"),
        (["tiny", "fake", "/proc/x"], "error: /proc/x: No such file or directory"),
        (["config", "{model}", "--set", "deployment.device=\udcff"], "deployment.device"),
    ],
)
def test_mistakes_end_with_exit_code_two(arguments, says, model, tmp_path):
    filled = [argument.format(model=model, tmp=tmp_path) for argument in arguments]
    result = run(*filled, code=2)
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_a_model_of_no_family(tmp_path, fake_registry):
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    assert "no family serves Other" in run("config", tmp_path, code=2).stderr


# ------------------------------------------------------------------------------------------ tiny and verify


@pytest.mark.parametrize("name", ["fake", "fake-1.0"])
def test_tiny_writes_a_checkpoint(name, tmp_path, fake_registry):
    folder = tmp_path / "new" / "tiny"
    result = run("tiny", name, folder, "--seed", 3, "--scale", 0.5)
    assert json.loads((folder / "config.json").read_text())["seed"] == 3
    assert json.loads((folder / "config.json").read_text())["scale"] == 0.5
    assert f"wrote {folder}" in result.stdout
    run("tiny", name, folder, "--force")
    assert json.loads((folder / "config.json").read_text())["scale"] == 0.0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_force_replaces_a_checkpoint_that_was_interrupted(name, tmp_path, fake_registry):
    folder = tmp_path / "tiny"
    folder.mkdir()
    for file in (name, "generation_config.json", "vocab.txt"):
        (folder / file).touch()
    run("tiny", "fake", folder, "--force")
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize("names", [["notes.txt", "data.json"], ["tokenizer.json", "thesis.tex"]])
def test_force_leaves_what_is_not_a_checkpoint(names, tmp_path, fake_registry):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    assert "is not just a checkpoint" in run("tiny", "fake", folder, "--force", code=2).stderr
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_an_error_of_the_system_is_one_line_or_a_traceback_for_debugging(monkeypatch, fake_registry):
    assert len(run("tiny", "fake", "/proc/x", code=2).stderr.strip().splitlines()) == 1
    monkeypatch.setenv("OMNISTAGE_DEBUG", "1")
    assert isinstance(run("tiny", "fake", "/proc/x", code=1).exception, OSError)


def test_verify_passes_when_all_rows_do(model, fake_registry):
    fake_registry.append(VerifyRow.judge("case 0", "logits", 1e-6, 1e-4))
    output = run("verify", model).stdout
    assert "logits" in output
    assert "all 1 quantities agree" in output


def test_verify_fails_when_one_row_does(model, fake_registry):
    fake_registry.append(VerifyRow.judge("case 0", "logits", 1e-6, 1e-4))
    fake_registry.append(VerifyRow.judge("case 0", "audio", float("nan"), 1e-4))
    result = run("verify", model, code=1)
    assert "FAIL" in result.stdout
    assert "1 of 2 quantities" in result.stderr


def test_verify_takes_another_tolerance(model, fake_registry):
    fake_registry.append(VerifyRow.judge("case 0", "logits", 1e-3, 1e-4))
    run("verify", model, code=1)
    run("verify", model, "--tolerance", "1e-2")


@pytest.mark.parametrize("rows", [[], ["not a row"]])
def test_verify_that_compares_nothing_is_no_success(rows, model, fake_registry):
    fake_registry.extend(rows)
    assert "compared nothing" in run("verify", model, code=2).stderr


def test_verify_of_a_family_without_reference(tmp_path, fake_registry):
    (tmp_path / "config.json").write_text('{"architectures": ["Bare"]}')
    assert "no comparison" in run("verify", tmp_path, code=2).stderr


# ------------------------------------------------------------------------------------------------- generate


@dataclass
class FakeOmni:
    """Stands in for the front door and remembers what it was asked."""

    answer: OmniRequestOutput
    calls: list[tuple[str, object, dict[str, object]]]
    modalities = ("text", "audio")
    processor = None

    def __call__(self, model: str, **options: object) -> FakeOmni:
        self.calls.append(("load", model, options))
        return self

    def __enter__(self) -> FakeOmni:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append(("close", None, {}))

    def chat(self, messages: object, **options: object) -> OmniRequestOutput:
        self.calls.append(("chat", messages, options))
        return self.answer

    def generate(self, prompt: object, **options: object) -> list[OmniRequestOutput]:
        self.calls.append(("generate", prompt, options))
        return [self.answer]


@pytest.fixture
def omni(monkeypatch) -> FakeOmni:
    trace = Trace("r", 0.0, stages={"thinker": StageTrace("thinker", 0.0, 0.1)})
    answer = OmniRequestOutput(
        "r",
        [CompletionOutput(text="[bold] answer")],
        audio=AudioOutput(np.zeros(2400, np.float32), 24_000),
        finish_reason=FinishReason.STOP,
        usage=Usage(3, 2, 0.1),
        trace=trace,
    )
    fake = FakeOmni(answer, [])
    module = ModuleType("omnistage.omni")
    module.Omni = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omnistage.omni", module)
    return fake


def test_generate_writes_text_speech_and_trace(omni, tmp_path):
    picture = tmp_path / "p.png"
    picture.touch()
    result = run(
        *("generate", "m", "hi", "--image", picture, "--system", "be kind", "--modalities", "text, audio,text"),
        *("--max-tokens", 5, "--temperature", 0, "--stop", "x", "--voice", "Ethan", "--use-audio-in-video"),
        *("--set", "thinker.seed=1", "--device", "cpu", "--out", tmp_path / "out", "--trace"),
    )
    assert result.stdout.startswith("[bold] answer\n")
    assert "request r:" in result.stdout
    assert (tmp_path / "out" / "answer.txt").read_text() == "[bold] answer\n"
    assert (tmp_path / "out" / "answer.wav").read_bytes().startswith(b"RIFF")
    (_, model, options), (_, messages, asked), closed = omni.calls
    assert (model, options["overrides"], options["device"]) == ("m", ("thinker.seed=1",), "cpu")
    assert messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "image", "image": str(picture)}, {"type": "text", "text": "hi"}]},
    ]
    assert asked["modalities"] == (Modality.TEXT, Modality.AUDIO)
    assert asked["sampling_params"] == SamplingParams(max_tokens=5, temperature=0.0, stop=("x",))
    assert asked["sampling_params"].model_fields_set == {"max_tokens", "temperature", "stop"}
    assert (asked["voice"], asked["use_audio_in_video"]) == ("Ethan", True)
    assert closed[0] == "close"


def test_generate_leaves_what_is_not_given_to_the_model(omni):
    run("generate", "m", "hi")
    assert omni.calls[1][2]["sampling_params"] is None
    assert omni.calls[1][2]["modalities"] is None


def test_generate_says_that_speech_was_not_kept(omni):
    assert "not saved; add --out" in run("generate", "m", "hi").stderr


def test_generate_without_speech(omni, tmp_path):
    omni.answer.audio = None
    run("generate", "m", "hi", "--out", tmp_path / "out", "--trace")
    assert not (tmp_path / "out" / "answer.wav").exists()


def test_generate_reads_standard_input_and_raw_prompts(omni):
    run("generate", "m", "-", "--raw", input="once")
    assert omni.calls[1][:2] == ("generate", "once")


def test_a_picture_beside_text_and_speech_is_drawn_with_its_own_options(omni, tmp_path):
    omni.modalities = ("text", "audio", "image")
    omni.orchestrator = SimpleNamespace(
        stages={
            "think": SimpleNamespace(params_type=SamplingParams),
            "draw": SimpleNamespace(params_type=DiffusionParams),
        }
    )
    omni.answer.images.append(ImageOutput(np.zeros((4, 4, 3), np.uint8)))
    result = run(
        *("generate", "m", "an apple", "--modalities", "text,audio,image", "--max-tokens", 5, "--seed", 3),
        *("--steps", 8, "--out", tmp_path, "--trace"),
    )
    assert result.stdout.startswith("[bold] answer\n")
    assert {path.name for path in tmp_path.iterdir()} == {"answer.txt", "answer.wav", "picture.png"}
    assert omni.calls[1][2]["sampling_params"] == {
        "think": SamplingParams(max_tokens=5, seed=3),
        "draw": DiffusionParams(steps=8, seed=3),
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "8"], "--steps: is only for pictures"),
        (["--steps", "8", "--modalities", "text,image", "--mask", "{picture}"], "--mask: is only for pictures alone"),
    ],
)
def test_options_for_pictures_are_refused_where_they_mean_nothing(options, says, omni, tmp_path):
    picture = tmp_path / "p.png"
    picture.touch()
    filled = [option.format(picture=picture) for option in options]
    assert says in run("generate", "m", "hi", *filled, code=2).stderr


def test_speech_alone_is_written_without_a_text(omni, tmp_path):
    omni.answer.outputs.clear()
    result = run("generate", "m", "hi", "--modalities", "audio", "--out", tmp_path)
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["answer.wav"]


def test_an_error_that_names_a_command_needs_no_hint(tmp_path, monkeypatch):
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    told = run("config", "starter", code=2).stderr
    assert "`omnistage pull starter`" in told
    assert "hint:" not in told


def test_media_without_text_is_a_request():
    assert chat_messages(None, {"image": [], "audio": [Path("a.wav")], "video": []}, None) == [
        {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}
    ]


@pytest.mark.parametrize("kind", [StageError, CapacityError])
def test_an_answer_that_failed_ends_with_its_error(kind, omni):
    omni.answer.error = error = kind("it failed [for a reason]")
    assert str(error) in run("generate", "m", "hi", code=2).stderr


# ---------------------------------------------------------------------------------------------------- bench


@pytest.mark.parametrize("code", [0, 1])
def test_bench_runs_the_benchmark_and_ends_with_its_code(code, monkeypatch, tmp_path):
    asked = {}
    module = ModuleType("omnistage.bench.offline")
    module.run = lambda **options: asked.update(options) or code  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omnistage.bench.offline", module)
    run("bench", "--quick", "--out", tmp_path, code=code)
    assert (asked["quick"], asked["out"]) == (True, tmp_path)


def test_progress_stays_within_its_bar(monkeypatch):
    moved = []
    monkeypatch.setattr(
        "omnistage.cli.common.Progress.update", lambda bar, task, **given: moved.append(tuple(given.values()))
    )
    with progress_bar("working") as report:
        report("over", 7.0)
        report("under", -1.0)
        report("", 0.25)
    assert moved == [("over", 1.0), ("under", 0.0), ("working", 0.25), ("working", 1.0)]


# --------------------------------------------------------------------------------------------- tiny's variants


def test_a_variant_goes_to_a_family_that_has_it(tmp_path: Path) -> None:
    run("tiny", "flux", tmp_path / "a", "--variant", "kontext")
    assert json.loads((tmp_path / "a" / "model_index.json").read_text())["_class_name"] == "FluxKontextPipeline"


@pytest.mark.parametrize(
    ("family", "reason"), [("flux", "dev, schnell, kontext"), ("wan", "t2v_experts"), ("z_image", "no variants")]
)
def test_a_variant_that_the_family_lacks_is_refused_with_those_it_has(tmp_path: Path, family: str, reason: str) -> None:
    result = run("tiny", family, tmp_path / "a", "--variant", "nonsense", code=2)
    assert reason in " ".join(result.output.split())
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("family", ["flux", "flux2", "qwen_image", "wan"])
def test_the_variants_that_are_listed_are_those_that_tiny_takes(family: str) -> None:
    module = __import__(f"omnistage.models.{family}.tiny", fromlist=["VARIANTS"])
    assert set(registry_module.REGISTRY.family(family).variants) == set(module.VARIANTS)
