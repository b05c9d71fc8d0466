"""Freed memory of the C library's heap, which is kept for the next tensors where stages compute on the CPU."""

from __future__ import annotations

import platform

import pytest

from omnistage.core import memory
from omnistage.engines.ar import prepared_layers
from tests.parity.test_torchscript import component_of, stage_of

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _SETTINGS:
        monkeypatch.delenv(name, raising=False)


def test_freed_memory_is_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[int, int] = {}

    def set_option(option: int, value: int) -> int:
        options[option] = value
        return 1

    monkeypatch.setattr(memory, "_of_libc", lambda name: set_option)
    assert memory.keep_heap()
    assert options == {-1: memory.KEPT_HEAP, -3: 32 << 20}  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


@glibc
def test_glibc_takes_the_limits() -> None:
    assert memory.keep_heap()


@pytest.mark.parametrize("name", _SETTINGS)
def test_limits_of_the_user_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    monkeypatch.setattr(memory, "_of_libc", lambda name: pytest.fail("the C library was called"))
    assert not memory.keep_heap()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_of_libc", lambda name: None)
    assert not memory.keep_heap()


def test_stages_on_the_cpu_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(prepared_layers, "keep_heap", lambda: calls.append(True))
    stage_of(component_of("llama, grouped heads"), torchscript=False)
    assert calls
