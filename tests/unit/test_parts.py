"""Fetching weights by package name: what is kept, what is refused, what an interruption leaves."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pickle
import random
import socket
import subprocess
import tarfile
import threading
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omnistage_starter.bundle import StarterBundle
from omnistage_starter.parts import fetch as fetching
from omnistage_starter.parts import installed as installed_parts
from omnistage_starter.parts.convert import extract_characters, torch_to_safetensors
from omnistage_starter.parts.fetch import FetchError, UnreachableError, fetch, fetch_all
from omnistage_starter.parts.installed import installed_state, keep_licences
from omnistage_starter.parts.manifest import STARTER, InstalledFile, InstalledPart, Manifest, Part, PartFile
from omnistage_starter.parts.store import Store
from safetensors.torch import load_file
from typer.testing import CliRunner

from omnistage.cli import app
from omnistage.config.checkpoint import find_model
from omnistage.core.errors import CheckpointError, MissingDependencyError
from omnistage.core.user_cache import weights_home
from omnistage.models.registry import REGISTRY
from tests.hang_guard import HANG_SECONDS

WEIGHTS = b"weights" * 1000
LICENCE = b"do as you like"


def part(source: str = "pip", **change: Any) -> Part:
    base = Part(
        "voice",
        "speak",
        "A voice",
        source,  # type: ignore[arg-type]
        "some-package",
        "1.0",
        (PartFile("pkg/model.onnx", "model.onnx", hashlib.sha256(WEIGHTS).hexdigest(), len(WEIGHTS)),),
        "MIT",
        ("pkg/LICENSE",),
        1,
        without="it will not speak",
    )
    return replace(base, **change)


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
    registry = Registry()
    monkeypatch.setattr(subprocess, "run", registry)
    monkeypatch.setattr(fetching.shutil, "which", lambda name: f"/bin/{name}")
    return registry


class Registry:
    """In place of pip and npm: writes an archive where they are reports to."""

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
    return Store(Manifest("small", (part(),)), tmp_path / "small")


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


def test_a_changed_file_is_refused_and_the_previous_one_kept(registry: Registry, store: Store) -> None:
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
        (b"no archive", "not a complete archive"),
        (wheel({"pkg/LICENSE": b""}), "has no pkg/model.onnx"),
        (None, "Could not"),
    ],
)
def test_errors_of_the_registry_are_reported(
    registry: Registry, store: Store, archive: bytes | None, says: str
) -> None:
    registry.wheel = archive
    with pytest.raises(FetchError, match=says):
        fetch(part(), store)
    assert not store.has(part())


def tar_or_wheel(source: str, members: dict[str, bytes]) -> bytes:
    """An archive of a registry's, compressed."""
    if source == "npm":
        return npm_archive(members)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize("source", ["pip", "npm"])
@pytest.mark.parametrize(
    ("member", "limit"), [("pkg/model.onnx", len(WEIGHTS)), ("pkg/LICENSE", fetching._MAX_LICENCE_BYTES)]
)
def test_a_member_larger_than_its_limit_is_not_written(
    registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch, source: str, member: str, limit: int
) -> None:
    written: list[int] = []
    unpack = fetching._blocks

    def counted(*arguments: Any) -> Any:
        for piece in unpack(*arguments):
            written.append(len(piece))
            yield piece

    monkeypatch.setattr(fetching, "_blocks", counted)
    registry.npm = registry.wheel = tar_or_wheel(source, {**GOOD, member: bytes(5_000_000)})
    with pytest.raises(FetchError, match=f"{member} .* larger than {limit} bytes"):
        fetch(part(source), store)
    assert sum(written) <= len(WEIGHTS) + limit
    assert not [path for path in store.root.rglob("*") if path.is_file()]


def test_a_decompression_bomb_is_refused(registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_MAX_UNPACKED_BYTES", 2**20)
    registry.npm = npm_archive({"first": bytes(2**21), **GOOD})
    with pytest.raises(FetchError, match="unpacks to more than 1048576 bytes"):
        fetch(part("npm"), store)
    assert not store.has(part("npm"))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_with_an_unusual_compression_is_refused(registry: Registry, store: Store, method: int) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in GOOD.items():
            archive.writestr(name, data)
    registry.wheel = buffer.getvalue()
    with pytest.raises(FetchError, match="compression that wheels do not have"):
        fetch(part(), store)


@pytest.mark.parametrize("source", ["pip", "npm"])
def test_a_broken_archive_is_refused_however_it_is_broken(registry: Registry, store: Store, source: str) -> None:
    chance = random.Random(0)
    noise = chance.randbytes(3000)
    file = PartFile("pkg/model.onnx", "model.onnx", hashlib.sha256(noise).hexdigest(), len(noise))
    whole = tar_or_wheel(source, {**GOOD, "pkg/model.onnx": noise, "pkg/text": b"some text " * 300})
    refused = 0
    for _ in range(200):
        broken = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        kept = chance.choice((len(broken), chance.randrange(1, len(broken))))
        registry.npm = registry.wheel = bytes(broken[:kept])
        try:
            fetch(part(source, files=(file,)), store)
        except FetchError:
            refused += 1
        else:
            assert (store.root / "speak/model.onnx").read_bytes() == noise
    assert refused > 60


def test_a_full_disk_is_not_reported_as_a_broken_archive(
    registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching, "_extract", full)
    with pytest.raises(OSError, match="No space"):
        fetch(part(), store)


def test_progress_is_reported_while_pip_downloads(
    registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_POLL_SECONDS", 0.01)
    half_reported = threading.Event()
    reports: list[tuple[str, float | None]] = []

    def report(what: str, done: float | None) -> None:
        reports.append((what, done))
        if done is not None and 0 < done < 0.7:
            half_reported.set()

    def growing(command: list[str], env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        half = store.root.with_name("half.whl")
        half.write_bytes(bytes(5_000_000))
        os.replace(half, Path(env["TMPDIR"]) / "pip-unpack")  # whole at once: it is watched
        assert half_reported.wait(HANG_SECONDS)
        return registry(command, **options)

    monkeypatch.setattr(subprocess, "run", growing)
    fetch(part(megabytes=10), store, report)
    assert ("A voice: 5 of 10 MB", 0.35) in reports
    shares = [done for _, done in reports if done is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_the_progress_of_npm_is_unknown(registry: Registry, store: Store) -> None:
    reports: list[tuple[str, float | None]] = []
    fetch(part("npm"), store, lambda what, done: reports.append((what, done)))
    assert reports[0] == ("A voice: fetching 1 MB", None)


def test_a_download_has_a_timeout(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(command: list[str], timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(FetchError, match="was not downloaded"):
        fetch(part(), store)


def test_without_npm_the_message_says_what_will_be_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="it will not speak"):
        fetch(part("npm"), store)


def test_an_interrupted_fetch_is_not_complete(
    registry: Registry, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Store, *rest: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write_receipt", interrupted)
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


def test_without_pip_the_message_names_ensurepip(registry: Registry, store: Store) -> None:
    registry.wheel, registry.says = None, "python: No module named pip\n"
    with pytest.raises(MissingDependencyError, match="ensurepip"):
        fetch(part(), store)


def test_parts_are_fetched_concurrently(store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=HANG_SECONDS)

    def together(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        both.wait()
        return registry(command, **options)

    monkeypatch.setattr(subprocess, "run", together)
    parts = [part(), part("npm", name="recogniser", role="hear")]
    assert fetch_all(parts, store) == {}
    assert all(store.has(wanted) for wanted in parts)


def test_a_failed_part_does_not_affect_the_others(store: Store, registry: Registry) -> None:
    registry.npm = None
    parts = [part(), part("npm", name="recogniser", role="hear")]
    failed = fetch_all(parts, store)
    assert list(failed) == ["recogniser"]
    assert isinstance(failed["recogniser"], UnreachableError)
    assert store.has(parts[0])


def test_an_unexpected_error_is_raised(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(command: list[str], **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(subprocess, "run", full)
    with pytest.raises(OSError, match="No space"):
        fetch_all([part()], store)


def test_folders_of_killed_fetches_are_removed_and_those_of_running_ones_kept(store: Store) -> None:
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
    data = held.getvalue()
    file = PartFile("pkg/net.pth", "net.pth", hashlib.sha256(data).hexdigest(), len(data))
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


def test_a_file_with_more_than_weights_is_refused_and_not_executed(tmp_path: Path) -> None:
    torch.save({"a": Trap(tmp_path / "sprung")}, tmp_path / "net.pth")
    with pytest.raises(CheckpointError, match="more than weights"):
        torch_to_safetensors(tmp_path / "net.pth", tmp_path / "net.safetensors")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(CheckpointError):
        torch_to_safetensors(tmp_path / "plain.pth", tmp_path / "net.safetensors")
    torch.save({"a": 1.0}, tmp_path / "number.pth")
    with pytest.raises(CheckpointError, match="named tensors"):
        torch_to_safetensors(tmp_path / "number.pth", tmp_path / "net.safetensors")
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "net.safetensors").exists()


def test_characters_are_extracted_from_the_recogniser(tmp_path: Path) -> None:
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
        extract_characters(tmp_path / "mute.onnx", tmp_path / "characters.txt")
    onnx.helper.set_model_props(model, {"character": "a\nü\n字\n"})
    onnx.save(model, tmp_path / "read.onnx")
    extract_characters(tmp_path / "read.onnx", tmp_path / "characters.txt")
    assert (tmp_path / "characters.txt").read_text(encoding="utf-8") == "a\nü\n字"


def test_another_version_is_not_present(registry: Registry, store: Store) -> None:
    fetch(part(), store)
    assert not store.has(part(version="1.1"))


def test_damaged_files_are_detected(registry: Registry, store: Store) -> None:
    fetch(part(), store)
    assert store.damaged(part()) == []
    (store.root / "speak/model.onnx").write_bytes(b"rotten")
    assert store.damaged(part()) == ["model.onnx"]
    (store.root / "speak/model.onnx").unlink()
    assert not store.has(part())


def test_the_home_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path / "own"))
    assert weights_home() == tmp_path / "own"
    monkeypatch.delenv("OMNISTAGE_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert weights_home() == tmp_path / "xdg" / "omnistage"


def test_every_part_of_the_starter_names_its_hashes_and_licence() -> None:
    for installed in STARTER.installed:
        assert installed.files
        assert all(len(file.sha256) == 64 for file in installed.files)
        assert installed.licence == "Apache-2.0"
        assert installed.licence_files
    for wanted in STARTER.parts:
        assert wanted.files
        assert all(len(file.sha256) == 64 for file in wanted.files)
        assert wanted.licence in ("MIT", "Apache-2.0")
        assert wanted.licence_files
    assert [wanted.name for wanted in STARTER.required] == ["smollm2"]
    assert {wanted.role for wanted in STARTER.parts} == {"think", "hear", "see"}


# --------------------------------------------------------------------------------------------- a model's folder


def model(tmp_path: Path) -> Store:
    parts = (part(without=None), part("npm", name="recogniser", role="hear"))
    return Store(Manifest("small", parts, (), "Small", "small"), tmp_path / "small")


def test_a_folder_with_all_required_parts_becomes_a_model(registry: Registry, tmp_path: Path) -> None:
    store = model(tmp_path)
    assert not store.configure()
    assert not (store.root / "config.json").exists()
    fetch(store.manifest.parts[0], store)
    assert store.missing() == []
    assert store.configure()
    config = json.loads((store.root / "config.json").read_text(encoding="utf-8"))
    assert config == {"architectures": ["Small"], "model_type": "small"}


def test_a_correct_config_is_not_rewritten(registry: Registry, tmp_path: Path) -> None:
    store = model(tmp_path)
    fetch(store.manifest.parts[0], store)
    path = store.root / "config.json"
    path.write_text('{"model_type": "small",   "architectures": ["Small"]}', encoding="utf-8")
    assert store.configure()
    assert "   " in path.read_text(encoding="utf-8")
    path.write_text('{"model_ty', encoding="utf-8")
    assert store.configure()
    assert json.loads(path.read_text(encoding="utf-8"))["model_type"] == "small"


# --------------------------------------------------------------------------------------------- installed parts

VOICE = InstalledPart(
    "voice",
    "speak",
    "A voice",
    "some-voice",
    "1.2",
    (InstalledFile("some_voice/voice.onnx", hashlib.sha256(WEIGHTS).hexdigest()),),
    "MIT",
    ("some_voice-1.2.dist-info/licenses/LICENSE", "some_voice-1.2.dist-info/licenses/NOTICE"),
)


def record(site: Path) -> None:
    """Write down the installed files as pip does."""
    lines = ["some_voice-1.2.dist-info/RECORD,,"]
    for path in sorted(site.rglob("*")):
        if path.is_file() and path.name not in ("RECORD", "METADATA"):
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            lines.append(f"{path.relative_to(site).as_posix()},sha256={digest},{path.stat().st_size}")
    (site / "some_voice-1.2.dist-info" / "RECORD").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package `some-voice` 1.2 with a file of weights and one of code; the folder that holds it."""
    site = tmp_path / "site"
    (site / "some_voice").mkdir(parents=True)
    (site / "some_voice" / "voice.onnx").write_bytes(WEIGHTS)
    (site / "some_voice" / "code.py").write_text("spoken = True\n", encoding="utf-8")
    info = site / "some_voice-1.2.dist-info"
    (info / "licenses").mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-voice\nVersion: 1.2\n", encoding="utf-8")
    (info / "licenses" / "LICENSE").write_bytes(LICENCE)
    (info / "licenses" / "NOTICE").write_bytes(b"who made it")
    record(site)
    monkeypatch.syspath_prepend(str(site))
    return site


def test_an_installed_part_is_compared_with_its_own_record(voice: Path) -> None:
    assert installed_state(VOICE).ok
    assert "1.2" in installed_state(VOICE).message
    (voice / "some_voice" / "voice.onnx").write_bytes(b"rotten")
    assert not installed_state(VOICE).ok
    assert "damaged: some_voice/voice.onnx" in installed_state(VOICE).message
    (voice / "some_voice" / "voice.onnx").unlink()
    assert "--force-reinstall --no-deps some-voice==1.2" in installed_state(VOICE).message
    (voice / "some_voice" / "voice.onnx").write_bytes(WEIGHTS)
    (voice / "some_voice" / "code.py").write_text("spoken = False\n", encoding="utf-8")
    assert "damaged: some_voice/code.py" in installed_state(VOICE).message


def test_the_interpreter_that_a_script_names_is_no_damage(voice: Path) -> None:
    """It changes where an environment is moved or copied."""
    with (voice / "some_voice-1.2.dist-info" / "RECORD").open("a", encoding="utf-8") as record:
        record.write("../../bin/some-voice,sha256=AAAA,10\n")
    assert installed_state(VOICE).ok


def test_an_installed_part_that_agrees_with_its_record_and_not_with_the_manifest_is_refused(voice: Path) -> None:
    (voice / "some_voice" / "voice.onnx").write_bytes(b"another voice")
    record(voice)
    assert not installed_state(VOICE).ok
    assert "damaged: some_voice/voice.onnx" in installed_state(VOICE).message


def test_an_installed_part_of_another_version_says_which_is_wanted(voice: Path) -> None:
    state = installed_state(replace(VOICE, version="1.3"))
    assert not state.ok
    assert "1.2 is installed: pip install some-voice==1.3" in state.message


def test_licences_of_installed_parts_are_kept_with_the_others(voice: Path, store: Store) -> None:
    keep_licences(VOICE, store)
    kept = {path.name: path.read_bytes() for path in store.licences(VOICE).iterdir()}
    assert kept == {"LICENSE": LICENCE, "NOTICE": b"who made it"}
    (voice / "some_voice-1.2.dist-info" / "licenses" / "NOTICE").unlink()
    record(voice)
    assert "NOTICE" in installed_state(VOICE).message
    assert not installed_state(VOICE).ok


def test_the_voice_that_is_installed_is_the_one_whose_hashes_are_known() -> None:
    project = Path(__file__).parents[2] / "starter" / "pyproject.toml"
    dependencies = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    known = STARTER.installed[0]
    assert f"{known.package}=={known.version}" in dependencies


def test_the_starters_voice_and_drawing_weights_are_those_of_the_manifest() -> None:
    voice, draw = STARTER.installed
    weights = {path.name for path in (installed_parts.PACKAGE_FOLDER / str(draw.folder)).rglob("*.safetensors")}
    assert {Path(file.path).name for file in draw.files} == weights
    assert installed_state(draw).ok, installed_state(draw).message
    hibari = pytest.importorskip("hibari", reason="the voice is the package hibari-tts")
    assets = {f"hibari/assets/{path.name}" for path in (Path(hibari.__file__).parent / "assets").iterdir()}
    assert {file.path for file in voice.files} == assets
    assert installed_state(voice).ok, installed_state(voice).message


def test_a_missing_installed_part_names_the_command() -> None:
    state = installed_state(replace(VOICE, package="no-such-voice-anywhere"))
    assert not state.ok
    assert "pip install 'omnistage[starter]'" in state.message


def test_weights_inside_the_package_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_parts, "PACKAGE_FOLDER", tmp_path)
    weights = b"0" * 3_100_000
    file = InstalledFile("transformer/model.safetensors", hashlib.sha256(weights).hexdigest())
    packaged = replace(VOICE, folder="models/drawn", version=None, files=(file,), licence_files=("README.md",))
    assert not installed_state(packaged).ok
    (tmp_path / "models/drawn/transformer").mkdir(parents=True)
    (tmp_path / "models/drawn/README.md").write_bytes(LICENCE)
    (tmp_path / "models/drawn/transformer/model.safetensors").write_bytes(weights)
    assert installed_state(packaged).ok
    assert "3 MB" in installed_state(packaged).message
    (tmp_path / "models/drawn/transformer/model.safetensors").write_bytes(weights[:-1] + b"1")
    assert not installed_state(packaged).ok
    assert "transformer/model.safetensors" in installed_state(packaged).message


# ------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    optional = part("npm", name="recogniser", role="hear", without="it will not hear")
    manifest = Manifest("starter", (part(without=None), optional), (), "Small", "small")
    monkeypatch.setattr(StarterBundle, "manifest", manifest)
    return lambda *words: CliRunner().invoke(app, words)


def test_pull_fetches_once_and_lists_its_parts(registry: Registry, command: Any, tmp_path: Path) -> None:
    first = command("pull", "starter")
    assert first.exit_code == 0, first.output
    assert first.output.count("fetched") == 2
    again = command("pull", "starter")
    assert again.output.count("present ") == 2
    assert len(registry.commands) == 2
    checked = command("pull", "starter", "--check")
    assert checked.exit_code == 0
    assert checked.output.count(": intact") == 2
    assert "present" in command("list").output
    assert (tmp_path / "starter" / "config.json").is_file()


def test_an_interrupted_pull_run_again_fetches_only_what_is_missing(
    registry: Registry, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "pip" in words:
            return registry(words, **options)
        (Path(options["cwd"]) / "half.tgz").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", killed)
        assert command("pull", "starter").exit_code != 0
    assert (tmp_path / "starter" / "speak" / "model.onnx").is_file()
    assert not (tmp_path / "starter" / "hear").exists()
    assert not list((tmp_path / "starter").glob(".partial-*"))
    registry.commands.clear()
    again = command("pull", "starter")
    assert again.exit_code == 0, again.output
    assert [words[1] for words in registry.commands] == ["pack"]
    assert (tmp_path / "starter" / "hear" / "model.onnx").read_bytes() == WEIGHTS
    assert "present   A voice" in again.output
    assert "fetched   A voice" in again.output


def test_after_a_pull_no_program_is_started_and_no_connection_opened(
    registry: Registry, command: Any, voice: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(StarterBundle, "manifest", replace(StarterBundle.manifest, installed=(VOICE,)))
    assert command("pull", "starter").exit_code == 0
    tried: list[str] = []

    def refused(*arguments: object, **options: object) -> None:
        tried.append(str(arguments))
        raise OSError("offline")

    for where, name in ((subprocess, "run"), (subprocess, "Popen"), (os, "system"), (socket.socket, "connect")):
        monkeypatch.setattr(where, name, refused)
    for words in (("pull", "starter"), ("pull", "starter", "--check"), ("list",)):
        done = command(*words)
        assert done.exit_code == 0, done.output
    assert find_model("starter", REGISTRY) == tmp_path / "starter"
    assert tried == []


def test_pull_continues_without_npm(registry: Registry, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.shutil, "which", lambda name: None)
    done = command("pull", "starter")
    assert done.exit_code == 0, done.output
    assert "it will not hear" in done.output
    checked = command("pull", "starter", "--check")
    assert checked.exit_code == 0
    assert "it will not hear" in checked.output


def test_pull_without_a_network_keeps_present_parts_and_names_missing_ones(
    registry: Registry, command: Any, tmp_path: Path
) -> None:
    registry.npm, registry.says = None, "npm error code ENOTFOUND\n"
    done = command("pull", "starter")
    assert done.exit_code == 0, done.output
    assert "check the network" in done.output
    assert "it will not hear" in done.output
    assert (tmp_path / "starter" / "config.json").is_file()


def test_pull_refuses_a_changed_package_even_for_an_optional_part(
    registry: Registry, command: Any, tmp_path: Path
) -> None:
    registry.npm = npm_archive({**GOOD, "pkg/model.onnx": b"changed"})
    done = command("pull", "starter")
    assert done.exit_code == 2
    assert "SHA-256" in done.output
    assert (tmp_path / "starter" / "speak" / "model.onnx").read_bytes() == WEIGHTS
    assert not (tmp_path / "starter" / "hear").exists()


def test_pull_fetches_damaged_parts_and_nothing_else(registry: Registry, command: Any, tmp_path: Path) -> None:
    command("pull", "starter")
    (tmp_path / "starter" / "hear" / "model.onnx").write_bytes(b"rotten")
    registry.commands.clear()
    assert command("pull", "starter").exit_code == 0
    assert (tmp_path / "starter" / "hear" / "model.onnx").read_bytes() == WEIGHTS
    assert len(registry.commands) == 1


def test_pull_and_list_show_parts_that_pip_installs(
    registry: Registry, command: Any, voice: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(StarterBundle, "manifest", replace(StarterBundle.manifest, installed=(VOICE,)))
    done = command("pull", "starter")
    assert done.exit_code == 0, done.output
    assert "installed A voice (MIT)" in done.output
    assert {path.name for path in (tmp_path / "starter/licences/voice").iterdir()} >= {"LICENSE", "NOTICE"}
    assert "installed, 1.2" in command("pull", "starter", "--check").output
    listed = command("list").output
    assert "some-voice 1.2" in listed
    assert "installed, 1.2" in listed


@pytest.mark.parametrize("words", [("pull", "starter"), ("pull", "starter", "--check")])
def test_a_missing_or_changed_installed_part_is_an_error(
    registry: Registry, command: Any, voice: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    absent = replace(VOICE, name="draw", title="A pencil", package="no-such-pencil")
    monkeypatch.setattr(StarterBundle, "manifest", replace(StarterBundle.manifest, installed=(VOICE, absent)))
    (voice / "some_voice" / "voice.onnx").write_bytes(b"another voice")
    record(voice)
    command("pull", "starter")
    done = command(*words)
    assert done.exit_code == 2
    assert "A voice: damaged: some_voice/voice.onnx" in done.output
    assert "A pencil: not installed: pip install 'omnistage[starter]'" in done.output
    assert done.output.count("required: without it starter does not load") == 2
    listed = command("list").output
    assert "damaged" in listed
    assert "not installed" in listed


def test_pull_fails_without_a_required_part(registry: Registry, command: Any) -> None:
    registry.wheel = None
    assert command("pull", "starter").exit_code == 2


def test_check_reports_damaged_files(registry: Registry, command: Any, tmp_path: Path) -> None:
    command("pull", "starter")
    (tmp_path / "starter" / "speak" / "model.onnx").write_bytes(b"rotten")
    done = command("pull", "starter", "--check")
    assert done.exit_code == 2
    assert "speak/model.onnx" in done.output
    assert done.output.count(": changed") == 2  # its line, and the error
    assert done.output.count(": intact") == 1


def test_an_unknown_bundle_is_refused(command: Any) -> None:
    done = command("pull", "everything")
    assert done.exit_code == 2
    assert "starter" in done.output


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A registry without the starter, as where its distribution is not installed."""
    families = {name: family for name, family in REGISTRY.families().items() if name != "starter"}
    monkeypatch.setattr(REGISTRY, "_families", families)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize(
    "words",
    [
        ("pull", "starter"),
        ("pull", "starter", "--check"),
        ("chat", "starter"),
        ("generate", "starter", "Hello"),
        ("serve", "starter"),
        ("verify", "starter"),
        ("config", "starter"),
    ],
    ids=" ".join,
)
def test_commands_say_how_to_install_the_starter(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "starter is not installed; run: pip install 'omnistage[starter]'" in result.output


@pytest.mark.usefixtures("uninstalled")
def test_list_says_how_to_install_the_starter() -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    assert "pip install 'omnistage[starter]'" in result.output


def test_the_package_does_not_name_the_starters_package() -> None:
    source = Path(__file__).parents[2] / "omnistage"
    assert [path for path in source.rglob("*.py") if "omnistage_starter" in path.read_text(encoding="utf-8")] == []
