"""What a model needs is imported beside the command's own set-up, and errors are left to whoever needs it."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from omnistage.cli import early_imports
from omnistage.cli.early_imports import EarlyImports


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def import_module(name: str) -> SimpleNamespace:
        names.append(name)
        return SimpleNamespace()

    monkeypatch.setattr(early_imports, "import_module", import_module)
    return names


def test_the_code_of_each_model_is_imported(tmp_path: Path, imported: list[str]) -> None:
    for name, kind in {"a": "llama", "b": "../evil", "c": "no_such_model", "d": 7}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
    folders = [str(tmp_path / name) for name in ("a", "b", "c", "d", "missing")]
    with EarlyImports(folders) as imports:
        imports.finish()
    assert imported == ["omnistage.hf", "transformers.models.llama.modeling_llama"]


def test_an_import_that_fails_is_left_to_whoever_needs_it(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        assert not gc.isenabled()
        imported.append(name)
        raise RuntimeError(name)

    monkeypatch.setattr(early_imports, "import_module", fail)
    with EarlyImports([]) as imports:
        imports.finish()
        assert gc.isenabled()
    assert imported == ["omnistage.hf"]


def test_what_was_imported_is_left_out_of_later_collections_unless_the_command_fails(
    imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with EarlyImports([]) as imports:
        assert not gc.isenabled()
        imports.finish()
        assert gc.isenabled()
    assert calls == ["freeze"]
    with pytest.raises(KeyError), EarlyImports([]):
        raise KeyError
    assert calls == ["freeze", "unfreeze"]
    assert gc.isenabled()


def test_the_system_reads_weights_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "sendfile"):
        pytest.skip("there is no sendfile here")
    sizes = {"a/model-1.safetensors": 5000, "a/model-2.safetensors": 1, "b/vae/model.safetensors": 70, "b/more.txt": 9}
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"0" * size)
    counts: list[int] = []
    sendfile = os.sendfile

    def spy(target: int, source: int, offset: int, count: int) -> int:
        counts.append(sendfile(target, source, offset, count))
        return counts[-1]

    monkeypatch.setattr(os, "sendfile", spy)
    monkeypatch.setattr(early_imports, "_READ_BYTES", 2000)
    folders = [str(tmp_path / name) for name in ("a", "b", "no-such-folder")]
    early_imports._read_ahead(folders)
    assert counts == [2000, 2000, 1000, 0, 1, 0, 70, 0]
    monkeypatch.setattr(early_imports, "free_host_memory", lambda: 10_000)
    early_imports._read_ahead(folders)
    assert sum(counts) == 5071  # more than half of the free memory: nothing is read
