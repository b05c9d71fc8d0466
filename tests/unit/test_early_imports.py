"""What a model needs is imported beside the command's own set-up, and errors are left to whoever needs it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from omnistage.cli import early_imports
from omnistage.engines import compiling


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def import_module(name: str) -> SimpleNamespace:
        names.append(name)
        return SimpleNamespace(
            start_compile_workers=lambda: names.append("processes that compile"),
            import_compiler=lambda: names.append("what compiles"),
        )

    monkeypatch.setattr(early_imports, "import_module", import_module)
    return names


def test_the_code_of_each_model_is_imported(
    tmp_path: Path, imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kind in {"a": "llama", "b": "../evil", "c": "no_such_model", "d": 7}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folders = [str(tmp_path / name) for name in ("a", "b", "c", "d", "missing")]
    early_imports.start_imports(folders, "cpu").join()
    assert imported == ["omnistage.hf", "transformers.models.llama.modeling_llama"]


def test_what_compiles_is_started_for_a_large_model_on_a_gpu(
    tmp_path: Path, imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    early_imports.start_imports([str(tmp_path)], None).join()
    assert imported == ["omnistage.hf"]
    monkeypatch.setattr(compiling, "MIN_BYTES", 100)
    early_imports.start_imports([str(tmp_path)], "cpu").join()
    assert imported == ["omnistage.hf"] * 2
    early_imports.start_imports([str(tmp_path)], "cuda:0").join()
    assert imported[2:] == [
        "omnistage.hf",
        "omnistage.engines.compiling",
        "processes that compile",
        "what compiles",
    ]


def test_an_import_that_fails_is_left_to_whoever_needs_it(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        assert not gc.isenabled()
        imported.append(name)
        raise RuntimeError(name)

    monkeypatch.setattr(early_imports, "import_module", fail)
    early_imports.start_imports([], None).join()
    assert imported == ["omnistage.hf"]
    assert gc.isenabled()
