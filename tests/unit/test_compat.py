"""Packages that are hidden from an import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from omnistage.compat import import_without

USER = """
import importlib.util
FOUND = importlib.util.find_spec("optional_of_compat") is not None
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optional_of_compat.py").write_text("")
    (tmp_path / "user_of_compat.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("optional_of_compat", "user_of_compat"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_module_is_imported_as_if_a_package_were_missing() -> None:
    import_without("optional_of_compat", "user_of_compat")
    assert not sys.modules["user_of_compat"].FOUND
    assert __import__("optional_of_compat") is not None


def test_a_package_that_is_imported_is_not_hidden() -> None:
    __import__("optional_of_compat")
    import_without("optional_of_compat", "user_of_compat")
    assert "user_of_compat" not in sys.modules


def test_a_package_that_is_missing_needs_no_hiding() -> None:
    import_without("no_such_package_of_compat", "user_of_compat")
    assert "user_of_compat" not in sys.modules


def test_a_failing_import_leaves_the_package_visible() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_without("optional_of_compat", "no_such_module_of_compat")
    assert "optional_of_compat" not in sys.modules
