"""Fetching weights by package name: what is kept, what is refused, what an interruption leaves."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omnistage.cli import app
from omnistage.errors import MissingDependencyError
from omnistage.parts import fetch as fetching
from omnistage.parts.fetch import FetchError, fetch
from omnistage.parts.manifest import BUNDLES, STARTER, Bundle, Part, PartFile
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
        self.npm = npm_archive(GOOD)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.wheel is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: Could not find a version\n")
        if "pip" in command:
            (Path(command[command.index("--dest") + 1]) / "some_package-1.0-py3-none-any.whl").write_bytes(self.wheel)
        else:
            (Path(command[command.index("--pack-destination") + 1]) / "some-package-1.0.tgz").write_bytes(self.npm)
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


# ------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    deaf = part("npm", name="ears", role="hear", without="it will not hear")
    monkeypatch.setitem(BUNDLES, "starter", Bundle("starter", "both", (part(without=None), deaf)))
    return lambda *words: CliRunner().invoke(app, words)


def test_pull_fetches_once_and_says_what_it_has(registry: Registry, command: Any) -> None:
    first = command("pull", "starter")
    assert first.exit_code == 0, first.output
    assert first.output.count("fetched") == 2
    again = command("pull", "starter")
    assert again.output.count("there ") == 2
    assert len(registry.commands) == 2
    assert command("pull", "starter", "--check").exit_code == 0
    assert "there" in command("list").output


def test_pull_goes_on_without_what_npm_would_bring(
    registry: Registry, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.shutil, "which", lambda name: None)
    done = command("pull", "starter")
    assert done.exit_code == 0, done.output
    assert "it will not hear" in done.output


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
