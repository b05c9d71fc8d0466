"""When layers are compiled without being told: where it pays, and where it can be done."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnistage.engines import compiling, triton_jit
from omnistage.engines.ar.attention import make_backend, triton_paged
from omnistage.engines.ar.attention.sdpa import SdpaBackend
from tests.hang_guard import HANG_SECONDS


def network(**weight: Any) -> Any:
    weight = {"is_cuda": True, "nbytes": compiling.MIN_BYTES, **weight}
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(**weight)]))


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    triton_jit.has_c_compiler.cache_clear()
    yield
    triton_jit.has_c_compiler.cache_clear()


def test_large_networks_on_cuda_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    assert compiling.worth_compiling([network()])
    assert compiling.worth_compiling([network(nbytes=compiling.MIN_BYTES // 2)] * 2)
    assert not compiling.worth_compiling([network(nbytes=100)])
    assert not compiling.worth_compiling([network(), network(is_cuda=False)])


def test_without_a_c_compiler_nothing_is_compiled_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_jit.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_paged, "HAS_TRITON", True)
    assert not compiling.worth_compiling([network()])
    assert isinstance(make_backend("auto", torch.device("cuda")), SdpaBackend)
    assert caplog.text.count("install gcc or set CC") == 1


def test_compiled_code_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    compiling.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "omnistage" / "compiled")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "elsewhere"
    compiling.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_where_a_user_has_no_cache_torch_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with any user id there may be no home, or one that cannot be written."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path / "file")})
    compiling.keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(os, "environ", {})
    compiling.keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_layers_are_compiled_when_no_other_thread_imports_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "elsewhere"})
    compiled = threading.Thread(target=compiling.compile_layers, args=([],), daemon=True)
    with compiling._importing:
        compiled.start()
        compiled.join(0.2)
        assert compiled.is_alive()
    compiled.join(HANG_SECONDS)
    assert not compiled.is_alive()


def test_what_compiles_is_imported_in_a_thread_and_its_errors_are_left_to_whoever_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def fail() -> None:
        calls.append(threading.current_thread().name)
        raise ImportError("half of a module")

    monkeypatch.setattr(compiling, "start_compile_workers", lambda: calls.append("processes"))
    monkeypatch.setattr(compiling, "_hash_triton", lambda: None)
    monkeypatch.setattr(compiling, "import_compiler", fail)
    compiling.prepare_compiler().join(HANG_SECONDS)
    assert calls == ["processes", "compiler-imports"]
    with pytest.raises(ImportError, match="half of a module"):
        compiling.compile_layers([])
