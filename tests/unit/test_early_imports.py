"""What a model needs is imported beside the command's own set-up, and errors are left to whoever needs it."""

from __future__ import annotations

import gc
import json
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
