"""The names that `transformers` exports come from the user's cache, and are those that it finds itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnistage import import_structure
from omnistage.hf import transformers
from omnistage.import_structure import Structure, keep_import_structure

SCANNER = """
def create_import_structure_from_path(path):
    return {frozenset({"torch"}): {"modeling_a": {str(path)}}}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "omnistage" / "imports"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "library" / "models"
    for name in ("llama", "qwen/deep"):
        (folder / name).mkdir(parents=True)
        (folder / name / "modeling.py").write_text("__all__ = []")
    (folder / "__init__.py").write_text("")
    return folder


FOUND: Structure = {
    frozenset(): {"top": {"A", "B"}},
    "llama": {frozenset(): {"configuration": {"C"}}, frozenset({"torch", "vision"}): {"modeling": {"D"}}},
    "qwen": {"deep": {frozenset({"torch"}): {"modeling": {"E"}}}},
}


def counted(scans: list[object]) -> Callable[[Any], Structure]:
    def scan(path: object) -> Structure:
        scans.append(path)
        return FOUND

    return scan


def test_a_later_import_reads_what_the_first_one_found(models: Path) -> None:
    scans: list[object] = []
    for path in (models, str(models / "__init__.py")):
        assert import_structure._Cached(counted(scans), models)(path) == FOUND
    assert scans == [models]
    assert import_structure._Cached(counted(scans), models)(str(models / "llama" / "__init__.py")) == FOUND
    assert scans == [models, str(models / "llama" / "__init__.py")]  # one folder is soon read


@pytest.mark.parametrize("change", ["a name", "a content", "a file more", "damage"])
def test_it_is_found_anew_where_a_file_has_changed(models: Path, cache: Path, change: str) -> None:
    scans: list[object] = []
    import_structure._Cached(counted(scans), models)(models)
    file = models / "qwen" / "deep" / "modeling.py"
    if change == "a name":
        file.rename(file.with_name("modular.py"))
    elif change == "a content":
        file.write_text("__all__ = ['E']")
    elif change == "a file more":
        (models / "new.py").write_text("")
    else:
        [kept] = cache.iterdir()
        kept.write_text('{"folders": {}, "modules": [3]}')
    for _ in range(2):
        assert import_structure._Cached(counted(scans), models)(models) == FOUND
    assert len(scans) == 2


def test_without_a_cache_it_is_found_every_time(models: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("not a folder")
    scans: list[object] = []
    for _ in range(2):
        assert import_structure._Cached(counted(scans), models)(models) == FOUND
    assert len(scans) == 2


def test_what_is_kept_of_the_library_is_what_it_finds() -> None:
    utils = importlib.import_module("transformers.utils.import_utils")
    scan = utils.create_import_structure_from_path
    scan = scan._scan if isinstance(scan, import_structure._Cached) else scan
    models = Path(str(transformers.__file__)).parent / "models"
    found = scan(models)
    for _ in range(2):
        assert import_structure._Cached(scan, models)(models) == found
    assert len(found) > 300


@pytest.mark.parametrize("source", [SCANNER, "def another_function(): ..."])
def test_one_function_is_exchanged_when_its_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    package = tmp_path / "library_of_structure"
    (package / "utils").mkdir(parents=True)
    (package / "models").mkdir()
    (package / "__init__.py").write_text("")
    (package / "utils" / "__init__.py").write_text("")
    (package / "utils" / "import_utils.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    name = "library_of_structure.utils.import_utils"
    monkeypatch.setattr(import_structure, "_MODULE", name)
    finders = list(sys.meta_path)
    keep_import_structure()
    try:
        module = importlib.import_module(name)
        assert sys.meta_path == finders
        assert "exec_module" not in vars(module.__loader__)
        function = vars(module).get("create_import_structure_from_path")
        assert isinstance(function, import_structure._Cached) == (source is SCANNER)
        if function is not None:
            models = package / "models"
            assert function(models) == function(models) == {frozenset({"torch"}): {"modeling_a": {str(models)}}}
        keep_import_structure()
        assert sys.meta_path == finders  # nothing is left to do
    finally:
        sys.meta_path[:] = finders
        for found in [found for found in sys.modules if found.startswith("library_of_structure")]:
            del sys.modules[found]
